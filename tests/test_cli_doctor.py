"""`moonep doctor` tells people and programs the same, and the command line says what to install when it cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the cli extra")

from typer.testing import CliRunner

import moonep
from moonep.backends import choose
from moonep.cli import doctor
from moonep.cli.app import app

KEYS = {"versions", "system", "gpus", "p2p", "shared_memory", "backend", "warnings"}


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)


def test_with_json_stdout_is_one_document_and_people_read_stderr():
    done = run_python("-m", "moonep", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report) == KEYS
    assert len(done.stdout.splitlines()) == 1
    assert "MOONEP_BACKEND" in done.stderr


def test_without_json_people_read_stdout():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert f"{moonep.__version__}" in result.stdout
    assert "not implemented yet in this version: collective" in " ".join(result.stdout.split())


def test_help_shows_an_example():
    result = CliRunner().invoke(app, ["doctor", "--help"])
    assert result.exit_code == 0
    assert "Example:" in result.stdout


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_cli_package_is_named_with_the_command_that_installs_it(missing):
    blocked = f"import sys; sys.modules[{missing!r}] = None; from moonep.cli import main; main()"
    done = run_python("-c", blocked)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f'moonep: the command line needs {missing}: pip install "moonep[cli]"\n'


def test_importing_moonep_needs_neither_typer_nor_rich():
    block = "import sys; sys.modules.update(typer=None, rich=None); import moonep"
    assert run_python("-c", block).returncode == 0


def test_the_reported_version_is_the_one_in_pyproject():
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert doctor.collect()["versions"]["moonep"] == moonep.__version__ == pyproject["project"]["version"]


def test_the_backend_is_the_one_a_buffer_would_take(monkeypatch):
    monkeypatch.delenv("MOONEP_BACKEND", raising=False)
    backend = doctor.collect()["backend"]
    assert (backend["name"], backend["reason"]) == choose(None)
    assert backend["MOONEP_BACKEND"] is None


def test_a_forced_backend_that_does_not_exist_is_a_warning(monkeypatch):
    monkeypatch.setenv("MOONEP_BACKEND", "no-such-backend")
    report = doctor.collect()
    assert report["backend"]["name"] is None
    assert report["backend"]["MOONEP_BACKEND"] == "no-such-backend"
    assert any("unset MOONEP_BACKEND" in warning for warning in report["warnings"])


def test_without_memfd_no_backend_is_promised(monkeypatch):
    monkeypatch.delenv("MOONEP_BACKEND", raising=False)
    monkeypatch.delattr("os.memfd_create", raising=False)
    report = doctor.collect()
    assert report["backend"]["name"] is None
    assert any("memfd_create" in warning for warning in report["warnings"])


def test_a_machine_that_reorders_stores_is_a_warning(monkeypatch):
    monkeypatch.delenv("MOONEP_BACKEND", raising=False)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert any("x86-64" in warning for warning in doctor.collect()["warnings"])


def test_low_limits_are_warnings_with_the_command_that_raises_them():
    report = doctor.collect()
    report["shared_memory"] |= {"max_map_count": 1000, "file_descriptors": 64}
    problems = "\n".join(doctor.find_problems(report))
    assert "sysctl -w vm.max_map_count=65530" in problems
    assert "ulimit -n 1024" in problems


def test_gpus_are_listed_with_the_peers_they_reach(monkeypatch):
    gpu = SimpleNamespace(name="Test GPU", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: {device, peer} == {0, 1})
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["p2p"] == [[0, 1], [1, 0]]
    assert report["gpus"][0] == {
        "index": 0,
        "name": "Test GPU",
        "memory_bytes": 80 * 2**30,
        "compute_capability": "9.0",
    }
    assert "reaches: no other GPU" in " ".join(result.stderr.split())
    assert not any("reaches" in warning for warning in report["warnings"])


def test_what_the_cuda_backend_lacks_is_a_warning(monkeypatch):
    report = doctor.collect()
    report["gpus"] = [{"index": 0}, {"index": 1}]
    report["versions"] |= {"triton": "3.6.0", "cuda-bindings": None}
    problems = "\n".join(doctor.find_problems(report))
    assert 'needs cuda-bindings: pip install "moonep[gpu]"' in problems
    assert "No GPU here reaches another" in problems
