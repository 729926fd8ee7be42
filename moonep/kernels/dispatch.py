"""Dispatch: a token's row travels once to each rank that computes it, then its duplicates are made there.

Rows are moved as 32-bit words; a row is a multiple of 16 bytes, so accesses are 16 bytes wide.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moonep.kernels.constants import INT32_MIN, LINK_HEAD, LINK_VALUE

WIDTH_PER_PROGRAM = 4096


@triton.jit(do_not_specialize=["num_tokens", "num_senders", "rank"])
def _send_rows_kernel(
    hidden, route_weights, dst, fill, status, rows, rows_stride, weights, weights_stride, links, num_tokens,
    num_senders, rank,
    K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    HAS_LINKS: tl.constexpr,
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
            if HAS_LINKS:
                tl.store(links + first + i, 0)
            i += 1


@triton.jit(do_not_specialize=["num_programs"])
def _expand_rows_kernel(
    rows, links, cu_seqlens, status, num_programs, G: tl.constexpr, H: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Copy each row that arrived to its duplicates: chains are followed from their heads, one row a turn."""
    if tl.load(status) != 0:
        return
    o = tl.arange(0, BH)
    used = tl.load(cu_seqlens + G - 1)
    head = tl.program_id(0)
    while head < used:
        link = tl.load(links + head)
        if (link & LINK_HEAD) != 0:
            if link >= 0:  # not the only row of its chain
                for begin in range(0, H, BH):
                    inside = begin + o < H
                    row = tl.load(rows + head.to(tl.int64) * H + begin + o, mask=inside)
                    at = link
                    while at >= 0:
                        follower = at & LINK_VALUE
                        tl.store(rows + follower.to(tl.int64) * H + begin + o, row, mask=inside)
                        at = tl.load(links + follower)
        head += num_programs


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
def _take_links_kernel(source, target, cu_seqlens, status, G: tl.constexpr, C: tl.constexpr, BC: tl.constexpr):
    """Copy the links of rows below the last offset; the others get 0."""
    if tl.load(status) != 0:
        return
    at = tl.program_id(0) * BC + tl.arange(0, BC)
    used = tl.load(cu_seqlens + G - 1)
    tl.store(target + at, tl.load(source + at, mask=at < used, other=0), mask=at < C)


def send_rows(
    hidden: Tensor, route_weights: Tensor | None, dst: Tensor, fill: Tensor, status: Tensor, rows: Tensor,
    rows_stride: int, weights: Tensor, weights_stride: int, links: Tensor | None, rank: int, K: int, C: int,
    num_programs: int,
) -> None:  # fmt: skip
    """Write each token's row to each of its ranks and its weights to all its rows; zero this rank's padding.

    Args:
        hidden: [s, H] int32 words. route_weights: [s, K] fp32 or None. dst: [s * K]. fill: [G, 2].
        rows: [C, H] int32 words of rank 0; weights: [C] fp32 of rank 0; strides in elements to the next rank's.
        links: [C] int32 of this rank, whose padding is zeroed too; None: not.

    Moves: s x (ranks of a token) rows.
    """
    s, H = hidden.shape
    senders = max(min(num_programs, s), 1)
    _send_rows_kernel[(senders + fill.shape[0],)](
        hidden, weights if route_weights is None else route_weights, dst, fill, status, rows, rows_stride,
        weights, weights_stride, dst if links is None else links, s, senders, rank,
        K=K, KP=triton.next_power_of_2(K), C=C, H=H, BH=row_block(H), HAS_WEIGHTS=route_weights is not None,
        HAS_LINKS=links is not None,
        num_warps=row_warps(H),
    )  # fmt: skip


def expand_rows(rows: Tensor, links: Tensor, cu_seqlens: Tensor, status: Tensor, num_programs: int) -> None:
    """Copy arrived rows to their duplicates. rows: [C, H] int32 words of this rank."""
    H = rows.shape[1]
    _expand_rows_kernel[(num_programs,)](
        rows, links, cu_seqlens, status, num_programs, G=len(cu_seqlens), H=H, BH=row_block(H), num_warps=row_warps(H)
    )


def copy_used(source: Tensor, target: Tensor, cu_seqlens: Tensor, status: Tensor, num_programs: int) -> None:
    """target[:used] = source[:used], used = the last offset. [C, H] int32 words."""
    H = source.shape[1]
    _copy_used_kernel[(num_programs,)](
        source, target, cu_seqlens, status, num_programs,
        G=len(cu_seqlens), H=H, BH=row_block(H), num_warps=row_warps(H),
    )  # fmt: skip


def take_links(source: Tensor, target: Tensor, cu_seqlens: Tensor, status: Tensor) -> None:
    """The plan's own links, from those that arrived. [C] int32."""
    C = source.shape[0]
    _take_links_kernel[(triton.cdiv(C, 1024),)](source, target, cu_seqlens, status, G=len(cu_seqlens), C=C, BC=1024)


def row_block(width: int) -> int:
    """Words (or elements) of a row that a program moves at once."""
    return min(triton.next_power_of_2(width), WIDTH_PER_PROGRAM)


def row_warps(width: int) -> int:
    """Warps for one row: 8 words (or elements) a thread."""
    return max(1, min(16, row_block(width) // 256))
