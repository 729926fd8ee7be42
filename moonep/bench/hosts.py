"""The hosts of all ranks meet, exchange values, and learn of each other's failures: in bounded time, in step.

Every exchange has a number, and every rank takes part in every number. A rank that fails in the middle of a row tells
so in place of its next exchange, wherever its peers are; they then fail in theirs. So after a failure all ranks are in
step again, and the next row can go on.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")

GATE, SKIPPED, ERROR = "gate", "skipped", "error"


class GateError(AssertionError):
    """An output differs from the specification: its time is not told."""


class Unavailable(RuntimeError):
    """What was asked for does not exist here. Raised by all ranks alike."""


class HostLost(RuntimeError):
    """A rank did not come to an exchange in time: nothing can go on."""


@dataclass(frozen=True)
class Failure:
    """What a rank tells in place of its next exchange."""

    kind: str
    text: str


class RowFailed(RuntimeError):
    """A row came to nothing, on all ranks.

    Attributes:
        kind: "gate", "skipped" or "error".
    """

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


class Hosts:
    """This rank's line to the others.

    Args:
        rank, size: of the world that torch.distributed has been initialised with; size 1 needs none.
        timeout_s: seconds to wait for a peer. More than a peer waits for this rank on the device.
        name: keeps the exchanges of different users apart.
    """

    def __init__(self, rank: int, size: int, timeout_s: float, name: str):
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._name = f"moonep.bench/{name}"
        self._store = dist.distributed_c10d._get_default_store() if size > 1 else None
        self._number = 0

    def exchange(self, value: Any = None) -> list[Any]:
        """Every rank's value, in rank order.

        Raises:
            RowFailed: a rank failed instead of coming here.
            HostLost: a rank did not come in time.
        """
        replies = self._post(value)
        failures = [(r, reply) for r, reply in enumerate(replies) if isinstance(reply, Failure)]
        if failures:
            raise _row_failed(failures)
        return replies

    def meet(self) -> None:
        """Wait until all ranks are here."""
        self.exchange()

    def attempt(self, fn: Callable[[], _T]) -> _T:
        """Call `fn`, which may exchange; it succeeds on all ranks or fails on all.

        Raises:
            RowFailed: it raised on some rank.
            HostLost: a rank did not come in time.
        """
        try:
            value = fn()
        except (RowFailed, HostLost):
            raise
        except Exception as error:
            replies = self._post(Failure(_kind(error), _describe(error)))
            failures = [(r, reply) for r, reply in enumerate(replies) if isinstance(reply, Failure)]
            raise _row_failed(failures) from error
        self.exchange()
        return value

    def _post(self, value: Any) -> list[Any]:
        self._number += 1
        if self._store is None:
            return [value]
        prefix = f"{self._name}/{self._number}"
        self._store.set(f"{prefix}/{self.rank}", pickle.dumps(value))  # type: ignore[arg-type]
        replies = []
        for r in range(self.size):
            key = f"{prefix}/{r}"
            if r == self.rank:
                replies.append(value)
                continue
            try:
                self._store.wait([key], timedelta(seconds=self.timeout_s))
            except RuntimeError as error:
                raise HostLost(f"rank {r} did not come within {self.timeout_s:g} s") from error
            replies.append(pickle.loads(self._store.get(key)))
        if self._number > 1:  # all ranks have come to this exchange, so they have read the last one
            self._store.delete_key(f"{self._name}/{self._number - 1}/{self.rank}")
        return replies


def _kind(error: Exception) -> str:
    if isinstance(error, GateError):
        return GATE
    return SKIPPED if isinstance(error, Unavailable) else ERROR


def _describe(error: Exception) -> str:
    text = str(error).strip() or repr(error)
    return text[:500] if isinstance(error, (GateError, Unavailable)) else f"{type(error).__name__}: {text}"[:500]


def _row_failed(failures: list[tuple[int, Failure]]) -> RowFailed:
    """One error for all ranks: a wrong output counts more than any other failure."""
    order = {GATE: 0, ERROR: 1, SKIPPED: 2}
    kind = min((failure.kind for _, failure in failures), key=order.__getitem__)
    texts = [(rank, failure.text) for rank, failure in failures if failure.kind == kind]
    if kind == SKIPPED:
        return RowFailed(kind, texts[0][1])
    return RowFailed(kind, "; ".join(f"rank {rank}: {text}" for rank, text in texts))
