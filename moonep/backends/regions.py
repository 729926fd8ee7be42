"""What every backend keeps: row regions of all ranks, as views of one symmetric chunk a rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moonep.dims import Dims
from moonep.memory.regions import Region


class RowRegion:
    """One receive buffer of every rank: rows [C, H] and route weights [C] fp32."""

    def __init__(self, name: str, views: Sequence[dict[str, Tensor]], rank: int):
        self.name = name
        self.rows_of = [v[f"{name}_rows"] for v in views]
        self.weights_of = [v[f"{name}_weights"] for v in views]
        self.rows, self.weights = self.rows_of[rank], self.weights_of[rank]

    def touch(self) -> None:
        """Tell autograd that the region is about to be overwritten: zero-copy views of it become stale."""
        torch.autograd.graph.increment_version((self.rows, self.weights))


def row_regions(dims: Dims, dtype: torch.dtype) -> list[Region]:
    """The regions that every backend has: arrivals, both row regions, staging."""
    d = dims
    return [
        Region("arrivals", (d.R, d.S, d.K), torch.int32),
        Region("forward_weights", (d.C,), torch.float32),
        Region("gradient_weights", (d.C,), torch.float32),
        Region("forward_rows", (d.C, d.H), dtype),
        Region("gradient_rows", (d.C, d.H), dtype),
        Region("staging", (d.S * d.W, d.H), dtype),
    ]
