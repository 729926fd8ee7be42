"""The planner's solve on the device: from the exchanged load to an allocation, equal to `policy.allocate` bit for bit.

Every rank solves for itself. Each program of one launch runs one candidate of `moonep.planner.policy`, and writes what
it found and what that costs; the kernels that come next pick the winner with `chosen`, so nothing waits for anything:

    program          0     1       2       3      4     5       6       7
    exact            path  chain1  chain2  alias
    with tolerance   path  chain1  chain2  alias  path  chain1  chain2  alias
                     (targets within the limits)  (the equal shares)

A candidate is one sequence of up to R choices, each of which depends on the one before: its time is that of R choices.
What is known of a rank is a lane of a vector over ranks, in registers, and a program is one warp: a reduction is one
instruction, and a choice is one reduction. For that, a value and its rank are one integer, their *key*: value * N +
rank, with N a power of two. The least key has the least value and, among equals, the lowest rank. `key ^ -N` flips the
bits of the value alone: its least has the largest value and, among equals, the lowest rank. With N = 32:

    balances of ranks 0 to 2    5      5     -3
    key                       160    161    -94     the least, -94: rank 2 with -3
    key ^ -N                 -192   -191     66     the least, -192: rank 0 with 5

Sums and comparisons of values are those of keys: values are kept as multiples of N meanwhile. What is left of each
expert lies in memory, in practice in the L1 cache, and a donor's experts are loaded when it gives. Which of them give
bears on no balance: that is computed beside the next choice, so that the warp waits for both at the same time.

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
from moonep.kernels.early import admit_next, await_previous
from moonep.kernels.launch import Given, Launch

POLICIES = ("path", "chain1", "chain2", "alias")

NUM_POLICIES = tl.constexpr(len(POLICIES))
PPM = tl.constexpr(_dims.PPM)
INT_MAX = tl.constexpr(2**31 - 1)
INT_MIN = tl.constexpr(-(2**31))
INT64_MAX = tl.constexpr(2**63 - 1)
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
        WIDE=_keys_are_wide(d), num_warps=num_warps,
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
        TILE=1024 * num_warps, WIDE=_keys_are_wide(d), BP=next_power_of_2(d.R), NF=NUM_FAULTS, TIMER=not interpreting(),
        EARLY=False, num_warps=num_warps,
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


def _keys_are_wide(dims: Dims) -> bool:
    """Whether keys need 64 bits: counts and limits, times two indices a rank or an expert, and a sign."""
    d = dims
    return max(d.R * d.A, d.max_rows) * 2 * max(_lanes(d.R), _lanes(d.L)) > 1 << 31


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


@triton.constexpr_function
def _log2(n: int) -> int:
    return n.bit_length() - 1


@triton.jit
def chosen(cost, MODES: tl.constexpr):
    """The winner's index, of 4 * MODES candidates. The exact plans of mode 2 come last, so they win no ties."""
    c = tl.arange(0, NUM_POLICIES * MODES)
    busiest, total = tl.load(cost + 2 * c), tl.load(cost + 2 * c + 1)
    total = tl.where(busiest == tl.min(busiest, 0), total, INT_MAX)
    return tl.min(tl.where(total == tl.min(total, 0), c, NUM_POLICIES * MODES), 0)


