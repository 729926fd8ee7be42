"""Every barrier is needed: without it, a rank that is late at the wrong moment changes results.

A scenario repeats one operation with other data each round, and nothing in between but what the operation does itself.
One rank is late at one place. With all barriers that changes nothing; with one of them taken away it does. `BARRIERS`
shows what the table in `docs/memory.md` claims.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from test_contract import DEVICE_BACKENDS, use_device
from torch import Tensor

from moonep import Buffer, ExpertPool, PeerError
from moonep.testing.routing import hot_rank

R, S, H, K, L = 2, 32, 32, 2, 4
ROUNDS = 4
HOME, HOLDER = 0, 1  # hot experts live on rank 0; rank 1 holds copies of them in its slots
SHAPE = (8, 8)
# How long the late rank sleeps, by backend; more than the other one takes for a round.
PAUSE_S = {"cpu": 0.02, "interpreter": 1.0, "cuda": 0.02}
CYCLES_A_SECOND = 2e9


@dataclass(frozen=True)
class Missing:
    """A barrier that is taken away, and the lateness it protects from.

    Attributes:
        scenario: what is repeated.
        operation, index: of the barrier: which wait within which operation.
        late: the rank that is late.
        after: late after which wait of the operation; None: before the round.
        flags: the wait is that of bulk movers within a kernel, for flags.
    """

    scenario: str
    operation: str
    index: int
    late: int
    after: int | None
    flags: bool = False


BARRIERS = {
    "loads are there before planning": Missing("other routings", "dispatch", 0, HOLDER, None),
    "rows have been read before a dispatch": Missing("one routing", "dispatch", 0, HOLDER, 1),
    "rows are there before they are expanded": Missing("one routing", "dispatch", 1, HOLDER, 0),
    "gradient rows have been read before a reuse": Missing("reuse", "dispatch with plan", 0, HOLDER, 1),
    "gradient rows are there before they are expanded": Missing("reuse", "dispatch with plan", 1, HOLDER, 0),
    "staging has been read before a combine": Missing("combine", "combine", 0, HOLDER, 1),
    "partial sums are there before the final sum": Missing("combine", "combine", 1, HOLDER, 0),
    "slot gradients are written before they are reduced": Missing("reduce", "reduce", 0, HOLDER, None),
    "slot gradients have been read before they are zeroed": Missing("reduce", "reduce", 1, HOME, 0),
    "parameters are written before a prefetch": Missing("prefetch", "barrier", 0, HOME, None),
    "slots have been used before weights are pushed": Missing("push", "prefetch", 0, HOLDER, 1),
    "pushed weights are there before they are used": Missing("push", "prefetch", 1, HOME, 0),
}

FLAGS = {
    "rows are there before they are expanded": Missing("one routing", "dispatch", 1, HOLDER, 0, True),
    "gradient rows are there before they are expanded": Missing("reuse", "dispatch with plan", 1, HOLDER, 0, True),
    "partial sums are there before the final sum": Missing("combine", "combine", 1, HOLDER, 0, True),
}
BULK_H = 64  # rows of 128 bytes, which bulk copies can move


class Rank:
    """One rank's Buffer, pool and data, other data in each round."""

    def __init__(self, backend: str, H: int = H):
        self.backend, self.device = backend, use_device(backend)
        sizes = {"token_padding": 8, "backend": backend, "timeout_s": 30.0}
        self.buffer = buffer = Buffer(S, H, K, L * R, R, **sizes)
        self.index = buffer.rank
        self.pool = ExpertPool(
            {"up": SHAPE}, L * R, dtype=torch.float32, grads=True, shared=False, backend=backend, timeout_s=30.0
        )
        self.generator = torch.Generator().manual_seed(self.index)
        routings = [hot_rank(S, L * R, K, R, 1.5, 2, seed)[self.index] for seed in range(ROUNDS)]
        self.topks = [ids.to(self.device) for ids in routings]
        self.xs = [self.draw(S, H).bfloat16() for _ in range(ROUNDS)]
        self.weights = self.draw(S, K)
        self.plan = buffer.dispatch(self.xs[0], None, self.topks[0])[3]
        self.used = int(self.plan.cu_seqlens[-1])
        self.ys = [self.draw(buffer.dims.C, H).bfloat16() for _ in range(ROUNDS)]
        self.row_weights = [self.draw(buffer.dims.C) for _ in range(ROUNDS)]
        self.experts = [self.draw(L, *SHAPE) for _ in range(ROUNDS)]
        self.slots = (self.plan.experts_to_copy[self.index] >= 0).nonzero().flatten()

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def pause(self) -> None:
        """Make this rank's next step late: on a GPU the device waits, not the host."""
        if self.backend == "cuda":
            torch.cuda._sleep(int(PAUSE_S["cuda"] * CYCLES_A_SECOND))
        else:
            time.sleep(PAUSE_S[self.backend])

    def align(self) -> None:
        """Wait until both ranks have done everything so far."""
        if self.backend == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def other_routings(self, i: int) -> Iterator[Tensor]:
        plan = self.buffer.dispatch(self.xs[i], None, self.topks[i])[3]
        yield from (plan.load, plan.alloc, plan.dst, plan.cu_seqlens)

    def one_routing(self, i: int) -> Iterator[Tensor]:
        hidden, weights, _, _ = self.buffer.dispatch(self.xs[i], self.weights + i, self.topks[0])
        yield from (hidden[: self.used], weights[: self.used])

    def reuse(self, i: int) -> Iterator[Tensor]:
        hidden, weights, _, _ = self.buffer.dispatch(self.xs[i], self.weights + i, plan=self.plan)
        yield from (hidden[: self.used], weights[: self.used])

    def combine(self, i: int) -> Iterator[Tensor]:
        output, weights, _ = self.buffer.combine(self.plan, self.ys[i], self.row_weights[i])
        yield from (output, weights)

    def reduce(self, i: int) -> Iterator[Tensor]:
        self.pool.local_grad["up"].fill_(i)
        self.pool.compact_grad["up"][L:] = 10 * self.index + i + 1
        self.buffer.reduce(self.plan, self.pool)
        yield self.pool.local_grad["up"]

    def prefetch(self, i: int) -> Iterator[Tensor]:
        self.pool.local["up"].copy_(self.experts[i])
        self.buffer.barrier()
        self.buffer.prefetch(self.plan, self.pool, force=True)
        yield self.pool.compact["up"][L:].index_select(0, self.slots)
        self.buffer.dispatch(self.xs[0], None, self.topks[0])  # peers have read before the next write

    def push(self, i: int) -> Iterator[Tensor]:
        symmetric = self.pool.reduce_buffer["up"]
        self.buffer.prefetch_weight(self.plan, local_up_weight=self.experts[i], up_prefetch_buffer=symmetric)
        yield symmetric[self.index].index_select(0, self.slots)


