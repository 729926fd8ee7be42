"""Who computes what: an allocation of every expert's assignments to ranks, in plain integers.

`T_E[e]` assignments chose expert e, whose weights live on its home rank e // L. A rank whose experts are popular has
more work than its share, its *target*; another has less. Letting a short rank compute some assignments of a foreign
expert costs a *copy* of that expert's weights, so the question is which copies to make.

Worked example, R = 2 ranks with L = 2 experts each:

>>> T_E = [6, 1, 1, 0]          # home loads 7 and 1
>>> caps(sum(T_E), R=2)         # rank 0 has 3 too many, rank 1 has 3 too few
[4, 4]
>>> path(T_E, R=2, targets=[4, 4])  # expert 0 alone covers the 3: one copy of it, on rank 1
[[3, 3], [1, 0], [0, 1], [0, 0]]

Finding the fewest copies is NP-hard, so three constructions, each a handful of integer comparisons, run side by side
and the best result is kept. All of them obey four invariants (`violations` names the broken ones):

* I1: conservation. The counts of an expert are not negative and add up to T_e.
* I2: balance. Rank r computes exactly targets[r] assignments.
* I3: one foreign home. The redundant experts of a rank all come from one home rank, so hence
* I4: at most L redundant experts on a rank, which bounds the slots to reserve.

I3 holds by construction: every rank receives in one step, from one donor. Every tie goes to the lower rank or the lower
expert id, so that all ranks reach the same allocation from the same loads without talking.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from moonep.dims import PPM, Dims

Counts = list[list[int]]


@dataclass(frozen=True)
class Allocation:
    """counts_ER[e][r] assignments of expert e are computed by rank r; `policy` names the construction that won."""

    counts_ER: Counts
    policy: str


def allocate(T_E: Sequence[int], dims: Dims) -> Allocation:
    """Choose the allocation of one call: exact shares, or within the tolerance of `dims.balance`.

    Args:
        T_E: [E], assignments of each expert over all ranks.
        dims: R, and the balance; with a tolerance also the rows that a rank can hold.

    Returns:
        The cheapest candidate. With a tolerance the exact plan competes last (policy `exact-...`): staying inside the
        limits does not always need fewer copies than meeting the shares.
    """
    assert len(T_E) == dims.E and min(T_E) >= 0 and sum(T_E) <= dims.R * dims.A, "T_E does not come from these dims"
    shares = caps(sum(T_E), dims.R)
    exact = _cheapest(T_E, dims.R, shares)
    if dims.balance.exact:
        return exact
    tolerant = _cheapest(T_E, dims.R, targets_within(T_E, limits(sum(T_E), dims)))
    if _cost(exact.counts_ER, dims.R) < _cost(tolerant.counts_ER, dims.R):
        return Allocation(exact.counts_ER, "exact-" + exact.policy)
    return tolerant


def caps(total: int, R: int) -> list[int]:
    """The equal shares of `total` assignments: they differ by at most 1, the lower ranks take the remainder."""
    return [total // R + (r < total % R) for r in range(R)]


def limits(total: int, dims: Dims) -> list[int]:
    """Most assignments that each rank may compute: its share and the tolerance, never more than `dims.max_rows`.

    Two kinds of tolerance: a fraction of the mean load, and `slack`, the assignments that one copy is worth. Neither
    depends on the rank, so the limits differ by at most 1: what `alias` needs to apply.
    """
    tolerance = max(total // dims.R * dims.balance.eps_ppm // PPM, dims.balance.slack)
    return [min(dims.max_rows, share + tolerance) for share in caps(total, dims.R)]


def targets_within(T_E: Sequence[int], limits_R: Sequence[int]) -> list[int]:
    """What each rank computes when only what exceeds a limit moves.

    A rank over its limit comes down to it. What these ranks shed goes to the rank with the largest room below its limit
    until that is full, then to the next (ties: lower rank): few receivers mean few copies.
    """
    homes = _home_loads(T_E, len(limits_R))
    targets = [min(load, limit) for load, limit in zip(homes, limits_R, strict=True)]
    excess = sum(homes) - sum(targets)
    rooms = [limit - target for limit, target in zip(limits_R, targets, strict=True)]
    for r in sorted(range(len(rooms)), key=lambda r: -rooms[r]):
        taken = min(rooms[r], excess)
        targets[r] += taken
        excess -= taken
    assert excess == 0, "the limits of all ranks together are below the load"
    return targets


def _cheapest(T_E: Sequence[int], R: int, targets: Sequence[int]) -> Allocation:
    """The candidate with the least (busiest link, total copies); ties in the order of this list.

    The candidates do not depend on each other, so a GPU runs them at the same time, one a warp.
    """
    candidates = {
        "path": path(T_E, R, targets),
        "chain1": chain(T_E, R, targets, g=1),
        "chain2": chain(T_E, R, targets, g=2),
        "alias": alias(T_E, R, targets),
    }
    valid = [
        Allocation(counts_ER, policy)
        for policy, counts_ER in candidates.items()
        if counts_ER is not None and not violations(T_E, counts_ER, targets)
    ]
    assert valid, "alias applies to the shares and to the targets of a tolerance"
    return min(valid, key=lambda plan: _cost(plan.counts_ER, R))


def _cost(counts_ER: Counts, R: int) -> tuple[int, int]:
    total, max_in, max_eg = copies(counts_ER, R)
    return max(max_in, max_eg), total


def copies(counts_ER: Counts, R: int) -> tuple[int, int, int]:
    """Copies of weights that an allocation needs: (total, most into one rank, most out of one rank)."""
    into, out_of = [0] * R, [0] * R
    for home, rank in _links(counts_ER, R):
        out_of[home] += 1
        into[rank] += 1
    return sum(into), max(into), max(out_of)


def _links(counts_ER: Counts, R: int) -> list[tuple[int, int]]:
    """(home, rank) of every copy: a rank that computes an expert away from its home."""
    L = len(counts_ER) // R
    links = []
    for e, count_R in enumerate(counts_ER):
        home = e // L
        # Nearly all experts stay whole at home: telling so without a loop makes planning several times faster.
        if count_R.count(0) + (count_R[home] != 0) < R:
            links += [(home, r) for r in range(R) if count_R[r] and r != home]
    return links


def violations(T_E: Sequence[int], counts_ER: Counts, targets: Sequence[int]) -> list[str]:
    """The names of the broken invariants, of I1 to I4 as stated in the module's docstring."""
    R = len(targets)
    links = _links(counts_ER, R)  # an entry for each copy: equal entries are copies between the same two ranks
    redundant = Counter(rank for _, rank in links)
    holds = {
        "I1": all(min(count_R) >= 0 and sum(count_R) == T for T, count_R in zip(T_E, counts_ER, strict=True)),
        "I2": [sum(rank_E) for rank_E in zip(*counts_ER, strict=True)] == list(targets),
        "I3": len(set(links)) == len(redundant),
        "I4": max(redundant.values(), default=0) <= len(T_E) // R,
    }
    return [name for name, held in holds.items() if not held]


