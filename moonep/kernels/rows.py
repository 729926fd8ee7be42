"""From the allocation to rows, on the device: slots and groups, piece tables, each assignment's row and arrival.

The twins of the same names in `moonep.planner.rows` say what the results are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonep.dims import Dims, ceil_div, next_power_of_2
from moonep.kernels.constants import ARRIVAL_SHIFT, INT32_MIN, NO_ARRIVAL
from moonep.kernels.launch import Given, Launch
from moonep.kernels.load import Blocks, block_tokens
from moonep.kernels.solve import Solution, chosen


@triton.jit
def _pad(size, P: tl.constexpr):
    return (size + P - 1) // P * P


@triton.jit(do_not_specialize=["rank"])
def _lay_groups_kernel(
    cost, left, given, donor, status, alloc, base, experts_to_copy, sizes, cu_seqlens, fill, remote_stats, rank,
    E: tl.constexpr, R: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, B: tl.constexpr, BP: tl.constexpr,
    GP: tl.constexpr, P: tl.constexpr, MODES: tl.constexpr,
):  # fmt: skip
    """Program d lays the groups of rank d; for this rank it also writes offsets and padding ranges."""
    d = tl.program_id(0)
    if tl.load(status) != 0:
        if d == rank:  # no rows at all: the caller's experts may run before the host has heard of the failure
            none = tl.arange(0, GP)
            tl.store(cu_seqlens + none, none * 0, mask=none < E + B)
            tl.store(fill + 2 * none, none * 0, mask=none < E + B)
            tl.store(fill + 2 * none + 1, none * 0, mask=none < E + B)
        return
    c = chosen(cost, MODES)
    l = tl.arange(0, LP)
    real = l < L
    h = tl.load(donor + c * R + d)
    own = tl.load(left + c * E + d * L + l, mask=real, other=0)
    foreign = tl.load(given + c * E + d * L + l, mask=real & (h >= 0), other=0)
    taken = (foreign > 0).to(tl.int32)
    num_redundant = tl.sum(taken, 0)

    # Slots: the B largest (ties: lower id).
    slotted = taken
    if B < L:
        slotted = taken * 0
        for _ in range(B):
            largest = tl.max(tl.where((taken == 1) & (slotted == 0), foreign, 0), 0)
            pick = tl.min(tl.where((taken == 1) & (slotted == 0) & (foreign == largest), l, LP), 0)
            slotted = tl.where(l == pick, taken, slotted)
    slot = tl.cumsum(slotted, 0) - slotted
    num_slots = tl.sum(slotted, 0)
    b = tl.arange(0, BP)
    tl.store(experts_to_copy + d * B + b, b * 0 - 1, mask=(b < B) & (b >= num_slots))
    tl.store(experts_to_copy + d * B + slot, h * L + l, mask=slotted == 1)

    own_rows = _pad(own, P)
    slot_rows = _pad(foreign * slotted, P)
    spill_rows = _pad(foreign * (taken - slotted), P)
    num_own, num_spilled = tl.sum(own_rows, 0), tl.sum(spill_rows, 0)
    before_own = tl.where(h < d, num_spilled, 0)
    before_spilled = tl.where(h < d, 0, num_own)
    own_base = before_own + tl.cumsum(own_rows, 0) - own_rows
    spilled_base = before_spilled + tl.cumsum(spill_rows, 0) - spill_rows
    slot_base = num_own + num_spilled + tl.cumsum(slot_rows, 0) - slot_rows
    foreign_base = tl.where(slotted == 1, slot_base, spilled_base)
    tl.store(base + (d * L + l) * R + d, own_base, mask=real)
    tl.store(base + (h * L + l) * R + d, foreign_base, mask=real & (h >= 0))
    e = tl.arange(0, GP)
    elsewhere = (e < E) & (e // L != d) & ((e // L != h) | (h < 0))
    tl.store(alloc + e * R + d, e * 0, mask=elsewhere)
    tl.store(alloc + (d * L + l) * R + d, own, mask=real)
    tl.store(alloc + (h * L + l) * R + d, foreign, mask=real & (h >= 0))

    if d == rank:
        g = tl.arange(0, GP)
        G: tl.constexpr = E + B
        tl.store(sizes + g, g * 0, mask=g < G)
        tl.debug_barrier()
        tl.store(sizes + d * L + l, own, mask=real)
        tl.store(sizes + h * L + l, foreign, mask=(taken == 1) & (slotted == 0))
        tl.store(sizes + E + slot, foreign, mask=slotted == 1)
        tl.debug_barrier()
        size = tl.load(sizes + g, mask=g < G, other=0)
        rows = _pad(size, P)
        end = tl.cumsum(rows, 0)
        padding = rows - size
        tl.store(cu_seqlens + g, end, mask=g < G)
        tl.store(fill + 2 * g, tl.where(padding > 0, end - padding, 0), mask=g < G)
        tl.store(fill + 2 * g + 1, padding, mask=g < G)
        tl.store(remote_stats, num_redundant)


@triton.jit(do_not_specialize=["rank"])
def _split_sources_kernel(
    load, tokens, alloc, base, experts_to_copy, status, plan_load, plan_tokens, first, row, remote_stats, rank,
    E: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, L: tl.constexpr, B: tl.constexpr, RBP: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """Program i: piece tables of BE experts for this rank as source. Columns are sources, then ranks."""
    if tl.load(status) != 0:
        return
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    r = tl.arange(0, RP)
    real = (e[:, None] < E) & (r[None, :] < R)
    have = tl.load(load + r[None, :] * E + e[:, None], mask=real, other=0)
    want = tl.load(alloc + e[:, None] * R + r[None, :], mask=real, other=0)
    tl.store(plan_load + r[None, :] * E + e[:, None], have, mask=real)
    kept = tl.minimum(have, want)
    give, take = have - kept, want - kept
    take_end = tl.cumsum(take, 1)
    take_begin = take_end - take
    give_begin = tl.sum(tl.where(r[None, :] < rank, give, 0), 1)
    give_end = give_begin + tl.sum(tl.where(r[None, :] == rank, give, 0), 1)
    earlier = tl.maximum(tl.minimum(give_begin[:, None], take_end) - take_begin, 0)
    earlier += tl.where(r[None, :] < rank, kept, 0)
    piece = tl.minimum(give_end[:, None], take_end) - tl.maximum(give_begin[:, None], take_begin)
    piece = tl.maximum(piece, 0) + tl.where(r[None, :] == rank, kept, 0)
    number = tl.cumsum(piece, 1) - piece
    # Where nothing of an expert is computed on a rank, no base was written: such a row is never used.
    at = tl.load(base + e[:, None] * R + r[None, :], mask=real & (want > 0), other=0)
    tl.store(first + e[:, None] * R + r[None, :], number, mask=real)
    tl.store(row + e[:, None] * R + r[None, :], at + earlier - number, mask=real)
    if tl.program_id(0) == 0:
        tl.store(plan_tokens + r, tl.load(tokens + r, mask=r < R), mask=r < R)
        mine = tl.full([], 0, tl.int32)
        if B > 0:
            i = tl.arange(0, RBP)
            start = tl.full([], 0, tl.int32)
            while start < R * B:
                held = tl.load(experts_to_copy + start + i, mask=start + i < R * B, other=-1)
                mine += tl.sum(tl.where((held >= 0) & (held // L == rank), 1, 0), 0)
                start += RBP
        tl.store(remote_stats + 1, mine)


@triton.jit(do_not_specialize=["num_tokens", "rank"])
def _assign_rows_kernel(
    topk, route_weights, before, first, row, status, dst, sends, arrivals, arrivals_stride, weights,
    weights_stride, num_tokens, rank,
    E: tl.constexpr, NB: tl.constexpr, R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    TB: tl.constexpr, C: tl.constexpr, S: tl.constexpr, W: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Program b: destination rank and row of the assignments of TB tokens; all ranks get their arrivals, and
    the tokens' route weights."""
    if tl.load(status) != 0:
        return
    b = tl.program_id(0)
    i = tl.arange(0, TB * KP)
    token, k = b * TB + i // KP, i % KP
    inside = (token < num_tokens) & (k < K)
    ids = tl.load(topk + token.to(tl.int64) * K + k, mask=inside, other=-1).to(tl.int32)
    real = (ids >= 0) & (ids < E)
    ids = tl.where(real, ids, -1)
    safe = tl.where(real, ids, 0)
    number = tl.load(before + safe * NB + b)
    for begin in tl.static_range(0, TB * KP, COLUMNS):  # all at once takes too many registers
        j = begin + tl.arange(0, COLUMNS)
        other, other_k = b * TB + j // KP, j % KP
        there = (other < num_tokens) & (other_k < K)
        others = tl.load(topk + other.to(tl.int64) * K + other_k, mask=there, other=-1).to(tl.int32)
        number += tl.sum(((ids[:, None] == others[None, :]) & (j[None, :] < i[:, None])).to(tl.int32), 1)
    to = i * 0
    for r in range(1, R):
        to += (tl.load(first + safe * R + r) <= number).to(tl.int32)
    at = tl.load(row + safe * R + to) + number
    to = tl.where(real, to, -1)

    if HAS_WEIGHTS:
        value = tl.load(route_weights + token.to(tl.int64) * K + k, mask=inside, other=0.0)
        to_weights = weights + (rank * S + token).to(tl.int64) * K + k
        for r in range(R):
            tl.store(to_weights + r * weights_stride.to(tl.int64), value, mask=inside)

    to_TK = tl.reshape(to, [TB, KP])
    at_TK = tl.reshape(at, [TB, KP])
    real_TK = to_TK >= 0
    j = tl.arange(0, KP)
    equal = (to_TK[:, :, None] == to_TK[:, None, :]) & real_TK[:, :, None]
    before = (j[None, None, :] < j[None, :, None]) & equal
    primary = tl.sum(before.to(tl.int32), 2) == 0
    counted = (primary & real_TK).to(tl.int32)
    lower = (to_TK[:, None, :] < to_TK[:, :, None]).to(tl.int32)
    ordinal = tl.sum(lower * counted[:, None, :], 2)

    token_TK = tl.reshape(token, [TB, KP])
    place = to_TK * C + at_TK
    out = tl.where(real_TK, tl.where(primary, place, -place - 1), INT32_MIN)
    k_TK = tl.reshape(k, [TB, KP])
    inside_TK = (token_TK < num_tokens) & (k_TK < K)
    tl.store(dst + token_TK.to(tl.int64) * K + k_TK, out, mask=inside_TK)
    to_send = sends + token_TK.to(tl.int64) * W
    tl.store(to_send + ordinal, place, mask=inside_TK & real_TK & primary)
    tl.store(to_send + k_TK, -1 + k_TK * 0, mask=inside_TK & (k_TK < W) & (k_TK >= tl.sum(counted, 1)[:, None]))
    arrival = (ordinal << ARRIVAL_SHIFT) + at_TK
    mine = arrivals + (rank * S + token_TK).to(tl.int64) * K + k_TK
    for r in range(R):
        tl.store(mine + r * arrivals_stride.to(tl.int64), tl.where(to_TK == r, arrival, NO_ARRIVAL), mask=inside_TK)


