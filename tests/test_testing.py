"""moonep.testing does what it says: failing ranks are told apart, assertions name the index, routings reach targets."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moonep.errors import PeerError
from moonep.testing import asserts, routing
from moonep.testing.ranks import Outcome, PerRank, RankDied, RankFailure, Ranks, RankTimeout, run_ranks, send

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Three ranks that all tests share; a test that breaks them makes the next one start fresh processes."""
    with Ranks(3, grace_s=0.5, timeout_s=60.0) as ranks:
        yield ranks


# What the ranks do. At the top level, because they import it.


def rank_and_pid() -> tuple[int, int]:
    return dist.get_rank(), os.getpid()


def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


def environment(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def num_threads() -> int:
    return torch.get_num_threads()


def join_again() -> int:
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    return int(sum_over_ranks(torch.ones(1)))


def echo(*values: object) -> tuple[object, ...]:
    return values


def part_of_a_big_tensor() -> torch.Tensor:
    return torch.arange(1_000_000)[5:8]


class TwoArguments(Exception):
    """Pickles, but cannot be unpickled."""

    def __init__(self, a: int, b: int):
        super().__init__(f"{a} and {b}")


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def fail_alone(failing_rank: int, how: str) -> str:
    """The named rank fails at once; the others return."""
    if dist.get_rank() == failing_rank:
        _fail(how)
    return "done"


def fail_alone_others_stuck(failing_rank: int, how: str) -> None:
    if dist.get_rank() == failing_rank:
        _fail(how)
    while True:
        time.sleep(0.01)


def _fail(how: str) -> None:
    if how == "ValueError":
        raise ValueError("a bad argument")
    if how == "PeerError":
        raise PeerError(7, "dispatch", "gone")
    if how == "two arguments":
        raise TwoArguments(1, 2)
    if how == "unpicklable":
        raise Unpicklable()
    if how == "exit":
        sys.exit(3)
    if how == "hard exit":
        os._exit(3)
    os.kill(os.getpid(), getattr(signal, how))


def fail_after_the_first(first: int) -> None:
    """One rank fails; the others notice a little later and say so."""
    if dist.get_rank() == first:
        raise ValueError("the cause")
    time.sleep(0.1)
    raise PeerError(first, "combine", "peer is gone")


def die_before_a_child() -> None:
    """The child keeps the rank's end of the pipe open."""
    if os.fork() == 0:
        time.sleep(8)
        os._exit(0)
    os._exit(4)


def allreduce_without(absent: int) -> None:
    if dist.get_rank() == absent:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))


def where_it_hangs(hanging: list[int]) -> str:
    if dist.get_rank() in hanging:
        time.sleep(600)
    return "done"


def return_a_lock() -> object:
    return threading.Lock()


def report_progress(steps: int) -> str:
    for step in range(steps):
        send({"rank": dist.get_rank(), "step": step})
    return "done"


def send_then_die() -> None:
    send("last words")
    os._exit(1)


def send_from_a_thread() -> str:
    thread = threading.Thread(target=send, args=("from a thread",))
    thread.start()
    thread.join()
    return "done"


# Ranks


def test_results_come_in_rank_order_from_separate_processes(ranks: Ranks) -> None:
    results = ranks.run(rank_and_pid)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert len({os.getpid(), *(pid for _, pid in results)}) == 4


def test_processes_are_reused(ranks: Ranks) -> None:
    assert ranks.run(rank_and_pid) == ranks.run(rank_and_pid)


def test_ranks_form_a_world_and_per_rank_arguments_differ(ranks: Ranks) -> None:
    totals = ranks.run(sum_over_ranks, PerRank([torch.full((2,), 10.0**r) for r in range(3)]))
    for total in totals:
        asserts.assert_equal("total", total, torch.tensor([111.0, 111.0]))


def test_a_per_rank_argument_of_another_length_is_refused(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="PerRank of 2 values, expected one for each of 3 ranks"):
        ranks.run(echo, PerRank([1, 2]))


