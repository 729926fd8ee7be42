"""Symmetric memory: who the peers are (`peers`), memory that all ranks map (`host`, `cuda`), how they wait (`barrier`).

`Memory` is what `host` and `cuda` have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from moonep.memory.peers import Peers


class Chunk(Protocol):
    """A piece of one rank's memory that can be mapped here."""

    nbytes: int

    def close(self) -> None:
        """Let go of it; mappings stay."""


class Mapping(Protocol):
    """Chunks side by side in one address range."""

    nbytes: int

    def tensor(
        self, shape: Sequence[int], dtype: torch.dtype, offset: int = 0, row_stride_bytes: int | None = None
    ) -> Tensor:
        """A tensor at a byte offset, which keeps the mapping alive."""


class Memory(Protocol):
    """Makes, shares and maps memory of one device.

    Attributes:
        granule: bytes that sizes of chunks are multiples of.
        zeroed: whether new memory is zero.
    """

    device: torch.device
    zeroed: bool

    @property
    def granule(self) -> int: ...

    def allocate(self, nbytes: int) -> Any:
        """A chunk of this rank."""

    def share(self, sizes: Sequence[int], peers: Peers, operation: str, timeout_s: float) -> list[list[Any]]:
        """For each size, a new chunk of every rank. Collective."""

    def map(self, chunks: Sequence[Any]) -> Mapping:
        """Map chunks side by side."""
