"""`pytest --case-table FILE.jsonl`: which cases of the contract passed in which setting, as JSON lines and a table.

A setting is a backend, a number of ranks, and how many GPUs they share. A run adds to the lines that FILE has already
(the suite may be run in parts, also at the same time) and replaces those of the same case and setting. The table goes
to FILE.md.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from moonep.bench.results import find_commit
from moonep.testing.cases import BY_NAME


class CaseTable:
    """Collects the outcome of each test that has the fixture `ran`."""

    def __init__(self, path: Path):
        self.path = path
        self.date, self.commit = datetime.now(UTC).date(), find_commit()
        self.lines: dict[tuple[str, str], dict[str, Any]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if "ran" in parameters and not report.skipped and (report.failed or report.when == "call"):
            line = self._line(*parameters["ran"])
            name = item.originalname
            if report.failed:
                line["failed"].append(name)
            else:
                line["passed"] += 1
        return report

    def _line(self, backend: str, case: str, R: int) -> dict[str, Any]:
        setting, device = f"{backend}, R = {R}", "cpu"
        if backend == "cuda":
            gpus = min(torch.cuda.device_count(), R)
            setting += ", one rank a GPU" if gpus == R else f" on {gpus} GPU{'s' if gpus > 1 else ''}"
            device = torch.cuda.get_device_name(0)
        about = {"device": device, "torch": str(torch.__version__), "date": str(self.date), "commit": self.commit}
        line = {"case": case, "setting": setting, **about, "passed": 0, "failed": []}
        return self.lines.setdefault((case, setting), line)

    def pytest_sessionfinish(self) -> None:
        with self.path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
            file.seek(0)
            lines = {(line["case"], line["setting"]): line for line in map(json.loads, file)} | self.lines
            order = list(BY_NAME)
            ordered = sorted(lines.values(), key=lambda line: (order.index(line["case"]), line["setting"]))
            file.truncate(0)
            file.writelines(json.dumps(line) + "\n" for line in ordered)
            file.flush()
            self.path.with_suffix(".md").write_text(format_table(ordered))


def format_table(lines: list[dict[str, Any]]) -> str:
    """Markdown: a row a case, a column a setting; empty where the case was not run."""
    settings = sorted({line["setting"] for line in lines})
    cells: dict[str, dict[str, str]] = {}
    for line in lines:
        failed = ", ".join(line["failed"])
        text = f"FAILED: {failed}" if failed else f"{line['passed']} passed"
        cells.setdefault(line["case"], {})[line["setting"]] = text
    rows = [["case", *settings], ["---"] * (1 + len(settings))]
    rows += [[case, *(texts.get(setting, "") for setting in settings)] for case, texts in cells.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
