"""Options that take several values: `--sms 8 16 32`, `--sms 8,16,32` and `--sms "8 16 32"` mean the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand

_T = TypeVar("_T")

MANY = "..."
"""How the metavar of such an option ends; its type is str."""


class ListCommand(TyperCommand):
    """A command some of whose options take all words up to the next option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Join the words of each list before click reads them one at a time."""
        lists = {name for p in self.params if str(getattr(p, "metavar", None)).endswith(MANY) for name in p.opts}
        joined: list[str] = []
        words = iter([*args, "--"])
        word = next(words)
        while word != "--":
            joined.append(word)
            values: list[str] = []
            wanted = word in lists
            for word in words:
                if not wanted or word.startswith("--"):
                    break
                values.append(word)
            if wanted and values:
                joined.append(" ".join(values))
        return super().parse_args(ctx, joined)


def split(option: str, text: str | None, kind: Callable[[str], _T], default: tuple[_T, ...] = ()) -> tuple[_T, ...]:
    """The values of a list option.

    Raises:
        typer.BadParameter: one of them is not of the kind.
    """
    if text is None:
        return default
    try:
        return tuple(kind(word) for word in text.replace(",", " ").split())
    except ValueError:
        name = "whole numbers" if kind is int else "numbers"
        raise typer.BadParameter(f"{option}: given {text!r}, expected {name}") from None
