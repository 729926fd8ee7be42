"""What the bulk-copy movers share: how a row lies in a descriptor, arrival flags, and words that outlive a launch.

On Hopper and newer the copy engine of a multiprocessor (TMA) moves whole rows between global and shared memory, for one
thread that asks for it. A few programs then saturate NVLink, and the others are free for what stays on this GPU.

Movers do not end at a barrier. The tokens of a source are cut into chunks; when all senders of a rank are through
with a chunk, the last of them sets the chunk's flag on every peer to the phase, the number of this launch. A program
that needs what arrived waits for the flag, with the same limit as a barrier. Programs that send never wait and come
first in the grid; operations of a GPU follow each other: so they run. Memory order: bulk stores have completed
(`complete_stores`) before a sender counts itself; counting is acquire and release, the flag a release, waiting an
acquire at system scope; the fence orders bulk loads after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._layouts import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moonep.dims import align_up, ceil_div, next_power_of_2
from moonep.kernels.barrier import NUM_FAULTS, POISONED, REFUSED_RANGE
from moonep.kernels.launch import Address, Descriptor

MAX_CHUNKS = 16
_MIN_CHUNK = 64
MAX_BOX = 256  # most elements of a descriptor's box in one dimension
_MIN_INNER_BYTES = 128  # at which boxes begin in shared memory
SHARED_BYTES = 216 * 1024  # of shared memory that a program uses

NUM_FAULTS_ = gl.constexpr(NUM_FAULTS)
REFUSED_RANGE_ = gl.constexpr(REFUSED_RANGE.value)
POISONED_ = gl.constexpr(POISONED.value)
MAX_CHUNKS_ = gl.constexpr(MAX_CHUNKS)
PHASE, TICKET = gl.constexpr(0), gl.constexpr(1)  # of `words`
SPINS_BEFORE_LOOKING = gl.constexpr(16)


@dataclass(frozen=True)
class RowShape:
    """A row of `width` elements as a box of a descriptor: outer x inner elements.

    Attributes:
        width: elements of a row.
        itemsize: bytes of one.
        inner: elements of the inner dimension: divides the width.
        outer: width / inner.
        block: outer rounded up to a power of two; what lies beyond the row is cut off.
    """

    width: int
    itemsize: int

    @cached_property
    def inner(self) -> int:
        return math.gcd(self.width, MAX_BOX)

    @cached_property
    def outer(self) -> int:
        return self.width // self.inner

    @cached_property
    def block(self) -> int:
        return next_power_of_2(self.outer)

    @cached_property
    def block_bytes(self) -> int:
        return self.block * self.inner * self.itemsize

    @cached_property
    def supported(self) -> bool:
        """Whether a row is one box, and some of them fit in shared memory."""
        fits = self.block <= MAX_BOX and 9 * self.block_bytes <= SHARED_BYTES  # two a warp, and one of zeros
        return fits and self.inner * self.itemsize >= _MIN_INNER_BYTES


def chunk_tokens(S: int) -> int:
    """Tokens of a chunk: at most MAX_CHUNKS of them in S."""
    return max(_MIN_CHUNK, align_up(ceil_div(S, MAX_CHUNKS), 32))


def describe_rows(rows: Tensor, ranks: int, rank_stride: int, count: int, inner: int, block: int) -> TensorDescriptor:
    """A descriptor [ranks, count, width / inner, inner] over rows; boxes of `block` x inner elements.

    Args:
        rows: [>= count, width], the first rank's, contiguous.
        rank_stride: elements to the next rank's.
        count: rows of a rank.
    """
    return _describe(rows, rows, ranks, rank_stride, count, inner, block)


def _describe(
    base: Tensor | Address, like: Tensor, ranks: int, rank_stride: int, count: int, inner: int, block: int
) -> TensorDescriptor:
    """`describe_rows` of rows at `base` that are like others in width and dtype."""
    width = like.shape[1]
    descriptor = TensorDescriptor.__new__(TensorDescriptor)  # its checks, which rows pass, take 10 us a call
    descriptor.base = base
    descriptor.shape = [ranks, max(count, 1), width // inner, inner]
    descriptor.strides = [max(rank_stride, width), width, inner, 1]
    descriptor.block_shape = [1, 1, block, inner]
    descriptor.layout = _layout(8 * like.itemsize)
    descriptor.padding = "zero"
    return descriptor


class GivenRows(Descriptor):
    """A descriptor over rows that each call brings; over others if there are none.

    Args:
        name: of the rows.
        like: [>= 1, width], the others; of the dtype that the rows are seen as.
        count: how many rows there are: an integer, or the name of one that is given.
        inner, block: as in `describe_rows`.
    """

    def __init__(self, name: str, like: Tensor, count: int | str, inner: int, block: int):
        super().__init__(name, like.dtype)
        self._like, self._count, self._sizes = like, count, (inner, block)

    def of(self, values: Mapping[str, Any]) -> TensorDescriptor:
        """Over the rows of this name."""
        return self._over(super().of(values), self.count(values))

    def at(self, address: int, count: int) -> TensorDescriptor:
        """Over rows at an address."""
        return self._over(Address(address), count)

    def count(self, values: Mapping[str, Any]) -> int:
        """How many rows there are."""
        return values[self._count] if isinstance(self._count, str) else self._count

    def _over(self, rows: Tensor | Address, count: int) -> TensorDescriptor:
        return _describe(rows if count else self._like, self._like, 1, 0, count, *self._sizes)


@cache
def _layout(bits: int) -> NVMMASharedLayout:
    return NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=bits, rank=4)


@cache
def row_shape(width: int, itemsize: int) -> RowShape:
    """The one `RowShape` of these sizes."""
    return RowShape(width, itemsize)


def waiting_for(groups: int) -> str:
    """The instruction that waits for all groups of bulk stores but the last `groups` to be visible."""
    return f"cp.async.bulk.wait_group {groups}; mov.u32 $0, 0;"


@dataclass(frozen=True, eq=False)
class Arrivals:
    """Flags and words of one kind of mover.

    Attributes:
        flags: [R, MAX_CHUNKS] int32 of rank 0; `flags_stride` elements to the next rank's. The phase in which a peer's
            chunk arrived.
        counters: [R, MAX_CHUNKS] int32 of this rank: senders that are through with a chunk; 0 between launches.
        words: [2] int32 of this rank: launches so far, and programs that have ended in this one.
    """

    flags: Tensor
    flags_stride: int
    counters: Tensor
    words: Tensor

    @staticmethod
    def make(flags: Tensor, flags_stride: int) -> Arrivals:
        zeros = torch.zeros_like(flags)
        return Arrivals(flags, flags_stride, zeros, torch.zeros(2, dtype=torch.int32, device=flags.device))


@gluon.jit
def complete_stores():
    """Wait until this program's bulk stores are visible (not only read from shared memory)."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def complete_stores_but(WAIT: gl.constexpr):
    """The same but for the last groups, as many as `waiting_for` says."""
    gl.inline_asm_elementwise(WAIT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def commit_nothing():
    """An empty group of bulk stores, so that each turn has at least one."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.commit_group; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fence_bulk_loads():
    """Bulk loads that follow see what loads before have seen."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def pause():
    """Some hundred nanoseconds in which this warp asks for nothing: many that spin slow down what they wait for."""
    gl.inline_asm_elementwise("nanosleep.u32 300; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def now():
    """Nanoseconds."""
    return gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def count_sender(counter, SENDERS: gl.constexpr):
    """Whether all senders are through, this one being the last. Resets the counter."""
    gl.thread_barrier()
    last = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SENDERS - 1
    if last:
        gl.store(counter, 0)
    return last


@gluon.jit
def raise_flag(flags, flags_stride, to, rank, chunk, phase):
    """Tell rank `to` that this rank's part of a chunk is there."""
    at = flags + to.to(gl.int64) * flags_stride + rank * MAX_CHUNKS_ + chunk
    gl.atomic_xchg(at, phase, sem="release", scope="sys")


@gluon.jit
def read_status(status):
    """The status word, the same for all warps."""
    return gl.atomic_add(status, 0, sem="relaxed", scope="gpu")


@gluon.jit
def has_arrived(flags, flags_stride, rank, peer, chunk, phase):
    """Whether a peer's chunk is there; looks once."""
    flag = flags + rank.to(gl.int64) * flags_stride + peer * MAX_CHUNKS_ + chunk
    return (gl.atomic_add(flag, 0, sem="acquire", scope="sys") - phase) >= 0


@gluon.jit
def await_flag(
    flags, flags_stride, faults, fault_stride, status, host_status, rank, peer, chunk, phase, operation, number, limit,
    R: gl.constexpr,
):  # fmt: skip
    """Wait until a peer's chunk is there. Returns 0, or what `status` holds then: nothing may be expected any more.

    All warps of the caller must go round the loop equally often, for there are barriers in it. So what ends it is read
    by atomics, which one thread does for all; what each warp sees for itself only makes that thread store a status.
    """
    flag = flags + rank.to(gl.int64) * flags_stride + peer * MAX_CHUNKS_ + chunk
    fault = faults + rank * fault_stride.to(gl.int64) + peer * NUM_FAULTS_
    failed = read_status(status)
    missing = (gl.atomic_add(flag, 0, sem="acquire", scope="sys") - phase) < 0
    start = now()
    spins = 0
    while missing & (failed == 0):
        pause()
        missing = (gl.atomic_add(flag, 0, sem="acquire", scope="sys") - phase) < 0
        spins += 1
        if missing & (spins % SPINS_BEFORE_LOOKING == 0):
            poisoned = gl.load(fault + POISONED_, volatile=True)
            refused = gl.load(fault + REFUSED_RANGE_, volatile=True)
            first = refused >> 32
            last = refused & 0x7FFFFFFF
            kind = 0
            if now() - start > limit:
                kind = 1
            if poisoned != 0:
                kind = 3
            if (first <= number) & (number <= last) & (number > 0):
                kind = 2
            if kind != 0:
                reported = kind | (peer << 4) | (operation << 12)
                gl.store(status, reported)
                gl.store(host_status, reported)
                for r in gl.static_range(R):
                    gl.store(
                        faults + r * fault_stride.to(gl.int64) + rank * NUM_FAULTS_ + POISONED_,
                        gl.to_tensor(1).to(gl.int64),
                    )
            failed = read_status(status)
    fence_bulk_loads()
    return failed


@gluon.jit
def end_launch(words, phase, PROGRAMS: gl.constexpr):
    """The last program to end counts the launch."""
    gl.thread_barrier()
    if gl.atomic_add(words + TICKET, 1, sem="acq_rel", scope="gpu") == PROGRAMS - 1:
        gl.store(words + TICKET, 0)
        gl.store(words + PHASE, phase)
