"""MoonEP and its peers in one process group: the same routings, the same SMs, samples in turn, each checked first."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moonep import environment
from moonep.bench.hosts import ERROR, GATE, SKIPPED, GateError, Hosts, RowFailed
from moonep.bench.measure import Report, choose_device
from moonep.bench.peers import PEERS, Batch, MoonEP, Peer, World, column_sums
from moonep.bench.routings import Routing
from moonep.bench.settings import EAGER, LOCAL_ALL, STRICT
from moonep.bench.timing import Stopwatch, quantiles
from moonep.testing import routing as routings
from moonep.testing.ranks import RankFailure, Ranks, send

Line = dict[str, Any]

OPERATIONS = ("dispatch", "combine")
PAYLOAD_SEED = 7
TOLERANCE = 0.03  # bf16: rounded once a hop, and by some peers at every sum
_KEYS = {GATE: "gate", ERROR: "error", SKIPPED: "unavailable"}
_LIMIT_S = 240.0  # for a start; one that is reached costs the peer that the ranks are busy with
_BUSY = "busy"  # a message, not a line: which peer the ranks are about to use; who is to blame if they die


@dataclass(frozen=True)
class Comparison:
    """What to compare. Letters: `moonep.dims`.

    Attributes:
        routings: of all tokens.
        peers: names in `PEERS`.
        sms: SMs of each.
        device: "cuda" or "cpu".
        samples: of each operation.
        peer_timeout_s: how long a rank waits for another.
    """

    S: int
    H: int
    K: int
    E: int
    routings: tuple[Routing, ...]
    peers: tuple[str, ...] = tuple(PEERS)
    sms: int | None = 32
    device: str = "cuda"
    samples: int = 21
    peer_timeout_s: float = 40.0

    def line(self, R: int, name: str, operation: str, routing: Routing) -> Line:
        """What a line says before it is measured."""
        mine = name.startswith("moonep")
        return {
            "R": R, "backend": self.device, "S": self.S, "H": self.H, "K": self.K, "E": self.E, "F": None,
            "sms": self.sms, "budget": LOCAL_ALL if name == "moonep_local_all" else STRICT, "balance": "exact",
            "cold": False, "peer": "moonep" if mine else name, "operation": operation, "mode": EAGER,
            "tokens": self.S, "routing": routing.record(),
        }  # fmt: skip


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
    world = World(c.S, c.H, c.K, c.E, R, rank, c.sms, device, c.peer_timeout_s)
    peers: dict[str, Peer] = {}
    for name in c.peers:
        tell({_BUSY: name})
        try:
            peers[name] = hosts.attempt(lambda name=name: PEERS[name](world))  # type: ignore[misc]
        except RowFailed as failure:
            _tell_failure(c, R, name, c.routings, failure, tell)
    align = next((peer.buffer.barrier for peer in peers.values() if isinstance(peer, MoonEP)), None)
    stopwatch = Stopwatch(device, hosts, align)
    for routing in c.routings:
        try:
            _compare_routing(c, world, routing, peers, hosts, stopwatch, tell)
        except RowFailed as failure:
            for name in peers:
                _tell_failure(c, R, name, [routing], failure, tell)
    for name, peer in peers.items():
        tell({_BUSY: name})
        peer.close()


def _compare_routing(
    c: Comparison, world: World, routing: Routing, peers: dict[str, Peer], hosts: Hosts, watch: Stopwatch, tell: Report
) -> None:
    batch, about = hosts.attempt(lambda: _make_batch(world, routing, hosts))
    calls: dict[str, Callable[[], Any]] = {}
    rows: dict[str, int] = {}
    for name, peer in peers.items():
        tell({_BUSY: name})
        try:
            sent, rows[name] = hosts.attempt(lambda peer=peer: _check(world, peer, batch, hosts))  # type: ignore[misc]
        except RowFailed as failure:
            _tell_failure(c, world.R, name, [routing], failure, tell)
            continue
        calls[f"{name} dispatch"] = lambda peer=peer: peer.dispatch(batch)  # type: ignore[misc]
        calls[f"{name} combine"] = lambda peer=peer, sent=sent: peer.combine(sent)  # type: ignore[misc]
    tell({_BUSY: None})
    try:
        times = hosts.attempt(lambda: watch.alternate(calls, c.samples))
    except RowFailed as failure:
        for name in rows:
            _tell_failure(c, world.R, name, [routing], failure, tell)
        return
    for call, samples_us in times.items():
        name, operation = call.split()
        clock = "device events" if watch.cuda else "wall clock"
        line = {**c.line(world.R, name, operation, routing), **about, "rows": rows[name], "clock": clock}
        tell({**line, **quantiles(samples_us)})


def _make_batch(world: World, routing: Routing, hosts: Hosts) -> tuple[Batch, Line]:
    """This rank's input; rank 0 makes the routing for all, so that there is one."""
    w = world
    topks = hosts.exchange(routing.make(w.S, w.E, w.K, w.R, w.device) if w.rank == 0 else None)[0]
    generator = torch.Generator(w.device).manual_seed(PAYLOAD_SEED + w.rank)
    x = torch.randn(w.S, w.H, device=w.device, generator=generator).to(w.dtype)
    weights = torch.rand(w.S, w.K, device=w.device, generator=generator)
    about = {
        "maxvio": round(routings.maxvio(topks, w.E), 4),
        "rank_imbalance": round(routings.rank_imbalance(topks, w.E), 4),
    }
    ids = topks[w.rank].to(w.device)
    return Batch(x, weights, ids.long(), ids), about


