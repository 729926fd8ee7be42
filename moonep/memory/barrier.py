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

_EPOCH, _REFUSED, _BROKEN, _PROCESS, _NUM_WORDS = range(5)
_TEXT_BYTES = 1024  # of each message: a length word, then UTF-8
_MAX_OPERATIONS = 16
RANGE_SHIFT = 32
_SPINS_BEFORE_SLEEP = 200
_SLEEP_S = 20e-6


def extend_range(refused: tuple[int, int], number: int) -> tuple[int, int]:
    """The refused range with one more operation: longer if it follows on, else a new one."""
    first, last = refused
    return (first if last == number - 1 else number, number)


def pack_range(refused: tuple[int, int]) -> int:
    """(first, last) as one word, which a peer reads whole."""
    return (refused[0] << RANGE_SHIFT) + refused[1]


class Barrier:
    """Counts operations, waits for peers within them, and tells them when this rank cannot go on.

    Every rank calls the same operations in the same order. An epoch is (waits so far, which operation), packed into
    one word so that a peer reads it whole. Operations that a rank refuses (bad arguments) are recorded as a range of
    operation numbers, also in one word: a peer that waits in one of them raises instead of hanging, while ranks that
    all refused it go on.
    """

    def __init__(self, chunks: Sequence[HostChunk], rank: int, timeout_s: float):
        self.rank, self.size, self.timeout_s = rank, len(chunks), timeout_s
        mapping = HostMapping(chunks)
        self._pages = [mapping.words(r * PAGE, _NUM_WORDS) for r in range(self.size)]
        self._refusals = [mapping.bytes(r * PAGE + _TEXT_BYTES, _TEXT_BYTES) for r in range(self.size)]
        self._failures = [mapping.bytes(r * PAGE + 2 * _TEXT_BYTES, _TEXT_BYTES) for r in range(self.size)]
        self._mine = self._pages[rank]
        self._mine[_PROCESS] = os.getpid()
        self._number = 0
        self._waits = self._waits_before = 0
        self._refused = (1, 0)
        self.operation = OPERATIONS[0]

    def begin(self, operation: str) -> None:
        """Enter the next operation."""
        self._number += 1
        self._waits_before = self._waits
        self.operation = operation

    @property
    def entered(self) -> bool:
        """Whether this rank has waited in the current operation, so that peers count on it."""
        return self._waits > self._waits_before

    def refuse(self, message: str) -> None:
        """This rank does not take part in the current operation; nothing of it has been written."""
        _write(self._refusals[self.rank], message)
        self._refused = extend_range(self._refused, self._number)
        self._mine[_REFUSED] = pack_range(self._refused)

    def poison(self, message: str) -> None:
        """This rank failed in the middle of the current operation and takes part in nothing any more."""
        if not self._mine[_BROKEN]:
            _write(self._failures[self.rank], message)
            self._mine[_BROKEN] = 1

    def wait(self) -> None:
        """Return when every rank is here. What they wrote before is then visible.

        Raises:
            PeerError: a peer refused this operation, is in another one, or failed.
            PeerTimeout: a peer did not arrive within the limit.
        """
        self._waits += 1
        self._mine[_EPOCH] = self._waits * _MAX_OPERATIONS + OPERATIONS.index(self.operation)
        start = time.monotonic()
        for r in range(self.size):
            spins = 0
            while not self._arrived(r, self._waits):
                spins += 1
                if spins < _SPINS_BEFORE_SLEEP:
                    os.sched_yield()
                    continue
                time.sleep(_SLEEP_S)
                if spins % 64 == 0:
                    self._check_time(r, start)

    def check(self) -> None:
        """Nothing goes wrong behind the host's back on the CPU."""

    def failure(self) -> None:
        """As `check`: nothing."""

    def _arrived(self, r: int, epoch: int) -> bool:
        page = self._pages[r]
        # The refusal is read last: a peer publishes it before any later epoch, and before it fails because of it.
        broken = page[_BROKEN]
        theirs, operation = divmod(page[_EPOCH], _MAX_OPERATIONS)
        first, last = divmod(page[_REFUSED], 1 << RANGE_SHIFT)
        if first <= self._number <= last:
            raise PeerError(r, self.operation, f"refused its arguments: {_read(self._refusals[r])}")
        if broken and theirs < epoch:
            raise PeerError(r, self.operation, f"failed: {_read(self._failures[r])}")
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
                f"did not arrive within {self.timeout_s:g} s (process {process}; rank {self.rank} waited)",
                self.rank,
                waited,
            )


def _write(area: memoryview, message: str) -> None:
    text = message.encode()[: len(area) - 8]
    area[8 : 8 + len(text)] = text
    area[:8] = len(text).to_bytes(8, "little")


def _read(area: memoryview) -> str:
    length = int.from_bytes(area[:8], "little")
    return bytes(area[8 : 8 + length]).decode(errors="replace")
