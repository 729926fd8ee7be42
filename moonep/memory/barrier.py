"""How ranks wait for each other on the CPU: a page a rank, written by its owner only and read by all.

Order of memory: a rank writes its data, then its epoch; a peer reads the epoch, then the data. Stores of an x86-64 core
become visible in order, and the page is plain shared memory, so what a rank wrote before `wait` is visible to every
peer whose `wait` returned.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from moonep.errors import PeerError, PeerTimeout
from moonep.memory.host import PAGE, HostChunk, HostMapping

OPERATIONS = ("none", "dispatch", "dispatch with plan", "combine", "prefetch", "reduce", "barrier", "destroy")

_EPOCH, _REFUSED_FROM, _REFUSED_TO, _BROKEN, _PROCESS, _LENGTH, _NUM_WORDS = range(7)
_MAX_WAITS = 16
_MAX_OPERATIONS = 16
_SPINS_BEFORE_SLEEP = 200
_SLEEP_S = 20e-6


class Barrier:
    """Counts operations, waits for peers within them, and tells them when this rank cannot go on.

    Every rank calls the same operations in the same order. An epoch is (operation number, waits within it, which
    operation), packed into one word so that a peer reads it whole. Operations that a rank refuses (bad arguments) are
    recorded as a range of numbers, so that a peer which waits in one of them raises instead of hanging, while ranks
    that all refused it go on.
    """

    def __init__(self, chunks: Sequence[HostChunk], rank: int, timeout_s: float):
        self.rank, self.size, self.timeout_s = rank, len(chunks), timeout_s
        mapping = HostMapping(chunks)
        self._pages = [mapping.words(r * PAGE, _NUM_WORDS) for r in range(self.size)]
        self._texts = [mapping.bytes(r * PAGE + 8 * _NUM_WORDS, PAGE - 8 * _NUM_WORDS) for r in range(self.size)]
        self._mine = self._pages[rank]
        self._mine[_PROCESS] = os.getpid()
        self._number = 0
        self._waits = 0
        self._refused_last = False
        self.operation = OPERATIONS[0]

    def begin(self, operation: str) -> None:
        """Enter the next operation."""
        self._number += 1
        self._waits = 0
        self.operation = operation

    def refuse(self, message: str) -> None:
        """This rank does not take part in the current operation; nothing of it has been written."""
        self._publish(message)
        if not self._refused_last:
            self._mine[_REFUSED_FROM] = self._number
        self._mine[_REFUSED_TO] = self._number
        self._refused_last = True

    def poison(self, message: str) -> None:
        """This rank failed in the middle of the current operation and takes part in nothing any more."""
        if not self._mine[_BROKEN]:
            self._publish(message)
            self._mine[_BROKEN] = 1

    def wait(self) -> None:
        """Return when every rank is here. What they wrote before is then visible.

        Raises:
            PeerError: a peer refused this operation, is in another one, or failed.
            PeerTimeout: a peer did not arrive within the limit.
        """
        self._waits += 1
        self._refused_last = False
        epoch = self._number * _MAX_WAITS + self._waits
        self._mine[_EPOCH] = epoch * _MAX_OPERATIONS + OPERATIONS.index(self.operation)
        start = time.monotonic()
        for r in range(self.size):
            spins = 0
            while not self._arrived(r, epoch):
                spins += 1
                if spins < _SPINS_BEFORE_SLEEP:
                    os.sched_yield()
                    continue
                time.sleep(_SLEEP_S)
                if spins % 64 == 0:
                    self._check_time(r, start)

    def check(self) -> None:
        """Nothing goes wrong behind the host's back on the CPU."""

    def _arrived(self, r: int, epoch: int) -> bool:
        page = self._pages[r]
        # The epoch is read first: a peer publishes a refusal before any later epoch.
        theirs, operation = divmod(page[_EPOCH], _MAX_OPERATIONS)
        if page[_REFUSED_FROM] <= self._number <= page[_REFUSED_TO]:
            raise PeerError(r, self.operation, f"refused its arguments: {self._read(r)}")
        if page[_BROKEN] and theirs < epoch:
            raise PeerError(r, self.operation, f"failed: {self._read(r)}")
        if theirs == epoch and OPERATIONS[operation] != self.operation:
            raise PeerError(r, self.operation, f"called {OPERATIONS[operation]} instead")
        return theirs >= epoch

    def _check_time(self, r: int, start: float) -> None:
        waited = time.monotonic() - start
        if waited > self.timeout_s:
            process = self._pages[r][_PROCESS]
            raise PeerTimeout(
                r,
                self.operation,
                f"did not arrive within {waited:.1f} s (limit {self.timeout_s:g} s), process {process}; "
                f"rank {self.rank} waited",
            )

    def _publish(self, message: str) -> None:
        text = message.encode()[: len(self._texts[self.rank])]
        self._texts[self.rank][: len(text)] = text
        self._mine[_LENGTH] = len(text)

    def _read(self, r: int) -> str:
        return bytes(self._texts[r][: self._pages[r][_LENGTH]]).decode(errors="replace")
