"""The solve kernel: every candidate and the choice are those of `policy`, bit for bit, and it compiles without a GPU.

The kernel runs in Triton's interpreter, in processes of its own: this one keeps a Triton that compiles. With a GPU,
`-m gpu` runs it there, on larger loads.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from moonep.dims import COPY_COST_ASSIGNMENTS, Balance, Dims  # noqa: E402
from moonep.kernels import solve  # noqa: E402
from moonep.kernels.solve import POLICIES, Solution, chosen, launch_solve, read_allocation  # noqa: E402
from moonep.planner import policy  # noqa: E402
from moonep.testing.launches import negated_in_minima_of_three, record_launches  # noqa: E402
from moonep.testing.ranks import PerRank, Ranks  # noqa: E402

Load = tuple[list[int], int, Balance, int]  # T_E, R, balance, and tokens a rank that did not come
EXACT, POISON = Balance(), -777
BALANCES = [EXACT, Balance(eps_ppm=10_000), Balance(eps_ppm=50_000), Balance(slack=3), Balance(300_000, slack=20)]


def dims_of(T_E: list[int], R: int, balance: Balance, absent: int = 0) -> Dims:
    """The smallest dims that can bring this load, plus `absent` tokens a rank."""
    return Dims(S=max(1, -(-sum(T_E) // R)) + absent, K=1, E=len(T_E), R=R, H=8, B=1, balance=balance)


def split_over_sources(T_E: list[int], R: int, stride: int, device: str) -> Tensor:
    """[R, E] of row stride `stride`, what lies between rows poisoned: random parts that add up to T_E."""
    generator = torch.Generator().manual_seed(len(T_E) + sum(T_E))
    left = torch.tensor(T_E)
    memory = torch.full((R, stride), POISON, dtype=torch.int32)
    for r in range(R - 1):
        part = (torch.rand(len(T_E), generator=generator, dtype=torch.float64) * 2 / (R - r) * left).long()
        memory[r, : len(T_E)] = part = part.clamp(max=left)
        left = left - part
    memory[R - 1, : len(T_E)] = left
    return memory.to(device)[:, : len(T_E)]


def run_solve(load_RE: Tensor, dims: Dims, status: int = 0) -> Solution:
    """Into poisoned memory, whose surroundings must stay poisoned."""
    shapes = [t.shape for t in vars(Solution.empty(dims, "cpu")).values()]
    margin = 2 * dims.E
    room = [shape.numel() + margin for shape in shapes]
    memory = torch.full((margin + sum(room),), POISON, dtype=torch.int32, device=load_RE.device)
    out, begin, inside = [], margin, torch.zeros(memory.shape, dtype=torch.bool)
    for shape, size in zip(shapes, room, strict=True):
        out.append(memory[begin : begin + shape.numel()].view(shape))
        inside[begin : begin + shape.numel()] = True
        begin += size
    launch_solve(load_RE, torch.tensor([status], dtype=torch.int32, device=load_RE.device), Solution(*out), dims)
    assert (memory.cpu()[~inside] == POISON).all(), "written outside the solution"
    return Solution(*(t.cpu() for t in out))


def check_loads(loads: list[Load], device: str = "cpu") -> int:
    """Every candidate of every load against `policy`, and the winner. Returns how often a candidate did not apply."""
    not_applicable = 0
    for T_E, R, balance, absent in loads:
        d, total = dims_of(T_E, R, balance, absent), sum(T_E)
        solution = run_solve(split_over_sources(T_E, R, d.E + absent % 5, device), d)
        targets = [policy.caps(total, R)]
        if not balance.exact:
            targets.insert(0, policy.targets_within(T_E, policy.limits(total, d)))
        for c in range(len(POLICIES) * len(targets)):
            want = candidate_of(POLICIES[c % 4], T_E, R, targets[c // 4])
            got = read_allocation(c, solution, d)
            where = f"{POLICIES[c % 4]} of targets {c // 4}, for {T_E=}, {R=}, {balance}, {absent=}"
            assert (got is None) == (want is None), f"applies: {got is not None}, expected {want is not None}: {where}"
            if got is not None and want is not None:
                assert got.tolist() == want, where
                copies, into, out_of = policy.copies(want, R)
                assert solution.cost[c].tolist() == [max(into, out_of), copies], where
            not_applicable += want is None
        winner, want = solve.choose(solution.cost), policy.allocate(T_E, d)
        assert ["", "exact-"][winner // 4] + POLICIES[winner % 4] == want.policy, f"{T_E=}, {R=}, {balance}"
    return not_applicable


def candidate_of(name: str, T_E: list[int], R: int, targets: list[int]) -> policy.Counts | None:
    if name.startswith("chain"):
        return policy.chain(T_E, R, targets, g=int(name[-1]))
    return {"path": policy.path, "alias": policy.alias}[name](T_E, R, targets)


@triton.jit
def _choose_kernel(cost, winner, MODES: tl.constexpr):
    tl.store(winner, chosen(cost, MODES))


def choose_on_device(cost: Tensor) -> int:
    winner = torch.full((1,), -1, dtype=torch.int32, device=cost.device)
    _choose_kernel[(1,)](cost, winner, MODES=len(cost) // 4, num_warps=1)
    return int(winner)


def patch_once_a_launch() -> None:
    """Twice as fast: at each call of a device function the interpreter patches triton.language, as it did before."""
    from triton.runtime import interpreter

    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_once(fn: Any) -> Any:
        if id(fn.__globals__) in patched:
            return None
        patched.add(id(fn.__globals__))
        return patch(fn)

    def run_afresh(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        run(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, run_afresh


@pytest.fixture(scope="module")
def interpreters() -> Iterator[Ranks]:
    with Ranks(2, env={"TRITON_INTERPRET": "1"}, start_method="spawn", timeout_s=280) as ranks:
        ranks.run(patch_once_a_launch)
        yield ranks


Z = [0, 0, 0, 0]
PINNED: dict[str, tuple[list[int], int]] = {
    "the worked example": ([6, 1, 1, 0], 2),
    "nine ranks, one expert each": ([8, 3, 5, 6, 2, 2, 1, 2, 1], 9),
    "no assignments": ([0] * 12, 4),
    "one assignment": ([0] * 11 + [1], 4),
    "fewer assignments than ranks": ([0, 0, 0, 2, 1, 0, 0, 0], 8),
    "one expert takes all": ([0] * 5 + [4000] + [0] * 10, 8),
    "one rank takes all": ([0] * 8 + [70, 1, 5, 24] + [0] * 20, 8),
    "all but one rank take all": ([9, 9, 9, 9, 9, 9, 0, 0], 4),
    "equal": ([7] * 24, 8),
    "equal, with a remainder of a rank": ([7, 7, 7, 7, 7, 8], 3),
    "one rank exactly at its share": ([5, 1, 2, 2, 0, 2], 3),
    "the surplus runs out on the way": ([6, 0, 2, 0, 6, 0, 2, 0], 4),
    "many equal surpluses and deficits": ([6, 0, 2, 0, 6, 0, 2, 0, 4, 0, 4, 0], 6),
    "one rank": ([5, 0, 3], 1),
    "too much for the next on the line": ([30, *Z[1:], *Z, 1, 1, 1, 1, *Z], 4),
    "the donor needs several experts": ([3] * 8 + [0] * 8, 2),
    "every deficit exceeds a part": ([6, 6, 0, 0, 0, 0], 3),
}


def small_loads(rng: random.Random, number: int, max_R: int) -> list[Load]:
    """Small integers, full of ties and zeros, balanced in every way; L = 1 and odd L among them."""
    loads: list[Load] = []
    for _ in range(number):
        R, L, most = rng.randint(1, max_R), rng.choice([1, 1, 2, 3, 5]), rng.choice([1, 3, 9])
        T_E = [rng.randint(0, most) for _ in range(R * L)]
        loads.append((T_E, R, rng.choice([*BALANCES, *[EXACT] * 4]), rng.choice([0, 0, 1, 7])))
    return loads


def lognormal_loads(rng: random.Random, number: int, sizes: list[tuple[int, int]], sigmas: list[float]) -> list[Load]:
    """From nearly equal popularity to a few experts that take nearly everything, sometimes sorted: popular ranks."""
    loads: list[Load] = []
    for i in range(number):
        R, L = sizes[i % len(sizes)]
        sigma, mean = rng.choice(sigmas), rng.choice([1, 30, 1000])
        T_E = [int(mean * rng.lognormvariate(0, sigma)) for _ in range(R * L)]
        if rng.random() < 0.3:
            T_E.sort()
        loads.append((T_E, R, rng.choice([EXACT, *BALANCES[:3]]), rng.choice([0, 3])))
    return loads


def run_split(interpreters: Ranks, loads: list[Load]) -> int:
    """Half the loads on each process. Returns how often a candidate did not apply."""
    return sum(interpreters.run(check_loads, PerRank([loads[0::2], loads[1::2]])))


def worked_example() -> list[list[Any]]:
    load_RE = torch.tensor([[4, 0, 0, 0], [2, 1, 1, 0]], dtype=torch.int32)
    solution = run_solve(load_RE, Dims(S=4, K=1, E=4, R=2, H=8, B=2))
    given = solution.given[:, 1]  # of rank 1: rank 0 has no donor
    return [t.tolist() for t in (solution.left, solution.donor, given, solution.cost)]


def test_the_example_of_the_docstring_is_what_the_kernel_writes(interpreters):
    left, donor, given, cost = interpreters.run(worked_example)[0]
    assert left == [[3, 1, 1, 0]] * 4
    assert donor == [[-1, 0]] * 4
    assert given == [[3, 0]] * 4
    assert cost == [[1, 1]] * 4


def test_pinned_loads_give_the_allocations_of_policy_in_every_balance(interpreters):
    loads = [(T_E, R, balance, 0) for T_E, R in PINNED.values() for balance in (EXACT, BALANCES[2])]
    assert run_split(interpreters, loads) > 0, "the path applies to all of them"


def test_small_loads_full_of_ties_give_the_allocations_of_policy(interpreters):
    assert run_split(interpreters, small_loads(random.Random(0), 130, max_R=4)) > 0
    run_split(interpreters, small_loads(random.Random(1), 16, max_R=11))


def test_popular_experts_give_the_allocations_of_policy(interpreters):
    sizes = [(2, 5), (3, 7), (2, 33), (4, 3), (2, 192)]
    run_split(interpreters, lognormal_loads(random.Random(2), 32, sizes, [0.1, 0.5, 1.0, 2.0]))
    run_split(interpreters, lognormal_loads(random.Random(3), 6, [(8, 48), (8, 1), (16, 3)], [0.5, 1.0, 2.0]))


def test_many_ranks_and_many_experts_give_the_allocations_of_policy(interpreters):
    rng = random.Random(4)
    popular = {(R, L): [int(300 * rng.lognormvariate(0, 1)) for _ in range(R * L)] for R, L in ((32, 8), (2, 1025))}
    calm = [1000 + rng.randint(0, 40) for _ in range(64 * 2)]
    whole = [0] * 127 + [128 * (2**24 - 300)]  # the most that dims allow, on one rank
    loads = [(T_E, R, EXACT, 0) for (R, _), T_E in popular.items()]
    loads += [(calm, 64, BALANCES[1], 0), (whole, 128, EXACT, 0)]
    run_split(interpreters, loads)


def test_auto_moves_only_surpluses_that_are_worth_a_copy(interpreters):
    auto = Balance.parse("auto")
    near, far = COPY_COST_ASSIGNMENTS, 2 * COPY_COST_ASSIGNMENTS
    loads = [([9000 + surplus, 9000, 9000, 9000], 2, auto, 3000) for surplus in (near, 2 * far, 3 * far)]
    run_split(interpreters, [*loads, ([2_000_000, 3, 0, 7, 1_000_000, 5], 3, Balance(123_457), 0)])


def solve_with_status(status: int) -> list[Tensor]:
    d = Dims(S=4, K=1, E=4, R=2, H=8, B=2)
    return list(vars(run_solve(torch.ones(2, 4, dtype=torch.int32), d, status)).values())


def test_nothing_is_written_once_a_peer_has_failed(interpreters):
    assert all((t == POISON).all() for t in interpreters.run(solve_with_status, 5)[0])
    assert any((t != POISON).any() for t in interpreters.run(solve_with_status, 0)[0])


def solve_senseless_loads(seeds: list[int], most: int, device: str = "cpu") -> int:
    """Counts up to `most`, negative ones too. `run_solve` checks what is written; that it returns is the claim."""
    for seed in seeds:
        rng = random.Random(seed)
        R, L = rng.choice([(1, 3), (2, 2), (3, 5), (5, 1)])
        d = dims_of([1] * (R * L), R, rng.choice(BALANCES), rng.choice([0, 9]))
        wild = [-most - 1, most, -1, 0, 1, most // 2, rng.randint(-most, most), rng.randint(-9, 9)]
        load = [[rng.choice(wild) for _ in range(R * L)] for _ in range(R)]
        run_solve(torch.tensor(load, dtype=torch.int32, device=device), d)
    return len(seeds)


def test_a_senseless_load_ends_and_stays_inside_its_memory(interpreters):
    # No more than this: the interpreter raises an error where sums wrap around.
    most = 2**24
    assert interpreters.run(solve_senseless_loads, PerRank([list(range(20)), list(range(20, 40))]), most) == [20, 20]


def choose_many(seed: int, device: str = "cpu") -> list[tuple[int, int]]:
    rng = random.Random(seed)
    huge = [solve.NOT_APPLICABLE.value] * 2
    pairs = []
    for modes in (1, 2) * 15:
        cost = [rng.choice([huge, [rng.randint(0, 2), rng.randint(0, 2)]]) for _ in range(4 * modes)]
        table = torch.tensor(cost, dtype=torch.int32, device=device)
        pairs.append((choose_on_device(table), solve.choose(table)))
    return pairs


def test_the_device_chooses_as_its_twin_does(interpreters):
    for of_device, of_twin in interpreters.run(choose_many, 0)[0]:
        assert of_device == of_twin


def test_launch_solve_asserts_what_it_is_given():
    d = Dims(S=4, K=1, E=4, R=2, H=8, B=2)
    load, status = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    out = Solution.empty(d, "cpu")
    for bad in (load[:, :2], load.t().contiguous().t(), load.long()):
        with pytest.raises(AssertionError):
            launch_solve(bad, status, out, d)
    with pytest.raises(AssertionError, match="out"):
        launch_solve(load, status, Solution.empty(Dims(S=4, K=1, E=8, R=2, H=8, B=2), "cpu"), d)


COMPILED = [(R, E, arch) for R, E in ((2, 384), (8, 384), (64, 384), (2, 2050)) for arch in (80, 90, 100)]


def compile_solve(R: int, E: int, balance: Balance, arch: int) -> Any:
    d = Dims(S=64, K=8, E=E, R=R, H=8, B=1, balance=balance)
    load, status = torch.zeros(R, E, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with record_launches() as launches:
        launch_solve(load, status, Solution.empty(d, "cpu"), d)
    return launches[0].compile(arch)


def stack_bytes(compiled: Any, folder: Path) -> int:
    """What a thread keeps in memory because registers do not suffice."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton brings no cuobjdump")
    (folder / "solve.cubin").write_bytes(compiled.asm["cubin"])
    command = [str(tool), "--dump-resource-usage", str(folder / "solve.cubin")]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted in this process")
@pytest.mark.parametrize(("R", "E", "arch"), [*COMPILED, (128, 1024, 90)])
def test_the_solve_compiles_without_spilling_registers(R, E, arch, tmp_path):
    compiled = compile_solve(R, E, EXACT if R == 8 else Balance(10_000), arch)
    assert stack_bytes(compiled, tmp_path) == 0
    assert compiled.metadata.shared <= 48 * 1024
    assert negated_in_minima_of_three(compiled.asm["ptx"]) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_all_loads_give_the_allocations_of_policy():
    rng = random.Random(5)
    loads = [(T_E, R, balance, 0) for T_E, R in PINNED.values() for balance in (EXACT, BALANCES[2])]
    sizes = [(8, 48), (64, 6), (128, 2), (128, 8), (100, 10), (2, 1025), (16, 16), (5, 300), (33, 3), (96, 1)]
    loads += lognormal_loads(rng, 120, sizes, [0.01, 0.03, 0.1, 0.5, 1.0, 2.0])
    check_loads(loads, "cuda")
    solve_senseless_loads(list(range(40)), 2**31 - 1, "cuda")
    assert all(of_device == of_twin for of_device, of_twin in choose_many(0, "cuda"))