def test_ranks_see_what_torchrun_sets(ranks: Ranks) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert ranks.run(environment, *names) == [[str(r), str(r), "3", "3", "127.0.0.1"] for r in range(3)]


def test_a_rank_can_join_a_second_world_by_the_environment() -> None:
    assert run_ranks(join_again, 2) == [2, 2]


def test_ranks_see_the_parents_environment_of_their_start_and_env(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONEP_TEST_A", "parent")  # after the fork server started
    monkeypatch.setenv("MOONEP_TEST_B", "parent")
    monkeypatch.delenv("HOME", raising=False)
    seen = run_ranks(environment, 1, "MOONEP_TEST_A", "MOONEP_TEST_B", "HOME", env={"MOONEP_TEST_B": "env"})
    assert seen == [["parent", "env", None]]


def test_threads_are_limited(ranks: Ranks) -> None:
    assert ranks.run(num_threads) == [1, 1, 1]
    assert run_ranks(num_threads, 1, threads=2) == [2]


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.bool, torch.complex64],
    ids=str,
)
def test_tensors_travel_both_ways(ranks: Ranks, dtype: torch.dtype) -> None:
    sent = torch.arange(-3, 5).reshape(2, 4).to(dtype)
    for (received,) in ranks.run(echo, sent):
        assert received.dtype == dtype
        assert received.shape == (2, 4)
        assert torch.equal(received.contiguous().view(torch.uint8), sent.view(torch.uint8))


def test_odd_tensors_travel(ranks: Ranks) -> None:
    sent = {
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4, dtype=torch.int32),
        "leaf": torch.ones(2, requires_grad=True),
        "computed": torch.ones(2, requires_grad=True) * 2,
        "negated": torch.complex(torch.ones(2), torch.ones(2)).conj().imag,
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    received = ranks.run(echo, sent)[0][0]
    for name, want in sent.items():
        asserts.assert_equal(name, received[name], want)
    assert received["leaf"].requires_grad
    assert isinstance(received["parameter"], torch.nn.Parameter)


def test_a_view_travels_without_its_storage(ranks: Ranks) -> None:
    result = ranks.run(part_of_a_big_tensor)[0]
    assert result.tolist() == [5, 6, 7]
    assert result.untyped_storage().nbytes() == 3 * 8


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("ValueError", ValueError, "a bad argument"),
        ("PeerError", PeerError, "dispatch: rank 7: gone"),
        ("exit", SystemExit, "3"),
    ],
)
def test_an_exception_arrives_as_itself(ranks: Ranks, how: str, kind: type[BaseException], text: str) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks.run(fail_alone, 1, how)
    error = caught.value.errors[1]
    assert list(caught.value.errors) == [1]
    assert type(error) is kind
    assert str(error) == text
    message = str(caught.value)
    assert message.startswith("1 of 3 ranks failed")
    assert f"rank 1: {'moonep.errors.' if kind is PeerError else ''}{kind.__name__}: {text}" in message
    assert "in _fail" in message  # the traceback
    assert "ranks.py" not in message  # without the machinery


@pytest.mark.parametrize("how", ["two arguments", "unpicklable"])
def test_an_exception_that_cannot_travel_is_reported_in_words(ranks: Ranks, how: str) -> None:
    with pytest.raises(RankFailure, match="1 and 2" if how == "two arguments" else "holds a lock") as caught:
        ranks.run(fail_alone, 2, how)
    assert caught.value.errors == {2: None}


def test_every_failed_rank_is_named_and_the_first_to_fail_comes_first(ranks: Ranks) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks.run(fail_after_the_first, 1)
    assert next(iter(caught.value.errors)) == 1
    assert sorted(caught.value.errors) == [0, 1, 2]
    message = str(caught.value)
    assert message.index("the cause") < message.index("peer is gone")
    assert "ranks 0, 2" in message or "ranks 2, 0" in message  # alike: told once


