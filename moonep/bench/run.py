"""Starts the ranks, keeps the time limit, and collects the lines. A rank that dies costs its setting, not the rest."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from moonep import environment
from moonep.bench.measure import Line, measure_setting
from moonep.bench.settings import Options, Setting
from moonep.testing.ranks import RankFailure, Ranks

SETTING_LIMIT_S = 240.0
_LEAST_S = 5.0  # with less time left, a setting is not begun


def run_settings(
    settings: Sequence[Setting], options: Options, R: int, timeout_s: float, on_line: Callable[[Line], None]
) -> None:
    """Measure settings on R processes of this machine, and call `on_line` with every line as it comes.

    Args:
        settings: what to measure; processes and compiled kernels are kept from one to the next.
        options: how.
        R: ranks.
        timeout_s: for everything. What is not reached is reported as an error.
        on_line: takes the lines.
    """
    deadline = time.monotonic() + timeout_s
    with Ranks(R, timeout_s=min(timeout_s, 120.0), env=environment.WITHOUT_MULTICAST, grace_s=10.0) as ranks:
        for number, setting in enumerate(settings):
            left = deadline - time.monotonic()
            come: list[Line] = []

            def take(rank: int, line: Any, come: list[Line] = come) -> None:
                come.append(line)
                on_line(line)

            problem = f"not begun: the time limit of {timeout_s:g} s was reached"
            if left > _LEAST_S:
                limit = min(left, SETTING_LIMIT_S)
                try:
                    ranks.run(measure_setting, setting, options, number, timeout_s=limit, on_message=take)
                    problem = "no result came"
                except RankFailure as failure:
                    problem = _summarize(failure)
            for line in _missing(setting, options, R, come, problem):
                on_line(line)


def run_launched(settings: Sequence[Setting], options: Options, on_line: Callable[[Line], None]) -> None:
    """The same as one rank of a world that torchrun has started. Lines come on rank 0."""
    os.environ.update(environment.WITHOUT_MULTICAST)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    try:
        for number, setting in enumerate(settings):
            measure_setting(setting, options, number, report=on_line)
    finally:
        dist.destroy_process_group()


def _missing(setting: Setting, options: Options, R: int, come: list[Line], problem: str) -> list[Line]:
    """Lines for the rows that no line came for."""
    shared = {"R": R, "backend": options.backend, **setting.record()}
    rows = [row.record() for row in setting.rows()]
    seen = [{key: line.get(key) for key in rows[0]} for line in come] if rows else []
    return [{**shared, **row, "error": problem} for row in rows if row not in seen]


def _summarize(failure: RankFailure) -> str:
    """The last line of what each failed rank said."""
    parts = []
    for rank in failure.errors:
        report = str(failure.outcomes[rank].report).strip().splitlines()
        parts.append(f"rank {rank}: {report[0] if report else 'failed'}")
    return "; ".join(parts)[:1000]
