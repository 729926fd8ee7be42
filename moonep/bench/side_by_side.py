"""MoonEP and its peers in one process group: the same routings, the same SMs, samples in turn, each checked first."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moonep import environment
from moonep.bench.comparison import Checked, Comparison
from moonep.bench.hosts import ERROR, GATE, SKIPPED, Hosts, RowFailed
from moonep.bench.measure import Report, choose_device
from moonep.bench.routings import Routing
from moonep.bench.timing import Stopwatch, quantiles
from moonep.testing.ranks import RankFailure, Ranks, send

Line = dict[str, Any]

_KEYS = {GATE: "gate", ERROR: "error", SKIPPED: "unavailable"}
_LIMIT_S = 240.0  # for a start; one that is reached costs the peer that the ranks are busy with
_LEAST_S = 5.0  # with less time left, a comparison is not begun
_BUSY = "busy"  # a message, not a line: which peer the ranks are about to use; who is to blame if they die


def compare(comparison: Comparison, number: int, report: Report | None = None) -> None:
    """One rank's part. Collective.

    Args:
        comparison: what to compare.
        number: different for each call in a world.
        report: takes the lines, on rank 0; None: they go to the parent process.
    """
    c, rank, R = comparison, dist.get_rank(), dist.get_world_size()
    device = choose_device(c.device, rank)
    if device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=device))  # peers use the communicator that this makes
    hosts = Hosts(rank, R, 3 * c.peer_timeout_s, f"side by side {number}")
    tell = (report or send) if rank == 0 else _say_nothing
    tell({_BUSY: None})
    try:
        world = hosts.attempt(lambda: c.open(rank, R, device))
    except RowFailed as failure:
        for name in c.peers:
            _tell_failure(c, R, name, c.routings, failure, tell)
        return
    peers: dict[str, Any] = {}
    for name in c.peers:
        tell({_BUSY: name})
        try:
            peers[name] = hosts.attempt(lambda name=name: c.open_peer(name, world))  # type: ignore[misc]
        except RowFailed as failure:
            _tell_failure(c, R, name, c.routings, failure, tell)
    stopwatch = Stopwatch(device, hosts, c.barrier(world, peers))
    for routing in c.routings:
        try:
            _compare_routing(c, world, routing, peers, hosts, stopwatch, tell)
        except RowFailed as failure:
            for name in peers:
                _tell_failure(c, R, name, [routing], failure, tell)
    for name, peer in peers.items():
        tell({_BUSY: name})
        peer.close()
    tell({_BUSY: None})
    c.close(world)


def _compare_routing(
    c: Comparison, world: Any, routing: Routing, peers: dict[str, Any], hosts: Hosts, watch: Stopwatch, tell: Report
) -> None:
    batch, about = hosts.attempt(lambda: c.make_batch(world, routing, hosts))
    checked: dict[str, Checked] = {}
    for name, peer in peers.items():
        tell({_BUSY: name})
        try:
            checked[name] = hosts.attempt(lambda name=name, peer=peer: c.check(world, name, peer, batch, hosts))  # type: ignore[misc]
        except RowFailed as failure:
            _tell_failure(c, hosts.size, name, [routing], failure, tell)
    tell({_BUSY: None})
    calls = {f"{name} {op}": call for name, right in checked.items() for op, call in right.calls.items()}
    try:
        times = hosts.attempt(lambda: watch.alternate(calls, c.samples)) if calls else {}
    except RowFailed as failure:
        for name in checked:
            _tell_failure(c, hosts.size, name, [routing], failure, tell)
        return
    for name, right in checked.items():
        measured = dict(right.found)
        for operation in right.calls:
            times_us = quantiles(times[f"{name} {operation}"])
            clock = "device events" if watch.cuda else "wall clock"
            measured[operation] = {"clock": clock, **times_us, **c.derive(hosts.size, times_us["median_us"])}
        for operation, values in measured.items():
            tell({**c.line(hosts.size, name, operation, routing), **about, **right.about, **values})


def _tell_failure(
    c: Comparison, R: int, name: str, routings: Sequence[Routing], failure: RowFailed, tell: Report
) -> None:
    for routing in routings:
        for line in c.lines(R, name, routing):
            tell({**line, _KEYS[failure.kind]: str(failure)})


def _say_nothing(line: Line) -> None:
    pass


def run_comparisons(
    comparisons: Sequence[Comparison], R: int, timeout_s: float, on_line: Callable[[Line], None]
) -> None:
    """Compare on R processes of this machine. A peer that kills or hangs its ranks is named and left out.

    Args:
        comparisons: what to compare, one after the other, all on the same device.
        R: ranks.
        timeout_s: for everything.
        on_line: takes the lines.
    """
    deadline = time.monotonic() + timeout_s
    world = "nccl" if comparisons[0].device == "cuda" else "gloo"
    numbers = itertools.count()
    with Ranks(R, backend=world, env=environment.WITHOUT_MULTICAST, timeout_s=min(timeout_s, 120.0)) as ranks:
        for comparison in comparisons:
            _run(ranks, comparison, R, numbers, deadline, on_line)


def _run(
    ranks: Ranks,
    comparison: Comparison,
    R: int,
    numbers: Iterator[int],
    deadline: float,
    on_line: Callable[[Line], None],
) -> None:
    peers, left = list(comparison.peers), list(comparison.routings)
    while peers and left:
        if deadline - time.monotonic() < _LEAST_S:
            _tell_all(comparison, R, peers, left, "not begun: the time limit was reached", on_line)
            return
        seen: list[Line] = []
        busy: list[str | None] = [None]
        part = replace(comparison, peers=tuple(peers), routings=tuple(left))
        try:
            limit = min(deadline - time.monotonic(), _LIMIT_S)
            ranks.run(compare, part, next(numbers), timeout_s=limit, on_message=_taker(on_line, seen, busy))
            return
        except RankFailure as failure:
            done = {str(line["routing"]) for line in seen if _is_measured(line)}
            left = [routing for routing in left if str(routing.record()) not in done]
            peers = [name for name in peers if not _is_unavailable(comparison, R, name, seen)]
            text = f"the ranks did not survive it: {str(failure.outcomes[next(iter(failure.errors))].report)[:300]}"
            culprit = busy[0]
            failed = [culprit] if culprit is not None and time.monotonic() < deadline else list(peers)
            _tell_all(comparison, R, failed, left, text, on_line)
            peers = [name for name in peers if name not in failed]


def _is_measured(line: Line) -> bool:
    return not any(key in line for key in _KEYS.values())


def _tell_all(
    c: Comparison,
    R: int,
    peers: Sequence[str],
    routings: Sequence[Routing],
    error: str,
    on_line: Callable[[Line], None],
) -> None:
    for name in peers:
        for routing in routings:
            for line in c.lines(R, name, routing):
                on_line({**line, "error": error})


def _is_unavailable(comparison: Comparison, R: int, name: str, seen: list[Line]) -> bool:
    """Whether a peer has said that it does not exist here."""
    mine = next(comparison.lines(R, name, comparison.routings[0]))
    said = [{key: line.get(key) for key in mine} for line in seen if "unavailable" in line]
    return mine in said


def _taker(on_line: Callable[[Line], None], seen: list[Line], busy: list[str | None]) -> Callable[[int, Line], None]:
    """Passes lines on; remembers which peer the ranks are busy with."""

    def take(rank: int, message: Line) -> None:
        if _BUSY in message:
            busy[0] = message[_BUSY]
        else:
            seen.append(message)
            on_line(message)

    return take


def run_launched(comparisons: Sequence[Comparison], on_line: Callable[[Line], None]) -> None:
    """The same as one rank of a world that torchrun has started. Lines come on rank 0."""
    os.environ.update(environment.WITHOUT_MULTICAST)
    cuda = comparisons[0].device == "cuda"
    device = choose_device(comparisons[0].device, int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(seconds=120), device_id=device if cuda else None
    )
    try:
        for number, comparison in enumerate(comparisons):
            compare(comparison, number, report=lambda line: None if _BUSY in line else on_line(line))
    finally:
        dist.destroy_process_group()
