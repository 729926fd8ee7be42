"""Combine: sum a token's rows on the rank that computed them, push the partial sum home, sum the partial sums.

Both sums are fp32 in a stated order (k, then rank), start at +0 and are rounded once to the payload dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonep.dims import Dims, next_power_of_2
from moonep.environment import interpreting
from moonep.kernels.constants import ARRIVAL_ROW, ARRIVAL_SHIFT, INT32_MIN, NO_ARRIVAL
from moonep.kernels.dispatch import row_block, row_warps
from moonep.kernels.launch import Given, Launch
from moonep.kernels.rounding import round_to

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit(do_not_specialize=["rank", "num_programs"])
def _push_partials_kernel(
    rows, arrivals, tokens, status, staging, staging_stride, rank, num_programs,
    R: tl.constexpr, S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, W: tl.constexpr, H: tl.constexpr,
    BH: tl.constexpr, DTYPE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One token a turn: the sum of its rows here goes to row token * W + ordinal of its rank's staging."""
    if tl.load(status) != 0:
        return
    o = tl.arange(0, BH)
    k = tl.arange(0, KP)
    for i in range(R):
        source = (rank + 1 + i) % R  # each rank starts with another peer
        num_tokens = tl.load(tokens + source)
        token = tl.program_id(0)
        while token < num_tokens:
            at = arrivals + (source * S + token).to(tl.int64) * K
            first = tl.max(tl.load(at + k, mask=k < K, other=NO_ARRIVAL), 0)
            if first >= 0:
                reply = (token * W + (first >> ARRIVAL_SHIFT)).to(tl.int64)
                for begin in range(0, H, BH):
                    inside = begin + o < H
                    total = tl.zeros([BH], tl.float32)
                    for j in range(K):
                        arrival = tl.load(at + j)
                        if arrival >= 0:
                            row = rows + (arrival & ARRIVAL_ROW).to(tl.int64) * H + begin
                            total += tl.load(row + o, mask=inside, other=0.0).to(tl.float32)
                    to = staging + source * staging_stride.to(tl.int64) + reply * H + begin
                    tl.store(to + o, round_to(total, DTYPE, INTERPRET), mask=inside)
            token += num_programs


@triton.jit(do_not_specialize=["num_tokens", "num_programs"])
def _sum_partials_kernel(
    staging, dst, weights, weights_stride, status, output, route_weights, num_tokens, num_programs,
    K: tl.constexpr, KP: tl.constexpr, W: tl.constexpr, C: tl.constexpr, H: tl.constexpr, BH: tl.constexpr,
    DTYPE: tl.constexpr, HAS_WEIGHTS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One token a turn: the sum of its partial sums, rank order; its route weights, read from their ranks."""
    if tl.load(status) != 0:
        return
    o = tl.arange(0, BH)
    k = tl.arange(0, KP)
    token = tl.program_id(0)
    while token < num_tokens:
        at = token.to(tl.int64) * K + k
        places = tl.load(dst + at, mask=k < K, other=INT32_MIN)
        if HAS_WEIGHTS:
            real = places != INT32_MIN
            place = tl.where(real, tl.where(places < 0, -places - 1, places), 0)
            value = tl.load(weights + (place // C).to(tl.int64) * weights_stride + place % C, mask=real, other=0.0)
            tl.store(route_weights + at, value, mask=k < K)
        count = tl.sum((places >= 0).to(tl.int32), 0)
        for begin in range(0, H, BH):
            inside = begin + o < H
            total = tl.zeros([BH], tl.float32)
            ordinal = count * 0
            while ordinal < count:
                partial = staging + (token.to(tl.int64) * W + ordinal) * H + begin + o
                total += tl.load(partial, mask=inside, other=0.0).to(tl.float32)
                ordinal += 1
            tl.store(output + token.to(tl.int64) * H + begin + o, round_to(total, DTYPE, INTERPRET), mask=inside)
        token += num_programs


def push_partials(
    status: Tensor, staging: Tensor, staging_stride: int, rank: int, dims: Dims, num_programs: int
) -> Launch:
    """Rows -> staging [S * W, H] of each token's rank (tensor of rank 0, stride in elements).

    Given: `hidden` [C, H]; `arrivals` and `tokens` of the plan.

    Moves: one row a token and rank that computes some of it. Visible to the token's rank after the next barrier.
    """
    d = dims
    return Launch(
        _push_partials_kernel, (num_programs,),
        (Given("hidden"), Given("arrivals"), Given("tokens"), status, staging, staging_stride, rank, num_programs),
        R=d.R, S=d.S, K=d.K, KP=next_power_of_2(d.K), W=d.W, H=d.H, BH=row_block(d.H), DTYPE=TYPES[staging.dtype],
        INTERPRET=interpreting(), num_warps=row_warps(d.H),
    )  # fmt: skip


def sum_partials(
    staging: Tensor, weights: Tensor | None, weights_stride: int, status: Tensor, dims: Dims, num_programs: int
) -> Launch:
    """Sum the partial sums of each token, and gather its route weights.

    Given: `output` [s, H]; `num_tokens`, s; `dst` of the plan; with weights, `gathered` [s, K] fp32.

    Args:
        staging: [S * W, H] of this rank.
        weights: [C] fp32 of rank 0, `weights_stride` elements to the next rank's; None: none are gathered.
    """
    d, output = dims, Given("output")
    return Launch(
        _sum_partials_kernel, (num_programs,),
        (
            staging, Given("dst"), output if weights is None else weights, weights_stride, status, output,
            output if weights is None else Given("gathered"), Given("num_tokens"), num_programs,
        ),
        K=d.K, KP=next_power_of_2(d.K), W=d.W, C=d.C, H=d.H, BH=row_block(d.H), DTYPE=TYPES[staging.dtype],
        HAS_WEIGHTS=weights is not None, INTERPRET=interpreting(), num_warps=row_warps(d.H),
    )  # fmt: skip
