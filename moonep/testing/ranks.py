"""Processes that play ranks on one machine, so that a distributed test is an ordinary function call.

    def mean_of_ranks(x):                                  # at the top level of a module: the ranks import it
        dist.all_reduce(x)
        return x / dist.get_world_size()

    with Ranks(4) as ranks:                                # persistent: start them once, call them often
        results = ranks.run(mean_of_ranks, PerRank([torch.ones(3) * r for r in range(4)]))

Every rank is a process of its own, inside an initialised `torch.distributed` world. They are forked from a server that
has already imported torch (multiprocessing's "forkserver"), which makes starting eight of them a matter of 0.2 s.

What can go wrong is part of the interface. An exception of a rank arrives in the parent as the same exception, a rank
that dies is named with its signal, a rank that hangs with its Python stack; nothing that a rank does hangs the parent.
After the first failure the others get `grace_s` to finish or to fail by themselves, because what they say about their
peer is information. Then all processes go, and the next `run` starts fresh ones.

Values travel by pickle through a pipe, tensors as contiguous CPU copies: nothing stays shared between processes.
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist

_MESSAGE, _OUTCOME = b"M", b"O"  # the first byte of what a rank sends
_EXIT_S = 2.0  # for a rank that was told to leave
_STACK_S = 1.0  # for a rank that was asked for its stack


class PerRank(list):
    """An argument that differs by rank: rank r is called with element r."""


class RankDied(RuntimeError):
    """A rank's process ended without an answer. `exitcode` is negative (minus the signal) if a signal ended it."""

    def __init__(self, exitcode: int | None):
        how = f"exited with code {exitcode}" if exitcode is not None else "closed its connection to the parent"
        if exitcode is not None and exitcode < 0:
            how = f"was killed by {_signal_name(-exitcode)}"
        super().__init__(f"the process {how}")
        self.exitcode = exitcode

    def __reduce__(self) -> tuple:
        return type(self), (self.exitcode,)


class RankTimeout(TimeoutError):
    """A rank did not answer in time and was killed. `stack` is where its Python threads were."""

    def __init__(self, message: str, stack: str):
        super().__init__(message)
        self.stack = stack

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.stack)


@dataclass(frozen=True)
class Outcome:
    """What became of one rank's call.

    Attributes:
        value: what the function returned, if it did.
        error: what it raised; `RankDied` or `RankTimeout` if it never answered; None if it raised something that
            does not survive pickling (`report` tells).
        report: the error in words, with its traceback or stack; None if the function returned.
    """

    value: Any = None
    error: BaseException | None = None
    report: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.report is None


class RankFailure(RuntimeError):
    """At least one rank failed. The message names every failed rank, the first to fail first, with its traceback.

    Attributes:
        outcomes: what became of every rank, in the order in which they answered.
        errors: the error of every failed rank; None where it could not be pickled.
    """

    def __init__(self, outcomes: dict[int, Outcome]):
        super().__init__(outcomes)
        self.outcomes = outcomes
        self.errors = {rank: outcome.error for rank, outcome in outcomes.items() if not outcome.ok}

    def __str__(self) -> str:
        by_report: dict[str, list[str]] = {}  # ranks that failed alike are told once
        for rank in self.errors:
            by_report.setdefault(str(self.outcomes[rank].report).rstrip(), []).append(str(rank))
        parts = [f"{len(self.errors)} of {len(self.outcomes)} ranks failed, in this order:"]
        for report, ranks in by_report.items():
            parts.append(f"--- rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}: {report}")
        return "\n".join(parts)


