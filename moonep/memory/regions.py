"""Regions: named tensors laid out one after another in a chunk, from one table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moonep.dims import align_up
from moonep.memory import Mapping

_ALIGNMENT = 256


@dataclass(frozen=True)
class Region:
    """A named part of a chunk."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Layout:
    """Byte offsets of regions in a chunk."""

    def __init__(self, regions: Sequence[Region]):
        self.regions = {r.name: r for r in regions}
        self.offsets: dict[str, int] = {}
        self.nbytes = 0
        for r in regions:
            self.offsets[r.name] = self.nbytes
            self.nbytes = align_up(self.nbytes + r.nbytes, _ALIGNMENT)

    def view(self, name: str, mapping: Mapping, chunk_offset: int = 0) -> Tensor:
        """The region as a tensor, in the chunk that begins at `chunk_offset` of the mapping."""
        region = self.regions[name]
        return mapping.tensor(region.shape, region.dtype, chunk_offset + self.offsets[name])