def alias(T_E: Sequence[int], R: int, targets: Sequence[int]) -> Counts | None:
    """The rank with the largest surplus fills the whole deficit of the rank with the largest deficit, repeatedly.

    A donor may give more than it has too much and become a receiver itself. Each step closes one rank: at most R - 1
    steps. It applies whenever no receiver's target is more than 1 above a donor's, as a donor has its target and at
    least 1 more to give from: this is why exact balance is always possible. But a hot owner serves many: a star.

    Source: Walker's alias method (1977), with ranks as columns. Ties: lower rank.
    """
    moves = _Moves(T_E, R, targets)
    balance = moves.balance
    while any(balance):
        # The largest deficit never grows, so a donor's quotas come largest first: a large expert covers them alone, and
        # what is left of it still covers a small one.
        if not moves.fill(_first_max(range(R), balance), _first_min(range(R), balance)):
            return None
    return moves.counts_ER


def path(T_E: Sequence[int], R: int, targets: Sequence[int]) -> Counts | None:
    """String all unbalanced ranks on a line, each passing the running surplus on to the next.

    A rank imports from its predecessor and exports, from its own experts, to its successor: nobody serves two ranks.
    The running surplus steers: next is the largest deficit that it fills, else the smallest surplus, which adds to it;
    at 0 a new line starts from the largest surplus. Ties: lower rank.

    Applies while no running surplus exceeds the target of its receiver, which it would have to compute. That is certain
    for max - min home load <= total // R, and frequent beyond.

    Source: MoonEP; the star of `alias` stretched out by passing through.
    """
    moves = _Moves(T_E, R, targets)
    balance = moves.balance
    waiting = [r for r in range(R) if balance[r]]
    surplus, last = 0, 0
    while waiting:
        givers = [r for r in waiting if balance[r] > 0]
        fitting = [r for r in waiting if 0 < -balance[r] <= surplus]
        if surplus == 0:
            rank = _first_max(givers, balance)
        else:
            # No deficit fits only while surpluses remain: balances add up to 0.
            rank = _first_min(fitting, balance) if fitting else _first_min(givers, balance)
            if surplus > targets[rank] or not moves.cover(last, rank, surplus):
                return None
        waiting.remove(rank)
        surplus, last = balance[rank], rank
    return moves.counts_ER