class Ranks:
    """A world of R rank processes on this machine, reused by every `run` until one fails or `close`.

    Scripts that use it need the usual `if __name__ == "__main__":`, since the ranks import the script. Ranks see the
    environment that the parent has when they start, plus `env`, plus what `torchrun` would set. They ignore Ctrl-C
    (the parent ends them), die with the parent, and cannot start `multiprocessing` children of their own.

    Args:
        R: number of ranks.
        backend: of `torch.distributed`; with "nccl" rank r uses GPU r.
        timeout_s: default limit of one `run`, and of starting the ranks.
        threads: `torch.set_num_threads` of each rank. More than the machine has cores for slows everything down.
        env: more environment variables. Those that are read when torch is imported come too late here.
        grace_s: how long the others may take to finish once one rank has failed.
        preload: modules that the fork server imports once for all ranks, besides torch. Only the first start in a
            process can choose them. An optimizer's first step imports "torch._dynamo": 2 s a rank unless preloaded.
        start_method: "forkserver", or "spawn": ranks that share nothing with what has been imported here, for variables
            in `env` that a module reads when it is imported. Starting takes seconds.
    """

    def __init__(
        self,
        R: int,
        *,
        backend: str = "gloo",
        timeout_s: float = 120.0,
        threads: int = 1,
        env: Mapping[str, str] | None = None,
        grace_s: float = 5.0,
        preload: Sequence[str] = (),
        start_method: str = "forkserver",
    ):
        if R < 1:
            raise ValueError(f"R must be at least 1, got {R}")
        self.R, self.backend, self.timeout_s, self.threads, self.grace_s = R, backend, timeout_s, threads, grace_s
        self._env, self._preload, self._start_method = dict(env or {}), list(preload), start_method
        self._ranks: list[_Rank] = []
        self._store: dist.Store | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
        on_message: Callable[[int, Any], None] | None = None,
        raise_errors: bool = True,
    ) -> list[Any]:
        """Calls `fn(*args)` on every rank at once.

        Args:
            fn: a function that the ranks can import: at the top level of a module.
            *args: picklable; a `PerRank` gives each rank its own.
            timeout_s: how long until ranks that have not answered are killed; the default is the constructor's.
            on_message: called here as `on_message(rank, message)` for each `send(message)` of a rank.
            raise_errors: False returns an `Outcome` for each rank instead of raising, for tests that expect a failure.

        Returns:
            The results (or the `Outcome`s) in rank order.

        Raises:
            RankFailure: if any rank raised, died or did not answer in time.
            TypeError: if `fn` or an argument cannot travel to another process.
        """
        tasks = _pack_tasks(fn, args, self.R)
        try:
            if not all(rank.alive for rank in self._ranks):
                self._stop(politely=False)
            if not self._ranks:
                self._start()
            for rank, task in zip(self._ranks, tasks, strict=True):
                rank.put(task)
            outcomes = self._collect(self.timeout_s if timeout_s is None else timeout_s, on_message)
        except BaseException:  # Ctrl-C, or an error of on_message: the ranks are in the middle of something
            self._stop(politely=False)
            raise
        failed = not all(outcome.ok for outcome in outcomes.values())
        if failed:
            self._stop(politely=False)
        if failed and raise_errors:
            raise RankFailure(outcomes)
        return [outcomes[r] if not raise_errors else outcomes[r].value for r in range(self.R)]

    def close(self) -> None:
        """Ends the processes. A later `run` would start new ones."""
        self._stop(politely=True)

    def _start(self) -> None:
        context = multiprocessing.get_context(self._start_method)
        if self._start_method == "forkserver":
            # pytest because test modules import it. Without effect if the process already has a fork server.
            context.set_forkserver_preload(
                ["torch", "torch.distributed", *(["pytest"] if "pytest" in sys.modules else []), *self._preload]
            )
        self._store, port = _serve_store()
        world = _World(self.R, self.backend, self.threads, port, {**os.environ, **self._env})
        for r in range(self.R):  # one by one, so that a failure here leaves nothing that _stop does not know
            self._ranks.append(_Rank.start(context, r, world))
        outcomes = self._collect(self.timeout_s, None)
        if not all(outcome.ok for outcome in outcomes.values()):
            raise RankFailure(outcomes)

    def _collect(self, timeout_s: float, on_message: Callable[[int, Any], None] | None) -> dict[int, Outcome]:
        """Waits for one outcome of every rank; returns them in the order of arrival."""
        outcomes: dict[int, Outcome] = {}
        deadline, limit = time.monotonic() + timeout_s, f"within {timeout_s:g} s"
        graced = False
        while pending := [rank for rank in self._ranks if rank.index not in outcomes]:
            waitables = [waitable for rank in pending for waitable in rank.waitables]
            if not connection.wait(waitables, max(0.0, deadline - time.monotonic())):
                return outcomes | _kill_stuck(pending, f"the rank did not answer {limit}")
            for rank in pending:
                outcome = rank.listen(on_message)
                if outcome is not None:
                    outcomes[rank.index] = outcome
            grace_end = time.monotonic() + self.grace_s
            if not graced and not all(outcome.ok for outcome in outcomes.values()):
                graced = True
                if grace_end < deadline:
                    deadline, limit = grace_end, f"within {self.grace_s:g} s after the first failure"
        return outcomes

    def _stop(self, politely: bool) -> None:
        """Ends all processes, by their own exit if they are idle, else by SIGKILL. Leaves no zombie, no open pipe."""
        for rank in self._ranks:
            rank.dismiss(politely)
        deadline = time.monotonic() + _EXIT_S
        for rank in self._ranks:
            rank.bury(max(0.0, deadline - time.monotonic()))
        self._ranks, self._store = [], None


