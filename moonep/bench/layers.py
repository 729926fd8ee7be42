"""One layer of routed experts, forward and backward, of MoonEP and of its peers: `moonep bench --suite layers`.

Routing is given, so there is no router. Every rank has its own tokens, ids and route weights, and its home experts.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import moonep
from moonep.bench.comparison import PAYLOAD_SEED, Checked, Comparison, Line, make_batch
from moonep.bench.hosts import GateError, Hosts
from moonep.bench.layer_gate import DENSE_TOLERANCE, TOLERANCE, Input, Result, check_result, dense_result
from moonep.bench.layer_movers import AllToAllMover
from moonep.bench.layer_peers import (
    LAYERS,
    Layer,
    LayerWorld,
    MoonEPLayer,
    PeerLayer,
    make_calls,
    result_of,
    run_layer,
)
from moonep.bench.measure import budget_arguments
from moonep.bench.routings import Routing
from moonep.bench.settings import LOCAL_ALL
from moonep.bench.timing import Call
from moonep.bench.weights import Weights, shapes

DENSE_WORK = 1 << 30  # multiplications of a projection: up to here layers are compared with a dense one, too


@dataclass(frozen=True)
class LayerBatch(Input):
    """One rank's input, and what it must give: by `all_to_all`, and by a dense layer where that is small."""

    want: Result
    dense: Result | None


@dataclass(frozen=True)
class Layers(Comparison):
    """Layers of routed experts. Letters: `moonep.dims`.

    Attributes:
        peers: names in `LAYERS`.
        F: FFN width.
        P: padding of MoonEP's groups.
        sms: SMs of MoonEP's kernels that cross to other ranks (and of DeepEP's); local ones use all.
    """

    peers: tuple[str, ...] = tuple(LAYERS)
    F: int = 2048
    P: int = 128

    def operations(self, name: str) -> tuple[str, ...]:
        return LAYERS[name].operations

    def line(self, R: int, name: str, operation: str, routing: Routing) -> Line:
        kind = LAYERS[name]
        about = {"F": self.F, "P": self.P, "budget": LOCAL_ALL, "peer": kind.peer, "variant": kind.variant}
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

    def open_peer(self, name: str, world: LayerWorld) -> Layer:
        return LAYERS[name].open(world)

    def barrier(self, world: LayerWorld, peers: Mapping[str, Any]) -> Call | None:
        return world.buffer.barrier

    def make_batch(self, world: LayerWorld, routing: Routing, hosts: Hosts) -> tuple[LayerBatch, Line]:
        batch, about = make_input(world, routing, hosts)
        reference = PeerLayer(world, AllToAllMover(world.E, world.R))
        got = result_of(reference, batch, world.pool, _meeting(world, hosts))
        want = replace(got, grad_weights={name: grad.clone() for name, grad in got.grad_weights.items()})
        dense = None
        if world.R * self.S * self.K * self.H * self.F <= DENSE_WORK:
            inputs = [Input(*parts) for parts in hosts.exchange([t.detach() for t in _tensors(batch)])]
            dense = dense_result(inputs, {name: full[: world.E] for name, full in world.pool.full.items()}, world.rank)
        return LayerBatch(*_tensors(batch), want, dense), about

    def check(self, world: LayerWorld, name: str, peer: Layer, batch: LayerBatch, hosts: Hosts) -> Checked:
        got = result_of(peer, batch, world.pool, _meeting(world, hosts))
        world.buffer.check()
        check_result(got, batch.want, TOLERANCE)
        if batch.dense is not None:
            check_result(got, batch.dense, DENSE_TOLERANCE)
        hosts.meet()  # what a rank finds wrong, its peers hear of here, and not in the middle of a layer
        if isinstance(peer, MoonEPLayer):
            check_in_place(peer, batch)
        hosts.meet()
        counts = hosts.exchange(peer.count(batch))
        about = {key: max(count[key] for count in counts) for key in counts[0]}
        return Checked(make_calls(peer, batch, self.operations(name)), about)

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


def check_in_place(layer: MoonEPLayer, batch: LayerBatch) -> None:
    """The layer without prefetch and reduction: all but weight gradients is right, as the slots still hold weights."""
    with layer.weights_in_place():
        output, grad_hidden, grad_route_weights = run_layer(layer, batch)
    try:
        got = Result(output.detach(), grad_hidden, grad_route_weights, {})
        check_result(got, batch.want, TOLERANCE, of_weights=False)
    except GateError as error:
        raise GateError(f"without prefetch: {error}") from None


def _tensors(batch: Input) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return batch.hidden, batch.route_weights, batch.ids, batch.grad


def _meeting(world: LayerWorld, hosts: Hosts) -> Call:
    """Waits until all ranks are here and their devices idle."""

    def meet() -> None:
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        hosts.meet()

    return meet