def test_a_killed_rank_is_named_by_signal_and_the_stuck_others_are_ended(ranks: Ranks) -> None:
    pids = [pid for _, pid in ranks.run(rank_and_pid)]
    started = time.monotonic()
    with pytest.raises(
        RankFailure, match=r"rank 1: RankDied: the process was killed by SIGKILL \(signal 9\)"
    ) as caught:
        ranks.run(fail_alone_others_stuck, 1, "SIGKILL")
    assert time.monotonic() - started < 10
    died = caught.value.errors[1]
    assert isinstance(died, RankDied)
    assert died.exitcode == -signal.SIGKILL
    for r in (0, 2):
        stuck = caught.value.errors[r]
        assert isinstance(stuck, RankTimeout)
        assert "within 0.5 s after the first failure" in str(stuck)
        assert "in fail_alone_others_stuck" in stuck.stack
    assert not any(_exists(pid) for pid in pids)


def test_peers_of_a_killed_rank_get_to_say_what_they_saw(ranks: Ranks) -> None:
    outcomes = ranks.run(allreduce_without, 0, raise_errors=False)
    assert isinstance(outcomes[0].error, RankDied)
    # In gloo's ring one neighbour sees the broken connection, and the other waits for that one.
    assert any("Connection" in str(outcomes[r].error) for r in (1, 2))
    assert all("all_reduce" in str(outcomes[r].report) for r in (1, 2))


def test_a_rank_that_exits_is_named_by_its_exit_code(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match="the process exited with code 3"):
        ranks.run(fail_alone, 0, "hard exit")


def test_a_dead_rank_is_noticed_although_its_child_lives(ranks: Ranks) -> None:
    ranks.run(echo)
    started = time.monotonic()
    with pytest.raises(RankFailure, match=r"ranks (0|1|2), \d, \d: RankDied: the process exited with code 4"):
        ranks.run(die_before_a_child)
    assert time.monotonic() - started < 6


def test_a_crash_comes_with_its_stack(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match=r"SIGSEGV(.|\n)*in _fail"):
        ranks.run(fail_alone, 0, "SIGSEGV")


def test_a_rank_that_returned_keeps_its_outcome_when_others_fail(ranks: Ranks) -> None:
    outcomes = ranks.run(fail_alone, 1, "ValueError", raise_errors=False)
    assert [outcome.ok for outcome in outcomes] == [True, False, True]
    assert outcomes[0] == Outcome("done")
    assert type(outcomes[1].error) is ValueError
    assert "a bad argument" in str(outcomes[1].report)


def test_without_failure_raise_errors_false_gives_values(ranks: Ranks) -> None:
    assert ranks.run(echo, 1, raise_errors=False) == [Outcome((1,))] * 3


def test_a_timeout_names_the_ranks_that_did_not_answer_and_where_they_are(ranks: Ranks) -> None:
    ranks.run(echo)  # so that the start does not count
    started = time.monotonic()
    with pytest.raises(RankFailure, match=r"did not answer within 0\.3 s") as caught:
        ranks.run(where_it_hangs, [0, 2], timeout_s=0.3)
    assert time.monotonic() - started < 5
    assert sorted(caught.value.errors) == [0, 2]
    assert "in where_it_hangs" in str(caught.value)
    assert "_exit_with_parent" not in str(caught.value)
    assert caught.value.outcomes[1] == Outcome("done")


def test_a_stopped_process_does_not_hang_the_parent(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match="rank 1: RankTimeout"):
        ranks.run(fail_alone, 1, "SIGSTOP", timeout_s=0.3)


def test_fresh_processes_follow_a_failure(ranks: Ranks) -> None:
    before = ranks.run(rank_and_pid)
    ranks.run(fail_alone, 1, "ValueError", raise_errors=False)
    after = ranks.run(rank_and_pid)
    assert {pid for _, pid in before}.isdisjoint(pid for _, pid in after)


def test_fresh_processes_follow_a_death_between_calls(ranks: Ranks) -> None:
    pid = ranks.run(rank_and_pid)[1][1]
    os.kill(pid, signal.SIGKILL)
    while _exists(pid):
        time.sleep(0.01)
    assert [rank for rank, _ in ranks.run(rank_and_pid)] == [0, 1, 2]


