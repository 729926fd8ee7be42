"""Worlds of rank processes that all tests share: started when first used, ended with the session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from moonep.testing.ranks import Ranks

# Tests are about CPU processes unless they ask for something else, also on a machine with GPUs.
os.environ.setdefault("MOONEP_BACKEND", "cpu")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(R).run(fn, ...)` calls fn on R ranks. After a failure the next run starts fresh processes."""
    worlds: dict[int, Ranks] = {}

    def world(R: int) -> Ranks:
        if R not in worlds:
            worlds[R] = Ranks(R)
        return worlds[R]

    yield world
    for each in worlds.values():
        each.close()