COLUMNS = tl.constexpr(32)


@dataclass(frozen=True, eq=False)
class Tables:
    """Workspace of planning: what later kernels read and the plan does not keep.

    Attributes:
        base: [E, R] first row of each expert's group on each rank.
        first, row: [E, R] piece tables of this rank as source.
        sizes: [E + B] rows of this rank's groups.
        blocks: counts of assignments by block of tokens.
    """

    base: Tensor
    first: Tensor
    row: Tensor
    sizes: Tensor
    blocks: Blocks

    @staticmethod
    def make(dims: Dims, device: torch.device) -> Tables:
        d = dims

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        blocks = Blocks.make(d.E, d.S, d.K, device)
        return Tables(ints(d.E, d.R), ints(d.E, d.R), ints(d.E, d.R), ints(d.G), blocks)


def lay_groups(solution: Solution, status: Tensor, tables: Tables, rank: int, dims: Dims) -> Launch:
    """Slots, group bases and allocation of every rank; offsets and padding of this one. Grid: R.

    Given: `alloc`, `experts_to_copy`, `cu_seqlens`, `zero_fill_ranges`, `remote_stats` of the plan.
    """
    d = dims
    return Launch(
        _lay_groups_kernel, (d.R,),
        (
            solution.cost, solution.left, solution.given, solution.donor, status, Given("alloc"), tables.base,
            Given("experts_to_copy"), tables.sizes, Given("cu_seqlens"), Given("zero_fill_ranges"),
            Given("remote_stats"), rank,
        ),
        E=d.E, R=d.R, L=d.L, LP=next_power_of_2(d.L), B=d.B, BP=next_power_of_2(max(d.B, 1)),
        GP=next_power_of_2(d.G), P=d.P, MODES=1 if d.balance.exact else 2,
    )  # fmt: skip


