"""What is compared side by side: sizes, routings and peers; how they are opened, checked, and named in lines.

`Comparison` is that of dispatch and combine; others derive from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moonep.bench.hosts import GateError, Hosts
from moonep.bench.peers import PEERS, Batch, MoonEP, Peer, World, column_sums
from moonep.bench.routings import Routing
from moonep.bench.settings import EAGER, LOCAL_ALL, STRICT
from moonep.bench.timing import Call
from moonep.testing import routing as routings

Line = dict[str, Any]

OPERATIONS = ("dispatch", "combine")
PAYLOAD_SEED = 7
TOLERANCE = 0.03  # bf16: rounded once a hop, and by some peers at every sum


@dataclass(frozen=True)
class Checked:
    """A peer whose outputs are right.

    Attributes:
        calls: what is timed, by operation.
        about: what all its lines say beside.
        found: what the check itself measured, by operation: lines without a time.
    """

    calls: Mapping[str, Call]
    about: Line
    found: Mapping[str, Line] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """What to compare: dispatch and combine of all peers. Letters: `moonep.dims`.

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

    def operations(self, name: str) -> tuple[str, ...]:
        """What is timed of a peer."""
        return OPERATIONS

    def line(self, R: int, name: str, operation: str, routing: Routing) -> Line:
        """What a line says before it is measured."""
        mine = name.startswith("moonep")
        return {
            "R": R, "backend": self.device, "S": self.S, "H": self.H, "K": self.K, "E": self.E, "F": None,
            "sms": self.sms, "budget": LOCAL_ALL if name == "moonep_local_all" else STRICT, "balance": "exact",
            "cold": False, "peer": "moonep" if mine else name, "operation": operation, "mode": EAGER,
            "tokens": self.S, "routing": routing.record(),
        }  # fmt: skip

    def lines(self, R: int, name: str, routing: Routing) -> Iterator[Line]:
        """The lines of a peer with a routing before they are measured."""
        for operation in self.operations(name):
            yield self.line(R, name, operation, routing)

    def open(self, rank: int, R: int, device: torch.device) -> Any:
        """What all peers share. Collective, as all that follows."""
        return World(self.S, self.H, self.K, self.E, R, rank, self.sms, device, self.peer_timeout_s)

    def open_peer(self, name: str, world: Any) -> Any:
        """A peer, with a method `close`.

        Raises:
            Unavailable: it does not exist here.
        """
        return PEERS[name](world)

    def barrier(self, world: Any, peers: Mapping[str, Any]) -> Call | None:
        """Enqueues a barrier of all devices, where something has one."""
        return next((peer.buffer.barrier for peer in peers.values() if isinstance(peer, MoonEP)), None)

    def make_batch(self, world: Any, routing: Routing, hosts: Hosts) -> tuple[Any, Line]:
        """This rank's input, and what it says of itself."""
        return make_batch(world, routing, hosts)

    def check(self, world: Any, name: str, peer: Any, batch: Any, hosts: Hosts) -> Checked:
        """Run a peer once.

        Raises:
            GateError: its outputs are wrong.
        """
        sent, rows = _check(world, peer, batch, hosts)
        calls = {"dispatch": lambda: peer.dispatch(batch), "combine": lambda: peer.combine(sent)}
        return Checked(calls, {"rows": rows})

    def derive(self, R: int, median_us: float) -> Line:
        """What follows from a time."""
        return {}

    def close(self, world: Any) -> None:
        """Give back what `open` made, after all peers have been closed."""


def make_batch(world: World, routing: Routing, hosts: Hosts) -> tuple[Batch, Line]:
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
