"""Worlds of rank processes that all tests share: started when first used, ended with the session.

Also the option `--case-table`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from case_table import CaseTable

from moonep.testing.ranks import Ranks

# Tests are about CPU processes unless they ask for something else, also on a machine with GPUs.
os.environ.setdefault("MOONEP_BACKEND", "cpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--case-table", type=Path, help="write which cases of the contract passed: FILE.jsonl and FILE.md")


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("--case-table")) is not None:
        config.pluginmanager.register(CaseTable(path))


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


@pytest.fixture(scope="session")
def interpreters() -> Iterator[Callable[[int], Ranks]]:
    """As `ranks`, with Triton kernels run in the interpreter, on shared memory of the host."""
    started: dict[int, Ranks] = {}

    def world(R: int) -> Ranks:
        # Spawned: another test's ranks may have made the fork server import Triton, which reads the variable then.
        options = {"env": {"TRITON_INTERPRET": "1"}, "start_method": "spawn", "timeout_s": 240.0}
        return started.setdefault(R, Ranks(R, **options))

    yield world
    for each in started.values():
        each.close()
