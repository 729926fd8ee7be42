"""What a compiler leaves to eager mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function eagerly when it is called from compiled code: the graph breaks before it and goes on after it.

    For the pieces of a layer, which return plans; the whole is `RoutedExperts`, which does not break a graph.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            # Not once and for all at import: it imports the compiler, which takes seconds.
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call
