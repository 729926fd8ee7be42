"""Result lines: one JSON object for each sample set, with hardware, versions and commit, in files that only grow.

Lines of one commit and day share a `set`, whichever program wrote them. All times are microseconds.
"""

from __future__ import annotations

import csv
import json
import platform
import subprocess
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import moonep
from moonep import environment

Line = dict[str, Any]

_QUERY = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit")


def describe_run(command: str) -> Line:
    """What all lines of one run share: set, date, commit, command, hardware and versions."""
    now, commit = datetime.now(UTC), find_commit()
    return {
        "set": f"{commit} {now:%Y-%m-%d}",
        "date": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "commit": commit,
        "command": command,
        "hardware": describe_hardware(),
        "versions": describe_versions(),
    }


def find_commit() -> str:
    """`MOONEP_COMMIT`, else the commit of the repository this package lies in; "+" if files were changed since."""
    if environment.commit():
        return str(environment.commit())
    root = Path(moonep.__file__).parent.parent
    if not (root / ".git").exists():
        return "unknown"
    head = _run("git", "-C", str(root), "rev-parse", "--short", "HEAD")
    changed = _run("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return (head.strip() or "unknown") + ("+" if changed.strip() else "")


def describe_hardware() -> Line:
    """GPUs with driver and clocks as found, their links, and the CPU. What cannot be read is left out."""
    hardware: Line = {"cpus": len(environment.cpus()), "machine": platform.machine()}
    rows = list(csv.reader(_run("nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader").splitlines()))
    if rows:
        hardware["gpus"] = [dict(zip(_QUERY, map(str.strip, row), strict=False)) for row in rows]
        hardware["nvlinks"] = sum("GB/s" in line for line in _run("nvidia-smi", "nvlink", "-s", "-i", "0").splitlines())
    elif torch.cuda.is_available():
        count = torch.cuda.device_count()
        hardware["gpus"] = [{"name": torch.cuda.get_device_properties(i).name} for i in range(count)]
    return hardware


def describe_versions() -> Line:
    """Of what takes part in a measurement."""
    versions: Line = {
        "python": platform.python_version(),
        "moonep": moonep.__version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
    }
    for package in ("triton", "cuda-bindings"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def append(path: Path, lines: Iterable[Line]) -> None:
    """Add lines to a file, made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for line in lines:
            file.write(json.dumps(line, allow_nan=False) + "\n")


def read(root: Path) -> Iterator[Line]:
    """The lines of a file, or of all .jsonl files below a directory; those that belong to a set."""
    for path in [root] if root.is_file() else sorted(root.rglob("*.jsonl")):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            if "set" in line:
                yield line


def newest_set(lines: Iterable[Line]) -> list[Line]:
    """The lines of the set that was written to last, the oldest line first; a set with a suite's lines if there is one.

    So a single measurement of one's own after the suite, at another commit, does not hide the suite's.
    """
    sets: dict[str, list[Line]] = {}
    for line in lines:
        sets.setdefault(line["set"], []).append(line)
    if not sets:
        return []
    whole = [some for some in sets.values() if any(line.get("suite") == "goals" for line in some)]
    newest = max(whole or sets.values(), key=lambda some: max(line["date"] for line in some))
    return sorted(newest, key=lambda line: line["date"])


def _run(*command: str) -> str:
    """What a command prints; nothing if it cannot run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
