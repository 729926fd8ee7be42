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
PROGRAMS = 128  # that count


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "num_programs", "rank", "operation"])
def _count_load_kernel(
    topk, counts, totals, load, load_stride, tokens, tokens_stride, given, signals, signal_stride, faults, fault_stride,
    epoch, status, host_status, num_tokens, num_blocks, num_programs, rank, operation,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, TB: tl.constexpr, R: tl.constexpr,
    RP: tl.constexpr, NF: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Program p counts the blocks p, p + num_programs, ... The last to end publishes the totals and arrives.

    Block b has the tokens [b * TB, (b + 1) * TB). An id out of range counts as masked and is reported.
    totals[EP] is the number of programs that have ended; all of totals is 0 between launches.
    """
    e = tl.arange(0, EP)
    i = tl.arange(0, TB * KP)
    sums = tl.zeros([EP], tl.int32)
    b = tl.program_id(0)
    while b < num_blocks:
        token, k = b * TB + i // KP, i % KP
        real = (token < num_tokens) & (k < K)
        ids = tl.load(topk + token.to(tl.int64) * K + k, mask=real, other=-1).to(tl.int32)
        bad = (ids < -1) | (ids >= E)
        if tl.max(bad.to(tl.int32), 0) > 0:
            tl.store(host_status, 5)
        ids = tl.where((ids < 0) | bad, EP - 1, ids)
        count = tl.histogram(ids, EP)
        tl.store(counts + b * EP + e, count)
        sums += count
        b += num_programs
    tl.atomic_add(totals + e, sums, mask=(sums > 0) & (e < E))
    tl.debug_barrier()
    if tl.atomic_add(totals + EP, 1, sem="acq_rel", scope="gpu") == num_programs - 1:
        total = tl.atomic_xchg(totals + e, 0, mask=e < E)
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
def number_blocks(counts, first_expert, num_blocks, EP: tl.constexpr, ROWS: tl.constexpr, BE: tl.constexpr):
    """Exclusive sums of counts over blocks, in place, for BE experts."""
    e = first_expert + tl.arange(0, BE)
    row = tl.arange(0, ROWS)
    total = tl.zeros([BE], tl.int32)
    first = tl.full([], 0, tl.int32)
    while first < num_blocks:
        at = counts + (first + row)[:, None] * EP + e[None, :]
        here = ((first + row)[:, None] < num_blocks) & (e[None, :] < EP)
        count = tl.load(at, mask=here, other=0)
        tl.store(at, tl.cumsum(count, 0) - count + total[None, :], mask=here)
        total += tl.sum(count, 0)
        first += ROWS


def count_load(
    topk: Tensor, counts: Tensor, totals: Tensor, load: Tensor, load_stride: int, tokens: Tensor, tokens_stride: int,
    given: Tensor | None, s: Signals, rank: int, operation: int, R: int, E: int, K: int,
) -> None:  # fmt: skip
    """Count, publish, and arrive at the barrier that `solve.launch_agreed` waits for.

    Args:
        topk: [s, K] int32 or int64.
        counts: [blocks, EP] int32 workspace: assignments of each expert by block.
        totals: [EP + 1] int32 workspace, 0.
        load: [R, E] int32 of rank 0; `load_stride` elements to the next rank's.
        tokens: [R] int32 of rank 0; `tokens_stride` elements to the next rank's.
        given: [E] int32 counts to compare with, or None.
        s: BAD_ID or BAD_COUNT is reported in its host status.
        rank, operation: as in `barrier.barrier`.
    """
    TB, EP = block_tokens(K), padded_experts(E)
    blocks = num_blocks(topk.shape[0], K)
    programs = max(1, min(PROGRAMS, blocks))
    _count_load_kernel[(programs,)](
        topk, counts, totals, load, load_stride, tokens, tokens_stride, totals if given is None else given,
        s.signals, s.signal_stride, s.faults, s.fault_stride, s.epoch, s.status, s.host_status,
        topk.shape[0], blocks, programs, rank, operation,
        E=E, EP=EP, K=K, KP=triton.next_power_of_2(K), TB=TB, R=R, RP=triton.next_power_of_2(R), NF=NUM_FAULTS,
        CHECK=given is not None,
    )  # fmt: skip


def num_blocks(num_tokens: int, K: int) -> int:
    """Blocks of a rank's tokens."""
    return triton.cdiv(num_tokens, block_tokens(K))


def block_tokens(K: int) -> int:
    """TB, tokens of a block."""
    return BLOCK // triton.next_power_of_2(K)


def padded_experts(E: int) -> int:
    """EP: a power of two with room for a bin of masked assignments."""
    return triton.next_power_of_2(E + 1)