@triton.jit(do_not_specialize=["eps_ppm", "slack", "max_rows"])
def _solve_candidates_kernel(
    load_RE, status, left, given, donor, cost, eps_ppm, slack, max_rows, load_stride: tl.constexpr,
    TOLERANT: tl.constexpr, R: tl.constexpr, L: tl.constexpr, RP: tl.constexpr, LP: tl.constexpr, TILE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Program c computes candidate c. Example: see `launch_solve`."""
    if tl.load(status) != 0:
        return
    _solve_candidate(
        tl.program_id(0), load_RE, left, given, donor, cost, eps_ppm, slack, max_rows, load_stride, TOLERANT, R, L, RP,
        LP, TILE, WIDE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["eps_ppm", "slack", "max_rows", "rank", "operation", "number", "limit"])
def _agree_kernel(
    load_RE, left, given, donor, cost, eps_ppm, slack, max_rows, signals, signal_stride, faults, fault_stride, epoch,
    status, host_status, rank, operation, number, limit, load_stride: tl.constexpr,
    TOLERANT: tl.constexpr, R: tl.constexpr, L: tl.constexpr, RP: tl.constexpr, LP: tl.constexpr, TILE: tl.constexpr,
    WIDE: tl.constexpr, BP: tl.constexpr, NF: tl.constexpr, TIMER: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program c waits for all loads and computes candidate c."""
    await_previous(EARLY)
    failed = wait(
        signals, signal_stride, faults, fault_stride, epoch, status, host_status, rank, operation, number, limit,
        R, BP, NF, TIMER,
    )  # fmt: skip
    admit_next(EARLY)
    if failed == 0:
        _solve_candidate(
            tl.program_id(0), load_RE, left, given, donor, cost, eps_ppm, slack, max_rows, load_stride, TOLERANT, R, L,
            RP, LP, TILE, WIDE,
        )  # fmt: skip


@triton.jit
def _solve_candidate(
    c, load_RE, left, given, donor, cost, eps_ppm, slack, max_rows, load_stride: tl.constexpr,
    TOLERANT: tl.constexpr, R: tl.constexpr, L: tl.constexpr, RP: tl.constexpr, LP: tl.constexpr, TILE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    left_E = left + c * (R * L)
    given_RL = given + c * (R * L)
    rank = tl.arange(0, RP)

    homes = _sum_load(load_RE, left_E, load_stride, R, L, RP, TILE)
    total = tl.sum(homes, 0)
    share = tl.where(rank < R, total // R + (rank < total % R).to(tl.int32), 0)
    target = share
    if TOLERANT:
        if c < NUM_POLICIES:
            tolerance = tl.maximum((total // R).to(tl.int64) * eps_ppm // PPM, slack).to(tl.int32)
            limit = tl.where(rank < R, tl.minimum(share + tolerance, max_rows), 0)
            target = _targets_within(homes, limit, R, RP, WIDE)

    balance = homes - target
    policy = c % NUM_POLICIES
    if R == 1:  # nobody to give to; Triton 3.6 does not compile the chains of one rank
        donors, busiest, copies, missing = tl.full([RP], -1, tl.int32), 0, 0, 0
    elif policy == 0:
        donors, busiest, copies, missing = _path(left_E, given_RL, balance, target, R, L, RP, TILE, WIDE)
    elif policy == 3:
        donors, busiest, copies, missing = _alias(left_E, given_RL, balance, R, L, RP, LP, WIDE)
    else:
        donors, busiest, copies, missing = _chain(
            left_E, given_RL, balance, tl.max(target, 0), policy, R, L, RP, LP, TILE, WIDE
        )
    tl.store(donor + c * R + rank, donors, mask=rank < R)
    tl.store(cost + c * 2, tl.where(missing == 0, busiest, NOT_APPLICABLE))
    tl.store(cost + c * 2 + 1, tl.where(missing == 0, copies, NOT_APPLICABLE))


@triton.jit
def _sum_load(
    load_RE, left_E, load_stride: tl.constexpr, R: tl.constexpr, L: tl.constexpr, RP: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Write the load of each expert to left_E; return what each rank's experts have in all."""
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
    for begin in range(0, L, COLUMNS):
        i = begin + tl.arange(0, COLUMNS)
        tile = left_E + rank[:, None] * L + i[None, :]
        counts = tl.load(tile, mask=(rank[:, None] < R) & (i[None, :] < L), other=0)
        homes += tl.sum(counts, 1)
    # The sums lie as the tile did, several lanes to a rank. Gathered, they lie one rank a lane; so does what follows.
    lane = tl.arange(0, RP)
    there = tl.minimum(lane, RN - 1)
    return tl.where(lane < RN, tl.gather(homes, there, 0), 0)


@triton.jit
def _targets_within(homes, limit, R: tl.constexpr, RP: tl.constexpr, WIDE: tl.constexpr):
    """`policy.targets_within`: down to the limits, and what that sheds to the largest rooms."""
    rank = tl.arange(0, RP)
    target = tl.minimum(homes, limit)
    room = _key(limit - target, rank, RP, WIDE)
    excess = _key(tl.sum(homes - target, 0), 0, RP, WIDE)
    step = 0
    while (excess > 0) & (step < R):
        best = tl.min(room ^ -RP, 0)
        taken = tl.minimum(~best & -RP, excess)
        room -= tl.where(rank == (best & (RP - 1)), taken, 0)
        excess -= taken
        step += 1
    return limit - _value(room, RP)


@triton.jit
def _path(
    left_E, given_RL, balance, target, R: tl.constexpr, L: tl.constexpr, RP: tl.constexpr, TILE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """`policy.path`. Each rank gives once at most: who gives what to whom is settled first, then all give at once."""
    LAST: tl.constexpr = INT64_MAX if WIDE else INT_MAX
    DONE: tl.constexpr = -LAST - 1
    rank = tl.arange(0, RP)
    key = tl.where(balance != 0, _key(balance, rank, RP, WIDE), DONE)
    donors = tl.full([RP], -1, tl.int32)
    gets = tl.zeros_like(key)
    surplus = tl.sum(gets, 0)
    last, step = -1, 0
    while step < R:
        # The running surplus picks the largest deficit that it fills, which is the least balance, else the smallest
        # surplus, which is the least balance too. At 0 a line starts, from the largest surplus.
        flip = tl.where(surplus == 0, -RP, 0)
        best = tl.min(tl.where(key >= -surplus, key ^ flip, LAST), 0)
        if best == LAST:
            step = R
        else:
            r = (best & (RP - 1)).to(tl.int32)
            here = rank == r
            key = tl.where(here, DONE, key)
            donors = tl.where(here, last, donors)
            gets = tl.where(here, surplus, gets)
            surplus += (best ^ flip) & -RP
            last = tl.where(surplus == 0, -1, r)
            step += 1
    gets = _value(gets, RP)
    missing = tl.max(((key != DONE) | (gets > target)).to(tl.int32), 0) | (surplus != 0).to(tl.int32)
    gets = tl.where(missing == 0, gets, 0)
    busiest, copies, rest = _give_all(left_E, given_RL, donors, gets, R, L, TILE, WIDE)
    return donors, busiest, copies, missing | rest


@triton.jit
def _alias(
    left_E, given_RL, balance, R: tl.constexpr, L: tl.constexpr, RP: tl.constexpr, LP: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """`policy.alias`. The next choice needs balances only, so it is made beside the copy that the last one asks for."""
    rank = tl.arange(0, RP)
    e = _experts(L, LP)
    key = _key(balance, rank, RP, WIDE)
    donors = tl.full([RP], -1, tl.int32)
    exports = tl.zeros([RP], tl.int32)
    donor, receiver, quota = 0, 0, 0  # nothing to copy before the first choice
    most_in, missing, step = 0, 0, 0
    while (step <= R) & (missing == 0):
        before, left, first = _begin(left_E, donor, quota, e, L, LP, WIDE)
        most = tl.min(key ^ -RP, 0)
        least = tl.min(key, 0)
        copies, missing = _finish(left_E, given_RL, before, left, first, donor, receiver, quota, e, R, L, LP, WIDE)
        exports += tl.where(rank == donor, copies, 0)
        most_in = tl.maximum(most_in, copies)
        donor = (most & (RP - 1)).to(tl.int32)
        receiver = (least & (RP - 1)).to(tl.int32)
        deficit = least & -RP
        quota = _value(-deficit, RP)
        if (most ^ -RP) >= RP:
            key = tl.where(rank == receiver, rank, key) + tl.where(rank == donor, deficit, 0)
            donors = tl.where(rank == receiver, donor, donors)
            step += 1
        else:
            step = R + 1
    missing |= tl.max((key != rank).to(tl.int32), 0)
    return donors, tl.maximum(most_in, tl.max(exports, 0)), tl.sum(exports, 0), missing


@triton.jit
def _chain(
    left_E, given_RL, balance, max_target, g, R: tl.constexpr, L: tl.constexpr, RP: tl.constexpr, LP: tl.constexpr,
    TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`policy.chain`, for g <= 2. As in `_alias`, the next head is chosen beside the copy that it does not depend on.

    What a member gives bears on no later choice: it has had its turn, and one copy does. So members give at the end,
    all at once. A part depends on exports in one way only: g = 2 and none yet halves it. So the index in a key is
    twice the rank, and 1 more once the rank has fed a chain.
    """
    N: tl.constexpr = 2 * RP
    LAST: tl.constexpr = INT64_MAX if WIDE else INT_MAX
    rank = tl.arange(0, RP)
    e = _experts(L, LP)
    index = 2 * rank
    key = _key(balance, index, N, WIDE)
    max_part = _key(max_target, 0, N, WIDE)
    donors = tl.full([RP], -1, tl.int32)
    gets = tl.zeros_like(key)
    exports = tl.zeros([RP], tl.int32)
    h, head, quota = 0, 0, 0
    most_in, missing, step = 0, 0, 0
    while (step <= R) & (missing == 0):
        before, left, first = _begin(left_E, h, quota, e, L, LP, WIDE)
        most = tl.min(key ^ -N, 0)
        deepest = tl.min(key, 0)
        shallowest = tl.max(tl.where(key < 0, key, -LAST), 0)
        surplus = ~most & -N
        halved = (g == 2) & ((most & 1) == 0)
        part = tl.minimum(tl.where(halved, ((surplus + N) >> 1) & -N, surplus), max_part)
        # The largest deficit of a part at most; if every deficit exceeds it, the smallest that takes all, else the
        # largest.
        fits = tl.min(tl.where((key < 0) & (key >= -part), key, LAST), 0)
        takes_all = tl.min(tl.where(key < N - surplus, key ^ -N, LAST), 0)
        choice = tl.where(fits != LAST, fits, tl.where(takes_all != LAST, takes_all ^ -N, deepest))
        copies, missing = _finish(left_E, given_RL, before, left, first, h, head, quota, e, R, L, LP, WIDE)
        exports += tl.where(rank == h, copies, 0)
        most_in = tl.maximum(most_in, copies)
        if surplus > 0:
            h = ((most & (N - 1)) // 2).to(tl.int32)
            head = ((choice & (N - 1)) // 2).to(tl.int32)
            needed = -(choice & -N)
            key = tl.where(rank == head, index, key)
            donors = tl.where(rank == head, h, donors)
            # Nearly all chains have one member: no other deficit fits in what is left of the part.
            if (fits != LAST) & (shallowest + part >= needed):
                most_left = _key(_most_left(left_E, h, e, L), 0, N, WIDE)
                spare = tl.minimum(part, most_left) - needed
                tail, members = head, 1
                while members < R:
                    can_give = tl.where(_at(exports, rank, tail) < g, _most_left(left_E, tail, e, L), 0)
                    spare = tl.minimum(spare, _key(can_give, 0, N, WIDE))
                    # Who was passed over stays too large, as `spare` only shrinks: next is the largest that fits.
                    best = tl.min(tl.where((key < 0) & (key >= -spare), key, LAST), 0)
                    if best == LAST:
                        members = R
                    else:
                        r = ((best & (N - 1)) // 2).to(tl.int32)
                        here = rank == r
                        donors = tl.where(here, tail, donors)
                        gets = tl.where(here, -needed, gets)  # and all that its chain will lack, known at its end
                        key = tl.where(here, index, key)
                        exports += (rank == tail).to(tl.int32)
                        deficit = best & -N
                        spare += deficit
                        needed -= deficit
                        tail = r
                        members += 1
                gets = tl.where(gets < 0, gets + needed, gets)
            quota = _value(needed, N)
            key = tl.where(rank == h, (key | 1) - needed, key)
            index |= (rank == h).to(tl.int32)
            step += 1
        else:
            step = R + 1
    missing |= tl.max(((key & -N) != 0).to(tl.int32), 0)
    gets = tl.where(missing == 0, _value(gets, N), 0)
    _, _, rest = _give_all(left_E, given_RL, donors, gets, R, L, TILE, WIDE)
    return donors, tl.maximum(most_in, tl.max(exports, 0)), tl.sum(exports, 0), missing | rest


@triton.jit
def _experts(L: tl.constexpr, LP: tl.constexpr):
    """The experts of a rank, one a lane.

    In a single warp lanes beyond L repeat the last one and do as it does, as one register a lane is loaded faster
    without a mask. In longer vectors they are masked.
    """
    i = tl.arange(0, LP)
    if LP == 32:
        i = tl.minimum(i, L - 1)
    return i


@triton.jit
def _most_left(left_E, donor, e, L: tl.constexpr):
    """The largest expert of `donor`."""
    return tl.max(tl.load(left_E + donor * L + e, mask=e < L, other=0), 0)


@triton.jit
def _copy(left, rest, e, LP: tl.constexpr, WIDE: tl.constexpr):
    """One copy of `policy._Moves.cover`. Returns what is left of the experts, and the place of the one that gave.

    If that is not negative, the expert went whole and did not suffice.
    """
    order = _copy_order(left, rest, e, LP, WIDE)
    first = tl.min(order, 0)
    return left - tl.where(order == first, tl.minimum(left, rest), 0), first


@triton.jit
def _begin(left_E, donor, quota, e, L: tl.constexpr, LP: tl.constexpr, WIDE: tl.constexpr):
    """The first copy of `policy._Moves.cover`. Returns the donor's experts before and after, and who gave: `_copy`.

    A quota of 0 changes nothing. Long vectors skip it; for short ones no branch stands between a copy and what is
    computed beside it.
    """
    before = tl.zeros([LP], tl.int32)
    left, first = before, tl.full([], -1, tl.int64 if WIDE else tl.int32)
    if (LP <= 64) | (quota > 0):
        before = tl.load(left_E + donor * L + e, mask=e < L, other=0)
        left, first = _copy(before, quota, e, LP, WIDE)
    return before, left, first


@triton.jit
def _finish(
    left_E, given_RL, before, left, first, donor, receiver, quota, e, R: tl.constexpr, L: tl.constexpr,
    LP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The further copies of `policy._Moves.cover`, and what they all gave. Returns the copies, and what is missing."""
    copies, rest = tl.where(quota > 0, 1, 0), quota
    if (LP <= 64) | (quota > 0):
        while (first >= 0) & (copies < L):
            count = _count_of(first, LP, WIDE)
            rest -= count
            left, first = _copy(left, rest, e, LP, WIDE)
            copies = tl.where(count > 0, copies + 1, L)
        tl.store(left_E + donor * L + e, left, mask=e < L)
        # A senseless load can have surplus only: then the receiver is a lane beyond R.
        tl.store(given_RL + receiver * L + e, before - left, mask=(e < L) & (receiver < R) & (quota > 0))
        if LP > 32:  # else each thread loads only what it has stored itself
            tl.debug_barrier()
    return copies, tl.where(first >= 0, 1, 0)


@triton.jit
def _give_all(
    left_E, given_RL, donors, gets, R: tl.constexpr, L: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """`policy._Moves.cover` for all receivers (gets > 0), whose donors differ.

    Returns the most copies of one, of all, and what is missing.
    """
    RN: tl.constexpr = triton.next_power_of_2(R)
    LN: tl.constexpr = triton.next_power_of_2(L)
    RECEIVERS: tl.constexpr = min(RN, max(1, TILE // LN))
    i = tl.arange(0, LN)[None, :]
    busiest, total, missing = 0, 0, 0
    tl.debug_barrier()  # other threads have stored what is left
    for begin in range(0, RN, RECEIVERS):
        receiver = begin + tl.arange(0, RECEIVERS)
        donor, rest = tl.gather(donors, receiver, 0), tl.gather(gets, receiver, 0)
        theirs = left_E + donor[:, None] * L + i
        giving = (rest > 0)[:, None] & (i < L)
        before = tl.load(theirs, mask=giving, other=0)
        left = before
        copies = tl.zeros([RECEIVERS], tl.int32)
        step = 0
        while (tl.max(rest, 0) > 0) & (step < L):
            order = _copy_order(left, rest[:, None], i, LN, WIDE)
            first = tl.min(order, 1)
            left -= tl.where(order == first[:, None], tl.minimum(left, rest[:, None]), 0)
            copies += (rest > 0).to(tl.int32)
            rest = tl.where(first < 0, 0, rest - _count_of(first, LN, WIDE))
            step += 1
        tl.store(theirs, left, mask=giving)
        tl.store(given_RL + receiver[:, None] * L + i, before - left, mask=giving)
        busiest = tl.maximum(busiest, tl.max(copies, 0))
        total += tl.sum(copies, 0)
        missing |= tl.max(rest, 0)
    return busiest, total, missing


@triton.jit
def _key(values, index, N: tl.constexpr, WIDE: tl.constexpr):
    """(value, index) in one integer, index below N, a power of two. What makes 32 bits suffice: `_keys_are_wide`."""
    return values.to(tl.int64 if WIDE else tl.int32) * N + index


@triton.jit
def _value(key, N: tl.constexpr):
    """The value in a key."""
    BITS: tl.constexpr = _log2(N)
    return (key >> BITS).to(tl.int32)


@triton.jit
def _copy_order(left, rest, e, N: tl.constexpr, WIDE: tl.constexpr):
    """The least is copied next: those that cover the rest alone, ascending (negative), then the others, descending."""
    FIRST: tl.constexpr = -INT64_MAX - 1 if WIDE else INT_MIN
    key = _key(left, e, N, WIDE)
    return tl.where(left >= rest, key, key ^ -N) ^ FIRST


@triton.jit
def _count_of(order, N: tl.constexpr, WIDE: tl.constexpr):
    """The count of an expert that does not cover the rest, from its place in that order."""
    FIRST: tl.constexpr = -INT64_MAX - 1 if WIDE else INT_MIN
    return _value(order ^ FIRST ^ -N, N)


@triton.jit
def _at(values, index, i):
    """values[i]."""
    return tl.sum(tl.where(index == i, values, 0), 0)
