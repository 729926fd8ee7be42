"""`--case-table` tells which cases passed in which setting, and adds to what earlier runs wrote."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning
from pathlib import Path

import pytest

CONFTEST = """
from pathlib import Path
from case_table import CaseTable

def pytest_configure(config):
    config.pluginmanager.register(CaseTable(Path("cases.jsonl")))
"""
TESTS = """
import pytest

@pytest.fixture(params=[("cpu", "odd-sizes", 2), ("cpu", "one-token", 2), ("cpu", "one-token", 3)])
def ran(request):
    if request.param[2] == 3:
        raise RuntimeError("a rank failed")
    return request.param

def test_rows(ran):
    pass

def test_plans(ran):
    assert ran[1] != "odd-sizes"

def test_nothing():
    pass
"""
TABLE = """\
| case | cpu, R = 2 | cpu, R = 3 |
| --- | --- | --- |
| one-token | 2 passed | FAILED: test_rows, test_plans |
| odd-sizes | FAILED: test_plans |  |
"""


def run_pytest(directory: Path, *options: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-m", "pytest", "-q", *options]
    subprocess.run(command, cwd=directory, env=environment, capture_output=True, timeout=120)


@pytest.mark.slow
def test_outcomes_of_several_runs_are_one_table(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    run_pytest(tmp_path, "-k", "ran0")
    run_pytest(tmp_path, "-k", "ran1 or ran2")
    assert (tmp_path / "cases.md").read_text() == TABLE
    lines = [json.loads(line) for line in (tmp_path / "cases.jsonl").read_text().splitlines()]
    assert [(line["case"], line["passed"], line["failed"]) for line in lines] == [
        ("one-token", 2, []),
        ("one-token", 0, ["test_rows", "test_plans"]),
        ("odd-sizes", 1, ["test_plans"]),
    ]


@pytest.mark.slow
def test_a_run_waits_for_another_that_writes_the_table(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    other = '{"case": "one-token", "setting": "cuda, R = 2", "passed": 12, "failed": []}\n'
    with ThreadPoolExecutor() as beside, (tmp_path / "cases.jsonl").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        run = beside.submit(run_pytest, tmp_path, "-k", "ran1")
        with pytest.raises(StillRunning):
            run.result(timeout=6)
        file.write(other)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_UN)
        run.result()
    assert other in (tmp_path / "cases.jsonl").read_text()
    assert "| one-token | 2 passed | 12 passed |" in (tmp_path / "cases.md").read_text()
