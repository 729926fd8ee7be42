"""Plans: the vectorised planner equals the reference, plans keep their invariants, and each broken one is named.

No processes: `planner.rows` is called for every source rank in turn, as the ranks would.
"""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moonep import reference
from moonep.dims import Balance, Dims
from moonep.plan import ARRIVAL_ROW, ARRIVAL_SHIFT, INT32_MIN, NO_ARRIVAL, Plan, check_plan, decode_dst
from moonep.planner import policy, rows
from moonep.testing.asserts import assert_equal

several = settings(max_examples=150, deadline=None)
BALANCES = ("exact", 0.1, 0.5, "auto")


@st.composite
def routings(draw: Any, max_R: int = 8) -> tuple[list[Tensor], Dims]:
    """Router outputs of all ranks: ragged, some masked, ids that repeat, from balanced to one expert only."""
    R = draw(st.integers(1, max_R))
    L, K, S, P = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.integers(1, 5))
    B = draw(st.integers(0, L + 1))
    d = Dims(S=S, K=K, E=R * L, R=R, H=8, B=B, P=P, balance=Balance.parse(draw(st.sampled_from(BALANCES))))
    liked = draw(st.lists(st.integers(-1, d.E - 1), min_size=1, max_size=6))
    pick = st.sampled_from(liked) if draw(st.booleans()) else st.integers(-1, d.E - 1)
    topk = []
    for _ in range(R):
        s = draw(st.integers(0, S))
        ids = draw(st.lists(pick, min_size=s * K, max_size=s * K))
        topk.append(torch.tensor(ids, dtype=torch.int32).view(s, K))
    return topk, d


def plan_vectorised(topk_sK: list[Tensor], d: Dims) -> list[Plan]:
    """What all ranks together compute with `planner.rows`."""
    load_RE = torch.stack([rows.count_load(topk, d) for topk in topk_sK])
    counts_ER = policy.allocate(load_RE.sum(0).tolist(), d).counts_ER
    alloc_ER = torch.tensor(counts_ER, dtype=torch.int32).view(d.E, d.R)
    groups = rows.lay_groups(alloc_ER, d)
    arrivals = []
    dst = []
    for source, topk in enumerate(topk_sK):
        pieces = rows.split_sources(load_RE, alloc_ER, groups.base_ER, source, d)
        dst.append(rows.assign_rows(topk, *pieces, d))
        rank_sK, row_sK, _ = decode_dst(dst[-1], d)
        arrivals.append(rows.mirror(rank_sK, row_sK, d))
    return [
        Plan.of(
            d,
            r,
            0,
            load=load_RE,
            alloc=alloc_ER,
            experts_to_copy=groups.experts_to_copy_RB,
            cu_seqlens=groups.ends_RG[r],
            zero_fill_ranges=groups.fill_RG2[r],
            remote_stats=torch.zeros(2, dtype=torch.int32),
            dst=dst[r],
            sends=rows.primaries(dst[r], d),
            tokens=torch.tensor([len(topk) for topk in topk_sK], dtype=torch.int32),
            arrivals=torch.stack([of_source[r] for of_source in arrivals]),
        )
        for r in range(d.R)
    ]


@given(routings())
@several
def test_vectorised_plans_equal_the_reference(routing):
    topk, d = routing
    for got, want in zip(plan_vectorised(topk, d), reference.make_plans(topk, d), strict=True):
        for field in (
            "load",
            "alloc",
            "experts_to_copy",
            "cu_seqlens",
            "zero_fill_ranges",
            "dst",
            "sends",
            "tokens",
            "arrivals",
        ):
            assert_equal(f"rank {want.rank}: {field}", getattr(got, field), getattr(want, field))


@given(routings())
@several
def test_plans_keep_every_invariant(routing):
    topk, d = routing
    plans = reference.make_plans(topk, d)
    assert check_plan(plans) == []
    for plan in plans:
        assert check_plan(plan) == []


