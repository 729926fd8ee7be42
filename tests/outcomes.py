"""How a call ends, for tests of errors that ranks raise."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def end_of(call: Callable[[], Any]) -> tuple[str, str, float]:
    """-> the error of a call, its message, and the time in seconds; empty where there is none"""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start
