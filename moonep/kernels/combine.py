"""Combine: sum a token's rows on the rank that computed them, push the partial sum home, sum the partial sums.

Both sums are fp32 in a stated order (k, then rank), start at +0 and are rounded once to the payload dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonep.environment import interpreting
from moonep.kernels.constants import INT32_MIN, LINK_HEAD, LINK_VALUE
from moonep.kernels.dispatch import row_block, row_warps
from moonep.kernels.rounding import round_to

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit(do_not_specialize=["num_programs"])
def _push_partials_kernel(
    rows, links, cu_seqlens, status, staging, staging_stride, num_programs,
    G: tl.constexpr, SW: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, DTYPE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One chain a turn: its sum goes to staging row reply % (S * W) of rank reply // (S * W)."""
    if tl.load(status) != 0:
        return
    o = tl.arange(0, BH)
    used = tl.load(cu_seqlens + G - 1)
    head = tl.program_id(0)
    while head < used:
        head_link = tl.load(links + head)
        if (head_link & LINK_HEAD) != 0:
            for begin in range(0, H, BH):
                inside = begin + o < H
                link = head_link
                total = tl.load(rows + head.to(tl.int64) * H + begin + o, mask=inside, other=0.0).to(tl.float32) + 0.0
                while link >= 0:
                    follower = link & LINK_VALUE
                    row = rows + follower.to(tl.int64) * H + begin
                    total += tl.load(row + o, mask=inside, other=0.0).to(tl.float32)
                    link = tl.load(links + follower)
                reply = link & LINK_VALUE
                to = (reply // SW).to(tl.int64) * staging_stride + (reply % SW).to(tl.int64) * H
                tl.store(staging + to + begin + o, round_to(total, DTYPE, INTERPRET), mask=inside)
        head += num_programs


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
    rows: Tensor, links: Tensor, cu_seqlens: Tensor, status: Tensor, staging: Tensor, staging_stride: int, SW: int,
    num_programs: int,
) -> None:  # fmt: skip
    """rows [C, H] -> staging [S * W, H] of each chain's rank (tensor of rank 0, stride in elements).

    Moves: one row a chain to its token's rank. Visible to it after the next barrier.
    """
    H = rows.shape[1]
    _push_partials_kernel[(num_programs,)](
        rows, links, cu_seqlens, status, staging, staging_stride, num_programs,
        G=len(cu_seqlens), SW=SW, H=H, BH=row_block(H), DTYPE=TYPES[rows.dtype], INTERPRET=interpreting(),
        num_warps=row_warps(H),
    )  # fmt: skip


def sum_partials(
    staging: Tensor, dst: Tensor, weights: Tensor | None, weights_stride: int, status: Tensor, output: Tensor,
    route_weights: Tensor | None, K: int, W: int, C: int, num_programs: int,
) -> None:  # fmt: skip
    """staging [S * W, H] of this rank -> output [s, H]; weights [C] of rank 0 -> route_weights [s, K]."""
    s, H = output.shape
    if s == 0:
        return
    _sum_partials_kernel[(min(num_programs, s),)](
        staging, dst, output if weights is None else weights, weights_stride, status, output,
        output if route_weights is None else route_weights, s, min(num_programs, s),
        K=K, KP=triton.next_power_of_2(K), W=W, C=C, H=H, BH=row_block(H), DTYPE=TYPES[output.dtype],
        HAS_WEIGHTS=weights is not None, INTERPRET=interpreting(), num_warps=row_warps(H),
    )  # fmt: skip