@st.composite
def allocations(draw: Any) -> tuple[Tensor, list[list[int]], Dims]:
    """Any load and any allocation of it, however scattered: more than policies come up with."""
    R, L, P = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    load = [[draw(st.integers(0, 4)) for _ in range(R * L)] for _ in range(R)]
    alloc = []
    for e in range(R * L):
        total = sum(row[e] for row in load)
        cuts = sorted(draw(st.lists(st.integers(0, total), min_size=R - 1, max_size=R - 1)))
        alloc.append([b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)])
    S = max(1, sum(map(sum, load))) + P * R * L  # so that everything fits on one rank
    d = Dims(S=S, K=1, E=R * L, R=R, H=8, B=draw(st.integers(0, R * L)), P=P)
    return torch.tensor(load, dtype=torch.int32), alloc, d


@given(allocations())
@several
def test_groups_of_any_allocation_equal_the_reference(allocation):
    _, alloc, d = allocation
    got = rows.lay_groups(torch.tensor(alloc, dtype=torch.int32), d)
    for r in range(d.R):
        slots = reference.choose_slots(alloc, r, d)
        groups = reference.lay_groups(alloc, slots, r, d)
        assert got.experts_to_copy_RB[r].tolist() == slots
        assert got.ends_RG[r].tolist() == [group.end for group in groups]
        assert got.fill_RG2[r].tolist() == [list(group.padding) for group in groups]
        for group in groups:
            if group.size:
                assert got.base_ER[group.expert, r] == group.begin


@given(allocations())
@several
def test_pieces_of_any_allocation_equal_the_reference(allocation):
    load, alloc, d = allocation
    for source in range(d.R):
        first_ER, _ = rows.split_sources(load, torch.tensor(alloc), torch.zeros(d.E, d.R, dtype=torch.long), source, d)
        for e in range(d.E):
            pieces = dict(reference.split_sources(load, alloc, e, d)[source])
            counts = [pieces.get(r, 0) for r in range(d.R)]
            assert first_ER[e].tolist() == [sum(counts[:r]) for r in range(d.R)]
            assert sum(counts) == load[source, e]
            assert counts[source] >= min(load[source, e], alloc[e][source]), "local first"


@given(allocations(), st.randoms(use_true_random=False))
@several
def test_rows_of_any_allocation_equal_the_reference(allocation, random):
    load, alloc, d = allocation
    topk = []
    for source in range(d.R):
        ids = [e for e in range(d.E) for _ in range(int(load[source, e]))] + [-1] * random.randrange(3)
        random.shuffle(ids)
        topk.append(torch.tensor(ids, dtype=torch.int32).view(-1, 1))
    slots = [reference.choose_slots(alloc, r, d) for r in range(d.R)]
    groups = [reference.lay_groups(alloc, slots[r], r, d) for r in range(d.R)]
    want = reference.assign_rows(topk, load, alloc, groups, d)
    alloc_ER = torch.tensor(alloc, dtype=torch.int32)
    base_ER = rows.lay_groups(alloc_ER, d).base_ER
    for source in range(d.R):
        got = rows.assign_rows(topk[source], *rows.split_sources(load, alloc_ER, base_ER, source, d), d)
        assert_equal(f"source {source}: dst", got, want[source])


@given(st.lists(st.integers(-1, 5), max_size=30))
@several
def test_stable_rank_counts_equal_elements_before(ids):
    got = rows.stable_rank(torch.tensor(ids, dtype=torch.long)).tolist()
    assert got == [ids[:i].count(e) for i, e in enumerate(ids)]


def test_the_example_in_the_reference_is_true():
    outcome = doctest.testmod(reference)
    assert outcome.attempted > 0 and outcome.failed == 0


@pytest.fixture
def example() -> list[Plan]:
    """The worked example of the planner."""
    topk = [torch.tensor([[0], [0], [0], [0]]), torch.tensor([[0], [1], [0], [2]])]
    return reference.make_plans(topk, Dims(S=4, K=1, E=4, R=2, H=8, B=2, P=2))


