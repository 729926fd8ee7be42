"""Counting: how many assignments each expert has on this rank, block by block, and telling every peer.

A block is TB tokens with all their K assignments. Counts of a block, summed over earlier blocks, number the assignments
of an expert; their totals are this rank's load, written into row `rank` of every peer's load.

Example, K = 1, blocks of 2 tokens, ids [0, 0, 1, 0]: counts [[2, 0], [1, 1]], before [[0, 0], [2, 0]], load [3, 1].
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moonep.kernels.barrier import NUM_FAULTS, Signals, arrive

BLOCK = 128  # assignments of a block, padding of K to a power of two included
BLOCKS = tl.constexpr(4)  # that one program counts
COLUMNS = tl.constexpr(16)  # that are compared at once


@triton.jit(do_not_specialize=["num_tokens", "num_programs", "rank", "operation"])
def _count_load_kernel(
    topk, counts, totals, load, load_stride, tokens, tokens_stride, given, signals, signal_stride, faults, fault_stride,
    epoch, status, host_status, num_tokens, num_programs, rank, operation,
    NB: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, TB: tl.constexpr,
    R: tl.constexpr, RP: tl.constexpr, NF: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Program p counts the blocks [p * BLOCKS, (p + 1) * BLOCKS). The last to end publishes the totals and arrives.

    Block b has the tokens [b * TB, (b + 1) * TB). An id out of range counts as masked and is reported.
    totals[EP] is the number of programs that have ended; all of totals is 0 between launches.
    """
    e = tl.arange(0, EP)
    sub = tl.arange(0, BLOCKS)
    first = tl.program_id(0) * BLOCKS
    tl.store(counts + e[:, None] * NB + first + sub[None, :], tl.zeros([EP, BLOCKS], tl.int32))
    i = tl.arange(0, TB * KP)
    token = (first + sub)[:, None] * TB + i[None, :] // KP
    k = i[None, :] % KP
    inside = (token < num_tokens) & (k < K)
    ids = tl.load(topk + token.to(tl.int64) * K + k, mask=inside, other=-1).to(tl.int32)
    bad = (ids < -1) | (ids >= E)
    if tl.max(tl.max(bad.to(tl.int32), 1), 0) > 0:
        tl.store(host_status, 5)
    real = (ids >= 0) & (ids < E)
    # An assignment counts for its expert if it is the last of its block: a histogram of so many bins is slower.
    count = tl.zeros([BLOCKS, TB * KP], tl.int32)
    later = tl.zeros([BLOCKS, TB * KP], tl.int32)
    for begin in tl.static_range(0, TB * KP, COLUMNS):
        j = begin + tl.arange(0, COLUMNS)
        other = (first + sub)[:, None] * TB + j[None, :] // KP
        there = (other < num_tokens) & (j[None, :] % KP < K)
        others = tl.load(topk + other.to(tl.int64) * K + j[None, :] % KP, mask=there, other=-1).to(tl.int32)
        equal = ids[:, :, None] == others[:, None, :]
        count += tl.sum(equal.to(tl.int32), 2)
        later += tl.sum((equal & (j[None, None, :] > i[None, :, None])).to(tl.int32), 2)
    last = real & (later == 0)
    tl.debug_barrier()  # zeros are written
    tl.store(counts + ids * NB + first + sub[:, None], count, mask=last)
    tl.atomic_add(totals + ids, count, mask=last, sem="relaxed")
    tl.debug_barrier()
    if tl.atomic_add(totals + EP, 1, sem="acq_rel", scope="gpu") == num_programs - 1:
        total = tl.atomic_xchg(totals + e, 0, mask=e < E, sem="relaxed")
        tl.store(totals + EP, 0)
        if CHECK:
            claimed = tl.load(given + e, mask=e < E, other=0).to(tl.int32)
            if tl.max(tl.where((e < E) & (claimed != total), 1, 0), 0) > 0:
                tl.store(host_status, 6)
        for r in range(R):
            tl.store(load + r * load_stride + rank * E + e, total, mask=e < E)
            tl.store(tokens + r * tokens_stride + rank, num_tokens)
        tl.debug_barrier()
        arrive(signals, signal_stride, faults, fault_stride, epoch, status, rank, operation, R, RP, NF)


@triton.jit
def number_blocks(counts, expert, num_blocks, NB: tl.constexpr, NBP: tl.constexpr):
    """Exclusive sums of an expert's counts over blocks, in place."""
    b = tl.arange(0, NBP)
    count = tl.load(counts + expert * NB + b, mask=b < num_blocks, other=0)
    tl.store(counts + expert * NB + b, tl.cumsum(count, 0) - count, mask=b < num_blocks)


def count_load(
    topk: Tensor, counts: Tensor, totals: Tensor, load: Tensor, load_stride: int, tokens: Tensor, tokens_stride: int,
    given: Tensor | None, s: Signals, rank: int, operation: int, R: int, E: int, K: int,
) -> None:  # fmt: skip
    """Count, publish, and arrive at the barrier that `solve.launch_agreed` waits for.

    Args:
        topk: [s, K] int32 or int64.
        counts: [EP, NB] int32 workspace: assignments of each expert by block.
        totals: [EP + 1] int32 workspace, 0.
        load: [R, E] int32 of rank 0; `load_stride` elements to the next rank's.
        tokens: [R] int32 of rank 0; `tokens_stride` elements to the next rank's.
        given: [E] int32 counts to compare with, or None.
        s: BAD_ID or BAD_COUNT is reported in its host status.
        rank, operation: as in `barrier.barrier`.
    """
    TB, EP = block_tokens(K), padded_experts(E)
    programs = max(1, triton.cdiv(num_blocks(topk.shape[0], K), BLOCKS.value))
    _count_load_kernel[(programs,)](
        topk, counts, totals, load, load_stride, tokens, tokens_stride, totals if given is None else given,
        s.signals, s.signal_stride, s.faults, s.fault_stride, s.epoch, s.status, s.host_status,
        topk.shape[0], programs, rank, operation,
        NB=counts.shape[1], E=E, EP=EP, K=K, KP=triton.next_power_of_2(K), TB=TB, R=R, RP=triton.next_power_of_2(R),
        NF=NUM_FAULTS, CHECK=given is not None, num_warps=8,
    )  # fmt: skip


def num_blocks(num_tokens: int, K: int) -> int:
    """Blocks of a rank's tokens."""
    return triton.cdiv(num_tokens, block_tokens(K))


def padded_blocks(S: int, K: int) -> int:
    """NB, the blocks of S tokens, rounded up to what programs count."""
    return triton.cdiv(num_blocks(S, K), BLOCKS.value) * BLOCKS.value


def block_tokens(K: int) -> int:
    """TB, tokens of a block."""
    return BLOCK // triton.next_power_of_2(K)


def padded_experts(E: int) -> int:
    """EP: a power of two with room for a bin of masked assignments."""
    return triton.next_power_of_2(E + 1)
