"""Backends: one small set of operations (`cpu`), chosen by device (`choose`)."""

from __future__ import annotations

import os

BACKENDS = ("cpu",)


def choose(backend: str | None) -> tuple[str, str]:
    """The backend that will be used and the reason.

    Args:
        backend: what the caller asks for; None: `MOONEP_BACKEND`, else what the machine offers.

    Raises:
        ValueError: a name that this version does not have.
    """
    asked, where = (backend, "backend") if backend is not None else (os.environ.get("MOONEP_BACKEND"), "MOONEP_BACKEND")
    if asked:
        if asked not in BACKENDS:
            raise ValueError(f"{where}: given {asked!r}, expected one of {', '.join(map(repr, BACKENDS))}")
        return asked, f"asked for by {where}"
    return "cpu", "the only backend of this version"
