"""The planner's solve on the device: from the exchanged load to an allocation, equal to `policy.allocate` bit for bit.

Every rank solves for itself. Each program of one launch runs one candidate of `moonep.planner.policy`, and writes what
it found and what that costs; the kernels that come next pick the winner with `chosen`, so nothing waits for anything:

    program          0     1       2       3      4     5       6       7
    exact            path  chain1  chain2  alias
    with tolerance   path  chain1  chain2  alias  path  chain1  chain2  alias
                     (targets within the limits)  (the equal shares)

A candidate is one sequence of up to R choices, each of which depends on the one before: its time is that of R choices.
What is known of a rank is a lane of a vector over ranks, in registers; a choice is two reductions over it: the best
value, then the lowest rank that has it. A program is one warp: these are two instructions. What is left of each
expert lies in memory, in practice in the L1 cache, and a donor's experts are loaded when it gives.

All loops are bounded whatever the data, so that no load, not even a senseless one, can hang a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonep import dims as _dims
from moonep.dims import Dims, next_power_of_2
from moonep.environment import interpreting
from moonep.kernels.barrier import NUM_FAULTS, Signals, wait
from moonep.kernels.launch import Given, Launch

POLICIES = ("path", "chain1", "chain2", "alias")

NUM_POLICIES = tl.constexpr(len(POLICIES))
PPM = tl.constexpr(_dims.PPM)
INT_MAX = tl.constexpr(2**31 - 1)
INT_MIN = tl.constexpr(-(2**31))
# Both costs of a candidate that does not apply: more than those of any that does.
NOT_APPLICABLE = tl.constexpr(2**30)
# Rows of the load that are loaded together; the next ones are on their way meanwhile.
SOURCES = tl.constexpr(8)


@dataclass(frozen=True, eq=False)
class Solution:
    """What the programs of one solve write, c of them. All int32; contents before the solve do not matter.

    Attributes:
        left: [c, E], the assignments of each expert that stay on its home rank.
        given: [c, R, L], what rank r computes of each expert of its donor. Undefined for a rank without a donor.
        donor: [c, R], the one rank whose experts rank r gets copies of; -1: none.
        cost: [c, 2], the copies on the busiest link and in total; NOT_APPLICABLE twice if the candidate does not apply,
            whose other entries are then undefined.
    """

    left: Tensor
    given: Tensor
    donor: Tensor
    cost: Tensor

    @staticmethod
    def empty(dims: Dims, device: torch.device | str) -> Solution:
        """Memory for one solve: 4 * c * (2 * E + R + 2) bytes."""
        return Solution(*(torch.empty(shape, dtype=torch.int32, device=device) for shape in _shapes(dims)))


def launch_solve(load_RE: Tensor, status: Tensor, out: Solution, dims: Dims) -> None:
    """Compute all candidate allocations of one call.

    Grid: one program a candidate, 4 or with a tolerance 8, of one warp (more where L > 512).
    Moves: reads 4 * c * R * E bytes of load, through the L2 cache all but once; writes `out`.
    Visible when it returns: nothing yet; `out`, to what follows on the same stream.

    Example, R = 2, E = 4, S = 4, K = 1 (that of `policy`): from load_RE = [[4, 0, 0, 0], [2, 1, 1, 0]], where rank 0
    has 3 assignments too many, every candidate finds

        left[c] = [3, 1, 1, 0]     donor[c] = [-1, 0]     given[c, 1] = [3, 0]     cost[c] = [1, 1]

    Args:
        load_RE: [R, E] int32, assignments of each expert by source rank; rows may lie further apart than E.
        status: [1] int32. The solve does nothing unless it is 0: a peer failed, and the load is not complete.
        out: where to write. Whatever the load, nothing else is written.
        dims: R, E, balance, and with a tolerance the rows that a rank can hold.
    """
    d, tensors = dims, (out.left, out.given, out.donor, out.cost)
    assert load_RE.shape == (d.R, d.E) and load_RE.stride(1) == 1, "load_RE: expected [R, E] with contiguous rows"
    assert status.shape == (1,), "status: expected one word"
    for tensor, shape in zip(tensors, _shapes(d), strict=True):
        assert tensor.shape == shape and tensor.is_contiguous(), f"out: expected contiguous {shape}"
    assert all(t.dtype == torch.int32 and t.device == load_RE.device for t in (load_RE, status, *tensors))
    num_warps = _num_warps(d)
    _solve_candidates_kernel[(out.cost.shape[0],)](
        load_RE, status, *tensors, d.balance.eps_ppm, d.balance.slack, d.max_rows, load_stride=load_RE.stride(0),
        TOLERANT=not d.balance.exact, R=d.R, L=d.L, RP=_lanes(d.R), LP=_lanes(d.L), TILE=1024 * num_warps,
        num_warps=num_warps,
    )  # fmt: skip


def solve_agreed(load_RE: Tensor, out: Solution, dims: Dims, signals: Signals, rank: int, limit: int) -> Launch:
    """`launch_solve`, after the wait for the loads of all ranks (`load.count_load`).

    Given: `operation`, `number` as in `barrier.barrier`.

    Args:
        load_RE, out, dims: as in `launch_solve`.
        signals, rank, limit: as in `barrier.barrier`.
    """
    d, s, num_warps = dims, signals, _num_warps(dims)
    return Launch(
        _agree_kernel, (out.cost.shape[0],),
        (
            load_RE, out.left, out.given, out.donor, out.cost, d.balance.eps_ppm, d.balance.slack, d.max_rows,
            s.signals, s.signal_stride, s.faults, s.fault_stride, s.epoch, s.status, s.host_status, rank,
            Given("operation"), Given("number"), limit,
        ),
        load_stride=load_RE.stride(0), TOLERANT=not d.balance.exact, R=d.R, L=d.L, RP=_lanes(d.R), LP=_lanes(d.L),
        TILE=1024 * num_warps, BP=next_power_of_2(d.R), NF=NUM_FAULTS, TIMER=not interpreting(),
        num_warps=num_warps,
    )  # fmt: skip


def _shapes(dims: Dims) -> tuple[tuple[int, ...], ...]:
    """Of the tensors of a `Solution`."""
    c, d = len(POLICIES) * (1 if dims.balance.exact else 2), dims
    return (c, d.E), (c, d.R, d.L), (c, d.R), (c, 2)


def _num_warps(dims: Dims) -> int:
    """One, as long as a lane's part of a donor's experts is small."""
    return max(1, min(8, _lanes(dims.L) // 512))


def _lanes(n: int) -> int:
    """Length of a vector of n elements: a power of two, and a warp at least, which reduces in one instruction."""
    return max(32, next_power_of_2(n))


def choose(cost: Tensor) -> int:
    """The winner's index: least copies on the busiest link, then in total; ties: the first. Plain twin of `chosen`."""
    costs = [tuple(pair) for pair in cost.tolist()]
    return costs.index(min(costs))