@contextmanager
def late(rank: Rank, missing: Missing, remove: bool) -> Iterator[Callable[[], None]]:
    """Be late if this is the rank; take the barrier away if asked to. Yields what is to be called before a round."""
    barrier = rank.buffer._backend.barrier
    kind = type(barrier)
    begin, wait = kind.begin, kind.wait
    waits = 0

    def pause_if(here: int | None) -> None:
        if rank.index == missing.late and here == missing.after:
            rank.pause()

    def begin_and_count(barrier, operation: str) -> None:
        nonlocal waits
        waits = 0
        begin(barrier, operation)

    def wait_here(barrier, wait_for_all: Callable[[], None], go_on: Callable[[], None]) -> None:
        nonlocal waits
        here, waits = waits, waits + 1
        taken_away = remove and not missing.flags and (barrier.operation, here) == (missing.operation, missing.index)
        (go_on if taken_away else wait_for_all)()
        if barrier.operation == missing.operation:
            pause_if(here)

    def wait_or_not(barrier) -> None:
        if hasattr(barrier, "signals"):  # then what is launched waits: `waits_of_kernels`
            wait(barrier)
        else:
            wait_here(barrier, lambda: wait(barrier), lambda: None)

    def before_round() -> None:
        if remove and missing.flags:
            rank.buffer._backend.mine("flags").fill_(1 << 30)  # as if all chunks of all times had arrived
        pause_if(None)

    kind.begin, kind.wait = begin_and_count, wait_or_not
    try:
        with waits_of_kernels(rank.buffer._backend, wait_here):
            yield before_round
    finally:
        kind.begin, kind.wait = begin, wait