def chain(T_E: Sequence[int], R: int, targets: Sequence[int], g: int) -> Counts | None:
    """The hottest rank feeds chains of short ranks, few enough that it makes about `g` copies.

    A member of a chain imports from the rank before and exports its own assignments to the rank behind. h, the rank
    with the largest balance, hands over an equal part of it in each of its remaining g copies, so a chain grows while
    its deficits fit in that part. A link is one copy: every member needs one expert that covers all behind it.

    Each rank receives once, so at most R - 1 links; g is a target for the copies out of a rank, not a bound.

    Source: MoonEP, between `alias` (all stars) and `path` (one line). Ties: lower rank.
    """
    moves = _Moves(T_E, R, targets)
    balance = moves.balance
    while True:
        h = _first_max(range(R), balance)
        if balance[h] <= 0:
            return moves.counts_ER
        members = _next_chain(moves, h, max(targets), g)
        # Tail first: what a member exports adds to its deficit, which the member before it then fills.
        for donor, receiver in reversed(list(pairwise([h, *members]))):
            if not moves.fill(donor, receiver):
                return None


def _next_chain(moves: _Moves, h: int, max_target: int, g: int) -> list[int]:
    """The ranks that h feeds next, in the order in which they pass assignments on."""
    balance = moves.balance
    part = min(-(-balance[h] // max(g - moves.exports[h], 1)), max_target)
    sinks = sorted((r for r in range(len(balance)) if balance[r] < 0), key=balance.__getitem__)
    fitting = [r for r in sinks if -balance[r] <= part]
    if not fitting:
        # Every deficit exceeds a part: the smallest that takes all of h's surplus, else the one that takes the most.
        enough = [r for r in sinks if -balance[r] >= balance[h]]
        return [_first_max(enough, balance) if enough else sinks[0]]

    def reach(member: int) -> int:
        """What `member` can export in one copy: one that has exported g copies already ends the chain."""
        return max(moves.left_RL[member]) if moves.exports[member] < g else 0

    head = fitting[0]
    members = [head]
    # The most that can still be appended so that h exports no more than its part, in one copy, and each member in one.
    spare = min(min(part, max(moves.left_RL[h])) + balance[head], reach(head))
    for r in fitting[1:]:
        if -balance[r] <= spare:
            members.append(r)
            spare = min(spare + balance[r], reach(r))
    return members


class _Moves:
    """An allocation in the making: everything at home at first, then moved away one quota at a time.

    Attributes:
        counts_ER: the allocation so far.
        left_RL: of each rank's own experts, the assignments still at home; what the rank can export.
        balance: [R], what a rank computes by the allocation so far - its target.
        exports: [R], copies made of the rank's experts so far.
    """

    def __init__(self, T_E: Sequence[int], R: int, targets: Sequence[int]):
        self.L = len(T_E) // R
        self.counts_ER = [[0] * R for _ in T_E]
        for e, T in enumerate(T_E):
            self.counts_ER[e][e // self.L] = T
        self.left_RL = [list(T_E[r * self.L : (r + 1) * self.L]) for r in range(R)]
        self.balance = [load - target for load, target in zip(_home_loads(T_E, R), targets, strict=True)]
        self.exports = [0] * R
        assert sum(self.balance) == 0, "the targets do not add up to the load"

    def cover(self, donor: int, receiver: int, quota: int) -> bool:
        """Move `quota` assignments of the donor's own experts in few copies; False if it has not that many.

        The smallest expert that covers the quota alone gives it; if there is none, the largest moves whole and the rest
        of the quota is covered in the same way. Ties: lower expert id.
        """
        left = self.left_RL[donor]
        while quota > 0:
            enough = [i for i, count in enumerate(left) if count >= quota]
            i = _first_min(enough, left) if enough else _first_max(range(self.L), left)
            moved = min(left[i], quota)
            if moved == 0:
                return False
            count_R = self.counts_ER[donor * self.L + i]
            count_R[donor] -= moved
            count_R[receiver] += moved
            left[i] -= moved
            quota -= moved
            self.balance[donor] -= moved
            self.balance[receiver] += moved
            self.exports[donor] += 1
        return True

    def fill(self, donor: int, receiver: int) -> bool:
        """Cover the whole deficit of the receiver, which is done with that; False if the donor has not that many."""
        return self.cover(donor, receiver, -self.balance[receiver])


def _home_loads(T_E: Sequence[int], R: int) -> list[int]:
    L = len(T_E) // R
    return [sum(T_E[r * L : (r + 1) * L]) for r in range(R)]


def _first_max(indices: Sequence[int] | range, values: Sequence[int]) -> int:
    """The first of `indices` with the largest value: where equals are listed by id, ties go to the lower one."""
    return max(indices, key=values.__getitem__)


def _first_min(indices: Sequence[int] | range, values: Sequence[int]) -> int:
    """The first of `indices` with the smallest value."""
    return min(indices, key=values.__getitem__)
