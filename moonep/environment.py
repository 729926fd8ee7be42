"""Environment variables: all that MoonEP reads, in one place."""

from __future__ import annotations

import os


def backend() -> str | None:
    """`MOONEP_BACKEND`: the backend that is used when none is asked for."""
    return os.environ.get("MOONEP_BACKEND") or None


def handles() -> str | None:
    """`MOONEP_HANDLES`: "fd" or "fabric": how GPU memory is handed to other ranks."""
    return os.environ.get("MOONEP_HANDLES") or None


def movers() -> str | None:
    """`MOONEP_MOVERS`: "bulk" or "portable": how rows are moved on a GPU."""
    return os.environ.get("MOONEP_MOVERS") or None


def products() -> str | None:
    """`MOONEP_PRODUCTS`: "kernels" or "torch": what multiplies rows with experts' weights on a GPU."""
    return os.environ.get("MOONEP_PRODUCTS") or None


def interpreting() -> bool:
    """`TRITON_INTERPRET=1`: Triton kernels of this process run in the interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def commit() -> str | None:
    """`MOONEP_COMMIT`: the commit that results are labelled with, for a copy of the tree without its repository."""
    return os.environ.get("MOONEP_COMMIT") or None


def launched() -> bool:
    """Whether torchrun (or what sets the same variables) has started this process as one rank of several."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def cpus() -> list[int]:
    """The CPUs that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


WITHOUT_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
"""What processes on GPUs are started with: nothing here uses NVLink multicast, and no other library shall."""