def split_sources(load: Tensor, tokens: Tensor, status: Tensor, tables: Tables, rank: int, dims: Dims) -> Launch:
    """Piece tables of this rank as source; copies load [R, E] and tokens [R] into the plan. Grid: E / BE.

    Given: `alloc`, `experts_to_copy`, `load`, `tokens`, `remote_stats` of the plan.
    """
    d = dims
    RP = next_power_of_2(d.R)
    BE = max(1024 // RP, 16)
    return Launch(
        _split_sources_kernel, (ceil_div(d.E, BE),),
        (
            load, tokens, Given("alloc"), tables.base, Given("experts_to_copy"), status, Given("load"),
            Given("tokens"), tables.first, tables.row, Given("remote_stats"), rank,
        ),
        E=d.E, R=d.R, RP=RP, L=d.L, B=d.B, RBP=min(next_power_of_2(max(d.R * d.B, 1)), 1024), BE=BE,
    )  # fmt: skip


def assign_rows(
    arrivals: Tensor, arrivals_stride: int, weights: Tensor, weights_stride: int, status: Tensor, tables: Tables,
    rank: int, dims: Dims, has_weights: bool,
) -> Launch:  # fmt: skip
    """`dst` and `sends` of each token, and its arrivals at each rank ([R, S, K] int32 of rank 0); if `has_weights`, its
    route weights to every rank ([R, S, K] fp32 of rank 0). Grid: blocks of tokens.

    Given: `topk` [s, K]; `route_weights` [s, K] fp32; `num_tokens`; `num_blocks`; `dst` and `sends` of the plan.
    """
    d = dims
    return Launch(
        _assign_rows_kernel, (Given("num_blocks"),),
        (
            Given("topk"), Given("route_weights") if has_weights else weights, tables.blocks.before, tables.first,
            tables.row, status, Given("dst"), Given("sends"), arrivals, arrivals_stride, weights, weights_stride,
            Given("num_tokens"), rank,
        ),
        E=d.E, NB=tables.blocks.before.shape[1], R=d.R, K=d.K, KP=next_power_of_2(d.K), TB=block_tokens(d.K), C=d.C,
        S=d.S, W=d.W, HAS_WEIGHTS=has_weights,
    )  # fmt: skip