def run_ranks(
    fn: Callable[..., Any],
    R: int,
    *args: Any,
    on_message: Callable[[int, Any], None] | None = None,
    raise_errors: bool = True,
    **options: Any,
) -> list[Any]:
    """Starts R ranks, calls `fn(*args)` on each, ends them. `options` are those of `Ranks`, the rest as `Ranks.run`."""
    with Ranks(R, **options) as ranks:
        return ranks.run(fn, *args, on_message=on_message, raise_errors=raise_errors)


def send(message: Any) -> None:
    """Inside a rank: passes `message` (picklable) to the parent's `on_message(rank, message)`."""
    if _parent is None:
        raise RuntimeError("send() works inside a function that Ranks.run or run_ranks called, not in the parent")
    _parent.put(_MESSAGE + _pack(message))


class _Pickler(pickle.Pickler):
    """Pickle by value. Torch's own pickling writes the whole storage of a view and cannot read float8 back."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout != torch.strided or value.is_quantized or value.is_meta:
            return NotImplemented
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        data = ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.numel() else b""
        return _tensor_from_bytes, (data, value.dtype, tuple(value.shape), value.requires_grad)


def _tensor_from_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)
    return tensor.requires_grad_(requires_grad)


def _pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _pack_tasks(fn: Callable[..., Any], args: tuple[Any, ...], R: int) -> list[bytes]:
    """Returns the task of each rank: the pickled list of fn and its arguments, each pickled by itself."""
    _check_importable(fn)
    parts = [[_pack_named("fn", fn)] * R]
    for i, arg in enumerate(args):
        if not isinstance(arg, PerRank):
            parts.append([_pack_named(f"argument {i}", arg)] * R)
        elif len(arg) == R:
            parts.append([_pack_named(f"argument {i} of rank {r}", arg[r]) for r in range(R)])
        else:
            raise ValueError(f"argument {i} is a PerRank of {len(arg)} values, expected one for each of {R} ranks")
    return [_pack(list(task)) for task in zip(*parts, strict=True)]


def _pack_named(name: str, value: Any) -> bytes:
    try:
        return _pack(value)
    except Exception as error:
        raise TypeError(f"{name} ({type(value).__name__}) cannot be pickled for the ranks: {error}") from error


def _check_importable(fn: Callable[..., Any]) -> None:
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    if "<lambda>" in name or "<locals>" in name:
        raise TypeError(
            f"fn must be a function at the top level of a module, because the ranks import it; got {name!r}. "
            "Move it there, and pass what it captured as arguments"
        )
    if getattr(fn, "__module__", None) == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise TypeError(f"fn must come from a file that the ranks can import; {name!r} was defined interactively")


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class _World:
    """What the processes of one world have in common."""

    size: int
    backend: str
    threads: int
    port: int
    environment: dict[str, str]

    def environment_of(self, rank: int) -> dict[str, str]:
        """Returns the environment of a rank: that of the parent, and what `torchrun` sets."""
        torchrun = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": self.size,
            "LOCAL_WORLD_SIZE": self.size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self.port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent serves the store, also for a second init_process_group
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        # The loopback interface works on a machine without a network, too.
        loopbacks = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        gloo = {"GLOO_SOCKET_IFNAME": loopbacks[0]} if loopbacks else {}
        return gloo | self.environment | {key: str(value) for key, value in torchrun.items()}


def _serve_store() -> tuple[dist.Store, int]:
    """Returns a store that the ranks meet in, served by this process, and its port.

    It outlives any rank, so a dead rank 0 does not hide who died. The socket is bound before its port is known to
    anyone, so no one else can take the port, and it is open to this machine only.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


