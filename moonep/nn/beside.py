"""Work that has nothing to do with communication, on a stream of its own beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


def start(function: Callable[[Tensor], Tensor], x: Tensor, *, beside: bool) -> Callable[[], Tensor]:
    """Begin function(x). Its backward runs on the same stream, as autograd has it: beside communication, too.

    Args:
        function: differentiable.
        x: its argument.
        beside: on a GPU, on a stream of its own; else at once. Compilers order work themselves.

    Returns:
        What waits for the result and returns it.
    """
    if not beside or not x.is_cuda or torch.compiler.is_compiling():
        y = function(x)
        return lambda: y
    stream = _stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        y = function(x)
    x.record_stream(stream)

    def finish() -> Tensor:
        current = torch.cuda.current_stream(y.device)
        current.wait_stream(stream)
        y.record_stream(current)
        return y

    return finish


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
