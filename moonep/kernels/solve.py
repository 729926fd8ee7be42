"""The planner's solve on the device: from the exchanged load to an allocation, equal to `policy.allocate` bit for bit.

Every rank solves for itself. Each program of one launch runs one candidate of `moonep.planner.policy`, and writes what it
found and what it costs; the kernels that come next pick the winner with `chosen`, so nothing waits for anything:

    program   0     1       2       3      4     5       6       7
    exact     path  chain1  chain2  alias
    tolerance path  chain1  chain2  alias  path  chain1  chain2  alias
              (targets within the limits)  (the equal shares)

The solve is one long dependent sequence of choices, at most R - 1 of them, so its time is the latency of a choice. What
is known of a rank is a lane of a vector over ranks, in registers, and a choice is two reductions over it: the best value,
then the lowest rank that has it. One warp, so that no reduction crosses warps. What is left of each expert lies in memory
(in practice in the L1 cache); the experts of one donor are loaded when it gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonep.dims import PPM as DIMS_PPM
from moonep.dims import Dims

POLICIES = ("path", "chain1", "chain2", "alias")

PPM = tl.constexpr(DIMS_PPM)
INT_MAX = tl.constexpr(2**31 - 1)
INT_MIN = tl.constexpr(-(2**31))
# The cost of a candidate that does not apply: more than any that does.
NOT_APPLICABLE = tl.constexpr(2**30)
NUM_POLICIES = tl.constexpr(len(POLICIES))
SOURCES = tl.constexpr(8)


@dataclass(frozen=True, eq=False)
class Solution:
    """What the programs of one solve write. All int32; contents before the solve do not matter.

    Attributes:
        left: [c, E], the assignments of each expert that stay on its home rank.
        given: [c, R, L], what rank r computes of each expert of its donor. Undefined for a rank without a donor.
        donor: [c, R], the one rank whose experts rank r gets copies of; -1: none.
        cost: [c, 2], the copies on the busiest link and in total; NOT_APPLICABLE twice if the candidate does not
            apply, whose other entries are then undefined.
    """

    left: Tensor
    given: Tensor
    donor: Tensor
    cost: Tensor

    @staticmethod
    def empty(dims: Dims, device: torch.device | str) -> Solution:
        """Memory for one solve, 4 * c * (E + R * L + R + 2) bytes, with c = 4 candidates, 8 with a tolerance."""
        c, d = num_candidates(dims), dims
        shapes = (c, d.E), (c, d.R, d.L), (c, d.R), (c, 2)
        return Solution(*(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes))


def num_candidates(dims: Dims) -> int:
    """Programs of a solve: the constructions of `policy`, with a tolerance twice."""
    return len(POLICIES) * (1 if dims.balance.exact else 2)


def launch_solve(load_RE: Tensor, status: Tensor, out: Solution, dims: Dims) -> None:
    """Compute all candidate allocations of one call.

    Grid: one program (one warp, unless L is large) a candidate. Each reads the whole load.
    Moves: reads c * R * E * 4 bytes of load; writes about c * (2 * E + R) * 4.
    Visible when it returns: nothing; what follows on the same stream sees `out`.

    Example, R = 2, E = 4, S = 4, K = 1 (the example of `policy`): from load_RE = [[4, 0, 0, 0], [2, 1, 1, 0]], where
    rank 0 has 3 assignments too many, every candidate finds

        left[c] = [3, 1, 1, 0]     donor[c] = [-1, 0]     given[c, 1] = [3, 0]     cost[c] = [1, 1]

    Args:
        load_RE: [R, E] int32, assignments of each expert by source rank; rows may lie further apart than E.
        status: [1] int32. The solve does nothing unless it is 0 (a peer failed and the load is not complete). On any
            load, also a senseless one, the solve ends, and stays inside `out`.
        out: where to write.
        dims: R, E, balance, and with a tolerance the rows that a rank can hold.
    """
    d, c = dims, num_candidates(dims)
    assert load_RE.shape == (d.R, d.E) and load_RE.stride(1) == 1, "load_RE: expected [R, E] with contiguous rows"
    shapes = (c, d.E), (c, d.R, d.L), (c, d.R), (c, 2)
    tensors = out.left, out.given, out.donor, out.cost
    assert all(t.shape == shape and t.is_contiguous() for t, shape in zip(tensors, shapes, strict=True)), "out: shapes"
    assert all(t.dtype == torch.int32 and t.device == load_RE.device for t in (load_RE, status, *tensors)), "int32"
    arguments = load_RE, status, *tensors, d.balance.eps_ppm, d.balance.slack, d.max_rows
    _solve_candidates_kernel[(c,)](*arguments, **constants(d, load_RE.stride(0)), num_warps=num_warps(d))


def constants(dims: Dims, load_stride: int) -> dict[str, int | bool]:
    """The compile-time arguments of the kernel: all fixed for the life of a buffer, none depends on data."""
    d = dims
    return {
        "load_stride": load_stride,
        "R": d.R,
        "L": d.L,
        "RP": _vector(d.R),
        "LP": _vector(d.L),
        "TOLERANT": not d.balance.exact,
    }


def num_warps(dims: Dims) -> int:
    """One, as long as a lane's share of a donor's experts fits in registers."""
    return max(1, min(8, _vector(dims.L) // 512))


def _vector(n: int) -> int:
    """Length of a vector of n elements: a power of 2, and a warp at least, as whole warps reduce in one instruction."""
    return max(32, triton.next_power_of_2(n))


def choose(cost: Tensor) -> int:
    """The winner's index: least copies on the busiest link, then in total; ties: the first. Plain twin of `chosen`."""
    costs = [tuple(cost) for cost in cost.tolist()]
    return costs.index(min(costs))


