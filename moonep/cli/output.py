"""What every command does with its output: people read it, or with `--json` a program does.

With `--json` the last line of stdout is exactly one JSON document; tables and progress bars go to stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON document as the last line of stdout; the rest goes to stderr.")
]


def open_console(json_flag: bool) -> Console:
    """The console for what people read: stdout, or stderr when stdout is for the JSON document."""
    return Console(stderr=json_flag, highlight=False)


def emit(console: Console, json_flag: bool, payload: Mapping[str, Any]) -> None:
    """End a command: with `json_flag`, print `payload` as one line, after everything written to `console`.

    Raises:
        ValueError: `payload` holds NaN or infinity, which JSON cannot say.
    """
    if not json_flag:
        return
    document = json.dumps(payload, allow_nan=False)
    console.file.flush()
    sys.stdout.write(document + "\n")
    sys.stdout.flush()
