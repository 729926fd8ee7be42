"""Groups, slots, pieces and statistics by the kernel are those of its twins, bit for bit; it compiles without a GPU.

Solutions are drawn at random, not found by a policy: more ways to have too few slots than any policy comes up with. The
kernel runs in Triton's interpreter, in processes of its own; with a GPU, `-m gpu` runs it there, on larger solutions.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from test_kernel_solve import patch_once_a_launch, stack_bytes

from moonep import reference
from moonep.dims import Balance, Dims
from moonep.kernels import rows as kernels
from moonep.kernels.solve import NOT_APPLICABLE, Solution, read_allocation
from moonep.plan import Plan, PlanLayout
from moonep.planner import rows
from moonep.testing.asserts import assert_equal
from moonep.testing.launches import negated_in_minima_of_three, record_launches
from moonep.testing.ranks import PerRank, Ranks

POISON = 7_777  # would be a redundant expert's rows
Found = tuple[Plan, kernels.Tables]


def solution_of(left: list[int], given: list[list[int]], donor: list[int], d: Dims, winner: int = 0) -> Solution:
    """A solve whose winner found this. All else that it has written is poison, and other candidates cost as much."""
    solution = Solution.empty(d, "cpu")
    for tensor in vars(solution).values():
        tensor.fill_(POISON)
    solution.left[winner] = torch.tensor(left)
    solution.donor[winner] = torch.tensor(donor)
    for r in range(d.R):
        if donor[r] >= 0:
            solution.given[winner, r] = torch.tensor(given[r])
    solution.cost[:winner] = NOT_APPLICABLE.value
    solution.cost[winner:] = 1
    return solution


def split_over_sources(T_E: list[int], R: int, rng: random.Random) -> Tensor:
    """[R, E] that adds up to T_E."""
    load = torch.zeros(R, len(T_E), dtype=torch.int32)
    for e, T in enumerate(T_E):
        cuts = sorted(rng.randint(0, T) for _ in range(R - 1))
        load[:, e] = torch.tensor([b - a for a, b in zip([0, *cuts], [*cuts, T], strict=True)])
    return load


def lay(load_RE: Tensor, solution: Solution, rank: int, d: Dims, device: str, status: int = 0) -> Found:
    """Into poisoned memory, whose surroundings must stay poisoned."""
    layout = PlanLayout(d)
    plan = Plan(layout, rank, 0, layout.empty(d.S, torch.device(device)).fill_(POISON))
    tables = kernels.Tables.make(d, torch.device(device))
    tables.first.fill_(POISON), tables.row.fill_(POISON)
    on_device = Solution(*(t.to(device) for t in vars(solution).values()))
    tokens = torch.arange(d.R, dtype=torch.int32, device=device)
    word = torch.tensor([status], dtype=torch.int32, device=device)
    kernels.lay_rows(load_RE.to(device), tokens, on_device, word, tables, rank, d).run(plan.views)
    host = Plan(layout, rank, 0, plan.packed.cpu())
    rest = Plan(layout, rank, 0, host.packed.clone())
    for name in ("load", "alloc", "experts_to_copy", "cu_seqlens", "zero_fill_ranges", "remote_stats", "tokens"):
        getattr(rest, name).fill_(POISON)
    assert (rest.packed == POISON).all(), "written outside"
    return host, kernels.Tables(tables.first.cpu(), tables.row.cpu(), tables.blocks)


def check(load_RE: Tensor, solution: Solution, winner: int, ranks: range, d: Dims, device: str) -> list[Found]:
    """On each of the ranks all is as `planner.rows` and `reference` say."""
    alloc = read_allocation(winner, solution, d)
    assert alloc is not None and torch.equal(alloc.sum(1).int(), load_RE.sum(0).int())
    groups = rows.lay_groups(alloc, d)
    found = []
    for rank in ranks:
        plan, tables = lay(load_RE, solution, rank, d, device)
        first, row = rows.split_sources(load_RE, alloc, groups.base_ER, rank, d)
        stats = reference.count_redundant(alloc.tolist(), groups.experts_to_copy_RB.tolist(), rank, d)
        used = alloc > 0
        for name, got, want in (
            ("load", plan.load, load_RE),
            ("tokens", plan.tokens, torch.arange(d.R)),
            ("alloc", plan.alloc, alloc),
            ("experts_to_copy", plan.experts_to_copy, groups.experts_to_copy_RB),
            ("cu_seqlens", plan.cu_seqlens, groups.ends_RG[rank]),
            ("zero_fill_ranges", plan.zero_fill_ranges, groups.fill_RG2[rank]),
            ("remote_stats", plan.remote_stats, torch.tensor(stats)),
            ("first", tables.first, first),
            ("row", tables.row[used], row[used]),
        ):
            assert_equal(f"rank {rank} of {d}: {name}", got, want.to(torch.int32))
        found.append((plan, tables))
    return found


def check_random(seeds: list[int], sizes: list[tuple[int, int]], device: str = "cpu") -> Counter[str]:
    """Random solutions on random ranks. Returns how often slots were scarce in which way."""
    met: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        R, L = sizes[seed % len(sizes)]
        B = rng.choice([0, 1, 2, L // 2, L - 1, L, L + 1])
        balance = rng.choice([Balance(), Balance(10_000)])
        d = Dims(S=3, K=1, E=R * L, R=R, H=8, B=B, P=rng.choice([1, 4, 7]), balance=balance)
        most = rng.choice([1, 3, 50])
        winner = rng.randrange(4 if balance.exact else 8)
        left = [rng.randint(0, most) for _ in range(d.E)]
        donor = [rng.choice([-1, *[h for h in range(R) if h != r] * 2]) for r in range(R)]
        scarce = [rng.choice([0.2, 0.5, 1.0]) for _ in range(R)]
        given = [[rng.randint(1, most) * (rng.random() < scarce[r]) for _ in range(L)] for r in range(R)]
        T_E = left.copy()
        for r in range(R):
            for l in range(L if donor[r] >= 0 else 0):
                T_E[donor[r] * L + l] += given[r][l]
        ranks = sorted(rng.sample(range(R), min(R, 2)))
        solution = solution_of(left, given, donor, d, winner)
        check(split_over_sources(T_E, R, rng), solution, winner, ranks, d, device)
        excess = [sum(map(bool, given[r])) - B for r in range(R) if donor[r] >= 0]
        met["some"] += min(excess, default=0) <= 0 < max(excess, default=0)
        met["both ways"] += any(0 < n <= B for n in excess) and any(0 < B < n for n in excess)
        met["none"] += max(excess, default=0) <= 0
    return met


@pytest.fixture(scope="module")
def interpreters() -> Iterator[Ranks]:
    with Ranks(2, env={"TRITON_INTERPRET": "1"}, start_method="spawn", timeout_s=280) as ranks:
        ranks.run(patch_once_a_launch)
        yield ranks


def test_any_solution_is_laid_as_its_twins_do(interpreters):
    sizes = [(4, 7), (2, 5), (3, 3), (5, 6), (2, 9), (1, 4), (3, 1), (8, 5)]
    met = sum(interpreters.run(check_random, PerRank([list(range(40)), list(range(40, 80))]), sizes), Counter())
    assert min(met["some"], met["both ways"], met["none"]) > 5, met


def lay_with_scarce_slots() -> list[list[Any]]:
    """One rank with a few experts too many, one with more too many than slots, one with enough slots, one without."""
    d = Dims(S=8, K=1, E=24, R=4, H=8, B=2, P=4)
    given = [[0] * 6, [5, 5, 5, 0, 0, 0], [1, 4, 4, 2, 4, 4], [0, 0, 3, 0, 0, 0]]
    T_E = [6, 9, 9, 2, 4, 4, *[0] * 6, 0, 0, 3, *[0] * 3, *[0] * 6]
    solution = solution_of([0] * 24, given, [-1, 0, 0, 2], d)
    found = check(split_over_sources(T_E, 4, random.Random(0)), solution, 0, range(4), d, "cpu")
    return [
        [plan.experts_to_copy.tolist(), plan.remote_stats.tolist(), plan.cu_seqlens[-1].item()] for plan, _ in found
    ]


def test_where_slots_are_scarce_on_some_ranks_the_largest_get_them_and_ties_go_to_the_lower_id(interpreters):
    found = interpreters.run(lay_with_scarce_slots)[0]
    assert [slots for slots, *_ in found] == [[[-1, -1], [0, 1], [1, 2], [14, -1]]] * 4
    assert [stats for _, stats, _ in found] == [[0, 4], [3, 0], [6, 1], [1, 0]]
    assert [end for *_, end in found] == [0, 24, 24, 4]


def worked_example() -> list[Any]:
    d = Dims(S=4, K=1, E=4, R=2, H=8, B=2, P=1)
    load = torch.tensor([[4, 0, 0, 0], [2, 1, 1, 0]], dtype=torch.int32)
    solution = solution_of([3, 1, 1, 0], [[0, 0], [3, 0]], [-1, 0], d)
    (_, tables), (plan, _) = check(load, solution, 0, range(2), d, "cpu")
    plans = [plan.alloc, plan.experts_to_copy, plan.cu_seqlens, plan.remote_stats]
    return [t.tolist() for t in (*plans, tables.first[0], tables.row[0])]


def test_the_example_of_the_docstring_is_what_the_kernel_writes(interpreters):
    alloc, slots, ends, stats, first, row = interpreters.run(worked_example)[0]
    assert alloc == [[3, 3], [1, 0], [0, 1], [0, 0]] and slots == [[-1, -1], [0, -1]]
    assert ends == [0, 0, 1, 1, 4, 4] and stats == [1, 0]
    assert first == [0, 3] and row == [0, -2]


def lay_after_a_failure() -> tuple[bool, bool]:
    d = Dims(S=4, K=1, E=6, R=2, H=8, B=2, P=4)
    solution = solution_of([1] * 6, [[0] * 3] * 2, [-1, -1], d)
    for tensor in vars(solution).values():
        tensor.fill_(-(2**31))  # the solve has written nothing
    plan, tables = lay(torch.ones(2, 6, dtype=torch.int32), solution, 1, d, "cpu", status=5)
    empty = bool((plan.cu_seqlens == 0).all() and (plan.zero_fill_ranges == 0).all())
    others = (plan.load, plan.alloc, plan.experts_to_copy, plan.remote_stats, plan.tokens, tables.first, tables.row)
    return empty, all(bool((t == POISON).all()) for t in others)


def test_after_a_failure_groups_are_empty_and_nothing_else_is_written(interpreters):
    assert interpreters.run(lay_after_a_failure)[0] == (True, True)


FEW = [(1, 384), (2, 384), (8, 384), (64, 384), (128, 1024), (2, 2048)]
COMPILED = [*((R, E, 4, 90) for R, E in FEW), (2, 384, 192, 90), (8, 384, 48, 90), (8, 384, 4, 80), (8, 384, 4, 100)]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted in this process")
@pytest.mark.parametrize(("R", "E", "B", "arch"), COMPILED)
def test_it_compiles_without_spilling_registers(R, E, B, arch, tmp_path):
    d = Dims(S=64, K=8, E=E, R=R, H=8, B=B)
    layout = PlanLayout(d)
    plan = Plan(layout, 0, 0, layout.empty(d.S, torch.device("cpu")))
    load, words = torch.zeros(R, E, dtype=torch.int32), torch.zeros(R, dtype=torch.int32)
    tables = kernels.Tables.make(d, torch.device("cpu"))
    with record_launches() as launches:
        kernels.lay_rows(load, words, Solution.empty(d, "cpu"), words[:1], tables, 0, d).run(plan.views)
    compiled = launches[0].compile(arch)
    assert stack_bytes(compiled, tmp_path) == 0
    assert compiled.metadata.shared <= 48 * 1024
    assert negated_in_minima_of_three(compiled.asm["ptx"]) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_any_solution_is_laid_as_its_twins_do():
    sizes = [(8, 48), (2, 192), (64, 6), (128, 8), (2, 1025), (1, 384), (33, 3), (5, 300), (100, 10), (4, 7), (96, 1)]
    met = check_random(list(range(22)), sizes, "cuda")  # each is compiled: about a second
    assert min(met["some"], met["both ways"], met["none"]) > 0, met
