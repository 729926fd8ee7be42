"""Backends: how ranks reach each other. One set of operations (`cpu`, `gpu`), chosen by device."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import torch

from moonep import environment
from moonep.memory import Memory

if TYPE_CHECKING:
    from moonep.backends.cpu import CpuBackend
    from moonep.backends.gpu import GpuBackend
    from moonep.dims import Dims
    from moonep.memory.peers import Peers

BACKENDS = ("cuda", "cpu", "interpreter")


def choose(backend: str | None) -> tuple[str, str]:
    """The backend that will be used and the reason.

    Args:
        backend: what the caller asks for; None: `MOONEP_BACKEND`, else cuda if there is a device, else cpu.

    Raises:
        ValueError: a name that does not exist, or a backend that cannot work here.
    """
    asked, where = (backend, "backend") if backend is not None else (environment.backend(), "MOONEP_BACKEND")
    if not asked:
        available = torch.cuda.is_available()
        return ("cuda", "a CUDA device is available") if available else ("cpu", "no CUDA device is available")
    if asked not in BACKENDS:
        raise ValueError(f"{where}: given {asked!r}, expected one of {', '.join(map(repr, BACKENDS))}")
    if asked == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{where}: given 'cuda', expected a machine on which torch.cuda.is_available()")
    if asked == "interpreter" and not environment.interpreting():
        raise ValueError(f"{where}: given 'interpreter', expected TRITON_INTERPRET=1 in the environment")
    return asked, f"asked for by {where}"


def open_memory(backend: str) -> Memory:
    """The symmetric memory of a backend, on this process's current device."""
    if backend == "cuda":
        from moonep.memory.cuda import CudaMemory

        return CudaMemory(torch.device("cuda", torch.cuda.current_device()))
    from moonep.memory.host import HostMemory

    return HostMemory()


def open_backend(
    name: str,
    dims: Dims,
    dtype: torch.dtype,
    peers: Peers,
    timeout_s: float,
    num_sms: int | None,
    num_local_sms: int | None,
    priority: int,
    enable_pdl: bool,
) -> CpuBackend | GpuBackend:
    """The backend of one Buffer. Collective."""
    if name == "cpu":
        from moonep.backends.cpu import CpuBackend

        return CpuBackend(dims, dtype, peers, timeout_s)
    from moonep.backends import movers
    from moonep.backends.gpu import GpuBackend

    memory = open_memory(name)
    early = enable_pdl and movers.starts_early(memory.device)
    return GpuBackend(dims, dtype, peers, timeout_s, memory, num_sms, num_local_sms, priority, early)


def movers_must_agree(backend: str, dims: Dims, dtype: torch.dtype) -> dict[str, str]:
    """What ranks must have in common to move rows."""
    if backend != "cuda":
        return {}
    from moonep.backends import movers

    return {"movers": movers.choose(torch.device("cuda", torch.cuda.current_device()), dims, dtype)}


def must_agree(backend: str) -> dict[str, str]:
    """What ranks must have in common to share memory with a backend."""
    if backend == "cuda":
        return {"backend": backend}
    with open("/proc/sys/kernel/random/boot_id") as file:
        return {"backend": backend, "host": f"{platform.node()} {file.read().strip()}"}
