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


def interpreting() -> bool:
    """`TRITON_INTERPRET=1`: Triton kernels of this process run in the interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"