def read_allocation(candidate: int, solution: Solution, dims: Dims) -> Tensor | None:
    """[E, R] int32, the allocation that a candidate found, as `policy` writes it; None if it does not apply."""
    d, c = dims, candidate
    if int(solution.cost[c, 0]) == NOT_APPLICABLE.value:
        return None
    expert = torch.arange(d.E)
    alloc_ER = torch.zeros(d.E, d.R, dtype=torch.int32)
    alloc_ER[expert, expert // d.L] = solution.left[c].cpu()
    for r, donor in enumerate(solution.donor[c].tolist()):
        if donor >= 0:
            alloc_ER[donor * d.L : (donor + 1) * d.L, r] = solution.given[c, r].cpu()
    return alloc_ER


@triton.jit
def chosen(cost, MODES: tl.constexpr):
    """The winner's index, of 4 * MODES candidates. The exact plans of mode 2 come last, so they win no ties."""
    c = tl.arange(0, NUM_POLICIES * MODES)
    busiest, total = tl.load(cost + 2 * c), tl.load(cost + 2 * c + 1)
    total = tl.where(busiest == tl.min(busiest, 0), total, INT_MAX)
    return _first_min(total, c, NUM_POLICIES * MODES)[1]


@triton.jit(do_not_specialize=["eps_ppm", "slack", "max_rows"])
def _solve_candidates_kernel(
    load_RE, status, left, given, donor, cost, eps_ppm, slack, max_rows, load_stride: tl.constexpr,
    TOLERANT: tl.constexpr, R: tl.constexpr, L: tl.constexpr, RP: tl.constexpr, LP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program c computes candidate c. Example: see `launch_solve`."""
    if tl.load(status) != 0:
        return
    _solve_candidate(
        tl.program_id(0), load_RE, left, given, donor, cost, eps_ppm, slack, max_rows, load_stride, TOLERANT, R, L, RP,
        LP, TILE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["eps_ppm", "slack", "max_rows", "rank", "operation", "number", "limit"])
def _agree_kernel(
    load_RE, left, given, donor, cost, eps_ppm, slack, max_rows, signals, signal_stride, faults, fault_stride, epoch,
    status, host_status, rank, operation, number, limit, load_stride: tl.constexpr,
    TOLERANT: tl.constexpr, R: tl.constexpr, L: tl.constexpr, RP: tl.constexpr, LP: tl.constexpr, TILE: tl.constexpr,
    BP: tl.constexpr, NF: tl.constexpr, TIMER: tl.constexpr,
):  # fmt: skip
    """Program c waits for all loads and computes candidate c."""
    failed = wait(
        signals, signal_stride, faults, fault_stride, epoch, status, host_status, rank, operation, number, limit,
        R, BP, NF, TIMER,
    )  # fmt: skip
    if failed == 0:
        _solve_candidate(
            tl.program_id(0), load_RE, left, given, donor, cost, eps_ppm, slack, max_rows, load_stride, TOLERANT, R, L,
            RP, LP, TILE,
        )  # fmt: skip


@triton.jit
def _solve_candidate(
    c, load_RE, left, given, donor, cost, eps_ppm, slack, max_rows, load_stride: tl.constexpr,
    TOLERANT: tl.constexpr, R: tl.constexpr, L: tl.constexpr, RP: tl.constexpr, LP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    left_E = left + c * (R * L)
    given_RL = given + c * (R * L)
    rank = tl.arange(0, RP)

    homes, reach = _sum_load(load_RE, left_E, load_stride, R, L, RP, TILE)
    total = tl.sum(homes, 0)
    share = tl.where(rank < R, total // R + (rank < total % R).to(tl.int32), 0)
    target = share
    if TOLERANT:
        if c < NUM_POLICIES:
            tolerance = tl.maximum((total // R).to(tl.int64) * eps_ppm // PPM, slack).to(tl.int32)
            limit = tl.where(rank < R, tl.minimum(share + tolerance, max_rows), 0)
            target = _targets_within(homes, limit, R, RP)

    balance = homes - target
    policy = c % NUM_POLICIES
    if policy == 0:
        donors, busiest, copies, missing = _path(left_E, given_RL, balance, target, R, L, RP, TILE)
    elif policy == 3:
        donors, busiest, copies, missing = _alias(left_E, given_RL, balance, R, L, RP, LP)
    else:
        donors, busiest, copies, missing = _chain(
            left_E, given_RL, balance, reach, tl.max(target, 0), policy, R, L, RP, LP, TILE
        )
    tl.store(donor + c * R + rank, donors, mask=rank < R)
    tl.store(cost + c * 2, tl.where(missing == 0, busiest, NOT_APPLICABLE))
    tl.store(cost + c * 2 + 1, tl.where(missing == 0, copies, NOT_APPLICABLE))


@triton.jit
def _sum_load(
    load_RE, left_E, load_stride: tl.constexpr, R: tl.constexpr, L: tl.constexpr, RP: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Write the load of each expert to left_E; return what each rank's experts have in all, and the most of one."""
    E: tl.constexpr = R * L
    BLOCK: tl.constexpr = min(512, triton.next_power_of_2(E))
    for begin in range(0, E, BLOCK):
        expert = begin + tl.arange(0, BLOCK)
        counts = tl.zeros([BLOCK], tl.int32)
        for first in tl.range(0, R, SOURCES, num_stages=3):
            for i in tl.static_range(SOURCES):
                row = load_RE + (first + i) * load_stride
                counts += tl.load(row + expert, mask=(expert < E) & (first + i < R), other=0)
        tl.store(left_E + expert, counts, mask=expert < E)
    tl.debug_barrier()  # other threads load it

    RN: tl.constexpr = triton.next_power_of_2(R)
    COLUMNS: tl.constexpr = min(triton.next_power_of_2(L), max(1, TILE // RN))
    rank = tl.arange(0, RN)
    homes = tl.zeros([RN], tl.int32)
    reach = tl.zeros([RN], tl.int32)
    for begin in range(0, L, COLUMNS):
        i = begin + tl.arange(0, COLUMNS)
        tile = left_E + rank[:, None] * L + i[None, :]
        counts = tl.load(tile, mask=(rank[:, None] < R) & (i[None, :] < L), other=0)
        homes += tl.sum(counts, 1)
        reach = tl.maximum(reach, tl.max(counts, 1))
    # The sums lie as the tile did, several lanes to a rank. Gathered, they lie one rank a lane; so does what follows.
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
        room, r = _first_max(limit - target, rank, RP)
        taken = tl.minimum(room, excess)
        target += tl.where(rank == r, taken, 0)
        excess -= taken
        step += 1
    return target


@triton.jit
def _path(
    left_E, given_RL, balance, target, R: tl.constexpr, L: tl.constexpr, RP: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """`policy.path`. Each rank gives once at most: who gives what to whom is settled first, then all give at once."""
    rank = tl.arange(0, RP)
    donors = tl.full([RP], -1, tl.int32)
    receivers = tl.full([RP], -1, tl.int32)
    gets = tl.zeros([RP], tl.int32)
    gives = tl.zeros([RP], tl.int32)
    surplus, last, step = 0, 0, 0
    while step < R:
        # The running surplus picks the largest deficit that it fills, which is the least balance, else the smallest
        # surplus, which is the least balance too. At 0 a line starts, from the largest surplus.
        fits = (balance > 0) | ((balance < 0) & (balance + surplus >= 0))
        # (~ and not -: the ptxas of CUDA 12.8 loses the sign of what goes into a minimum of three, on sm_90.)
        start = tl.where(balance > 0, ~balance, INT_MAX)
        best, r = _first_min(tl.where(surplus == 0, start, tl.where(fits, balance, INT_MAX)), rank, RP)
        if best == INT_MAX:
            step = R
        else:
            if surplus == 0:
                surplus = ~best
            else:
                donors = tl.where(rank == r, last, donors)
                gets = tl.where(rank == r, surplus, gets)
                receivers = tl.where(rank == last, r, receivers)
                gives = tl.where(rank == last, surplus, gives)
                surplus += best
            balance = tl.where(rank == r, 0, balance)  # on a line now
            last = r
            step += 1
    missing = tl.max(tl.where((balance != 0) | (gets > target), 1, 0), 0) | surplus
    busiest, copies, rest = _give_all(left_E, given_RL, receivers, tl.where(missing == 0, gives, 0), R, L, TILE)
    return donors, busiest, copies, missing | rest


@triton.jit
def _alias(
    left_E, given_RL, balance, R: tl.constexpr, L: tl.constexpr, RP: tl.constexpr, LP: tl.constexpr
):  # fmt: skip
    """`policy.alias`."""
    rank = tl.arange(0, RP)
    donors = tl.full([RP], -1, tl.int32)
    exports = tl.zeros([RP], tl.int32)
    most_in, total, missing, step = 0, 0, 0, 0
    while (step < R) & (missing == 0):
        surplus, donor = _first_max(balance, rank, RP)
        deficit, receiver = _first_min(balance, rank, RP)
        if surplus > 0:
            left = _load_left(left_E, donor, L, LP)
            left, copies, missing = _give(left_E, given_RL, left, donor, receiver, -deficit, R, L, LP)
            donors = tl.where(rank == receiver, donor, donors)
            balance = tl.where(rank == receiver, 0, balance) + tl.where(rank == donor, deficit, 0)
            exports += tl.where(rank == donor, copies, 0)
            most_in = tl.maximum(most_in, copies)
            total += copies
            step += 1
        else:
            step = R
    missing |= tl.max(tl.abs(balance), 0)
    return donors, tl.maximum(most_in, tl.max(exports, 0)), total, missing


@triton.jit
def _chain(
    left_E, given_RL, balance, reach, max_target, g, R: tl.constexpr, L: tl.constexpr, RP: tl.constexpr,
    LP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """`policy.chain`, for g <= 2. `reach` is the largest expert of each rank.

    What a member gives bears on no later choice: it has had its turn, and one copy does. So members give at the end,
    all at once.
    """
    rank = tl.arange(0, RP)
    donors = tl.full([RP], -1, tl.int32)
    receivers = tl.full([RP], -1, tl.int32)
    gives = tl.zeros([RP], tl.int32)
    exports = tl.zeros([RP], tl.int32)
    most_in, total, missing, step = 0, 0, 0, 0
    while (step < R) & (missing == 0):
        surplus, h = _first_max(balance, rank, RP)
        if surplus > 0:
            left = _load_left(left_E, h, L, LP)
            exported = _at(exports, rank, h)
            part = tl.minimum(tl.where(g - exported > 1, (surplus + 1) // 2, surplus), max_target)
            sink = balance < 0
            least, head = _first_min(tl.where(sink & (balance + part >= 0), balance, INT_MAX), rank, RP)
            if least == INT_MAX:
                # Every deficit exceeds a part: the smallest that takes all, else the largest.
                takes_all = balance + surplus <= 0
                _, head = _first_min(tl.where(takes_all, INT_MIN - balance, balance), rank, RP)
                quota = -_at(balance, rank, head)
            else:
                quota = -least
                spare = tl.minimum(tl.minimum(part, tl.max(left, 0)) + least, _at(reach, rank, head))
                ahead = tl.where(rank == head, 0, -1)  # of a member: what the members before it lack
                tail, members = head, 1
                while members < R:
                    # Who was passed over stays too large, as `spare` only shrinks: next is the largest that fits.
                    fits = sink & (ahead < 0) & (balance + spare >= 0)
                    least, r = _first_min(tl.where(fits, balance, INT_MAX), rank, RP)
                    if least == INT_MAX:
                        members = R
                    else:
                        donors = tl.where(rank == r, tail, donors)
                        receivers = tl.where(rank == tail, r, receivers)
                        ahead = tl.where(rank == r, quota, ahead)
                        spare = tl.minimum(spare + least, _at(reach, rank, r))
                        quota -= least
                        tail = r
                        total += 1
                        members += 1
                if tail != head:
                    # A member gets what it and all behind it lack, and gives on the latter.
                    member = ahead >= 0
                    gives = tl.where(member, quota - ahead + balance, gives)
                    exports += (member & (rank != tail)).to(tl.int32)
                    balance = tl.where(member, 0, balance)
            left, copies, missing = _give(left_E, given_RL, left, h, head, quota, R, L, LP)
            donors = tl.where(rank == head, h, donors)
            balance = tl.where(rank == head, 0, balance) - tl.where(rank == h, quota, 0)
            exports += tl.where(rank == h, copies, 0)
            # A rank that has made g copies ends a chain.
            reach = tl.where(rank == h, tl.where(exported + copies < g, tl.max(left, 0), 0), reach)
            most_in = tl.maximum(most_in, copies)
            total += copies
            step += 1
        else:
            step = R
    missing |= tl.max(tl.abs(balance), 0)
    _, _, rest = _give_all(left_E, given_RL, receivers, tl.where(missing == 0, gives, 0), R, L, TILE)
    return donors, tl.maximum(most_in, tl.max(exports, 0)), total, missing | rest


@triton.jit
def _load_left(left_E, donor, L: tl.constexpr, LP: tl.constexpr):
    i = tl.arange(0, LP)
    return tl.load(left_E + donor * L + i, mask=i < L, other=0)


@triton.jit
def _give(
    left_E, given_RL, left, donor, receiver, quota, R: tl.constexpr, L: tl.constexpr, LP: tl.constexpr
):  # fmt: skip
    """`policy._Moves.cover`. Returns what is left of the donor's experts, the copies, and what is missing."""
    i = tl.arange(0, LP)
    before, rest, copies = left, quota, 0
    while (rest > 0) & (copies < L):
        count, e = _first_min(_copy_order(left, rest), i, LP)
        moved = tl.minimum(_count_of(count), rest)
        left -= tl.where(i == e, moved, 0)
        rest -= moved
        copies = tl.where(moved > 0, copies + 1, L)
    tl.store(left_E + donor * L + i, left, mask=i < L)
    # A senseless load can have surplus only: then the receiver is a lane beyond R.
    tl.store(given_RL + receiver * L + i, before - left, mask=(i < L) & (receiver < R))
    tl.debug_barrier()  # other threads may load what is left
    return left, copies, rest


@triton.jit
def _give_all(left_E, given_RL, receivers, gives, R: tl.constexpr, L: tl.constexpr, TILE: tl.constexpr):
    """`_give` for many donors of one receiver each. Returns the most copies of one, of all, and what is missing."""
    RN: tl.constexpr = triton.next_power_of_2(R)
    LN: tl.constexpr = triton.next_power_of_2(L)
    DONORS: tl.constexpr = min(RN, max(1, TILE // LN))
    i = tl.arange(0, LN)[None, :]
    busiest, total, missing = 0, 0, 0
    for begin in range(0, RN, DONORS):
        donor = begin + tl.arange(0, DONORS)
        receiver, rest = tl.gather(receivers, donor, 0), tl.gather(gives, donor, 0)
        mine = left_E + donor[:, None] * L + i
        giving = (rest > 0)[:, None] & (i < L)
        before = tl.load(mine, mask=giving, other=0)
        left = before
        copies = tl.zeros([DONORS], tl.int32)
        step = 0
        while (tl.max(rest, 0) > 0) & (step < L):
            order = _copy_order(left, rest[:, None])
            least = tl.min(order, 1)
            e = tl.min(tl.where(order == least[:, None], i, LN), 1)
            moved = tl.minimum(_count_of(least), rest)
            left -= tl.where(i == e[:, None], moved[:, None], 0)
            rest -= moved
            copies += (moved > 0).to(tl.int32)
            step += 1
        tl.store(mine, left, mask=giving)
        tl.store(given_RL + receiver[:, None] * L + i, before - left, mask=giving)
        busiest = tl.maximum(busiest, tl.max(copies, 0))
        total += tl.sum(copies, 0)
        missing |= tl.max(rest, 0)
    return busiest, total, missing


@triton.jit
def _copy_order(left, rest):
    """The least is copied next: those that cover the rest alone, ascending (negative), then the others, descending."""
    return tl.where(left >= rest, left + INT_MIN, INT_MAX - left)


@triton.jit
def _count_of(order):
    """The inverse of `_copy_order`."""
    return tl.where(order < 0, order - INT_MIN, INT_MAX - order)


@triton.jit
def _first_min(values, index, N: tl.constexpr):
    """The least value, and the first index (below N) that has it. (A reduction of pairs costs more than these two.)"""
    least = tl.min(values, 0)
    return least, tl.min(tl.where(values == least, index, N), 0)


@triton.jit
def _first_max(values, index, N: tl.constexpr):
    """The largest value, and the first index (below N) that has it."""
    largest = tl.max(values, 0)
    return largest, tl.min(tl.where(values == largest, index, N), 0)


@triton.jit
def _at(values, index, i):
    """values[i]."""
    return tl.sum(tl.where(index == i, values, 0), 0)