def test_the_worked_example_keeps_local_assignments_and_sends_one(example):
    first, second = example
    assert first.load.tolist() == [[4, 0, 0, 0], [2, 1, 1, 0]]
    assert first.alloc.tolist() == [[3, 3], [1, 0], [0, 1], [0, 0]]
    assert first.experts_to_copy.tolist() == [[-1, -1], [0, -1]]
    assert (first.cu_seqlens.tolist(), second.cu_seqlens.tolist()) == ([4, 6, 6, 6, 6, 6], [0, 0, 2, 2, 6, 6])
    assert first.zero_fill_ranges.tolist() == [[3, 1], [5, 1], [0, 0], [0, 0], [0, 0], [0, 0]]
    assert second.zero_fill_ranges.tolist() == [[0, 0], [0, 0], [1, 1], [0, 0], [5, 1], [0, 0]]
    assert (first.remote_stats.tolist(), second.remote_stats.tolist()) == ([0, 1], [1, 0])
    # Rank 0 keeps three and sends its last one to the slot's first row; rank 1's two come after it, in source order.
    rank, row, primary = first.destinations()
    assert (rank.flatten().tolist(), row.flatten().tolist()) == ([0, 0, 0, 1], [0, 1, 2, 2])
    rank, row, _ = second.destinations()
    assert (rank.flatten().tolist(), row.flatten().tolist()) == ([1, 0, 1, 1], [3, 4, 4, 0])
    assert primary.all()


def test_compact_offsets_are_those_of_own_experts_then_slots(example):
    assert example[0].compact_cu_seqlens.tolist() == [4, 6, 6, 6]
    assert example[1].compact_cu_seqlens.tolist() == [2, 2, 6, 6]


def test_compact_offsets_are_refused_when_an_expert_may_have_no_slot():
    topk = [torch.zeros(4, 1, dtype=torch.int32)] * 2
    plan = reference.make_plans(topk, Dims(S=4, K=1, E=4, R=2, H=8, B=1, P=2))[1]
    with pytest.raises(ValueError, match="compact_cu_seqlens: given B = 1, expected B >= 2"):
        _ = plan.compact_cu_seqlens


@given(routings())
@several
def test_compact_offsets_end_where_the_full_ones_do(routing):
    topk, d = routing
    for plan in reference.make_plans(topk, d):
        if not d.spills:
            compact = plan.compact_cu_seqlens
            assert compact.shape == (d.L + d.B,) and compact.dtype == torch.int32
            used = plan.cu_seqlens[-1] if d.B else plan.cu_seqlens[(plan.rank + 1) * d.L - 1]
            assert compact[-1] == used == plan.cu_seqlens[-1]
            assert plan.cu_seqlens[: plan.rank * d.L].sum() == 0, "nothing lies before the own experts"


def test_decode_dst_tells_primaries_duplicates_and_masked_apart():
    d = Dims(S=2, K=3, E=2, R=2, H=8, B=1, P=1)
    dst = torch.tensor([d.C + 4, -(d.C + 2) - 1, INT32_MIN, 0, -1, d.C], dtype=torch.int32)
    rank, row, primary = decode_dst(dst, d)
    assert rank.tolist() == [[1, 1, -1], [0, 0, 1]]
    assert row.tolist() == [[4, 2, 0], [0, 0, 0]]
    assert primary.tolist() == [[True, False, False], [True, False, True]]


@given(routings())
@several
def test_arrivals_name_every_real_row_once_and_a_place_in_staging_of_its_own(routing):
    topk, d = routing
    plans = reference.make_plans(topk, d)
    replies: list[tuple[int, int, int]] = []
    for plan in plans:
        source, token, _ = (plan.arrivals >= 0).nonzero(as_tuple=True)
        arrivals = plan.arrivals[plan.arrivals >= 0]
        rows_here = (arrivals & ARRIVAL_ROW).tolist()
        assert len(rows_here) == len(set(rows_here)) == int(plan.alloc[:, plan.rank].sum())
        replies += set(zip(source.tolist(), token.tolist(), (arrivals >> ARRIVAL_SHIFT).tolist(), strict=True))
    assert len(replies) == len(set(replies))
    assert all(ordinal < d.W for *_, ordinal in replies)


def test_a_clone_is_equal_and_independent(example):
    plan = example[1]
    names = list(plan.views)
    clone = plan.clone()
    assert (clone.key, clone.owner, clone.rank, clone.dims) == (plan.key, plan.owner, plan.rank, plan.dims)
    before = {name: getattr(plan, name).clone() for name in names}
    for name in names:
        assert_equal(name, getattr(clone, name), before[name])
        getattr(clone, name).fill_(77)
        assert_equal(name, getattr(plan, name), before[name])
    assert len(names) == 10


def test_plans_of_different_calls_have_different_keys(example):
    assert len({plan.key for plan in example}) == 2


