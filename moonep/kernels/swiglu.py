"""SwiGLU of grouped rows with their route weights, and its gradients: one pass over the rows in use."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonep.dims import ceil_div, next_power_of_2
from moonep.environment import interpreting
from moonep.kernels.launch import launch, varying
from moonep.kernels.rounding import round_to

_ROWS, _MAX_COLUMNS, _WARPS = 4, 1024, 8


@triton.jit(do_not_specialize=["G"])
def _activate_kernel(
    gate, up, route_weights, z, offsets, G, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program p: ROWS rows, all columns. z = silu(gate) up w."""
    end = tl.load(offsets + G - 1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) * ROWS >= end:
        return
    w = tl.load(route_weights + rows, mask=rows < end, other=0.0)[:, None]
    for column in range(0, F, COLUMNS):
        cols = column + tl.arange(0, COLUMNS)
        keep = (rows < end)[:, None] & (cols < F)[None, :]
        at = rows.to(tl.int64)[:, None] * F + cols[None, :]
        a = tl.load(gate + at, mask=keep, other=0.0).to(tl.float32)
        b = tl.load(up + at, mask=keep, other=0.0).to(tl.float32)
        tl.store(z + at, round_to(a * tl.sigmoid(a) * b * w, z.dtype.element_ty, INTERPRET), mask=keep)


@triton.jit(do_not_specialize=["G", "C"])
def _differentiate_kernel(
    grad_z, gate, up, route_weights, grad_gate, grad_up, z, grad_weights, offsets, G, C,
    F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program p: ROWS rows, all columns: gradients of gate, up and w (0 of rows not in use), and z."""
    end = tl.load(offsets + G - 1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sums = tl.zeros((ROWS,), tl.float32)
    if tl.program_id(0) * ROWS < end:
        w = tl.load(route_weights + rows, mask=rows < end, other=0.0)[:, None]
        for column in range(0, F, COLUMNS):
            cols = column + tl.arange(0, COLUMNS)
            keep = (rows < end)[:, None] & (cols < F)[None, :]
            at = rows.to(tl.int64)[:, None] * F + cols[None, :]
            a = tl.load(gate + at, mask=keep, other=0.0).to(tl.float32)
            b = tl.load(up + at, mask=keep, other=0.0).to(tl.float32)
            g = tl.load(grad_z + at, mask=keep, other=0.0).to(tl.float32)
            s = tl.sigmoid(a)
            silu = a * s
            sums += tl.sum(g * silu * b, 1)
            g *= w
            dtype = z.dtype.element_ty
            tl.store(z + at, round_to(silu * b * w, dtype, INTERPRET), mask=keep)
            tl.store(grad_up + at, round_to(g * silu, dtype, INTERPRET), mask=keep)
            tl.store(grad_gate + at, round_to(g * b * s * (1 + a * (1 - s)), dtype, INTERPRET), mask=keep)
    tl.store(grad_weights + rows, sums, mask=rows < C)


def activate(gate: Tensor, up: Tensor, route_weights: Tensor, offsets: Tensor) -> Tensor:
    """silu(gate) * up * route weight, in fp32, rounded once.

    Args:
        gate, up: [C, F].
        route_weights: [C] fp32.
        offsets: [G] int32; rows past the last are not read.

    Returns:
        [C, F]; rows past the last offset are undefined.

    Moves: 3 C F elements.
    """
    route_weights, z = route_weights.contiguous(), torch.empty_like(gate)
    args = (gate, up, route_weights, z, offsets, len(offsets))
    launch(
        _activate_kernel, (ceil_div(len(gate), _ROWS),), args, varying(gate, up, route_weights, offsets),
        num_warps=_WARPS, **_constants(gate),
    )  # fmt: skip
    return z


def differentiate(
    grad_z: Tensor, gate: Tensor, up: Tensor, route_weights: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The backward of `activate`.

    Args:
        grad_z: [C, F], of what `activate` returned.
        gate, up, route_weights, offsets: its inputs.

    Returns:
        Gradients of gate and up [C, F], z [C, F] again, and the gradient of route weights [C] fp32. Past the last
        offset they are undefined, but those of route weights 0.

    Moves: 6 C F elements.
    """
    grad_gate, grad_up, z = (torch.empty_like(gate) for _ in range(3))
    C, route_weights = len(gate), route_weights.contiguous()
    grad_weights = torch.empty(C, dtype=torch.float32, device=gate.device)
    args = (grad_z, gate, up, route_weights, grad_gate, grad_up, z, grad_weights, offsets, len(offsets), C)
    varies = varying(grad_z, gate, up, route_weights, offsets)
    launch(_differentiate_kernel, (ceil_div(C, _ROWS),), args, varies, num_warps=_WARPS, **_constants(gate))
    return grad_gate, grad_up, z, grad_weights


def _constants(rows: Tensor) -> dict[str, int | bool]:
    F = rows.shape[1]
    return {"F": F, "ROWS": _ROWS, "COLUMNS": min(next_power_of_2(F), _MAX_COLUMNS), "INTERPRET": interpreting()}
