"""Counting: how many assignments each expert has on this rank, block by block, and telling every peer.

A block is TB tokens with all their K assignments. Counts of a block, summed over earlier blocks, number the assignments
of an expert; their totals are this rank's load, written into row `rank` of every peer's load.

Example, K = 1, blocks of 2 tokens, ids [0, 0, 1, 0]: counts [[2, 0], [1, 1]], before [[0, 0], [2, 0]], load [3, 1].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonep.dims import Dims, ceil_div, next_power_of_2
from moonep.kernels.barrier import NUM_FAULTS, Signals, arrive
from moonep.kernels.early import admit_next, await_previous
from moonep.kernels.launch import Given, Launch

BLOCK = 128  # assignments of a block, padding of K to a power of two included
PUBLISHED = 2048  # counts that a program takes


@triton.jit(do_not_specialize=["num_tokens"])
def _count_blocks_kernel(
    topk, counts, host_status, num_tokens, NB: tl.constexpr, E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    TB: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program b counts the tokens [b * TB, (b + 1) * TB). An id out of range counts as masked and is reported."""
    await_previous(EARLY)
    admit_next(EARLY)
    b = tl.program_id(0)
    i = tl.arange(0, TB * KP)
    token, k = b * TB + i // KP, i % KP
    ids = tl.load(topk + token.to(tl.int64) * K + k, mask=(token < num_tokens) & (k < K), other=-1).to(tl.int32)
    if tl.max(((ids < -1) | (ids >= E)).to(tl.int32), 0) > 0:
        tl.store(host_status + 1, 5)
    tl.atomic_add(counts + ids * NB + b, 1, mask=(ids >= 0) & (ids < E), sem="relaxed")


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "num_programs", "rank", "operation"])
def _publish_load_kernel(
    counts, before, ticket, load, load_stride, tokens, tokens_stride, given, signals, signal_stride, faults,
    fault_stride, epoch, status, host_status, num_tokens, num_blocks, num_programs, rank, operation,
    NB: tl.constexpr, NBP: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    NF: tl.constexpr, CHECK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program i: BE experts: exclusive sums over blocks, the totals into load[rank] of every peer; counts become 0.

    The last program to end arrives at the barrier.
    """
    await_previous(EARLY)
    admit_next(EARLY)
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    b = tl.arange(0, NBP)
    at = e[:, None] * NB + b[None, :]
    here = (e[:, None] < E) & (b[None, :] < num_blocks)
    count = tl.load(counts + at, mask=here, other=0)
    tl.store(before + at, tl.cumsum(count, 1) - count, mask=here)
    tl.store(counts + at, count * 0, mask=here)
    total = tl.sum(count, 1)
    if CHECK:
        claimed = tl.load(given + e, mask=e < E, other=0).to(tl.int32)
        if tl.max(tl.where((e < E) & (claimed != total), 1, 0), 0) > 0:
            tl.store(host_status + 1, 6)
    for r in range(R):
        tl.store(load + r * load_stride.to(tl.int64) + rank * E + e, total, mask=e < E)
    tl.debug_barrier()
    if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == num_programs - 1:
        tl.store(ticket, 0)
        for r in range(R):
            tl.store(tokens + r * tokens_stride.to(tl.int64) + rank, num_tokens)
        tl.debug_barrier()
        arrive(signals, signal_stride, faults, fault_stride, epoch, status, rank, operation, R, RP, NF)


def count_load(
    blocks: Blocks, load: Tensor, load_stride: int, tokens: Tensor, tokens_stride: int, s: Signals, rank: int,
    dims: Dims, check: bool,
) -> list[Launch]:  # fmt: skip
    """Count, publish, and arrive at the barrier that `solve.solve_agreed` waits for.

    Given: `topk` [s, K] int32 or int64; `num_tokens`, s; `num_blocks` of them; `operation` as in `barrier.barrier`; if
    `check`, `counts` [E] int32 or int64 to compare with.

    Args:
        blocks: workspace; `before` is what later kernels read.
        load: [R, E] int32 of rank 0; `load_stride` elements to the next rank's.
        tokens: [R] int32 of rank 0; `tokens_stride` elements to the next rank's.
        s: BAD_ID or BAD_COUNT is reported in its host status.
        rank: this rank.
    """
    d, NB = dims, blocks.counts.shape[1]
    num_tokens, num_blocks = Given("num_tokens"), Given("num_blocks")
    NBP = next_power_of_2(NB)
    BE = max(1, min(PUBLISHED // NBP, 16))
    programs = ceil_div(d.E, BE)
    return [
        Launch(
            _count_blocks_kernel, (num_blocks,),
            (
                Given("topk"), blocks.counts, s.host_status, num_tokens,
            ),
            NB=NB, E=d.E, K=d.K, KP=next_power_of_2(d.K), TB=block_tokens(d.K), EARLY=False,
        ),
        Launch(
            _publish_load_kernel, (programs,),
            (
                blocks.counts, blocks.before, blocks.ticket, load, load_stride, tokens, tokens_stride,
                Given("counts") if check else blocks.ticket, s.signals, s.signal_stride, s.faults, s.fault_stride,
                s.epoch, s.status, s.host_status, num_tokens, num_blocks, programs, rank, Given("operation"),
            ),
            NB=NB, NBP=NBP, E=d.E, BE=BE, R=d.R, RP=next_power_of_2(d.R), NF=NUM_FAULTS, CHECK=check,
            EARLY=False,
        ),
    ]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Blocks:
    """Assignments of each expert by block of tokens.

    Attributes:
        counts: [E, NB] int32, 0 between launches.
        before: [E, NB] int32, how many assignments of an expert earlier blocks have.
        ticket: [1] int32, 0 between launches.
    """

    counts: Tensor
    before: Tensor
    ticket: Tensor

    @staticmethod
    def make(E: int, S: int, K: int, device: torch.device) -> Blocks:
        NB = ceil_div(S, block_tokens(K))
        counts = torch.zeros(E, NB, dtype=torch.int32, device=device)
        return Blocks(counts, torch.zeros_like(counts), torch.zeros(1, dtype=torch.int32, device=device))


def block_tokens(K: int) -> int:
    """TB, tokens of a block."""
    return BLOCK // next_power_of_2(K)