@given(routings())
@several
def test_statistics_equal_a_count_by_hand(routing):
    topk, d = routing
    plans = reference.make_plans(topk, d)
    chosen = [(source, t, e) for source, ids in enumerate(topk) for t, row in enumerate(ids.tolist()) for e in row]
    chosen = [(source, t, e) for source, t, e in chosen if e >= 0]
    T_E = [sum(e == f for *_, e in chosen) for f in range(d.E)]
    before = [sum(T_E[r * d.L : (r + 1) * d.L]) for r in range(d.R)]
    places = [plan.destinations()[0].tolist() for plan in plans]
    after = [sum(row.count(r) for rows in places for row in rows) for r in range(d.R)]
    computed = [{e for e in range(d.E) if plans[0].alloc[e, r] > 0} for r in range(d.R)]
    slots = [[e for e in row if e >= 0] for row in plans[0].experts_to_copy.tolist()]
    for r, plan in enumerate(plans):
        stats = plan.stats().host()
        assert stats["rows_before"] == before
        assert stats["rows_after"] == after
        assert stats["maxvio"] == pytest.approx(max(T_E) * d.E / sum(T_E) - 1 if chosen else 0.0, abs=1e-6)
        assert stats["imbalance_before"] == pytest.approx(max(before) * d.R / sum(before) if chosen else 1.0, abs=1e-6)
        assert stats["imbalance_after"] == pytest.approx(max(after) * d.R / sum(after) if chosen else 1.0, abs=1e-6)
        assert stats["redundant_experts"] == [sum(e // d.L != q for e in computed[q]) for q in range(d.R)]
        assert stats["copies_in"] == [len(row) for row in slots]
        assert stats["copies_out"] == [sum(e // d.L == q for row in slots for e in row) for q in range(d.R)]
        assert stats["rows_crossing"] == sum(
            q not in (-1, source) for source, rows in enumerate(places) for row in rows for q in row
        )
        assert stats["transfers_sent"] == sum(len(set(row) - {-1, r}) for row in places[r])
        assert plan.remote_stats.tolist() == [stats["redundant_experts"][r], stats["copies_out"][r]]


def test_statistics_are_tensors_until_the_host_asks(example):
    assert all(isinstance(value, Tensor) for value in vars(example[0].stats()).values())


def skewed_plans() -> list[Plan]:
    """Four ranks, all alike: most tokens choose two experts of rank 0, the others what is left."""
    topk = torch.tensor([[0, 1], [1, 0], [0, 0], [0, 3], [1, 6], [0, 9]], dtype=torch.int32)
    return reference.make_plans([topk] * 4, Dims(S=6, K=2, E=12, R=4, H=8, B=3, P=8))


def changed(plans: list[Plan], field: str, change: Callable[[Tensor], Any], ranks: Any = range(4)) -> list[Plan]:
    """The plans, with one field changed in place on the given ranks."""
    result = []
    for plan in plans:
        tensor = getattr(plan, field).clone()
        if plan.rank in ranks:
            change(tensor)
        result.append(plan.changed(**{field: tensor}))
    return result


def mirrored(plans: list[Plan]) -> list[Plan]:
    """With the sends and arrivals that belong to the changed `dst`."""
    arrivals = reference.mirror([plan.dst for plan in plans], plans[0].dims)
    sends = [reference.primaries(plan.dst, plan.dims) for plan in plans]
    return [plan.changed(sends=s, arrivals=a) for plan, s, a in zip(plans, sends, arrivals, strict=True)]


def replanned(plans: list[Plan], alloc: list[list[int]], topk: list[Tensor]) -> list[Plan]:
    """Right plans of another allocation."""
    d = plans[0].dims
    slots = [reference.choose_slots(alloc, r, d) for r in range(d.R)]
    groups = [reference.lay_groups(alloc, slots[r], r, d) for r in range(d.R)]
    dst = reference.assign_rows(topk, reference.count_load(topk, d), alloc, groups, d)
    return mirrored(
        [
            plan.changed(
                load=reference.count_load(topk, d),
                alloc=torch.tensor(alloc, dtype=torch.int32),
                experts_to_copy=torch.tensor(slots, dtype=torch.int32),
                cu_seqlens=torch.tensor([g.end for g in groups[r]], dtype=torch.int32),
                zero_fill_ranges=torch.tensor([g.padding for g in groups[r]], dtype=torch.int32),
                dst=dst[r],
            )
            for r, plan in enumerate(plans)
        ]
    )


def allocated(T_E: list[int], alloc: list[list[int]], L: int, B: int, balance: str | float = "exact") -> list[Plan]:
    """Plans of a given allocation, K = 1, in which all else is right."""
    R = len(alloc[0])
    d = Dims(S=8, K=1, E=R * L, R=R, H=8, B=B, P=1, balance=Balance.parse(balance))
    ids = [e for e, T in enumerate(T_E) for _ in range(T)]
    topk = [torch.tensor(ids[r::R], dtype=torch.int32).view(-1, 1) for r in range(R)]
    return replanned(reference.make_plans(topk, d), alloc, topk)


def swap(tensor: Tensor, i: int, j: int) -> None:
    tensor[[i, j]] = tensor[[j, i]]


def first_padding(plan: Plan) -> int:
    return next(first for first, count in plan.zero_fill_ranges.tolist() if count)


def same_group(plan: Plan) -> tuple[int, int]:
    """Two assignments of a source, of different tokens, in one group of one rank."""
    rank, row, _ = (t.flatten().tolist() for t in plan.destinations())
    ends = plan.cu_seqlens.tolist()
    group = [sum(end <= r for end in ends) if q == plan.rank else None for q, r in zip(rank, row, strict=True)]
    single = [i for i, q in enumerate(rank) if rank[i ^ 1] != q]  # K = 2: the token's only one there
    return next((i, j) for i in single for j in single if i < j and group[i] is not None and group[i] == group[j])


def break_conservation(plans: list[Plan]) -> list[Plan]:
    return changed(plans, "load", lambda t: t[3].add_(torch.eye(12, dtype=torch.int32)[11]))


def break_balance(plans: list[Plan]) -> list[Plan]:
    return allocated([3, 0, 0, 1], [[3, 0], [0, 0], [0, 0], [0, 1]], L=2, B=2)


def break_one_home(plans: list[Plan]) -> list[Plan]:
    alloc = [[2, 0, 1], [0, 0, 0], [0, 2, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    return allocated([3, 0, 3, 0, 0, 0], alloc, L=2, B=2)


def break_slots(plans: list[Plan]) -> list[Plan]:
    """A slot holds another expert than the one that has rows."""
    return changed(plans, "experts_to_copy", lambda t: t[1].copy_(torch.tensor([2, -1, -1])), ranks=[0])


def break_number_of_redundant_experts(plans: list[Plan]) -> list[Plan]:
    # One home expert a rank, and rank 2 computes two foreign ones.
    return allocated([3, 3, 0], [[2, 0, 1], [0, 2, 1], [0, 0, 0]], L=1, B=1)


def break_capacity(plans: list[Plan]) -> list[Plan]:
    d = plans[0].dims
    return changed(plans, "cu_seqlens", lambda t: t[-1].fill_(d.C + d.P), ranks=[2])


def break_bijection_by_a_shared_row(plans: list[Plan]) -> list[Plan]:
    i, j = same_group(plans[0])
    return mirrored(changed(plans, "dst", lambda t: t[i].copy_(t[j]), ranks=[0]))


def break_bijection_by_a_lost_assignment(plans: list[Plan]) -> list[Plan]:
    return mirrored(changed(plans, "dst", lambda t: t[0].fill_(INT32_MIN), ranks=[1]))


def break_bijection_by_a_padding_row(plans: list[Plan]) -> list[Plan]:
    i, _ = same_group(plans[0])
    return mirrored(changed(plans, "dst", lambda t: t[i].fill_(first_padding(plans[0])), ranks=[0]))


def break_order(plans: list[Plan]) -> list[Plan]:
    i, j = same_group(plans[0])
    return mirrored(changed(plans, "dst", lambda t: swap(t, i, j), ranks=[0]))


def break_groups_by_falling_offsets(plans: list[Plan]) -> list[Plan]:
    return changed(plans, "cu_seqlens", lambda t: t[6].sub_(4), ranks=[0])


def break_groups_by_a_size_that_is_no_multiple(plans: list[Plan]) -> list[Plan]:
    return changed(plans, "cu_seqlens", lambda t: t[-1].add_(1), ranks=[0])


def break_groups_by_rows_of_an_empty_group(plans: list[Plan]) -> list[Plan]:
    return changed(plans, "cu_seqlens", lambda t: t[-1].add_(4), ranks=[0])


def break_groups_by_forgotten_padding(plans: list[Plan]) -> list[Plan]:
    return changed(plans, "zero_fill_ranges", lambda t: t.zero_(), ranks=[3])


def break_sends_by_a_forgotten_one(plans: list[Plan]) -> list[Plan]:
    return changed(plans, "sends", lambda t: t[0].fill_(-1), ranks=[3])


def first_arrival(arrivals: Tensor) -> tuple[int, ...]:
    return tuple((arrivals >= 0).nonzero()[0].tolist())


def break_arrivals_by_a_missing_one(plans: list[Plan]) -> list[Plan]:
    return changed(plans, "arrivals", lambda t: t.__setitem__(first_arrival(t), NO_ARRIVAL), ranks=[0])


def break_arrivals_by_a_wrong_ordinal(plans: list[Plan]) -> list[Plan]:
    def reply_elsewhere(arrivals: Tensor) -> None:
        arrivals[first_arrival(arrivals)] ^= 1 << ARRIVAL_SHIFT

    return changed(plans, "arrivals", reply_elsewhere, ranks=[2])


def break_arrivals_by_a_token_that_is_not_there(plans: list[Plan]) -> list[Plan]:
    return changed(plans, "tokens", lambda t: t.sub_(1), ranks=[0])


def break_primaries(plans: list[Plan]) -> list[Plan]:
    """A token's first assignment on a rank is called a duplicate."""
    return changed(plans, "dst", lambda t: t[0].copy_(-t[0] - 1), ranks=[0])


BREAKS: list[tuple[list[str], Callable[[list[Plan]], list[Plan]]]] = [
    (["I1", "I2", "I6"], break_conservation),
    (["I2"], break_balance),
    (["I3"], break_one_home),
    (["I4"], break_slots),
    (["I3", "I4"], break_number_of_redundant_experts),
    (["I5", "I8"], break_capacity),
    (["I6"], break_bijection_by_a_shared_row),
    (["I6"], break_bijection_by_a_lost_assignment),
    (["I6", "I7"], break_bijection_by_a_padding_row),
    (["I7"], break_order),
    (["I8"], break_groups_by_falling_offsets),
    (["I8"], break_groups_by_a_size_that_is_no_multiple),
    (["I8"], break_groups_by_rows_of_an_empty_group),
    (["I8"], break_groups_by_forgotten_padding),
    (["I9"], break_sends_by_a_forgotten_one),
    (["I9"], break_arrivals_by_a_missing_one),
    (["I9"], break_arrivals_by_a_wrong_ordinal),
    (["I9"], break_arrivals_by_a_token_that_is_not_there),
    (["I9"], break_primaries),
]


@pytest.mark.parametrize(("names", "breaks"), BREAKS, ids=[breaks.__name__ for _, breaks in BREAKS])
def test_a_broken_invariant_is_named(names, breaks):
    plans = skewed_plans()
    assert check_plan(plans) == []
    assert check_plan(breaks(plans)) == names


def test_every_invariant_is_broken_once():
    assert {name for names, _ in BREAKS for name in names} == {f"I{i}" for i in range(1, 10)}


@pytest.mark.parametrize(
    ("rows_of_ranks", "names"),
    [([4, 4], []), ([6, 2], []), ([5, 3], ["I2"]), ([7, 1], ["I2"]), ([8, 0], ["I2"]), ([2, 6], ["I2"])],
    ids=str,
)
def test_with_a_tolerance_ranks_meet_their_share_or_exactly_their_limit(rows_of_ranks, names):
    plans = allocated([8, 0], [rows_of_ranks, [0, 0]], L=1, B=1, balance=0.5)  # shares 4, 4; limits 6, 6
    assert check_plan(plans) == names


def test_the_plan_of_one_rank_is_checked_alone():
    assert check_plan(break_groups_by_forgotten_padding(skewed_plans())[3]) == ["I8"]
    assert check_plan(break_primaries(skewed_plans())[0]) == ["I9"]
    assert check_plan(break_slots(skewed_plans())[0]) == ["I4"]


def test_rows_outside_of_all_buffers_are_named_and_not_an_error_of_the_check():
    d = skewed_plans()[0].dims
    assert "I6" in check_plan(changed(skewed_plans(), "dst", lambda t: t[0].fill_(d.R * d.C + 3), ranks=[0]))
