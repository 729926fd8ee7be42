"""Symmetric memory on the CPU: one anonymous file a rank, mapped by all ranks, side by side where that is wanted.

A memfd has no name: nothing is left behind when processes end, however they end. A tensor over a mapping keeps the
mapping alive; the mapping keeps the memory alive, whoever created it. So no rank can pull memory from under another.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from moonep.dims import align_up
from moonep.memory.peers import Peers
from moonep.memory.strides import dense_strides

PAGE = os.sysconf("SC_PAGE_SIZE")

_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class HostChunk:
    """A piece of memory of this rank that others can map: `nbytes` rounded up to pages, zeroed."""

    def __init__(self, nbytes: int, descriptor: int | None = None):
        self.nbytes = align_up(max(nbytes, 1), PAGE)
        if descriptor is None:
            descriptor = os.memfd_create("moonep", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, self.nbytes)
        self.descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False

    def close(self) -> None:
        """Give the descriptor back. Mappings stay."""
        self._close()


class HostMapping:
    """Chunks side by side in one address range; unmapped when the last tensor over it is gone.

    Args:
        chunks: what to map; a chunk may occur several times.
    """

    def __init__(self, chunks: Sequence[HostChunk]):
        self.nbytes = sum(c.nbytes for c in chunks)
        base = _mmap(None, self.nbytes, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        self._array = (ctypes.c_uint8 * self.nbytes).from_address(base)
        finalizer = weakref.finalize(self._array, _libc.munmap, base, self.nbytes)
        finalizer.atexit = False
        for chunk in chunks:
            _mmap(base, chunk.nbytes, _PROT_READ_WRITE, _MAP_SHARED | _MAP_FIXED, chunk.descriptor)
            base += chunk.nbytes

    def words(self, offset: int, count: int) -> memoryview:
        """`count` int64 words at a byte offset, to read and write one at a time."""
        return memoryview(self._array).cast("B")[offset : offset + 8 * count].cast("q")

    def bytes(self, offset: int, count: int) -> memoryview:
        """`count` bytes at a byte offset."""
        return memoryview(self._array).cast("B")[offset : offset + count]

    def tensor(
        self, shape: Sequence[int], dtype: torch.dtype, offset: int = 0, row_stride_bytes: int | None = None
    ) -> Tensor:
        """A tensor at a byte offset: dense rows, dim 0 `row_stride_bytes` apart (None: dense as a whole)."""
        flat = torch.frombuffer(self._array, dtype=torch.uint8).view(dtype)
        return flat.as_strided(shape, dense_strides(shape, dtype, row_stride_bytes), offset // dtype.itemsize)


class HostMemory:
    """Makes, shares and maps memory of the host. New memory is zero."""

    device = torch.device("cpu")
    granule = PAGE
    zeroed = True

    def allocate(self, nbytes: int) -> HostChunk:
        """A chunk of this rank."""
        return HostChunk(nbytes)

    def share(self, sizes: Sequence[int], peers: Peers, operation: str, timeout_s: float) -> list[list[HostChunk]]:
        """Create chunks on every rank and exchange them, all in one go. Collective.

        Args:
            sizes: bytes of each chunk, equal on all ranks.

        Returns:
            For each size, the chunk of every rank in rank order.
        """
        own = [HostChunk(n) for n in sizes]
        try:
            descriptors = peers.exchange_descriptors([c.descriptor for c in own], operation, timeout_s)
        finally:
            for chunk in own:
                chunk.close()
        return [[HostChunk(n, fds[i]) for fds in descriptors] for i, n in enumerate(sizes)]

    def map(self, chunks: Sequence[HostChunk]) -> HostMapping:
        """Map chunks side by side."""
        return HostMapping(chunks)


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, descriptor: int) -> int:
    mapped = _libc.mmap(address, nbytes, protection, flags, descriptor, 0)
    if mapped == _MAP_FAILED:
        error = ctypes.get_errno()
        hint = "; is vm.max_map_count or memory exhausted?" if error == 12 else ""
        raise OSError(error, f"mmap of {nbytes} bytes: {os.strerror(error)}{hint}")
    return mapped