@contextmanager
def waits_of_kernels(backend, wait_here: Callable[..., None]) -> Iterator[None]:
    """On a GPU a kernel waits, that of a barrier or the one that solves: inside, such a wait can be taken away."""
    if not hasattr(backend.barrier, "signals"):
        yield
        return
    from moonep.kernels import barrier, solve
    from moonep.kernels.launch import Launch

    def solve_alone() -> None:
        solve.launch_solve(backend.mine("load"), backend.status, backend.solution, backend.dims)

    instead = {barrier._barrier_kernel: lambda: None, solve._agree_kernel: solve_alone}
    originals = {name: getattr(Launch, name) for name in ("run", "repeat")}

    def intercept(name: str) -> Callable[..., None]:
        def launch_or_not(launch, *args) -> None:
            if launch.kernel in instead:
                wait_here(backend.barrier, lambda: originals[name](launch, *args), instead[launch.kernel])
            else:
                originals[name](launch, *args)

        return launch_or_not

    for name in originals:
        setattr(Launch, name, intercept(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Launch, name, original)


def notice(backend: str, name: str, flags: bool = False) -> tuple[bool, bool]:
    """Whether lateness changes anything on this rank: with all barriers, and with one missing."""
    missing = FLAGS[name] if flags else BARRIERS[name]
    rank = Rank(backend, BULK_H if flags else H)
    step = getattr(rank, missing.scenario.replace(" ", "_"))

    def repeat(before: Callable[[], None]) -> list[Tensor]:
        results = []
        rank.align()
        try:
            for i in range(ROUNDS):
                before()
                results += [tensor.clone() for tensor in step(i)]
        finally:
            rank.align()
        return results

    want = repeat(lambda: None)
    different = []
    for remove in (False, True):
        with late(rank, missing, remove) as before:
            try:
                got = repeat(before)
                rank.buffer.check()
            except (PeerError, ValueError):
                different.append(True)
                break
        different.append(not all(torch.equal(a, b) for a, b in zip(got, want, strict=True)))
    return different[0], different[-1]


def assert_noticed(outcomes: list[tuple[bool, bool]]) -> None:
    with_all, without = zip(*outcomes, strict=True)
    assert not any(with_all), f"lateness changes results although all barriers are there: ranks {with_all}"
    assert any(without), "nobody notices that the barrier is missing"


@pytest.mark.parametrize("backend", DEVICE_BACKENDS)
@pytest.mark.parametrize("name", BARRIERS)
def test_removing_a_barrier_is_noticed(ranks, backend, name):
    assert_noticed(ranks(R).run(notice, backend, name, timeout_s=90))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the cuda backend is not run here")
@pytest.mark.parametrize("name", FLAGS)
def test_removing_the_wait_for_a_flag_is_noticed(ranks, name):
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("bulk movers need a GPU of capability 9.0")
    assert_noticed(ranks(R).run(notice, "cuda", name, True, timeout_s=90))


@pytest.mark.slow
def test_removing_a_barrier_of_the_kernels_is_noticed_in_the_interpreter(interpreters):
    name = "slots have been used before weights are pushed"  # the quickest: all take six minutes, and pass
    assert_noticed(interpreters(R).run(notice, "interpreter", name, timeout_s=200))
