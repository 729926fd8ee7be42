"""From the allocation to rows, on the device: slots and groups, piece tables, each assignment's row and arrival.

The twins in `moonep.planner.rows` say what the results are: `assign_rows`, and `lay_groups` with `split_sources`, which
are one launch here, `lay_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonep.dims import Dims, next_power_of_2
from moonep.kernels.constants import ARRIVAL_SHIFT, INT32_MIN, NO_ARRIVAL
from moonep.kernels.early import admit_next, await_previous
from moonep.kernels.launch import Given, Launch
from moonep.kernels.load import Blocks, block_tokens
from moonep.kernels.solve import INT64_MAX, Solution, chosen


@triton.jit
def _pad(size, P: tl.constexpr):
    return (size + P - 1) // P * P


@triton.jit(do_not_specialize=["rank"])
def _lay_rows_kernel(
    load, tokens, cost, left, given, donor, status, plan_load, plan_tokens, alloc, experts_to_copy, cu_seqlens, fill,
    remote_stats, first, row, rank,
    E: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, B: tl.constexpr,
    BP: tl.constexpr, GP: tl.constexpr, P: tl.constexpr, MODES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program d: what all ranks compute of the experts of home d, and the slots of rank d. Example: see `lay_rows`.

    Every program lays the groups of all ranks, so that none waits for another. Tiles are [rank, expert of a home].
    """
    await_previous(EARLY)
    admit_next(EARLY)
    d = tl.program_id(0)
    r, l = tl.arange(0, RP), tl.arange(0, LP)
    real = (r[:, None] < R) & (l[None, :] < L)
    homes = r[:, None] * L + l[None, :]
    to = (d * L + l)[None, :] * R + r[:, None]
    # What a failed solve has left in memory can be loaded, if not used: so no load waits for the status.
    failed = tl.load(status) != 0
    have = tl.load(load + r[:, None] * E + d * L + l[None, :], mask=real, other=0)
    c = chosen(cost, MODES)
    h, donor_here = tl.load(donor + c * R + r, mask=r < R, other=-1), tl.load(donor + c * R + d)
    own = tl.load(left + c * E + homes, mask=real, other=0)
    foreign = tl.load(given + c * E + homes, mask=real, other=0)
    if failed:
        if d == rank:  # no rows at all: the caller's experts may run before the host has heard of the failure
            none = tl.arange(0, GP)
            tl.store(cu_seqlens + none, none * 0, mask=none < E + B)
            tl.store(fill + 2 * none, none * 0, mask=none < E + B)
            tl.store(fill + 2 * none + 1, none * 0, mask=none < E + B)
        return
    foreign = tl.where((h >= 0)[:, None], foreign, 0)
    num_redundant = tl.sum((foreign > 0).to(tl.int32), 1)
    num_slots = tl.minimum(num_redundant, B)
    slotted, spilled, own_base, foreign_base = _lay_groups(own, foreign, num_redundant, h, r, l, R, L, LP, B, P)

    at_home = real & (r == d)[:, None]
    copied = at_home & (slotted == 1)
    slot = tl.cumsum(slotted, 1) - slotted
    theirs = h[:, None] * L + l[None, :]
    b = tl.arange(0, BP)
    num_slots_here = tl.sum(tl.where(r == d, num_slots, 0), 0)
    tl.store(experts_to_copy + d * B + b, b * 0 - 1, mask=(b < B) & (b >= num_slots_here))
    tl.store(experts_to_copy + d * B + slot, theirs, mask=copied)

    want = tl.where(at_home, own, tl.where((h == d)[:, None], foreign, 0))
    number, earlier = _split_sources(have, want, r, rank)
    tl.store(first + to, number, mask=real)
    tl.store(row + to, tl.where(at_home, own_base, foreign_base) + earlier - number, mask=real)
    tl.store(alloc + to, want, mask=real)
    tl.store(plan_load + r[:, None] * E + d * L + l[None, :], have, mask=real)
    if d == 0:
        tl.store(plan_tokens + r, tl.load(tokens + r, mask=r < R), mask=r < R)

    if d == rank:
        tl.store(remote_stats + r * 0, num_redundant, mask=r == d)
        tl.store(remote_stats + 1, tl.sum(tl.where(h == d, num_slots, 0), 0))
        # Sizes first, each in its place; then all threads see them, and offsets take their places.
        g = tl.arange(0, GP)
        empty = tl.where(g < E, (g // L != d) & (g // L != donor_here), g - E >= num_slots_here)
        tl.store(cu_seqlens + g, g * 0, mask=(g < E + B) & empty)
        tl.store(cu_seqlens + homes, own, mask=at_home)
        tl.store(cu_seqlens + theirs, spilled, mask=at_home & (h >= 0)[:, None])
        tl.store(cu_seqlens + E + slot, foreign, mask=copied)
        tl.debug_barrier()
        size = tl.load(cu_seqlens + g, mask=g < E + B, other=0)
        tl.debug_barrier()
        end = tl.cumsum(_pad(size, P), 0)
        padding = _pad(size, P) - size
        range_G2 = tl.join(tl.where(padding > 0, end - padding, 0), padding)
        tl.store(cu_seqlens + g, end, mask=g < E + B)
        tl.store(fill + 2 * g[:, None] + tl.arange(0, 2)[None, :], range_G2, mask=(g < E + B)[:, None])


@triton.jit
def _lay_groups(
    own, foreign, num_redundant, h, r, l, R: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, B: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """Of all ranks: which foreign experts get a slot (1 or 0), rows of the others, first rows of own and foreign ones.

    h is each rank's donor. That more experts than slots come is rare, and then only it costs anything.
    """
    slotted = (foreign > 0).to(tl.int32)
    spilled, num_spilled, spilled_base = foreign * 0, num_redundant * 0, foreign * 0
    if (R > 1) & (B < L):
        if tl.max(num_redundant, 0) > B:
            slotted = _choose_slots(foreign, num_redundant, l, B, LP)
            spilled = foreign * (1 - slotted)
            spilled_rows = _pad(spilled, P)
            num_spilled = tl.sum(spilled_rows, 1)
            spilled_base = tl.cumsum(spilled_rows, 1) - spilled_rows
    own_rows, slot_rows = _pad(own, P), _pad(foreign * slotted, P)
    num_own = tl.sum(own_rows, 1)
    # Home rows in the order of homes, then slots. A rank without a donor, h = -1, has no spilled rows.
    own_base = tl.where(h < r, num_spilled, 0)[:, None] + tl.cumsum(own_rows, 1) - own_rows
    spilled_base += tl.where(h < r, 0, num_own)[:, None]
    slot_base = (num_own + num_spilled)[:, None] + tl.cumsum(slot_rows, 1) - slot_rows
    return slotted, spilled, own_base, tl.where(slotted == 1, slot_base, spilled_base)


@triton.jit
def _choose_slots(foreign, num_redundant, l, B: tl.constexpr, LP: tl.constexpr):
    """1 where an expert gets a slot: the B largest of each rank (ties: lower id).

    A rank picks the largest, which get one, or the smallest, which get none: what are fewer. All ranks do at once.
    """
    num_spilled = tl.maximum(num_redundant - B, 0)
    largest_first = num_spilled > B
    steps = tl.where(largest_first, B, num_spilled)
    most_steps = tl.max(steps, 0)
    taken = foreign > 0
    key = foreign.to(tl.int64) * LP + (LP - 1 - l)[None, :]
    key = tl.where(taken, tl.where(largest_first[:, None], ~key, key), INT64_MAX)  # the least is picked next
    step = 0
    while step < most_steps:
        least = tl.where(step < steps, tl.min(key, 1), INT64_MAX)
        key = tl.where(key == least[:, None], INT64_MAX, key)
        step += 1
    return (taken & ((key == INT64_MAX) == largest_first[:, None])).to(tl.int32)


@triton.jit
def _split_sources(have, want, r, rank):
    """Of this rank as source: number of its first assignment for each rank, and rows there that lie before its own."""
    kept = tl.minimum(have, want)
    give, take = have - kept, want - kept
    take_end = tl.cumsum(take, 0)
    take_begin = take_end - take
    lower, here = (r < rank)[:, None], (r == rank)[:, None]
    give_begin = tl.sum(tl.where(lower, give, 0), 0)[None, :]
    give_end = give_begin + tl.sum(tl.where(here, give, 0), 0)[None, :]
    earlier = tl.maximum(tl.minimum(give_begin, take_end) - take_begin, 0) + tl.where(lower, kept, 0)
    piece = tl.maximum(tl.minimum(give_end, take_end) - tl.maximum(give_begin, take_begin), 0)
    piece += tl.where(here, kept, 0)
    return tl.cumsum(piece, 0) - piece, earlier


@triton.jit(do_not_specialize=["num_tokens", "rank"])
def _assign_rows_kernel(
    topk, route_weights, before, first, row, status, dst, sends, arrivals, arrivals_stride, weights,
    weights_stride, num_tokens, rank,
    E: tl.constexpr, NB: tl.constexpr, R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    TB: tl.constexpr, C: tl.constexpr, S: tl.constexpr, W: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program b: destination rank and row of the assignments of TB tokens; all ranks get their arrivals, and
    the tokens' route weights."""
    await_previous(EARLY)
    admit_next(EARLY)
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
        first, row: [E, R] piece tables of this rank as source.
        blocks: counts of assignments by block of tokens.
    """

    first: Tensor
    row: Tensor
    blocks: Blocks

    @staticmethod
    def make(dims: Dims, device: torch.device) -> Tables:
        d = dims
        first = torch.zeros(d.E, d.R, dtype=torch.int32, device=device)
        return Tables(first, torch.zeros_like(first), Blocks.make(d.E, d.S, d.K, device))


def lay_rows(
    load: Tensor, tokens: Tensor, solution: Solution, status: Tensor, tables: Tables, rank: int, dims: Dims
) -> Launch:
    """`lay_groups` and `split_sources`: slots and allocation of all ranks; of this one, offsets, padding, statistics,
    and piece tables as source. Copies load [R, E] and tokens [R] into the plan. Grid: R.

    Given: `load`, `tokens`, `alloc`, `experts_to_copy`, `cu_seqlens`, `zero_fill_ranges`, `remote_stats` of the plan.

    Example, that of `solve.launch_solve`, with P = 1 and B = 2. Rank 1 computes a row of expert 2, then, in its slot,
    three of expert 0. Rank 0 sends it the last of its assignments 0 to 3, which comes before rank 1's own two:

        alloc = [[3, 3], [1, 0], [0, 1], [0, 0]]     experts_to_copy = [[-1, -1], [0, -1]]
        on rank 1   cu_seqlens = [0, 0, 1, 1, 4, 4]     remote_stats = [1, 0]
        on rank 0   first[0] = [0, 3]     row[0] = [0, -2]     so 3 goes to rank 1, row 3 - 2
    """
    d = dims
    RP, LP = next_power_of_2(d.R), next_power_of_2(d.L)
    return Launch(
        _lay_rows_kernel, (d.R,),
        (
            load, tokens, solution.cost, solution.left, solution.given, solution.donor, status, Given("load"),
            Given("tokens"), Given("alloc"), Given("experts_to_copy"), Given("cu_seqlens"), Given("zero_fill_ranges"),
            Given("remote_stats"), tables.first, tables.row, rank,
        ),
        E=d.E, R=d.R, RP=RP, L=d.L, LP=LP, B=d.B, BP=next_power_of_2(max(d.B, 1)), GP=next_power_of_2(d.G), P=d.P,
        MODES=1 if d.balance.exact else 2, EARLY=False, num_warps=max(4, min(RP * LP // 256, 16)),
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
        S=d.S, W=d.W, HAS_WEIGHTS=has_weights, EARLY=False,
    )  # fmt: skip
