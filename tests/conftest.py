"""Fixtures for all tests: processes that play ranks, started once per world size."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from moonep.testing.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(R).run(fn, *args)`: fn on R ranks. The processes live until the end; after a failure they are new."""
    started: dict[int, Ranks] = {}

    def of(R: int) -> Ranks:
        if R not in started:
            started[R] = Ranks(R)
        return started[R]

    yield of
    for processes in started.values():
        processes.close()
