"""`moonep doctor`: what this machine offers to MoonEP, which backend that gives, and what stands in the way."""

from __future__ import annotations

import mmap
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import moonep
from moonep import environment
from moonep.backends import BACKENDS, choose
from moonep.cli.output import JsonFlag, emit, open_console

CUDA_PACKAGES = ("triton", "cuda-bindings")
OPTIONAL_PACKAGES = (*CUDA_PACKAGES, "transformers")
ORDERED_STORES = ("x86_64", "AMD64")
USUAL_MAP_COUNT = 65530
USUAL_FILE_DESCRIPTORS = 1024


def doctor(json: JsonFlag = False) -> None:
    """Show versions, devices, limits, the backend and why it is used, and what to do about problems.

    Example: moonep doctor --json | tail -1
    """
    console = open_console(json)
    report = collect()
    render(report, console)
    emit(console, json, report)


def collect() -> dict[str, Any]:
    """Everything the command reports, as plain values that JSON can carry. Absent things are None or empty."""
    report: dict[str, Any] = {
        "versions": _versions(),
        "system": _system(),
        "gpus": _gpus(),
        "p2p": _p2p_links(),
        "shared_memory": _shared_memory(),
    }
    report["backend"] = describe_backend(report["shared_memory"]["memfd"])
    report["warnings"] = find_problems(report)
    return report


def describe_backend(memfd: bool) -> dict[str, Any]:
    """The backend that a Buffer takes here when none is asked for, None if none works, and the reason.

    Args:
        memfd: whether shared memory without a file name works.
    """
    name: str | None
    try:
        name, reason = choose(None)
    except ValueError as error:
        name, reason = None, str(error)
    if name == "cpu" and not memfd:
        name, reason = None, "the cpu backend needs memfd_create, which this system lacks"
    return {
        "name": name,
        "reason": reason,
        "MOONEP_BACKEND": environment.backend(),
        "MOONEP_MOVERS": environment.movers(),
        "MOONEP_HANDLES": environment.handles(),
        "MOONEP_PRODUCTS": environment.products(),
        "not_implemented": [planned for planned in ("collective",) if planned not in BACKENDS],
    }


def find_problems(report: dict[str, Any]) -> list[str]:
    """One warning for each thing in `report` that is likely to hurt: what it is, and what to do about it."""
    problems = []
    system, memory, backend = report["system"], report["shared_memory"], report["backend"]
    if not memory["memfd"]:
        problems.append("memfd_create does not work here, so ranks cannot share memory: use Linux.")
    if backend["name"] is None and memory["memfd"]:
        problems.append(f"No backend can be used ({backend['reason']}): unset MOONEP_BACKEND, or set it to cpu.")
    if backend["name"] == "cpu" and system["machine"] not in ORDERED_STORES:
        problems.append(
            f"The cpu backend relies on the store order of x86-64, and this is {system['machine']}: "
            "do not trust its results here, use an x86-64 machine."
        )
    missing = [package for package in CUDA_PACKAGES if not report["versions"][package]]
    if report["gpus"] and missing:
        problems.append(f'The cuda backend needs {" and ".join(missing)}: pip install "moonep[gpu]"')
    if len(report["gpus"]) > 1 and not report["p2p"]:
        problems.append("No GPU here reaches another one's memory: ranks on different GPUs cannot share memory.")
    if system["nvidia_driver"] and not report["gpus"]:
        problems.append(
            f"An NVIDIA driver is loaded but torch {report['versions']['torch']} sees no GPU: "
            "install a CUDA build of torch, and check CUDA_VISIBLE_DEVICES."
        )
    if (memory["max_map_count"] or USUAL_MAP_COUNT) < USUAL_MAP_COUNT:
        problems.append(
            f"vm.max_map_count is {memory['max_map_count']}, and expert weights take a mapping for each chunk. "
            f"Run: sysctl -w vm.max_map_count={USUAL_MAP_COUNT}"
        )
    if (memory["file_descriptors"] or USUAL_FILE_DESCRIPTORS) < USUAL_FILE_DESCRIPTORS:
        problems.append(
            f"A process may open {memory['file_descriptors']} files only, and ranks exchange memory as file "
            f"descriptors. Run: ulimit -n {USUAL_FILE_DESCRIPTORS}"
        )
    return problems


def render(report: dict[str, Any], console: Console) -> None:
    """Write `report` for people."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for package, version in report["versions"].items():
        facts.add_row(package, version or "not installed")
    system, memory, backend = report["system"], report["shared_memory"], report["backend"]
    facts.add_row("system", f"{system['os']}, {system['cpus']} CPUs")
    if not report["gpus"]:
        facts.add_row("GPUs", "none")
    for gpu in report["gpus"]:
        size = f"{gpu['memory_bytes'] / 2**30:.0f} GiB, compute capability {gpu['compute_capability']}"
        peers = [str(peer) for device, peer in report["p2p"] if device == gpu["index"]]
        facts.add_row(f"GPU {gpu['index']}", f"{gpu['name']}, {size}, reaches: {' '.join(peers) or 'no other GPU'}")
    facts.add_row("memfd", "available" if memory["memfd"] else "missing")
    facts.add_row("page", f"{memory['page_bytes']} bytes")
    facts.add_row("mappings", f"{memory['max_map_count'] or 'no known limit'} a process")
    facts.add_row("descriptors", f"{memory['file_descriptors'] or 'no known limit'} a process")
    for name in ("MOONEP_BACKEND", "MOONEP_MOVERS", "MOONEP_HANDLES", "MOONEP_PRODUCTS"):
        facts.add_row(name, backend[name] or "not set")
    facts.add_row("backend", f"{backend['name'] or 'none'}: {backend['reason']}")
    if backend["not_implemented"]:
        facts.add_row("", f"not implemented yet in this version: {', '.join(backend['not_implemented'])}")
    console.print(facts, markup=False)
    for problem in report["warnings"]:
        console.print(f"warning: {problem}", style="yellow", markup=False, soft_wrap=True)
    if not report["warnings"]:
        console.print("No problems found.", style="green")


def _versions() -> dict[str, str | None]:
    core = {"python": platform.python_version(), "moonep": moonep.__version__, "torch": str(torch.__version__)}
    return core | {package: _installed_version(package) for package in OPTIONAL_PACKAGES}


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _system() -> dict[str, Any]:
    can_pin = hasattr(os, "sched_getaffinity")
    return {
        "os": platform.platform(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)) if can_pin else os.cpu_count(),
        "nvidia_driver": Path("/proc/driver/nvidia/version").exists(),
    }


def _gpus() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "index": index,
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "compute_capability": f"{properties.major}.{properties.minor}",
            }
        )
    return found


def _p2p_links() -> list[list[int]]:
    """Pairs (device, peer) where the device can read and write the peer's memory."""
    devices = range(torch.cuda.device_count())
    return [[i, j] for i in devices for j in devices if i != j and torch.cuda.can_device_access_peer(i, j)]


def _shared_memory() -> dict[str, Any]:
    return {
        "memfd": _memfd_works(),
        "page_bytes": mmap.PAGESIZE,
        "max_map_count": _max_map_count(),
        "file_descriptors": _file_descriptors(),
    }


def _memfd_works() -> bool:
    if not hasattr(os, "memfd_create"):
        return False
    try:
        os.close(os.memfd_create("moonep-doctor"))
    except OSError:
        return False
    return True


def _max_map_count() -> int | None:
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return None


def _file_descriptors() -> int | None:
    """How many files this process may open (the soft limit); None if no limit is known."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft
