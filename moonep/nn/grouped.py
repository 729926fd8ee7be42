"""Grouped SwiGLU: rows of each group through its own expert's weights, and the gradients of all of it.

    gate, up = x Wgate[g], x Wup[g]         [n, F]
    z = silu(gate) * up * route weight      [n, F]
    y = z Wdown[g]                          [n, H]

Groups are given by their end rows, on the device. What is known there only, nothing on the host depends on, except on a
CPU: there the rows in use are counted, and the others left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moonep.dims import ROW_ALIGNMENT_BYTES

Weights = Mapping[str, Tensor]  # gate [G, H, F], up [G, H, F], down [G, F, H]


def compute(weights: Weights, offsets: Tensor, hidden: Tensor, route_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The experts' output, and the rows in use times gate and up.

    Args:
        weights: of the groups, in the dtype of the rows.
        offsets: [G] int32: end row of each group.
        hidden: [C, H]. Rows past the last offset have no influence.
        route_weights: [C] fp32.

    Returns:
        [C, H], undefined past the last offset; [n, F] and [n, F], n <= C.
    """
    used = rows_in_use(offsets, len(hidden))
    gate, up = _multiply_gate_up(hidden[:used], weights, offsets)
    out = torch.empty_like(hidden)
    out[:used] = grouped_mm(_activate(gate, up, route_weights[:used, None]), weights["down"], offsets)
    return out, gate, up


def differentiate(
    weights: Weights,
    grads: Weights,
    offsets: Tensor,
    grad_out: Tensor,
    hidden: Tensor,
    route_weights: Tensor,
    products: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """The backward of `compute`: adds weight gradients to `grads`, and returns those of rows and route weights.

    Args:
        weights, offsets: of `compute`.
        grads: fp32, like `weights`; those that are wanted.
        grad_out: [C, H], of its output.
        hidden, route_weights: its inputs, at least the rows in use.
        products: what it returned with the output; empty: computed again.

    Returns:
        [C, H], undefined past the last offset; [C] fp32.
    """
    used = rows_in_use(offsets, len(grad_out))
    x, w, grad_y = hidden[:used], route_weights[:used, None], grad_out[:used].contiguous()
    gate, up = (p[:used] for p in products) if products else _multiply_gate_up(x, weights, offsets)

    grad_z = grouped_mm(grad_y, weights["down"].transpose(1, 2), offsets).float()
    a, b = gate.float(), up.float()
    s = torch.sigmoid(a)
    grad_weights = route_weights.new_zeros(route_weights.shape)
    grad_weights[:used] = (grad_z * (a * s * b)).sum(1)
    grad_z *= w
    grad_up = (grad_z * a * s).to(x.dtype)
    grad_gate = (grad_z * b * s * (1 + a * (1 - s))).to(x.dtype)
    grad_x = grouped_mm(grad_gate, weights["gate"].transpose(1, 2), offsets).float()
    grad_x += grouped_mm(grad_up, weights["up"].transpose(1, 2), offsets)
    grad_hidden = torch.empty_like(grad_out)
    grad_hidden[:used] = grad_x

    pairs = {"gate": (x, grad_gate), "up": (x, grad_up), "down": (_activate(gate, up, w), grad_y)}
    for name, grad in grads.items():
        add_weight_grad(grad, *pairs[name], offsets)
    return grad_hidden, grad_weights


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Rows of group g times weight[g]: [n, H] x [G, H, F] -> [n, F]. `offsets`: [G] int32 end rows, the last one n.

    `torch.nn.functional.grouped_mm` where it exists and takes the operands; a product a group elsewhere.
    """
    if hasattr(F, "grouped_mm") and len(x) and _takes(x) and _takes(weight):
        return F.grouped_mm(x, weight, offs=offsets)
    product = x.new_zeros(len(x), weight.shape[2])
    for group, rows in _groups(offsets):
        torch.mm(x[rows], weight[group], out=product[rows])
    return product


def _takes(operand: Tensor) -> bool:
    """What grouped_mm demands of dtype and strides."""
    aligned = all(n == 1 or n * operand.itemsize % ROW_ALIGNMENT_BYTES == 0 for n in operand.stride()[-2:])
    return operand.dtype in (torch.bfloat16, torch.float16, torch.float32) and aligned


def rows_in_use(offsets: Tensor, capacity: int) -> int:
    """Rows below the last offset; on a GPU, where knowing it means waiting, all there is room for."""
    return capacity if offsets.is_cuda else int(offsets[-1])


def _groups(offsets: Tensor) -> list[tuple[int, slice]]:
    """(group, its rows) of every group that has rows."""
    ends = offsets.tolist()
    return [(g, slice(b, e)) for g, (b, e) in enumerate(zip([0, *ends[:-1]], ends, strict=True)) if e > b]


def add_weight_grad(grad: Tensor, x: Tensor, grad_y: Tensor, offsets: Tensor) -> None:
    """grad[g] += x[rows of g]^T grad_y[rows of g]; groups without rows are not changed.

    In fp32 on the CPU. On a GPU the product of a group is rounded to the operands' dtype before it is added.
    """
    if grad.is_cuda and x.dtype == torch.bfloat16 and hasattr(F, "grouped_mm"):
        product = F.grouped_mm(x.t(), grad_y, offs=offsets)
        has_rows = torch.diff(offsets, prepend=offsets.new_zeros(1)) > 0
        grad += torch.where(has_rows[:, None, None], product, 0)
        return
    for group, rows in _groups(offsets):
        grad[group].addmm_(x[rows].float().t(), grad_y[rows].float())


def _multiply_gate_up(x: Tensor, weights: Weights, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Rows times gate, and times up."""
    return grouped_mm(x, weights["gate"], offsets), grouped_mm(x, weights["up"], offsets)


def _activate(gate: Tensor, up: Tensor, route_weights: Tensor) -> Tensor:
    """silu(gate) * up * route weight, in fp32, rounded once."""
    a = gate.float()
    return (a * torch.sigmoid(a) * up.float() * route_weights).to(gate.dtype)