def test_a_result_that_cannot_travel_is_a_failure_of_the_rank(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match=r"the result \(lock\) cannot be pickled"):
        ranks.run(return_a_lock)


def test_functions_and_arguments_that_cannot_travel_are_refused_in_words(ranks: Ranks) -> None:
    def local() -> None: ...

    pids = ranks.run(rank_and_pid)
    for fn in (local, lambda: None):
        with pytest.raises(TypeError, match="top level of a module"):
            ranks.run(fn)
    with pytest.raises(TypeError, match=r"fn .* cannot be pickled"):
        ranks.run(functools.partial(echo, threading.Lock()))
    with pytest.raises(TypeError, match=r"argument 1 \(lock\) cannot be pickled"):
        ranks.run(echo, 0, threading.Lock())
    assert ranks.run(rank_and_pid) == pids  # nothing broke


def test_messages_arrive_in_order_before_run_returns(ranks: Ranks) -> None:
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def on_message(rank: int, message: dict[str, int]) -> None:
        assert message["rank"] == rank
        seen[rank].append(message["step"])

    assert ranks.run(report_progress, 50, on_message=on_message) == ["done"] * 3
    assert seen == {r: list(range(50)) for r in range(3)}
    assert ranks.run(report_progress, 2) == ["done"] * 3  # nobody listens


def test_messages_come_from_any_thread_and_survive_a_death(ranks: Ranks) -> None:
    seen = []
    ranks.run(send_from_a_thread, on_message=lambda *message: seen.append(message))
    ranks.run(send_then_die, on_message=lambda *message: seen.append(message), raise_errors=False)
    assert sorted(seen) == sorted((r, text) for r in range(3) for text in ("from a thread", "last words"))


def test_an_error_of_on_message_ends_the_call_and_the_processes(ranks: Ranks) -> None:
    pids = [pid for _, pid in ranks.run(rank_and_pid)]
    with pytest.raises(ZeroDivisionError):
        ranks.run(report_progress, 1, on_message=lambda *_: 1 // 0)
    assert not any(_exists(pid) for pid in pids)


def test_send_outside_a_rank_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="inside a function that"):
        send("nobody hears it")


def test_close_leaves_no_process_and_no_open_file() -> None:
    run_ranks(echo, 1)  # the fork server stays
    open_before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    with Ranks(2, grace_s=0.1) as two:
        pids = [pid for _, pid in two.run(rank_and_pid)]
        two.run(fail_alone_others_stuck, 1, "ValueError", raise_errors=False)
        pids += [pid for _, pid in two.run(rank_and_pid)]
    assert not any(_exists(pid) for pid in pids)
    if open_before:
        assert len(os.listdir("/proc/self/fd")) == open_before


