"""What the machine reaches: the copy engines between two ranks, pushing and pulling, and a copy within one memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

import moonep
from moonep.bench.gate import check_equal
from moonep.bench.hosts import Unavailable
from moonep.bench.operations import Operation

MOST_BYTES = 235_000_000


def ceiling(name: str, buffer: moonep.Buffer, meet: Callable[[], None]) -> Operation:
    """A copy of rows of the Buffer, by all ranks at once.

    Args:
        name: "copy_push" (into the next rank's memory), "copy_pull" (out of it) or "hbm_copy" (within this rank's).
        buffer: whose symmetric memory is used.
        meet: waits until all ranks are here and their devices idle.

    Moves: up to MOST_BYTES a rank and direction; `hbm_copy` reads and writes them.
    """
    forward, gradient = buffer._backend.forward, buffer._backend.gradient
    R, rank = buffer.dims.R, buffer.rank
    if name != "hbm_copy" and R == 1:
        raise Unavailable(f"{name} needs a second rank")
    after, before = (rank + 1) % R, (rank - 1) % R
    count = max(1, min(buffer.dims.C, MOST_BYTES // (buffer.dims.H * buffer.dtype.itemsize)))
    source, target, arrives, sender = {
        "copy_push": (forward.rows_of[rank], gradient.rows_of[after], gradient.rows, before),
        "copy_pull": (forward.rows_of[after], gradient.rows_of[rank], gradient.rows, after),
        "hbm_copy": (forward.rows, gradient.rows, gradient.rows, rank),
    }[name]
    source, target, arrives = source[:count], target[:count], arrives[:count]
    nbytes = source.numel() * source.itemsize

    def pattern(r: int) -> torch.Tensor:
        row = torch.arange(count, device=source.device)
        return ((row * 5 + r) % 97).to(source.dtype)[:, None].expand_as(source)

    def prepare() -> None:
        forward.rows[:count].copy_(pattern(rank))
        gradient.rows[:count].fill_(torch.nan)
        meet()

    def check(_: object) -> None:
        meet()  # the one that pushes into this rank's memory has finished
        check_equal(name, arrives, pattern(sender))

    return Operation(
        call=lambda: target.copy_(source),
        prepare=prepare,
        check=check,
        logical_bytes=nbytes,
        physical_bytes=nbytes if name != "hbm_copy" else 2 * nbytes,
    )
