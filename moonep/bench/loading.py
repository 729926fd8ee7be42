"""Copying a rank's own experts into the pool, as in every forward where a framework keeps the weights itself.

load_local   {projection: [L, ...]} on the device, in the pool's dtype -> the pool's rows of own experts
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moonep.bench.comparison import Checked, Line
from moonep.bench.gate import check_equal
from moonep.bench.hosts import Hosts
from moonep.bench.layer_world import LayerComparison, LayerWorld
from moonep.bench.routings import Routing
from moonep.bench.weights import expert_bytes

LOAD_LOCAL = "load_local"


class Source:
    """Weights that a framework keeps."""

    def __init__(self, own: Mapping[str, Tensor]):
        self.weights = {name: local.clone() for name, local in own.items()}

    def close(self) -> None:
        """Let them go."""
        self.weights.clear()


@dataclass(frozen=True)
class Loading(LayerComparison):
    """`ExpertPool.load_local` of all projections. Routings change nothing of it."""

    peers: tuple[str, ...] = ("moonep",)

    def operations(self, name: str) -> tuple[str, ...]:
        return (LOAD_LOCAL,)

    def line(self, R: int, name: str, operation: str, routing: Routing) -> Line:
        return {**super().line(R, name, operation, routing), "variant": None}

    def open_peer(self, name: str, world: LayerWorld) -> Source:
        return Source(world.pool.local)

    def make_batch(self, world: LayerWorld, routing: Routing, hosts: Hosts) -> tuple[None, Line]:
        return None, {}

    def check(self, world: LayerWorld, name: str, peer: Source, batch: None, hosts: Hosts) -> Checked:
        for local in world.pool.local.values():
            local.fill_(torch.nan)
        world.pool.load_local(peer.weights)
        for projection, local in world.pool.local.items():
            check_equal(f"{LOAD_LOCAL}, {projection}", local, peer.weights[projection])
        return Checked({LOAD_LOCAL: lambda: world.pool.load_local(peer.weights)}, {})

    def derive(self, R: int, median_us: float) -> Line:
        """Bytes in memory: read, and written."""
        nbytes = 2 * self.E // R * expert_bytes(self.H, self.F, torch.bfloat16.itemsize)
        return {"physical_bytes": nbytes, "physical_gbps": round(nbytes / median_us / 1e3, 3)}
