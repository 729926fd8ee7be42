"""The allocation of the planner: what holds for every load on generated loads, ties and bounds on pinned ones."""

from __future__ import annotations

import doctest
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonep.dims import PPM, Balance, Dims
from moonep.planner import policy
from moonep.planner.policy import alias, allocate, caps, chain, copies, limits, path, targets_within, violations

Load = tuple[list[int], int]  # T_E, R
EXACT = Balance()
Z = [0, 0, 0, 0]  # an expert without assignments, on 4 ranks


def dims_of(T_E: list[int], R: int, balance: Balance = EXACT, room: int = 0) -> Dims:
    """The smallest dims that can bring this load, plus `room` tokens a rank."""
    return Dims(S=max(1, -(-sum(T_E) // R)) + room, K=1, E=len(T_E), R=R, H=8, B=len(T_E) // R, balance=balance)


def homes_of(T_E: list[int], R: int) -> list[int]:
    L = len(T_E) // R
    return [sum(T_E[r * L : (r + 1) * L]) for r in range(R)]


def rows_of(counts_ER: list[list[int]]) -> list[int]:
    return [sum(rank_E) for rank_E in zip(*counts_ER, strict=True)]


def cost_of(counts_ER: list[list[int]], R: int) -> tuple[int, int]:
    total, max_in, max_eg = copies(counts_ER, R)
    return max(max_in, max_eg), total


def candidates_of(T_E: list[int], R: int, targets: list[int]) -> dict[str, list[list[int]] | None]:
    chains = {f"chain{g}": chain(T_E, R, targets, g) for g in (1, 2, 3)}
    return {"path": path(T_E, R, targets), **chains, "alias": alias(T_E, R, targets)}


@st.composite
def small_loads(draw: st.DrawFn) -> Load:
    """Few ranks and small integers, full of ties and zeros: these shrink to readable failures."""
    R, L = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    return draw(st.lists(st.integers(0, 9), min_size=R * L, max_size=R * L)), R


@st.composite
def large_loads(draw: st.DrawFn) -> Load:
    """Up to R = 64, E = 512; from equal popularity to one expert that takes nearly everything."""
    R = draw(st.sampled_from([1, 2, 3, 8, 13, 32, 64]))
    L = draw(st.integers(1, 512 // R))
    sigma, mean = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 4.0])), draw(st.sampled_from([1, 30, 1000]))
    rng = random.Random(draw(st.integers(0, 2**32)))
    T_E = [int(mean * rng.lognormvariate(0, sigma)) for _ in range(R * L)]
    if draw(st.booleans()):  # popular ranks rather than popular experts
        T_E.sort()
    return T_E, R


loads = st.one_of(small_loads(), large_loads())
tolerances = st.one_of(
    st.builds(Balance, eps_ppm=st.sampled_from([1, 10_000, 50_000, 300_000, PPM])),
    st.builds(Balance, slack=st.sampled_from([1, 3, 40, 1500])),
    st.builds(Balance, eps_ppm=st.just(10_000), slack=st.just(20)),
)
several = settings(max_examples=150, deadline=None)

DEGENERATE: dict[str, Load] = {
    "nothing to do": ([0] * 12, 4),
    "one assignment": ([0] * 11 + [1], 4),
    "fewer assignments than ranks": ([0, 0, 0, 2, 1, 0, 0, 0], 8),
    "one expert takes all": ([0] * 5 + [4000] + [0] * 10, 8),
    "the last expert takes all, with a remainder": ([0] * 15 + [4003], 8),
    "one rank takes all": ([0] * 8 + [70, 1, 5, 24] + [0] * 20, 8),
    "all but one rank take all": ([9, 9, 9, 9, 9, 9, 0, 0], 4),
    "all equal": ([7] * 64, 16),
    "every rank exactly balanced by unequal experts": ([10, 0, 4, 6, 5, 5, 1, 9], 4),
    "two pairs that cancel: the running surplus returns to zero": ([6, 6, 2, 2], 4),
    "a prefix that is exactly zero before a larger surplus": ([5, 3, 9, 1, 4, 2], 6),
    "one expert a rank, total divisible only after a remainder": ([8, 3, 5, 6, 2, 2, 1, 2, 1], 9),
    "total not divisible": ([11, 0, 0, 3, 2, 1, 1, 4], 4),
    "one rank": ([3, 0, 5], 1),
    "a uniformly hot rank": ([9] * 16 + [3] * 16, 2),
    "a line of 64 ranks": ([65 - r for r in range(64)], 64),
    "one giver, 63 receivers": ([63 * 64 + 64] + [0] * 63, 64),
}


def test_the_worked_example_makes_one_copy_of_the_hot_expert():
    T_E = [6, 1, 1, 0]
    plan = allocate(T_E, dims_of(T_E, R=2))
    assert plan.counts_ER == [[3, 3], [1, 0], [0, 1], [0, 0]]
    assert plan.policy == "path"
    assert copies(plan.counts_ER, R=2) == (1, 1, 1)


def test_the_examples_in_the_docstrings_are_true():
    outcome = doctest.testmod(policy)
    assert outcome.attempted > 0 and outcome.failed == 0


@given(st.integers(0, 10**6), st.integers(1, 128))
@several
def test_shares_add_up_and_differ_by_one_in_favour_of_lower_ranks(total: int, R: int):
    shares = caps(total, R)
    assert len(shares) == R and sum(shares) == total
    assert shares == sorted(shares, reverse=True) and shares[0] - shares[-1] <= 1


@given(loads)
@several
def test_every_candidate_that_applies_keeps_all_invariants(load: Load):
    T_E, R = load
    shares = caps(sum(T_E), R)
    for name, counts_ER in candidates_of(T_E, R, shares).items():
        assert counts_ER is None or violations(T_E, counts_ER, shares) == [], name


@pytest.mark.parametrize("load", DEGENERATE.values(), ids=DEGENERATE.keys())
def test_degenerate_loads_are_balanced_exactly(load: Load):
    T_E, R = load
    shares = caps(sum(T_E), R)
    for name, counts_ER in candidates_of(T_E, R, shares).items():
        assert counts_ER is None or violations(T_E, counts_ER, shares) == [], name
    assert rows_of(allocate(T_E, dims_of(T_E, R)).counts_ER) == shares


@given(loads)
@several
def test_the_choice_is_exact_and_never_worse_than_alias(load: Load):
    T_E, R = load
    shares = caps(sum(T_E), R)
    plan, star = allocate(T_E, dims_of(T_E, R)), alias(T_E, R, shares)
    assert star is not None, "alias always applies"
    assert violations(T_E, plan.counts_ER, shares) == []
    assert cost_of(plan.counts_ER, R) <= cost_of(star, R)


@given(loads)
@several
def test_the_choice_is_the_first_of_the_cheapest_candidates(load: Load):
    T_E, R = load
    candidates = candidates_of(T_E, R, caps(sum(T_E), R))
    costs = [
        (cost_of(counts_ER, R), rank, name)
        for rank, name in enumerate(["path", "chain1", "chain2", "alias"])
        if (counts_ER := candidates[name]) is not None
    ]
    plan = allocate(T_E, dims_of(T_E, R))
    assert plan.policy == min(costs)[2]
    assert plan.counts_ER == candidates[plan.policy]


@given(loads, tolerances)
@several
def test_the_same_load_gets_the_same_allocation_and_is_left_alone(load: Load, balance: Balance):
    T_E, R = load
    given_before = list(T_E)
    for dims in (dims_of(T_E, R), dims_of(T_E, R, balance)):
        assert allocate(T_E, dims) == allocate(tuple(T_E), dims)
    assert T_E == given_before


@given(loads)
@several
def test_a_path_has_one_predecessor_and_one_successor_a_rank(load: Load):
    T_E, R = load
    homes, shares = homes_of(T_E, R), caps(sum(T_E), R)
    counts_ER = path(T_E, R, shares)
    if max(homes) - min(homes) <= sum(T_E) // R:
        assert counts_ER is not None, "certain to apply to nearly balanced ranks"
    if counts_ER is None:
        return
    L = len(T_E) // R
    arcs = {(e // L, r) for e, count_R in enumerate(counts_ER) for r, n in enumerate(count_R) if n and r != e // L}
    assert len({home for home, _ in arcs}) == len({rank for _, rank in arcs}) == len(arcs)


@given(loads)
@several
def test_alias_and_chain_connect_fewer_pairs_than_there_are_ranks(load: Load):
    T_E, R = load
    L = len(T_E) // R
    for name, counts_ER in candidates_of(T_E, R, caps(sum(T_E), R)).items():
        if counts_ER is not None:
            arcs = {(e // L, r) for e, row in enumerate(counts_ER) for r, n in enumerate(row) if n and r != e // L}
            assert len(arcs) <= R - 1, name


def test_the_lower_rank_gives_and_receives_first_among_equals():
    T_E, expected = [6, 6, 0, 0], [[3, 0, 3, 0], [0, 3, 0, 3], [0] * 4, [0] * 4]
    assert candidates_of(T_E, 4, [3] * 4) == dict.fromkeys(["path", "chain1", "chain2", "chain3", "alias"], expected)


def test_the_lower_expert_moves_first_among_equals():
    for counts_ER in candidates_of([4, 4, 0, 0], 2, [4, 4]).values():
        assert counts_ER == [[0, 4], [4, 0], [0, 0], [0, 0]]


def test_the_smallest_expert_that_covers_a_quota_gives_it():
    for counts_ER in candidates_of([9, 3, 4, 0, 0, 0], 2, [13, 3]).values():
        assert counts_ER == [[9, 0], [0, 3], [4, 0], [0, 0], [0, 0], [0, 0]]


def test_a_quota_that_no_expert_covers_takes_the_largest_whole_and_the_rest_from_the_smallest_that_covers_it():
    for counts_ER in candidates_of([4, 5, 2, 0, 0, 0], 2, [5, 6]).values():
        assert counts_ER == [[4, 0], [0, 5], [1, 1], [0, 0], [0, 0], [0, 0]]


def test_alias_lets_a_donor_overshoot_and_become_a_receiver():
    # Rank 0 has 1 too many, but fills all 3 that rank 2 lacks; rank 1 repays it.
    assert alias([5, 5, 1, 5], 4, [4, 4, 4, 4]) == [[2, 0, 2 + 1, 0], [1 + 1, 3, 0, 0], [0, 0, 1, 0], [0, 1, 0, 4]]


def test_a_chain_relieves_a_hot_rank_that_no_path_does():
    # Rank 0 has 5 too many. A path would pass all 5 through rank 1, which computes 4.
    T_E, shares = [9, 1, 3, 3], [4, 4, 4, 4]
    assert path(T_E, 4, shares) is None
    # Of its 4 rank 1 needs 3: it passes its own assignment on to rank 2.
    chained = [[4, 4, 0, 1], [0, 0, 1, 0], [0, 0, 3, 0], [0, 0, 0, 3]]
    assert chain(T_E, 4, shares, g=1) == chained
    star = alias(T_E, 4, shares)
    assert star is not None
    assert (copies(chained, 4), copies(star, 4)) == ((3, 1, 2), (3, 1, 3))


def test_alias_covers_the_larger_quota_of_a_donor_first():
    # Rank 1 lacks 4 and gets all of expert 1; rank 2 lacks 3 and gets them of expert 0.
    counts_ER = alias([5, 4, 2, 2, 2, 0, 0, 0, 3, 0, 0, 0], 3, [6, 6, 6])
    assert counts_ER is not None
    assert counts_ER[:2] == [[2, 0, 3], [0, 4, 0]]


@pytest.mark.parametrize(
    ("T_E", "R", "expected"),
    [
        ([1, 2, 6], 3, [[0, 1, 0], [0, 2, 0], [3, 0, 3]]),
        ([10, 14, 11, 1], 4, [[4, 0, 6, 0], [5, 9, 0, 0], [0, 0, 3, 8], [0, 0, 0, 1]]),
        ([0, 4, 5], 3, [[0, 0, 0], [3, 1, 0], [0, 2, 3]]),
    ],
    ids=["the largest deficit that fits first", "then the smallest surplus", "from the largest surplus on"],
)
def test_a_path_takes(T_E: list[int], R: int, expected: list[list[int]]):
    assert path(T_E, R, caps(sum(T_E), R)) == expected


@pytest.mark.parametrize(
    ("T_E", "R", "g", "expected"),
    [
        ([0, 6, 1, 5], 4, 2, [[0, 0, 0, 0], [0, 3, 2, 1], [0, 0, 1, 0], [3, 0, 0, 2]]),
        ([1, 0, 6, 1], 4, 2, [[0, 0, 0, 1], [0, 0, 0, 0], [2, 2, 2, 0], [0, 0, 0, 1]]),
        (
            [11, 12, 11, 1, 0],
            5,
            1,
            [[7, 1, 3, 0, 0], [0, 6, 0, 6, 0], [0, 0, 4, 0, 7], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0]],
        ),
        (
            [4, 5, 4, 3, 0, 0, 5, 0, 0],
            3,
            1,
            [[0, 4, 0], [5, 0, 0], [2, 0, 2], [0, 3, 0], [0, 0, 0], [0, 0, 0], [0, 0, 5], [0, 0, 0], [0, 0, 0]],
        ),
        ([0, 24, 2, 1, 0, 9], 3, 1, [[0, 0, 0], [12, 9, 3], [0, 2, 0], [0, 1, 0], [0, 0, 0], [0, 0, 9]]),
        (
            [24, 0, 0, 8, 0, 0, 3, 3, 2, 8, 0, 0],
            4,
            1,
            [[12, 8, 0, 4], Z, Z, [0, 4, 4, 0], Z, Z, [0, 0, 3, 0], [0, 0, 3, 0], [0, 0, 2, 0], [0, 0, 0, 8], Z, Z],
        ),
    ],
    ids=[
        "rounds the part of a copy up",
        "divides the surplus by the copies still to make",
        "fills the smallest deficit that takes the whole surplus when none fits",
        "is no longer than what one expert of its hot rank covers",
        "is no longer than what one expert of its head covers",
        "is no longer than what one expert of each later member covers",
    ],
)
def test_a_chain(T_E: list[int], R: int, g: int, expected: list[list[int]]):
    assert chain(T_E, R, caps(sum(T_E), R), g) == expected


def test_a_chain_ends_at_a_rank_that_has_made_its_copies():
    # Rank 1 gives 75 in 3 copies, 13 more than it has too many. Getting them back from rank 9 it could also pass on the
    # 4 that rank 4 lacks, but not for a 4th copy: rank 9 serves both.
    T_E = [0, 102, 0, 58, 58, 6, 0, 0, 39, 137]
    counts_ER = chain(T_E, 10, [40] * 10, g=2)
    assert counts_ER is not None
    assert counts_ER[1] == [0, 27, 40, 0, 0, 34, 0, 0, 1, 0]
    assert counts_ER[9] == [40, 13, 0, 0, 4, 0, 40, 0, 0, 40]


def test_a_candidate_that_cannot_cover_a_quota_does_not_apply():
    # Rank 1 is to compute 5, more than rank 0 has, so two donors would have to serve it.
    assert set(map(str, candidates_of([3, 0, 3], 3, [1, 4, 1]).values())) == {"None"}


@given(loads, tolerances, st.sampled_from([0, 1, 5, 2000]))
@settings(several, max_examples=250)
def test_with_a_tolerance_only_what_exceeds_a_limit_moves(load: Load, balance: Balance, room: int):
    T_E, R = load
    dims = dims_of(T_E, R, balance, room)
    limits_R, homes = limits(sum(T_E), dims), homes_of(T_E, R)
    plan = allocate(T_E, dims)
    rows = rows_of(plan.counts_ER)
    exact = plan.policy.startswith("exact-")
    assert violations(T_E, plan.counts_ER, caps(sum(T_E), R) if exact else rows) == []
    assert all(row <= limit <= dims.max_rows for row, limit in zip(rows, limits_R, strict=True))
    if not exact:
        assert all(row == limit for row, limit, home in zip(rows, limits_R, homes, strict=True) if home > limit)
        assert rows == targets_within(T_E, limits_R)


@given(loads, tolerances, st.sampled_from([0, 5, 2000]))
@several
def test_a_tolerance_never_costs_more_than_exactness_or_than_alias(load: Load, balance: Balance, room: int):
    T_E, R = load
    dims = dims_of(T_E, R, balance, room)
    star = alias(T_E, R, targets_within(T_E, limits(sum(T_E), dims)))
    assert star is not None, "alias always applies"
    exact = allocate(T_E, dims_of(T_E, R))
    cost = cost_of(allocate(T_E, dims).counts_ER, R)
    assert cost <= cost_of(star, R) and cost <= cost_of(exact.counts_ER, R)


@given(loads, tolerances, st.sampled_from([0, 5, 2000]))
@several
def test_limits_differ_by_at_most_one_and_leave_room_for_all(load: Load, balance: Balance, room: int):
    T_E, R = load
    limits_R = limits(sum(T_E), dims_of(T_E, R, balance, room))
    assert max(limits_R) - min(limits_R) <= 1
    assert all(limit >= share for limit, share in zip(limits_R, caps(sum(T_E), R), strict=True))


@given(loads)
@several
def test_auto_moves_nothing_that_fits(load: Load):
    T_E, R = load
    dims = dims_of(T_E, R, Balance.parse("auto"), room=10**6)
    plan = allocate(T_E, dims)
    if max(homes_of(T_E, R)) <= min(limits(sum(T_E), dims)):
        assert copies(plan.counts_ER, R) == (0, 0, 0)
        assert plan.policy == "path"


def test_the_larger_of_the_two_tolerances_counts():
    T_E = [1000, 1000, 1000, 1001]
    assert limits(4001, dims_of(T_E, 4, Balance(eps_ppm=50_000, slack=20), room=99)) == [1051, 1050, 1050, 1050]
    assert limits(4001, dims_of(T_E, 4, Balance(eps_ppm=10_000, slack=20), room=99)) == [1021, 1020, 1020, 1020]


def test_auto_leaves_a_decode_step_at_home():
    T_E = [37, 0, 0, 5, 1, 1, 0, 0]
    dims = Dims(S=128, K=2, E=8, R=4, H=8, B=2, balance=Balance.parse("auto"))
    assert rows_of(allocate(T_E, dims).counts_ER) == [37, 5, 2, 0]


def test_auto_moves_what_does_not_fit_the_receive_buffer():
    T_E = [300, 0, 0, 5, 1, 1, 0, 0]
    dims = Dims(S=128, K=2, E=8, R=4, H=8, B=2, balance=Balance.parse("auto"))
    assert limits(sum(T_E), dims) == [256] * 4
    assert rows_of(allocate(T_E, dims).counts_ER) == [256, 5, 2, 44]


@given(loads)
@several
def test_auto_is_exact_when_every_rank_brings_all_its_tokens(load: Load):
    T_E, R = load
    T_E[-1] += -sum(T_E) % R
    assert sum(T_E) % R == 0
    exact = allocate(T_E, dims_of(T_E, R))
    if sum(T_E):
        assert allocate(T_E, dims_of(T_E, R, Balance.parse("auto"))) == exact


def test_the_excess_goes_to_the_largest_room_and_then_to_the_lower_rank():
    # Limits 5, 5, 5, 5: rank 0 sheds 7; rooms 0, 3, 4, 4.
    assert targets_within([12, 2, 1, 1], [5] * 4) == [5, 2, 5, 4]


def test_the_exact_plan_wins_where_a_tolerance_needs_more_copies():
    # Limits 5, 5, 4, 4. Filling rank 0 to its limit takes both hot ranks; meeting the shares 4, 4, 3, 3 takes one each.
    T_E = [0, 0, 7, 7]
    dims = dims_of(T_E, 4, Balance(slack=1), room=2)
    assert targets_within(T_E, limits(14, dims)) == [5, 1, 4, 4]
    plan = allocate(T_E, dims)
    assert plan.policy == "exact-path"
    assert plan.counts_ER == [[0] * 4, [0] * 4, [4, 0, 3, 0], [0, 4, 0, 3]]


def test_a_load_that_these_dims_cannot_bring_is_our_own_bug():
    dims = dims_of([6, 1, 1, 0], R=2)
    for T_E in ([7, 1, 1, 0], [6, 1, 1], [6, 1, 1, -1]):
        with pytest.raises(AssertionError, match="does not come from these dims"):
            allocate(T_E, dims)


GOOD = [[3, 3], [1, 0], [0, 1], [0, 0]]


@pytest.mark.parametrize(
    ("broken", "T_E", "counts_ER", "targets"),
    [
        ([], [6, 1, 1, 0], GOOD, [4, 4]),
        (["I1"], [6, 1, 1, 0], [[3, 3], [1, 0], [0, 0], [0, 1]], [4, 4]),
        (["I1"], [6, 1, 1, 0], [[3, 3], [1, 0], [-1, 2], [1, -1]], [4, 4]),
        (["I1", "I2"], [6, 1, 1, 0], [[3, 3], [1, 0], [0, 0], [0, 0]], [4, 4]),
        (["I2"], [6, 1, 1, 0], [[4, 2], [1, 0], [0, 1], [0, 0]], [4, 4]),
        (["I3"], [4, 0, 4, 0, 0, 0], [[3, 0, 1], [0, 0, 0], [0, 3, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]], [3, 3, 2]),
        (["I3", "I4"], [4, 4, 0], [[3, 0, 1], [0, 3, 1], [0, 0, 0]], [3, 3, 2]),
    ],
    ids=["none", "conservation", "a negative count", "a lost assignment", "balance", "two homes", "a slot too many"],
)
def test_a_broken_invariant_is_named(broken, T_E, counts_ER, targets):
    assert violations(T_E, counts_ER, targets) == broken


def test_a_uniformly_hot_rank_has_no_plan_with_few_copies():
    # What docs/algorithm.md says: 192 equally hot experts, 1.5 times the mean load on their rank.
    dims = Dims(S=38_400, K=1, E=384, R=2, H=8, B=192)
    assert copies(allocate([300] * 192 + [100] * 192, dims).counts_ER, 2) == (64, 64, 64)