def _check(world: World, peer: Peer, batch: Batch, hosts: Hosts) -> tuple[Any, int]:
    """Dispatch and combine once. -> what dispatch returned, and the rows of the rank with most

    All ranks together hold K copies of each token (their sums agree to the last bits), and a token's rows, summed where
    it came from, are K times the token.
    """
    sent = peer.dispatch(batch)
    rows = peer.rows(sent)
    count = len(rows)
    got = sum(hosts.exchange(column_sums(rows)))
    want = sum(hosts.exchange(world.K * column_sums(batch.x)))
    scale = sum(hosts.exchange(world.K * column_sums(batch.x.abs())))
    assert isinstance(got, Tensor) and isinstance(want, Tensor) and isinstance(scale, Tensor)
    if float(((got - want).abs() / scale).max()) > 1e-9 or not bool(got.isfinite().all()):
        raise GateError("dispatch: the rows that arrived are not K copies of each token")
    output = peer.combine(sent)
    wanted = world.K * batch.x.float()
    error = float(((output.float() - wanted).abs() / wanted.abs().clamp(min=0.1)).max())
    if not error <= TOLERANCE:
        raise GateError(f"combine: differs from K times the token by {error:.3g}, allowed {TOLERANCE}")
    return sent, max(hosts.exchange(count))


def _tell_failure(
    c: Comparison, R: int, name: str, routings: Sequence[Routing], failure: RowFailed, tell: Report
) -> None:
    for routing in routings:
        for operation in OPERATIONS:
            tell({**c.line(R, name, operation, routing), _KEYS[failure.kind]: str(failure)})


def _say_nothing(line: Line) -> None:
    pass


def run_comparison(comparison: Comparison, R: int, timeout_s: float, on_line: Callable[[Line], None]) -> None:
    """Compare on R processes of this machine. A peer that kills or hangs its ranks is named and left out.

    Args:
        comparison: what to compare.
        R: ranks.
        timeout_s: for everything.
        on_line: takes the lines.
    """
    deadline = time.monotonic() + timeout_s
    peers, left = list(comparison.peers), list(comparison.routings)
    world = "nccl" if comparison.device == "cuda" else "gloo"
    with Ranks(R, backend=world, env=environment.WITHOUT_MULTICAST, timeout_s=min(timeout_s, 120.0)) as ranks:
        number = 0
        while peers and left:
            seen: list[Line] = []
            busy: list[str | None] = [None]
            part = _part(comparison, peers, left)
            try:
                limit = min(max(deadline - time.monotonic(), 1.0), _LIMIT_S)
                ranks.run(compare, part, number, timeout_s=limit, on_message=_taker(on_line, seen, busy))
                return
            except RankFailure as failure:
                number += 1
                done = {str(line["routing"]) for line in seen if "median_us" in line}
                left = [routing for routing in left if str(routing.record()) not in done]
                peers = [name for name in peers if not _is_unavailable(comparison, R, name, seen)]
                text = f"the ranks did not survive it: {str(failure.outcomes[next(iter(failure.errors))].report)[:300]}"
                culprit = busy[0]
                failed = [culprit] if culprit is not None and time.monotonic() < deadline else list(peers)
                for name in failed:
                    for routing in left:
                        for operation in OPERATIONS:
                            on_line({**comparison.line(R, name, operation, routing), "error": text})
                    peers.remove(name)


def _is_unavailable(comparison: Comparison, R: int, name: str, seen: list[Line]) -> bool:
    """Whether a peer has said that it does not exist here."""
    mine = comparison.line(R, name, OPERATIONS[0], comparison.routings[0])
    said = [(line["peer"], line["budget"]) for line in seen if "unavailable" in line]
    return (mine["peer"], mine["budget"]) in said


def _part(comparison: Comparison, peers: Sequence[str], routings: Sequence[Routing]) -> Comparison:
    return replace(comparison, peers=tuple(peers), routings=tuple(routings))


def _taker(on_line: Callable[[Line], None], seen: list[Line], busy: list[str | None]) -> Callable[[int, Line], None]:
    """Passes lines on; remembers which peer the ranks are busy with."""

    def take(rank: int, message: Line) -> None:
        if _BUSY in message:
            busy[0] = message[_BUSY]
        else:
            seen.append(message)
            on_line(message)

    return take


def run_launched(comparison: Comparison, on_line: Callable[[Line], None]) -> None:
    """The same as one rank of a world that torchrun has started. Lines come on rank 0."""
    os.environ.update(environment.WITHOUT_MULTICAST)
    cuda = comparison.device == "cuda"
    device = choose_device(comparison.device, int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(seconds=120), device_id=device if cuda else None
    )
    try:
        compare(comparison, 0, report=lambda line: None if _BUSY in line else on_line(line))
    finally:
        dist.destroy_process_group()
