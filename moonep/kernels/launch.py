"""Launching compiled kernels without asking Triton again what it has found out before.

Triton's launch looks at every argument, makes a key of it and checks that no global has changed: more than 10 us of
Python. Here callers say what can vary; a launch that Triton has compiled once goes straight to its launcher.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

INT_MAX = 2**31 - 1

_compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}


def varying(*values: Tensor | int | None) -> tuple[Hashable, ...]:
    """What a compiled kernel depends on, of arguments that callers of this library give: see `launch`."""
    return tuple([_trait(value) for value in values])


def _trait(value: Tensor | int | None) -> Hashable:
    if value is None:
        return None
    if isinstance(value, int):
        return value > INT_MAX
    return value.dtype, value.data_ptr() & 15


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    varies: tuple[Hashable, ...] = (),
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    **constants: Any,
) -> None:
    """`kernel[grid](*args, num_warps=num_warps, num_stages=num_stages, **constants)`.

    Args:
        kernel: whose constexpr parameters come last.
        grid: one to three dimensions.
        args: tensors, descriptors and integers, in order.
        varies: `varying` of those whose dtype, alignment to 16 bytes or width is not the same in all launches with
            equal constants. Integers that Triton specialises on (1, multiples of 16) must not vary.
        num_warps, num_stages, constants: as in Triton.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
    key = (id(kernel), device, num_warps, num_stages, varies, *constants.values())
    known = _compiled.get(key)
    if known is None:
        compiled = kernel[grid](*args, num_warps=num_warps, num_stages=num_stages, **constants)
        if device >= 0 and hasattr(compiled, "packed_metadata"):
            in_order = tuple(constants[p.name] for p in kernel.params if p.name in constants)
            _compiled[key] = (compiled, in_order)
        return
    compiled, in_order = known
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *in_order)
