"""Counting: how many assignments each expert has on this rank, block by block, and telling every peer.

A block is TB tokens with all their K assignments. Counts of a block, summed over earlier blocks, number the assignments
of an expert; their totals are this rank's load, written into row `rank` of every peer's load.

Example, K = 1, blocks of 2 tokens, ids [0, 0, 1, 0]: counts [[2, 0], [1, 1]], before [[0, 0], [2, 0]], load [3, 1].
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128  # assignments of a block, padding of K to a power of two included
ROWS, EXPERTS = 16, 32


@triton.jit(do_not_specialize=["num_tokens"])
def _count_blocks_kernel(
    topk, counts, host_status, num_tokens, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    TB: tl.constexpr,
):  # fmt: skip
    """Program b counts the tokens [b * TB, (b + 1) * TB). An id out of range counts as masked and is reported."""
    b = tl.program_id(0)
    i = tl.arange(0, TB * KP)
    token, k = b * TB + i // KP, i % KP
    real = (token < num_tokens) & (k < K)
    ids = tl.load(topk + token.to(tl.int64) * K + k, mask=real, other=-1).to(tl.int32)
    bad = (ids < -1) | (ids >= E)
    if tl.max(bad.to(tl.int32), 0) > 0:
        tl.store(host_status, 5)
    ids = tl.where((ids < 0) | bad, EP - 1, ids)
    tl.store(counts + b * EP + tl.arange(0, EP), tl.histogram(ids, EP))


@triton.jit(do_not_specialize=["rank", "num_blocks", "num_tokens"])
def _publish_load_kernel(
    counts, load, load_stride, tokens, tokens_stride, given, host_status, rank, num_blocks, num_tokens,
    E: tl.constexpr, EP: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BE: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Program i: exclusive sums over blocks, in place, for BE experts; totals into load[rank] of every peer."""
    e = tl.program_id(0) * BE + tl.arange(0, BE)
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
    real = e < E
    if CHECK:
        claimed = tl.load(given + e, mask=real, other=0).to(tl.int32)
        if tl.max(tl.where(real & (claimed != total), 1, 0), 0) > 0:
            tl.store(host_status, 6)
    for r in range(R):
        tl.store(load + r * load_stride + rank * E + e, total, mask=real)
        if tl.program_id(0) == 0:
            tl.store(tokens + r * tokens_stride + rank, num_tokens)


def count_load(
    topk: Tensor, counts: Tensor, load: Tensor, load_stride: int, tokens: Tensor, tokens_stride: int,
    given: Tensor | None, host_status: Tensor, rank: int, R: int, E: int, K: int,
) -> None:  # fmt: skip
    """Count and publish. Visible to peers after the next barrier.

    Args:
        topk: [s, K] int32 or int64.
        counts: [blocks, EP] int32 workspace: becomes, for each block, how many assignments of e earlier blocks have.
        load: [R, E] int32 of rank 0; `load_stride` elements to the next rank's.
        tokens: [R] int32 of rank 0; `tokens_stride` elements to the next rank's.
        given: [E] int32 counts to compare with, or None.
        host_status: [1] int32: BAD_ID or BAD_COUNT is reported here.
    """
    TB, EP = block_tokens(K), padded_experts(E)
    num_blocks = triton.cdiv(topk.shape[0], TB)
    KP = triton.next_power_of_2(K)
    if num_blocks:
        _count_blocks_kernel[(num_blocks,)](topk, counts, host_status, topk.shape[0], E=E, EP=EP, K=K, KP=KP, TB=TB)
    _publish_load_kernel[(triton.cdiv(E, EXPERTS),)](
        counts, load, load_stride, tokens, tokens_stride, counts if given is None else given, host_status, rank,
        num_blocks, topk.shape[0],
        E=E, EP=EP, R=R, ROWS=ROWS, BE=EXPERTS, CHECK=given is not None,
    )  # fmt: skip


def block_tokens(K: int) -> int:
    """TB, tokens of a block."""
    return BLOCK // triton.next_power_of_2(K)


def padded_experts(E: int) -> int:
    """EP: a power of two with room for a bin of masked assignments."""
    return triton.next_power_of_2(E + 1)
