"""Dispatch: a token's row travels once to each rank that computes it, then its duplicates are made there.

Rows are moved as 32-bit words; a row is a multiple of 16 bytes, so accesses are 16 bytes wide.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonep.dims import Dims, ceil_div, next_power_of_2
from moonep.kernels.constants import ARRIVAL_ROW, NO_ARRIVAL
from moonep.kernels.early import admit_next, await_previous
from moonep.kernels.launch import Given, Launch

WIDTH_PER_PROGRAM = 4096
WEIGHTS_PER_PROGRAM = 1024


@triton.jit(do_not_specialize=["num_tokens", "num_senders", "rank"])
def _send_rows_kernel(
    hidden, dst, fill, status, rows, rows_stride, own_weights, num_tokens, num_senders, rank,
    K: tl.constexpr, C: tl.constexpr, H: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Programs [0, num_senders): rows of tokens, one token a turn. The others: a group's padding.

    H: words of a row. Remote stores are ordered by the barrier that follows.
    """
    if tl.load(status) != 0:
        return
    pid = tl.program_id(0)
    o = tl.arange(0, BH)
    if pid < num_senders:
        token = pid
        while token < num_tokens:
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
        own_rows = rows + rank * rows_stride.to(tl.int64)
        while i < count:
            for begin in range(0, H, BH):
                tl.store(own_rows + (first + i).to(tl.int64) * H + begin + o, o * 0, mask=begin + o < H)
            tl.store(own_weights + first + i, 0.0)
            i += 1


@triton.jit(do_not_specialize=["count", "rank"])
def _send_weights_kernel(
    route_weights, status, weights, weights_stride, count, rank, R: tl.constexpr, SK: tl.constexpr, BA: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Route weights to every rank. Remote stores are ordered by what follows in the stream."""
    await_previous(EARLY)
    admit_next(EARLY)
    if tl.load(status) != 0:
        return
    a = tl.program_id(0) * BA + tl.arange(0, BA)
    value = tl.load(route_weights + a, mask=a < count, other=0.0)
    for r in range(R):
        tl.store(weights + r * weights_stride.to(tl.int64) + rank * SK + a, value, mask=a < count)


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
def _take_arrivals_kernel(
    source, target, tokens, arriving_weights, weights, status,
    S: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, FRESH: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Program (i, r): a block of the arrivals of rank r's tokens; beyond its tokens there are none."""
    if tl.load(status) != 0:
        return
    r = tl.program_id(1)
    o = tl.program_id(0) * BK + tl.arange(0, BK)
    at = r.to(tl.int64) * S * K + o
    arrival = tl.load(source + at, mask=o < tl.load(tokens + r) * K, other=NO_ARRIVAL)
    if FRESH:
        tl.store(target + at, arrival, mask=o < S * K)
    if HAS_WEIGHTS:
        weight = tl.load(arriving_weights + at, mask=arrival >= 0)
        tl.store(weights + (arrival & ARRIVAL_ROW), weight, mask=arrival >= 0)


def send_rows(
    status: Tensor, rows: Tensor, rows_stride: int, own_weights: Tensor, rank: int, dims: Dims, num_programs: int
) -> Launch:
    """Write each token's row to each of its ranks; zero this rank's padding, rows and weights.

    Given: `hidden` [s, H] payload; `num_tokens`, s; `dst` and `zero_fill_ranges` of the plan.

    Args:
        rows: [C, words of a row] int32 of rank 0; stride in elements to the next rank's.
        own_weights: [C] fp32 of this rank.
        num_programs: that send; one more for each group's padding.

    Moves: s x (ranks of a token) rows.
    """
    d, H = dims, rows.shape[1]
    return Launch(
        _send_rows_kernel, (num_programs + d.G,),
        (
            Given("hidden", torch.int32), Given("dst"), Given("zero_fill_ranges"), status, rows, rows_stride,
            own_weights, Given("num_tokens"), num_programs, rank,
        ),
        K=d.K, C=d.C, H=H, BH=row_block(H), num_warps=row_warps(H),
    )  # fmt: skip


def send_weights(status: Tensor, weights: Tensor, weights_stride: int, rank: int) -> Launch:
    """Write route weights to every rank: weights [R, S, K] fp32 of rank 0, elements to the next rank's.

    Given: `route_weights` [s, K] fp32; `num_weights`, s x K; `weight_blocks`, s x K / WEIGHTS_PER_PROGRAM.
    """
    return Launch(
        _send_weights_kernel, (Given("weight_blocks"),),
        (Given("route_weights"), status, weights, weights_stride, Given("num_weights"), rank),
        R=weights.shape[0], SK=weights[0].numel(), BA=WEIGHTS_PER_PROGRAM, EARLY=False,
    )  # fmt: skip


def expand_rows(rows: Tensor, status: Tensor, dims: Dims, num_programs: int) -> Launch:
    """Copy arrived rows to their duplicates. rows: [C, words of a row] int32 of this rank.

    Given: `arrivals` and `tokens` of the plan.
    """
    d, H = dims, rows.shape[1]
    return Launch(
        _expand_rows_kernel, (num_programs,),
        (rows, Given("arrivals"), Given("tokens"), status, num_programs),
        R=d.R, S=d.S, K=d.K, KP=next_power_of_2(d.K), H=H, BH=row_block(H), num_warps=row_warps(H),
    )  # fmt: skip


def copy_used(source: Tensor, status: Tensor, dims: Dims, num_programs: int) -> Launch:
    """Copy the rows below the last offset. source: [C, words of a row] int32.

    Given: `target` [C, H] payload; `cu_seqlens` of the plan.
    """
    H = source.shape[1]
    return Launch(
        _copy_used_kernel, (num_programs,),
        (source, Given("target", torch.int32), Given("cu_seqlens"), status, num_programs),
        G=dims.G, H=H, BH=row_block(H), num_warps=row_warps(H),
    )  # fmt: skip


def take_arrivals(
    arriving: Tensor | None, arriving_weights: Tensor | None, weights: Tensor, status: Tensor, dims: Dims
) -> Launch:
    """The plan's own arrivals, from what sources wrote; and route weights to their rows.

    Given: `arrivals` and `tokens` of the plan.

    Args:
        arriving: [R, S, K] int32, as sources wrote them; None: the plan has its own already.
        arriving_weights: [R, S, K] fp32, as sources wrote them; None: no weights.
        weights: [C] fp32.
    """
    d, arrivals = dims, Given("arrivals")
    return Launch(
        _take_arrivals_kernel, (ceil_div(d.S * d.K, 1024), d.R),
        (
            arrivals if arriving is None else arriving, arrivals, Given("tokens"),
            weights if arriving_weights is None else arriving_weights, weights, status,
        ),
        S=d.S, K=d.K, BK=1024, FRESH=arriving is not None, HAS_WEIGHTS=arriving_weights is not None,
    )  # fmt: skip


def row_block(width: int) -> int:
    """Words (or elements) of a row that a program moves at once."""
    return min(next_power_of_2(width), WIDTH_PER_PROGRAM)


def row_warps(width: int) -> int:
    """Warps for one row: 8 words (or elements) a thread."""
    return max(1, min(16, row_block(width) // 256))
