"""The `moonep` command. It needs typer and rich (the `cli` extra), which the library itself does not."""

from __future__ import annotations

import sys

REQUIRED = ("typer", "rich")


def main() -> None:
    """Run the command line; without typer or rich, say in one sentence what to install and exit with 1."""
    try:
        from moonep.cli.app import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in REQUIRED:
            raise
        print(f'moonep: the command line needs {missing}: pip install "moonep[cli]"', file=sys.stderr)
        raise SystemExit(1) from None
    app(prog_name="moonep")
