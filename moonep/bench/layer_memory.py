"""Device memory of a layer while the hot rank changes from step to step: does it stay what the first steps needed?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from moonep.bench.comparison import Checked, Line
from moonep.bench.hosts import Hosts, Unavailable
from moonep.bench.layer_gate import Input
from moonep.bench.layer_peers import LAYERS, Layer, MoonEPLayer, run_layer
from moonep.bench.layer_world import LayerComparison, LayerWorld, make_input, meeting
from moonep.bench.routings import Routing

PEAK_MEMORY = "peak_memory"
FIRST_STEPS = 8
HOT = (1.25, 1.5, 1.9)


@dataclass(frozen=True)
class PeakMemory(LayerComparison):
    """Steps of one layer: balanced ones first, as its only routing says, then hot ones whose hot rank rotates.

    Attributes:
        steps: forward and backward, each.
    """

    peers: tuple[str, ...] = ("moonep", "all_to_all", "deepep_v2")
    steps: int = 200

    def operations(self, name: str) -> tuple[str, ...]:
        return (PEAK_MEMORY,)

    def line(self, R: int, name: str, operation: str, routing: Routing) -> Line:
        kind = LAYERS[name]
        about = {"peer": kind.peer, "variant": kind.variant, "steps": self.steps}
        return {**super().line(R, name, operation, routing), **about}

    def open_peer(self, name: str, world: LayerWorld) -> Layer:
        if world.E == world.L:
            raise Unavailable(f"{PEAK_MEMORY} needs a second rank: one alone cannot be hot")
        return LAYERS[name].open(world)

    def make_batch(self, world: LayerWorld, routing: Routing, hosts: Hosts) -> tuple[list[Input], Line]:
        """The balanced batch, then hot ones: of each strength one for every rank."""
        first, about = make_input(world, routing, hosts)
        batches = [first]
        for value in HOT:
            hot, _ = make_input(world, Routing("hot_rank", value, routing.seed), hosts)
            shifts = range(0, world.E, world.L)  # to the same experts of the next rank
            batches += [replace(first, ids=(hot.ids + shift) % world.E) for shift in shifts]
        return batches, about

    def check(self, world: LayerWorld, name: str, peer: Layer, batch: Sequence[Input], hosts: Hosts) -> Checked:
        """Nothing is compared: that the same layers are right is what `Layers` shows."""
        balanced, *hot = batch
        held = _held_bytes(world, peer)
        meet = meeting(world, hosts)
        meet()
        first = held + _peak_bytes(world, peer, [balanced] * FIRST_STEPS)
        rest = held + _peak_bytes(world, peer, [hot[i % len(hot)] for i in range(self.steps - FIRST_STEPS)])
        world.buffer.check()
        meet()
        if world.device.type != "cuda":
            return Checked({}, {}, {PEAK_MEMORY: {"first_bytes": None, "peak_bytes": None, "growth": None}})
        growths = hosts.exchange((max(first, rest) / first, first, max(first, rest)))
        growth, first, peak = max(growths)
        found = {"first_bytes": first, "peak_bytes": peak, "growth": round(growth, 4)}
        return Checked({}, {}, {PEAK_MEMORY: found})


def _held_bytes(world: LayerWorld, layer: Layer) -> int:
    """What a layer holds outside of torch's allocator: MoonEP all of pool and Buffer, peers weights and gradients."""
    pool = world.pool.memory()
    if isinstance(layer, MoonEPLayer):
        return pool["total"] + world.buffer.memory()["total"]
    return pool["weights"] + pool["gradients"]


def _peak_bytes(world: LayerWorld, layer: Layer, batches: Sequence[Input]) -> int:
    """The most that torch's allocator has given out while a layer ran; 0 without a GPU."""
    cuda = world.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(world.device)
    for batch in batches:
        run_layer(layer, batch)
    return torch.cuda.max_memory_allocated(world.device) if cuda else 0