@dataclass
class _Rank:
    """The parent's handle of one rank process."""

    index: int
    process: Any
    link: connection.Connection
    stacks: connection.Connection  # a pipe that the rank's faulthandler writes to: no file to clean up
    _hung_up: bool = False

    @classmethod
    def start(cls, context: Any, index: int, world: _World) -> _Rank:
        """Starts the process; its first outcome says whether it joined the world."""
        link, rank_link = context.Pipe(duplex=True)
        stacks, rank_stacks = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main, args=(index, world, rank_link, rank_stacks), name=f"rank-{index}", daemon=True
        )
        process.start()
        rank_link.close()
        rank_stacks.close()
        os.set_blocking(stacks.fileno(), False)
        return cls(index, process, link, stacks)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.is_alive()

    @property
    def waitables(self) -> list[Any]:
        """What becomes ready when the rank speaks or dies. (A child of the rank may keep its link open.)"""
        return [self.link, self.process.sentinel]

    def put(self, task: bytes) -> None:
        """Sends a task. That the rank is dead is noticed by `listen`."""
        try:
            self.link.send_bytes(task)
        except OSError:
            self._hung_up = True

    def listen(self, on_message: Callable[[int, Any], None] | None) -> Outcome | None:
        """Passes on all messages that have arrived; returns the outcome if that has arrived, or if the rank is dead."""
        dead = not self.alive  # asked first: what a dead rank has sent is all there already
        for kind, payload in self._frames():
            if kind == _MESSAGE and on_message is not None:
                on_message(self.index, pickle.loads(payload))
            elif kind == _OUTCOME:
                return _unpack_outcome(payload)
        if not dead and not self._hung_up:
            return None
        self.process.join(_EXIT_S)
        error = RankDied(self.process.exitcode)
        return Outcome(error=error, report=f"RankDied: {error}\n{self.read_stack()}")

    def _frames(self) -> Iterator[tuple[bytes, bytes]]:
        try:
            while self.link.poll():
                frame = self.link.recv_bytes()
                yield frame[:1], frame[1:]
        except (EOFError, OSError):
            self._hung_up = True

    def ask_for_stack(self) -> None:
        """Makes the rank's faulthandler write all stacks, whatever the rank is stuck in."""
        if self.alive:
            os.kill(self.process.pid, signal.SIGUSR1)

    def read_stack(self) -> str:
        """Returns what the rank's faulthandler wrote, without the thread that only waits for the parent's end."""
        data = b""
        try:
            while part := os.read(self.stacks.fileno(), 65536):
                data += part
        except BlockingIOError:
            pass
        threads = data.decode(errors="replace").split("\n\n")
        threads = [thread for thread in threads if f"in {_exit_with_parent.__name__}\n" not in f"{thread}\n"]
        return "\n\n".join(_without_machinery(thread) for thread in threads)

    def kill(self) -> None:
        """SIGKILL: no handler, no C call that holds the interpreter can delay it."""
        self.process.kill()

    def dismiss(self, politely: bool) -> None:
        """Tells an idle rank to leave: with an empty task to leave its world in order, or by hanging up."""
        if politely:
            self.put(b"")
        self.link.close()

    def bury(self, timeout_s: float) -> None:
        """Waits for the process to end, kills it if it does not, and frees what the parent holds of it."""
        self.process.join(timeout_s)
        if self.alive:
            self.kill()
            self.process.join()
        self.process.close()
        self.stacks.close()


def _without_machinery(stack: str) -> str:
    """Ends a stack (innermost call first) above the frames of this module that called the rank's function."""
    lines = stack.split("\n")
    machinery = [i for i, line in enumerate(lines) if __file__ in line and line.endswith(f"in {_perform.__name__}")]
    return "\n".join(lines[: machinery[0]] if machinery else lines)


def _unpack_outcome(payload: bytes) -> Outcome:
    try:
        return pickle.loads(payload)
    except Exception as error:
        return Outcome(error=error, report=f"the rank's result cannot be unpickled: {type(error).__name__}: {error}")


