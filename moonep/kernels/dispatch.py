"""Dispatch: a token's row travels once to each rank that computes it, then its duplicates are made there.

Rows are moved as 32-bit words; a row is a multiple of 16 bytes, so accesses are 16 bytes wide.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moonep.kernels.constants import ARRIVAL_ROW, INT32_MIN, NO_ARRIVAL

WIDTH_PER_PROGRAM = 4096


@triton.jit(do_not_specialize=["num_tokens", "num_senders", "rank"])
def _send_rows_kernel(
    hidden, route_weights, dst, fill, status, rows, rows_stride, weights, weights_stride, num_tokens, num_senders, rank,
    K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Programs [0, num_senders): rows and route weights of tokens, one token a turn. The others: a group's padding.

    H: words of a row. Remote stores are ordered by the barrier that follows.
    """
    if tl.load(status) != 0:
        return
    pid = tl.program_id(0)
    o = tl.arange(0, BH)
    if pid < num_senders:
        k = tl.arange(0, KP)
        token = pid
        while token < num_tokens:
            places = tl.load(dst + token.to(tl.int64) * K + k, mask=k < K, other=INT32_MIN)
            if HAS_WEIGHTS:
                real = places != INT32_MIN
                place = tl.where(real, tl.where(places < 0, -places - 1, places), 0)
                value = tl.load(route_weights + token.to(tl.int64) * K + k, mask=real, other=0.0)
                tl.store(weights + (place // C).to(tl.int64) * weights_stride + place % C, value, mask=real)
            for begin in range(0, H, BH):
                inside = begin + o < H
                row = tl.load(hidden + token.to(tl.int64) * H + begin + o, mask=inside)
                for j in range(K):
                    at = tl.load(dst + token.to(tl.int64) * K + j)
                    if at >= 0:  # a primary
                        to = (at // C).to(tl.int64) * rows_stride + (at % C).to(tl.int64) * H
                        tl.store(rows + to + begin + o, row, mask=inside)
            token += num_senders
    else:
        first = tl.load(fill + 2 * (pid - num_senders))
        count = tl.load(fill + 2 * (pid - num_senders) + 1)
        i = tl.full([], 0, tl.int32)
        own_rows = rows + rank * rows_stride
        own_weights = weights + rank * weights_stride
        while i < count:
            for begin in range(0, H, BH):
                tl.store(own_rows + (first + i).to(tl.int64) * H + begin + o, o * 0, mask=begin + o < H)
            tl.store(own_weights + first + i, 0.0)
            i += 1


@triton.jit(do_not_specialize=["num_programs"])
def _expand_rows_kernel(
    rows, arrivals, tokens, status, num_programs, R: tl.constexpr, S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    H: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Copy each row that arrived to its duplicates, one token a turn."""
    if tl.load(status) != 0:
        return
    o = tl.arange(0, BH)
    k = tl.arange(0, KP)
    for source in range(R):
        num_tokens = tl.load(tokens + source)
        token = tl.program_id(0)
        while token < num_tokens:
            at = arrivals + (source * S + token).to(tl.int64) * K
            here = tl.load(at + k, mask=k < K, other=NO_ARRIVAL)
            primary = tl.min(tl.where(here >= 0, k, KP), 0)
            if tl.sum((here >= 0).to(tl.int32), 0) > 1:
                head = tl.load(at + primary) & ARRIVAL_ROW
                for begin in range(0, H, BH):
                    inside = begin + o < H
                    row = tl.load(rows + head.to(tl.int64) * H + begin + o, mask=inside)
                    for j in range(1, K):
                        arrival = tl.load(at + j)
                        if (arrival >= 0) & (j > primary):
                            duplicate = (arrival & ARRIVAL_ROW).to(tl.int64)
                            tl.store(rows + duplicate * H + begin + o, row, mask=inside)
            token += num_programs


@triton.jit(do_not_specialize=["num_programs"])
def _copy_used_kernel(
    source, target, cu_seqlens, status, num_programs, G: tl.constexpr, H: tl.constexpr, BH: tl.constexpr
):  # fmt: skip
    """Copy the rows below the last offset."""
    if tl.load(status) != 0:
        return
    o = tl.arange(0, BH)
    used = tl.load(cu_seqlens + G - 1)
    row = tl.program_id(0)
    while row < used:
        for begin in range(0, H, BH):
            at = row.to(tl.int64) * H + begin + o
            inside = begin + o < H
            tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)
        row += num_programs


@triton.jit
def _take_arrivals_kernel(source, target, tokens, status, S: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Program (i, r): a block of the arrivals of rank r's tokens; beyond its tokens there are none."""
    if tl.load(status) != 0:
        return
    r = tl.program_id(1)
    o = tl.program_id(0) * BK + tl.arange(0, BK)
    at = r.to(tl.int64) * S * K + o
    arrival = tl.load(source + at, mask=o < tl.load(tokens + r) * K, other=NO_ARRIVAL)
    tl.store(target + at, arrival, mask=o < S * K)


def send_rows(
    hidden: Tensor, route_weights: Tensor | None, dst: Tensor, fill: Tensor, status: Tensor, rows: Tensor,
    rows_stride: int, weights: Tensor, weights_stride: int, rank: int, K: int, C: int, num_programs: int,
) -> None:  # fmt: skip
    """Write each token's row to each of its ranks and its weights to all its rows; zero this rank's padding.

    Args:
        hidden: [s, H] int32 words. route_weights: [s, K] fp32 or None. dst: [s * K]. fill: [G, 2].
        rows: [C, H] int32 words of rank 0; weights: [C] fp32 of rank 0; strides in elements to the next rank's.

    Moves: s x (ranks of a token) rows.
    """
    s, H = hidden.shape
    senders = max(min(num_programs, s), 1)
    _send_rows_kernel[(senders + fill.shape[0],)](
        hidden, weights if route_weights is None else route_weights, dst, fill, status, rows, rows_stride,
        weights, weights_stride, s, senders, rank,
        K=K, KP=triton.next_power_of_2(K), C=C, H=H, BH=row_block(H), HAS_WEIGHTS=route_weights is not None,
        num_warps=row_warps(H),
    )  # fmt: skip


def expand_rows(rows: Tensor, arrivals: Tensor, tokens: Tensor, status: Tensor, num_programs: int) -> None:
    """Copy arrived rows to their duplicates. rows: [C, H] int32 words of this rank."""
    H = rows.shape[1]
    R, S, K = arrivals.shape
    _expand_rows_kernel[(num_programs,)](
        rows, arrivals, tokens, status, num_programs,
        R=R, S=S, K=K, KP=triton.next_power_of_2(K), H=H, BH=row_block(H), num_warps=row_warps(H),
    )  # fmt: skip


def copy_used(source: Tensor, target: Tensor, cu_seqlens: Tensor, status: Tensor, num_programs: int) -> None:
    """target[:used] = source[:used], used = the last offset. [C, H] int32 words."""
    H = source.shape[1]
    _copy_used_kernel[(num_programs,)](
        source, target, cu_seqlens, status, num_programs,
        G=len(cu_seqlens), H=H, BH=row_block(H), num_warps=row_warps(H),
    )  # fmt: skip


def take_arrivals(source: Tensor, target: Tensor, tokens: Tensor, status: Tensor) -> None:
    """The plan's own arrivals, from what sources wrote. [R, S, K] int32."""
    R, S, K = source.shape
    _take_arrivals_kernel[(triton.cdiv(S * K, 1024), R)](source, target, tokens, status, S=S, K=K, BK=1024)


def row_block(width: int) -> int:
    """Words (or elements) of a row that a program moves at once."""
    return min(triton.next_power_of_2(width), WIDTH_PER_PROGRAM)


def row_warps(width: int) -> int:
    """Warps for one row: 8 words (or elements) a thread."""
    return max(1, min(16, row_block(width) // 256))