def test_ranks_die_with_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent("""
        import os, time
        from moonep.testing.ranks import Ranks, send

        def work():
            send(os.getpid())
            while True:
                pass

        if __name__ == "__main__":
            Ranks(2).run(work, on_message=lambda rank, pid: print(pid, flush=True))
        """)
    )
    # Killed, it cannot remove the directory of multiprocessing's own socket: hence TMPDIR.
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(_exists(pid) for pid in pids)
        parent.kill()
    deadline = time.monotonic() + 10
    while (left := [pid for pid in pids if _exists(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_a_function_of_an_interactive_session_is_refused() -> None:
    code = "from moonep.testing.ranks import run_ranks\ndef f(): pass\nrun_ranks(f, 2)"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "TypeError: fn must come from a file" in ended.stderr


def test_rank_failures_can_be_pickled() -> None:
    failure = RankFailure(
        {
            0: Outcome("done"),
            1: Outcome(error=RankDied(-9), report="died"),
            2: Outcome(error=RankTimeout("t", "s"), report="x"),
        }
    )
    again = pickle.loads(pickle.dumps(failure))
    assert str(again) == str(failure)
    assert isinstance(again.errors[1], RankDied)
    assert again.errors[2].stack == "s"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# Assertions

ALL_DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_assert_equal_names_tensor_count_index_and_values(dtype: torch.dtype) -> None:
    want = torch.zeros(3, 4, 5).to(dtype)
    got = want.clone()
    asserts.assert_equal("x", got, want)
    got[1, 2, 3] = got[2, 0, 0] = 1
    value, zero = got[1, 2, 3].item(), want[0, 0, 0].item()
    with pytest.raises(AssertionError) as caught:
        asserts.assert_equal("hidden", got, want)
    kind = str(dtype).removeprefix("torch.")
    assert (
        f"hidden: 2 of 60 elements differ ({kind}[3, 4, 5]); first at [1, 2, 3]: got {value!r}, want {zero!r}"
        in str(caught.value)
    )


def test_assert_equal_is_bitwise_but_for_nan() -> None:
    nan, other_nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    asserts.assert_equal("nan", torch.stack([nan, nan]), torch.stack([nan, other_nan]))
    with pytest.raises(AssertionError, match=r"first at \[0\]: got 0.0, want -0.0"):
        asserts.assert_equal("zero", torch.tensor([0.0]), torch.tensor([-0.0]))
    with pytest.raises(AssertionError, match=r"first at \[\]: got nan, want 1.0; one of them NaN"):
        asserts.assert_equal("nan", nan, torch.tensor(1.0))
    one = torch.tensor([1.0])
    with pytest.raises(AssertionError, match="at most 1 ulp apart"):
        asserts.assert_equal("next", one, one.nextafter(torch.tensor([2.0])))


@pytest.mark.parametrize("check", [asserts.assert_equal, functools.partial(asserts.assert_close, rtol=1, atol=1)])
def test_assertions_compare_dtype_and_shape_and_ignore_strides(check) -> None:  # type: ignore[no-untyped-def]
    x = torch.ones(2, 3)
    check("strides", x.t().contiguous().t(), x)
    check("empty", torch.empty(0, 3), torch.empty(0, 3))
    with pytest.raises(AssertionError, match=r"x: got float32\[2, 3\], want bfloat16\[2, 3\]"):
        check("x", x, x.bfloat16())
    with pytest.raises(AssertionError, match=r"x: got float32\[2, 3\], want float32\[3, 2\]"):
        check("x", x, x.t())
    with pytest.raises(TypeError, match="x: want must be a real tensor, got list"):
        check("x", x, [1.0])


def test_assert_close_holds_within_its_bounds_and_names_the_largest_error() -> None:
    want = torch.tensor([[1.0, 100.0], [torch.inf, torch.nan]])
    got = torch.tensor([[1.1, 110.0], [torch.inf, torch.nan]])
    asserts.assert_close("y", got, want, rtol=0.11, atol=0.0)
    asserts.assert_close("y", got, want, rtol=0.0, atol=10.0)
    with pytest.raises(AssertionError) as caught:
        asserts.assert_close("y", got, want, rtol=0.0, atol=0.05)
    assert "y: 2 of 4 elements differ (float32[2, 2]); first at [0, 0]: got 1.1" in str(caught.value)
    assert "largest error 10 at [0, 1], allowed atol 0.05 + rtol 0 * |want|" in str(caught.value)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_assert_close_never_forgives_infinity_or_nan(bad: float) -> None:
    for got, want in ((bad, 1.0), (1.0, bad), (bad, torch.inf if bad != torch.inf else -torch.inf)):
        with pytest.raises(AssertionError, match="largest error inf at"):
            asserts.assert_close("y", torch.tensor([got]), torch.tensor([want]), rtol=1e9, atol=1e9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_ulp_distance_counts_representable_numbers(dtype: torch.dtype) -> None:
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    one = torch.ones(1, dtype=dtype)
    for steps in (0, 1, 5, -3):
        assert asserts.ulp_distance(one, (one.view(bits) + steps).view(dtype)).item() == abs(steps)
    smallest = torch.ones(1, dtype=bits).view(dtype)
    assert asserts.ulp_distance(smallest, -smallest).item() == 2
    largest, infinity = torch.tensor([torch.finfo(dtype).max, torch.inf], dtype=dtype)
    nan = torch.tensor(torch.nan, dtype=dtype)
    assert asserts.ulp_distance(largest, infinity).item() == 1
    assert asserts.ulp_distance(0 * one, -0 * one).item() == 0
    assert asserts.ulp_distance(nan, -nan).item() == 0
    assert asserts.ulp_distance(nan, infinity).item() == 2**63 - 1
    with pytest.raises(ValueError, match="one shape and one dtype"):
        asserts.ulp_distance(one, one.double())


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_fresh_memory_is_poison_within_poisoned_allocators(dtype: torch.dtype) -> None:
    like = torch.zeros(2, 3, dtype=dtype)
    with asserts.poisoned_allocators():
        fresh = [
            torch.empty(2, 3, dtype=dtype),
            torch.empty((), dtype=dtype),
            torch.empty_like(like),
            torch.empty_strided((2, 3), (8, 1), dtype=dtype),
            torch.empty_strided((2, 3), (0, 1), dtype=dtype),
            like.new_empty(2, 3),
            torch.empty_strided((2, 3), (8, 1), dtype=dtype).as_strided((11,), (1,)),  # gaps too
        ]
    for tensor in fresh:
        assert tensor.dtype == dtype
        if dtype.is_floating_point:
            assert tensor.double().isnan().all()
        elif dtype != torch.bool:
            assert (tensor == torch.tensor([0x7F] * dtype.itemsize, dtype=torch.uint8).view(dtype)).all()


def test_poison_shows_a_read_of_unwritten_output_and_ends_with_the_context() -> None:
    def rows_of_two(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(3)
        out[:2] = x
        return out

    allocators = [torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty]
    with asserts.poisoned_allocators():
        with asserts.poisoned_allocators():
            assert torch.empty(1).isnan().all()
        with pytest.raises(AssertionError, match=r"first at \[2\]: got nan"):
            asserts.assert_equal("rows", rows_of_two(torch.ones(2)), torch.tensor([1.0, 1.0, 0.0]))
        assert torch.empty(2, requires_grad=True).isnan().all()
        assert torch.empty(2, out=torch.ones(4)[:2]).isnan().all()
        assert torch.empty(2, device="meta").is_meta
        assert torch.empty(2, dtype=torch.complex64).isnan().all()
    assert [torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty] == allocators


# Routings

DIMS = [(64, 16, 2, 4), (256, 64, 8, 8), (1000, 96, 6, 2), (512, 128, 8, 1)]  # S, E, K, R


def check_ids(ids: list[torch.Tensor], S: int, E: int, K: int, R: int, *, distinct: bool = True) -> None:
    assert len(ids) == R
    for ids_SK in ids:
        assert ids_SK.shape == (S, K)
        assert ids_SK.dtype == torch.int32
        assert ids_SK.is_contiguous()
        assert 0 <= ids_SK.min() <= ids_SK.max() < E
        if distinct:
            assert (ids_SK.sort(dim=1).values.diff(dim=1) > 0).all()


def same_ids(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("target", [1.0, 2.5, 5.0])
def test_lognormal_reaches_its_maxvio(dims: tuple[int, int, int, int], target: float) -> None:
    S, E, K, R = dims
    ids = routing.lognormal(*dims, maxvio=target, seed=3)
    check_ids(ids, *dims)
    assert abs(routing.maxvio(ids, E) - target) <= max(routing.TOLERANCE * target, E / (R * S * K))
    assert same_ids(ids, routing.lognormal(*dims, maxvio=target, seed=3))
    assert not same_ids(ids, routing.lognormal(*dims, maxvio=target, seed=4))
    assert R == 1 or not torch.equal(ids[0], ids[1])


def test_lognormal_reaches_the_largest_maxvio_and_refuses_what_is_out_of_reach() -> None:
    ids = routing.lognormal(64, 16, 2, 4, maxvio=7.0, seed=0)
    assert routing.maxvio(ids, 16) > 6.9
    with pytest.raises(ValueError, match=r"between 0 and E / K - 1 = 7, got 7.5"):
        routing.lognormal(64, 16, 2, 4, maxvio=7.5, seed=0)
    with pytest.raises(ValueError, match=r"maxvio=0.01 is out of reach"):
        routing.lognormal(64, 16, 2, 4, maxvio=0.01, seed=0)


@pytest.mark.parametrize("dims", DIMS[:3], ids=str)
@pytest.mark.parametrize(
    ("imbalance", "hot"),
    [(0.5, 1000), (1.0, 2), (1.25, 2), (1.25, 1000), (1.9, 8), (1.9, 1000)],  # 1000: all experts of the rank
)
def test_hot_rank_reaches_its_imbalance(dims: tuple[int, int, int, int], imbalance: float, hot: int) -> None:
    S, E, K, R = dims
    L = E // R
    ids = routing.hot_rank(*dims, imbalance, hot, seed=1)
    check_ids(ids, *dims)
    load_E = routing.expert_load(ids, E)
    assert abs(load_E[:L].sum() / (S * K) - imbalance) <= max(routing.TOLERANCE * imbalance, 1 / (S * K))
    if imbalance > 1.5:
        num_hot = min(hot, L)
        assert load_E[:num_hot].min() > load_E[num_hot:].max()
        assert routing.rank_imbalance(ids, E) == pytest.approx((load_E[:L].sum() / (S * K)).item())


def test_hot_rank_refuses_what_is_out_of_reach() -> None:
    with pytest.raises(ValueError, match=r"imbalance=3 is out of reach: the nearest that was found is 2\.\d+"):
        routing.hot_rank(64, 16, 2, 4, 3, hot_experts=1)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_plain_routings_are_what_they_say(dims: tuple[int, int, int, int]) -> None:
    S, E, K, R = dims
    L = E // R
    check_ids(routing.uniform(*dims, seed=0), *dims)
    assert routing.rank_imbalance(routing.uniform(*dims, seed=0), E) < 1.2
    check_ids(routing.balanced(*dims), *dims)
    load_E = routing.expert_load(routing.balanced(*dims), E)
    assert load_E.max() - load_E.min() <= 1
    one = routing.all_to_one_expert(*dims, expert=5)
    check_ids(one, *dims, distinct=False)
    assert routing.expert_load(one, E)[5] == R * S * K
    for r, (local, remote) in enumerate(zip(routing.all_local(*dims), routing.all_remote(*dims), strict=True)):
        assert (local // L == r).all()
        assert (remote // L == (r + 1) % R).all()
    check_ids(routing.all_local(*dims), *dims)
    check_ids(routing.all_remote(*dims), *dims)
    twice = routing.repeated(*dims)
    check_ids(twice, *dims, distinct=False)
    assert all((ids_SK[:, 0] == ids_SK[:, 1]).all() for ids_SK in twice)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 1.0])
def test_with_mask_masks_a_fraction_of_a_copy(fraction: float) -> None:
    ids = routing.uniform(100, 16, 2, 4, seed=0)
    masked = routing.with_mask(ids, fraction, seed=1)
    for before, after in zip(ids, masked, strict=True):
        check_ids([before], 100, 16, 2, 1)
        assert (after == -1).sum() == fraction * 200
        assert torch.equal(torch.where(after == -1, before, after), before)
    assert fraction in (0, 1) or not torch.equal(masked[0] == -1, masked[1] == -1)
    assert torch.equal(routing.with_mask(ids[0], fraction, seed=1), masked[0])
    assert routing.expert_load(masked, 16).sum() == 4 * round((1 - fraction) * 200)


def test_routings_refuse_impossible_sizes_and_allow_no_tokens() -> None:
    assert [ids_SK.shape for ids_SK in routing.uniform(0, 16, 2, 4, seed=0)] == [(0, 2)] * 4
    with pytest.raises(ValueError, match="E a multiple of R"):
        routing.uniform(8, 10, 2, 4, seed=0)
    with pytest.raises(ValueError, match="K <= E / R, got K=8, E / R=4"):
        routing.all_local(8, 16, 8, 4)
    with pytest.raises(ValueError, match="fraction must be between 0 and 1"):
        routing.with_mask(torch.zeros(2, 2, dtype=torch.int32), 1.5)