def read_allocation(candidate: int, out: Solution, dims: Dims) -> Tensor | None:
    """[E, R] int32, the allocation that a candidate found, as `policy` writes it; None if it does not apply."""
    d = dims
    if int(out.cost[candidate, 0]) == NOT_APPLICABLE.value:
        return None
    expert, donor_R = torch.arange(d.E), out.donor[candidate].cpu()
    alloc_ER = torch.zeros(d.E, d.R, dtype=torch.int32)
    alloc_ER[expert, expert // d.L] = out.left[candidate].cpu()
    for r in range(d.R):
        donor = int(donor_R[r])
        if donor >= 0:
            alloc_ER[donor * d.L : (donor + 1) * d.L, r] = out.given[candidate, r].cpu()
    return alloc_ER


@triton.jit
def chosen(cost, MODES: tl.constexpr):
    """The winner's index, of 4 or 8 candidates. With a tolerance the exact plans come last, so they win no ties."""
    c = tl.arange(0, NUM_POLICIES * MODES)
    busiest, total = tl.load(cost + 2 * c), tl.load(cost + 2 * c + 1)
    total = tl.where(busiest == tl.min(busiest, 0), total, INT_MAX)
    return _first_min(total, c, NUM_POLICIES * MODES)[1]


@triton.jit(do_not_specialize=["eps_ppm", "slack", "max_rows"])
def _solve_candidates_kernel(
    load_RE,
    status,
    left,
    given,
    donor,
    cost,
    eps_ppm,
    slack,
    max_rows,
    load_stride: tl.constexpr,
    R: tl.constexpr,
    L: tl.constexpr,
    RP: tl.constexpr,
    LP: tl.constexpr,
    TOLERANT: tl.constexpr,
):
    """Program c computes candidate c. Example: see `launch_solve`."""
    if tl.load(status) != 0:
        return
    c = tl.program_id(0)
    left_E = left + c * (R * L)
    given_RL = given + c * (R * L)

    homes, reach = _sum_load(load_RE, left_E, load_stride, R, L, RP)
    rank = tl.arange(0, RP)
    total = tl.sum(homes, 0)
    share = tl.where(rank < R, total // R + (rank < total % R).to(tl.int32), 0)
    target = share
    if TOLERANT:
        if c < NUM_POLICIES:
            tolerance = tl.maximum((total // R).to(tl.int64) * eps_ppm // PPM, slack).to(tl.int32)
            target = _targets_within(homes, tl.where(rank < R, tl.minimum(share + tolerance, max_rows), 0), R, RP)

    balance = homes - target
    donors = tl.full([RP], -1, tl.int32)
    exports = tl.zeros([RP], tl.int32)
    imports = tl.zeros([RP], tl.int32)
    policy = c % NUM_POLICIES
    if policy == 0:
        balance, donors, exports, imports = _path(
            left_E, given_RL, target, balance, donors, exports, imports, R, L, RP, LP
        )
    elif policy == 3:
        balance, donors, exports, imports = _alias(left_E, given_RL, balance, donors, exports, imports, R, L, RP, LP)
    else:
        balance, donors, exports, imports = _chain(
            left_E, given_RL, target, reach, policy, balance, donors, exports, imports, R, L, RP, LP
        )

    tl.store(donor + c * R + rank, donors, mask=rank < R)
    applies = tl.max(tl.abs(balance), 0) == 0
    busiest = tl.maximum(tl.max(imports, 0), tl.max(exports, 0))
    tl.store(cost + c * 2, tl.where(applies, busiest, NOT_APPLICABLE))
    tl.store(cost + c * 2 + 1, tl.where(applies, tl.sum(imports, 0), NOT_APPLICABLE))


@triton.jit
def _sum_load(load_RE, left_E, load_stride: tl.constexpr, R: tl.constexpr, L: tl.constexpr, RP: tl.constexpr):
    """Write the load of each expert to left_E; return what each rank's experts have in all, and the most of one."""
    E: tl.constexpr = R * L
    BLOCK: tl.constexpr = min(512, triton.next_power_of_2(E))
    for begin in range(0, E, BLOCK):
        expert = begin + tl.arange(0, BLOCK)
        counts = tl.zeros([BLOCK], tl.int32)
        for first in range(0, R, SOURCES):
            for i in tl.static_range(SOURCES):
                row = load_RE + (first + i) * load_stride
                counts += tl.load(row + expert, mask=(expert < E) & (first + i < R), other=0)
        tl.store(left_E + expert, counts, mask=expert < E)
    tl.debug_barrier()  # read below, and by `_move`, in another layout

    RN: tl.constexpr = triton.next_power_of_2(R)
    COLUMNS: tl.constexpr = min(triton.next_power_of_2(L), max(1, 1024 // RN))
    rank = tl.arange(0, RN)
    homes = tl.zeros([RN], tl.int32)
    reach = tl.zeros([RN], tl.int32)
    for begin in range(0, L, COLUMNS):
        i = begin + tl.arange(0, COLUMNS)
        tile = left_E + rank[:, None] * L + i[None, :]
        counts = tl.load(tile, mask=(rank[:, None] < R) & (i[None, :] < L), other=0)
        homes += tl.sum(counts, 1)
        reach = tl.maximum(reach, tl.max(counts, 1))
    # The sums lie spread over lanes as the tile was. Gathered, they lie one rank a lane, and stay so.
    lane = tl.arange(0, RP)
    there = tl.minimum(lane, RN - 1)
    homes = tl.where(lane < RN, tl.gather(homes, there, 0), 0)
    reach = tl.where(lane < RN, tl.gather(reach, there, 0), 0)
    return homes, reach


@triton.jit
def _targets_within(homes, limit, R: tl.constexpr, RP: tl.constexpr):
    """`policy.targets_within`: down to the limits, and what that sheds to the largest rooms."""
    rank = tl.arange(0, RP)
    target = tl.minimum(homes, limit)
    excess = tl.sum(homes - target, 0)
    step = 0
    while (excess > 0) & (step < R):
        nearly_full, r = _first_min(tl.where(rank < R, target - limit, INT_MAX), rank, RP)
        taken = tl.minimum(-nearly_full, excess)
        target += tl.where(rank == r, taken, 0)
        excess -= taken
        step += 1
    return target


@triton.jit
def _path(
    left_E,
    given_RL,
    target,
    balance,
    donors,
    exports,
    imports,
    R: tl.constexpr,
    L: tl.constexpr,
    RP: tl.constexpr,
    LP: tl.constexpr,
):
    """`policy.path`."""
    rank = tl.arange(0, RP)
    waiting = balance  # of the ranks that are not on a line yet; the others' is 0
    too_much = tl.zeros([RP], tl.int32)
    surplus, last, step, missing = 0, 0, 0, 0
    while (step < R) & (missing == 0):
        # The running surplus picks the largest deficit that it fills, which is the least balance, else the smallest
        # surplus, which is the least balance too. At 0 a line starts, from the largest surplus.
        fits = (waiting > 0) | ((waiting < 0) & (waiting + surplus >= 0))
        start = tl.where(waiting > 0, -waiting, INT_MAX)
        best, r = _first_min(tl.where(surplus == 0, start, tl.where(fits, waiting, INT_MAX)), rank, RP)
        if best == INT_MAX:
            step = R
        else:
            if surplus == 0:
                surplus = -best
            else:
                too_much = tl.where((rank == r) & (surplus > target), 1, too_much)
                balance, donors, exports, imports, missing, _ = _move(
                    left_E, given_RL, last, r, surplus, balance, donors, exports, imports, R, L, RP, LP
                )
                surplus += best
            waiting = tl.where(rank == r, 0, waiting)
            last = r
            step += 1
    # Any balance but 0 says that the candidate does not apply.
    return tl.where(tl.max(too_much, 0) > 0, 1, balance), donors, exports, imports


@triton.jit
def _alias(
    left_E,
    given_RL,
    balance,
    donors,
    exports,
    imports,
    R: tl.constexpr,
    L: tl.constexpr,
    RP: tl.constexpr,
    LP: tl.constexpr,
):
    """`policy.alias`."""
    rank = tl.arange(0, RP)
    step, missing = 0, 0
    while (step < R) & (missing == 0):
        surplus, donor = _first_max(balance, rank, RP)
        deficit, receiver = _first_min(balance, rank, RP)
        if surplus > 0:
            balance, donors, exports, imports, missing, _ = _move(
                left_E, given_RL, donor, receiver, -deficit, balance, donors, exports, imports, R, L, RP, LP
            )
            step += 1
        else:
            step = R
    return balance, donors, exports, imports


@triton.jit
def _chain(
    left_E,
    given_RL,
    target,
    reach,
    g,
    balance,
    donors,
    exports,
    imports,
    R: tl.constexpr,
    L: tl.constexpr,
    RP: tl.constexpr,
    LP: tl.constexpr,
):
    """`policy.chain`. `reach` is the largest expert left on each rank."""
    rank = tl.arange(0, RP)
    max_target = tl.max(target, 0)
    step, missing = 0, 0
    while (step < 2 * R) & (missing == 0):  # at most R - 1 links, of at most R - 1 chains
        surplus, h = _first_max(balance, rank, RP)
        if surplus > 0:
            step += 1
            copies = tl.maximum(g - _at(exports, rank, h), 1)
            part = tl.minimum((surplus + copies - 1) // copies, max_target)
            sink = balance < 0
            least, tail = _first_min(tl.where(sink & (balance + part >= 0), balance, INT_MAX), rank, RP)
            if least == INT_MAX:
                # Every deficit exceeds a part: the smallest that takes all, else the largest.
                enough = balance + surplus <= 0
                least, tail = _first_min(tl.where(enough, INT_MIN - balance, balance), rank, RP)
                donors = tl.where(rank == tail, h, donors)
            else:
                # A member ends the chain if it has made g copies already. What a chain passed over stays too large, as
                # `spare` only shrinks: so the next is the largest that fits, and the order needs no memory.
                donors = tl.where(rank == tail, h, donors)
                can = tl.where(exports < g, reach, 0)
                spare = tl.minimum(tl.minimum(part, _at(reach, rank, h)) + least, _at(can, rank, tail))
                links = 0
                while links < R:
                    fits = sink & (donors < 0) & (balance + spare >= 0)
                    least, r = _first_min(tl.where(fits, balance, INT_MAX), rank, RP)
                    if least < INT_MAX:
                        donors = tl.where(rank == r, tail, donors)
                        spare = tl.minimum(spare + least, _at(can, rank, r))
                        tail = r
                        links += 1
                    else:
                        links = R
            # Tail first: what a member exports adds to its deficit, which the member before it then fills.
            receiver = tail
            while (receiver != h) & (step < 2 * R) & (missing == 0):
                donor = _at(donors, rank, receiver)
                quota = -_at(balance, rank, receiver)
                balance, donors, exports, imports, missing, largest = _move(
                    left_E, given_RL, donor, receiver, quota, balance, donors, exports, imports, R, L, RP, LP
                )
                reach = tl.where(rank == donor, largest, reach)
                receiver = donor
                step += 1
        else:
            step = 2 * R
    return balance, donors, exports, imports


@triton.jit
def _move(
    left_E,
    given_RL,
    donor,
    receiver,
    quota,
    balance,
    donors,
    exports,
    imports,
    R: tl.constexpr,
    L: tl.constexpr,
    RP: tl.constexpr,
    LP: tl.constexpr,
):
    """`policy._Moves.cover`. Returns also what of the quota the donor could not cover, and its largest expert left."""
    rank, i = tl.arange(0, RP), tl.arange(0, LP)
    before = tl.load(left_E + donor * L + i, mask=i < L, other=0)
    left = before
    copies, rest = 0, quota
    while (rest > 0) & (copies < L):
        # One order for both rules: those that cover the rest, ascending, then the others, descending.
        covers = left >= rest
        key, giver = _first_min(tl.where(covers, left + INT_MIN, INT_MAX - left), i, LP)
        moved = tl.minimum(tl.where(key < 0, key - INT_MIN, INT_MAX - key), rest)
        left -= tl.where(i == giver, moved, 0)
        rest -= moved
        copies = tl.where(moved > 0, copies + 1, L)
    tl.store(left_E + donor * L + i, left, mask=i < L)
    # A senseless load can have deficits nowhere, and a lane beyond R is no receiver to write to.
    tl.store(given_RL + receiver * L + i, before - left, mask=(i < L) & (receiver < R))
    tl.debug_barrier()  # the next loads of left_E may be by other threads

    moved = quota - rest
    balance += tl.where(rank == receiver, moved, 0) - tl.where(rank == donor, moved, 0)
    donors = tl.where(rank == receiver, donor, donors)
    exports += tl.where(rank == donor, copies, 0)
    imports += tl.where(rank == receiver, copies, 0)
    return balance, donors, exports, imports, rest, tl.max(left, 0)


@triton.jit
def _first_min(values, index, NONE: tl.constexpr):
    """The least value, and the first index that has it. (A reduction of pairs costs several times two of integers.)"""
    least = tl.min(values, 0)
    return least, tl.min(tl.where(values == least, index, NONE), 0)


@triton.jit
def _first_max(values, index, NONE: tl.constexpr):
    """The largest value, and the first index that has it."""
    largest = tl.max(values, 0)
    return largest, tl.min(tl.where(values == largest, index, NONE), 0)


@triton.jit
def _at(values, index, i):
    """values[i]."""
    return tl.sum(tl.where(index == i, values, 0), 0)
