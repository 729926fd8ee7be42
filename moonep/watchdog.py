"""Watching for errors that the device has reported while nobody calls: during replays of a captured graph."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("moonep")


@contextmanager
def watching(failure: Callable[[], Exception | None], who: str, interval_s: float) -> Iterator[None]:
    """Inside, a daemon thread logs each new error that `failure` returns.

    Args:
        failure: what has gone wrong so far; must not touch the device.
        who: the log line begins with it.
        interval_s: seconds between looks.
    """
    done = threading.Event()

    def look() -> None:
        said = None
        while not done.wait(interval_s):
            error = failure()
            if error is not None and str(error) != said:
                said = str(error)
                log.error("%s: %s: %s", who, type(error).__name__, error)

    thread = threading.Thread(target=look, name="moonep-watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
