"""What to measure: a setting is what rows share with a Buffer, a case one routing with its operations and modes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moonep.bench.routings import Routing

GRAPH, EAGER = "graph", "eager"
STRICT, LOCAL_ALL = "strict", "local_all"


@dataclass(frozen=True)
class Case:
    """One routing of a setting, and what is timed with it.

    Attributes:
        routing: see `Routing`.
        operations: names in `moonep.bench.operations`.
        modes: "graph": captured once and replayed; "eager".
        tokens: s; None: the capacity S.
    """

    routing: Routing
    operations: tuple[str, ...]
    modes: tuple[str, ...] = (GRAPH,)
    tokens: int | None = None


@dataclass(frozen=True)
class Setting:
    """One Buffer, and all that is measured with it.

    Attributes:
        S, H, K, E, P: see `moonep.dims`.
        F: with weights of this FFN width (three projections); None: without weights.
        sms: SMs of a kernel; None: all.
        budget: "strict": all kernels keep to `sms`; "local_all": those that touch only the rank's memory use all.
        balance: as for `Buffer`.
        cases: what is timed.
        ceilings: also measure what the copy engines and the memory reach.
        cold: flush the L2 before each sample.
    """

    S: int
    H: int
    K: int
    E: int
    cases: tuple[Case, ...]
    P: int = 128
    F: int | None = None
    sms: int | None = None
    budget: str = STRICT
    balance: str = "exact"
    ceilings: bool = False
    cold: bool = False

    @property
    def label(self) -> str:
        """What people read."""
        sms = "all SMs" if self.sms is None else f"{self.sms} SMs {self.budget}"
        return f"S={self.S} H={self.H} K={self.K} E={self.E}, {sms}, {self.balance}"

    def record(self) -> dict[str, Any]:
        """What every line of the setting says."""
        names = ("S", "H", "K", "E", "P", "F", "sms", "budget", "balance", "cold")
        return {name: getattr(self, name) for name in names}

    def rows(self) -> Iterator[Row]:
        """The rows, in the order in which they are measured."""
        for case in self.cases:
            for operation in case.operations:
                for mode in case.modes:
                    yield Row(operation, mode, case.routing, self.S if case.tokens is None else case.tokens)
        if self.ceilings:
            for operation in CEILINGS:
                yield Row(operation, EAGER, None, self.S)


CEILINGS = ("copy_push", "copy_pull", "hbm_copy")


@dataclass(frozen=True)
class Row:
    """One line of the results, before it is measured."""

    operation: str
    mode: str
    routing: Routing | None
    tokens: int

    def record(self) -> dict[str, Any]:
        """What the line says of it."""
        routing = None if self.routing is None else self.routing.record()
        return {"operation": self.operation, "mode": self.mode, "tokens": self.tokens, "routing": routing}

    @property
    def label(self) -> str:
        """What people read."""
        return ", ".join([self.operation, self.mode, *([self.routing.label] if self.routing else [])])


@dataclass(frozen=True)
class Options:
    """How to measure.

    Attributes:
        backend: of the Buffers: "cuda" or "cpu".
        samples: of each row.
        peer_timeout_s: how long a rank waits for a peer.
    """

    backend: str = "cpu"
    samples: int = 21
    peer_timeout_s: float = 40.0
