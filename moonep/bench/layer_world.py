"""What comparisons of a layer share: one pool of experts' weights and gradients, one Buffer, one way to make inputs."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import moonep
from moonep.bench.comparison import PAYLOAD_SEED, Comparison, Line, make_batch
from moonep.bench.hosts import Hosts
from moonep.bench.layer_gate import Input
from moonep.bench.measure import budget_arguments
from moonep.bench.peers import World
from moonep.bench.routings import Routing
from moonep.bench.settings import LOCAL_ALL
from moonep.bench.timing import Call
from moonep.bench.weights import Weights, shapes


@dataclass(frozen=True)
class LayerWorld(World):
    """What all layers share: weights and gradients of the experts, and MoonEP's Buffer."""

    pool: moonep.ExpertPool
    buffer: moonep.Buffer


@dataclass(frozen=True)
class LayerComparison(Comparison):
    """A comparison of layers, or of parts of one.

    Attributes:
        F: FFN width.
        P: padding of MoonEP's groups.
        sms: SMs of MoonEP's kernels that cross to other ranks (and of DeepEP's); local ones use all.
    """

    F: int = 2048
    P: int = 128

    def line(self, R: int, name: str, operation: str, routing: Routing) -> Line:
        about = {"F": self.F, "P": self.P, "budget": LOCAL_ALL}
        return {**super().line(R, name, operation, routing), **about}

    def open(self, rank: int, R: int, device: torch.device) -> LayerWorld:
        pool = moonep.ExpertPool(
            shapes(self.H, self.F),
            self.E,
            grads=True,
            shared=False,
            backend=device.type,
            timeout_s=self.peer_timeout_s,
        )
        Weights(pool)
        for local in pool.local.values():
            local *= local.shape[1] ** -0.5
        sms = budget_arguments(self.sms, LOCAL_ALL)
        sizes = (self.S, self.H, self.K, self.E, R)
        buffer = moonep.Buffer(*sizes, token_padding=self.P, backend=device.type, timeout_s=self.peer_timeout_s, **sms)
        buffer.barrier()  # peers may read the weights
        return LayerWorld(*sizes, rank, self.sms, device, self.peer_timeout_s, pool, buffer)

    def barrier(self, world: LayerWorld, peers: Mapping[str, Any]) -> Call | None:
        return world.buffer.barrier

    def close(self, world: LayerWorld) -> None:
        world.buffer.destroy()
        world.pool.destroy()
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()


def make_input(world: LayerWorld, routing: Routing, hosts: Hosts) -> tuple[Input, Line]:
    """This rank's input: that of all comparisons, with a gradient of the output."""
    batch, about = make_batch(world, routing, hosts)
    generator = torch.Generator(world.device).manual_seed(PAYLOAD_SEED + world.R + world.rank)
    grad = torch.randn(batch.x.shape, device=world.device, generator=generator).to(world.dtype)
    return Input(batch.x.requires_grad_(), batch.weights.requires_grad_(), batch.ids, grad), about


def meeting(world: LayerWorld, hosts: Hosts) -> Call:
    """Waits until all ranks are here and their devices idle."""

    def meet() -> None:
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        hosts.meet()

    return meet
