"""The command table: each command is a function of its own name in a module of its own name."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer

from moonep import __version__

COMMANDS = ("doctor", "demo", "bench")

app = typer.Typer(
    help="Balanced expert parallelism: look at this machine, try MoonEP on it, and time it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for _name in COMMANDS:
    _module = import_module(f"moonep.cli.{_name}")
    app.command(_name, cls=getattr(_module, "COMMAND", None))(getattr(_module, _name))