def _kill_stuck(ranks: list[_Rank], message: str) -> dict[int, Outcome]:
    """Kills ranks that did not answer; returns where they were."""
    for rank in ranks:
        rank.ask_for_stack()
    deadline = time.monotonic() + _STACK_S
    for rank in ranks:
        connection.wait([rank.stacks], max(0.0, deadline - time.monotonic()))
    time.sleep(0.05)  # to write the rest
    outcomes = {}
    for rank in ranks:
        rank.kill()
        rank.process.join()
        error = RankTimeout(message, rank.read_stack() or "(no stack: it was not running Python code)")
        outcomes[rank.index] = Outcome(error=error, report=f"RankTimeout: {message}. It was in:\n{error.stack}")
    return outcomes


class _Parent:
    """A rank's line to its parent. Any thread of the rank may use it, hence the lock."""

    def __init__(self, link: connection.Connection):
        self._link, self._lock = link, threading.Lock()

    def put(self, frame: bytes) -> None:
        with self._lock:
            self._link.send_bytes(frame)

    def tasks(self) -> Iterator[bytes]:
        """Yields tasks until the parent hangs up; an empty one asks for an orderly end."""
        try:
            while True:
                yield self._link.recv_bytes()
        except (EOFError, OSError):
            return


# The one global: `send` is called from anywhere below a rank's function, and a process is one rank or none.
_parent: _Parent | None = None


def _rank_main(rank: int, world: _World, link: connection.Connection, stacks: connection.Connection) -> None:
    """The life of a rank process: joins the world, then answers tasks. Every answer is one outcome."""
    global _parent
    faulthandler.enable(stacks.fileno())
    faulthandler.register(signal.SIGUSR1, stacks.fileno(), all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # so that a killed rank's prints are seen
    _parent = _Parent(link)
    _parent.put(_OUTCOME + _attempt(_join_world, rank, world))
    for task in _parent.tasks():
        if not task:
            if dist.is_initialized():
                dist.destroy_process_group()
            return
        _parent.put(_OUTCOME + _attempt(_perform, task))


def _exit_with_parent() -> None:
    """Ends this process when the parent is gone, even if by SIGKILL. (The fork server lives as long as any of us.)"""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _join_world(rank: int, world: _World) -> None:
    os.environ.clear()  # the fork server's, from when it started
    os.environ.update(world.environment_of(rank))
    torch.set_num_threads(world.threads)
    device = torch.device("cuda", rank) if "nccl" in world.backend else None
    if device is not None:
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", world.port, is_master=False, wait_for_workers=False)
    dist.init_process_group(world.backend, store=store, rank=rank, world_size=world.size, device_id=device)


def _perform(task: bytes) -> Any:
    fn_bytes, *arg_bytes = pickle.loads(task)
    try:
        fn = pickle.loads(fn_bytes)
    except (ImportError, AttributeError) as error:
        hint = "it must be at the top level of a module on sys.path"
        raise TypeError(f"the rank cannot import fn ({error}): {hint}") from error
    return fn(*map(pickle.loads, arg_bytes))


def _attempt(call: Callable[..., Any], *args: Any) -> bytes:
    """Returns the pickled outcome of a call."""
    try:
        value = call(*args)
    except BaseException as error:  # SystemExit too: a rank that leaves early has failed
        return _pack_error(error)
    try:
        return _pack(Outcome(value))
    except Exception as error:
        return _pack_error(TypeError(f"the result ({type(value).__name__}) cannot be pickled for the parent: {error}"))


def _pack_error(error: BaseException) -> bytes:
    calls = error.__traceback__
    while calls is not None and calls.tb_next is not None and calls.tb_frame.f_code.co_filename == __file__:
        calls = calls.tb_next  # not the frames of this module that called the rank's function
    report = "".join(traceback.format_exception_only(error) + traceback.format_exception(type(error), error, calls))
    # Both ways: an exception whose __init__ takes other arguments than `args` pickles, but cannot be read back.
    try:
        packed = _pack(Outcome(error=error, report=report))
        pickle.loads(packed)
        return packed
    except Exception:
        return _pack(Outcome(report=report))
