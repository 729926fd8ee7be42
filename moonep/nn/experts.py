"""The experts: a grouped SwiGLU over the rows of this rank, with gradients added straight into the pool's fp32 rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moonep.dims import ROW_ALIGNMENT_BYTES, Dims
from moonep.nn.graphs import outside_graphs
from moonep.plan import Plan
from moonep.pool import ExpertPool
from moonep.weights import PROJECTIONS


@outside_graphs
def experts(
    pool: ExpertPool,
    plan: Plan,
    hidden: Tensor,
    route_weights: Tensor,
    *,
    slot_set: int = 0,
    rows_again: Callable[[], tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """down(silu(x gate) * (x up) * route weight) for every row, each group of rows with its own expert's weights.

    Args:
        pool: with projections gate [H, F], up [H, F], down [F, H]. Backward adds weight gradients to its
            `compact_grad`, if it was made with `grads=True`.
        plan: of the dispatch that brought the rows.
        hidden: [C, H] the pool's dtype. Rows past the plan's last offset have no influence.
        route_weights: [C] fp32.
        slot_set: which of the pool's slots hold this plan's redundant experts; filled again when they do not.
        rows_again: None: rows and activations are saved for backward. Else a function that brings `hidden` and
            `route_weights` again in backward, when nothing of them was saved.

    Returns:
        [C, H]; rows past the plan's last offset are undefined.
    """
    check_pool(pool, plan.dims)
    return _Experts.apply(pool, plan, slot_set, rows_again, hidden, route_weights)


def check_pool(pool: ExpertPool, dims: Dims) -> None:
    """Raise a ValueError unless the pool has the projections of `experts`, and room for all gradients."""
    names = [p.name for p in pool.projections]
    if sorted(names) != sorted(PROJECTIONS):
        raise ValueError(f"pool: given projections {names}, expected {list(PROJECTIONS)}")
    if pool.grads and dims.spills:
        raise ValueError(f"pool: given B = {pool.B} with gradients, expected B >= {dims.max_redundant}")


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


def rows_in_use(plan: Plan) -> int:
    """Rows that the experts work on: those below the last offset; all C on a GPU, where knowing it means waiting."""
    return plan.dims.C if plan.cu_seqlens.is_cuda else int(plan.cu_seqlens[-1])


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


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        pool: ExpertPool,
        plan: Plan,
        slot_set: int,
        rows_again: Callable[[], tuple[Tensor, Tensor]] | None,
        hidden: Tensor,
        route_weights: Tensor,
    ) -> Tensor:
        out, gate, up = compute_rows(pool, plan, slot_set, hidden, route_weights)
        ctx.pool, ctx.plan, ctx.slot_set, ctx.rows_again = pool, plan, slot_set, rows_again
        if rows_again is None:
            # A view made here: if it is one of the Buffer's rows and they are overwritten, autograd says so.
            ctx.save_for_backward(hidden[: len(gate)], route_weights, gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.rows_again is None:
            hidden, route_weights, *products = ctx.saved_tensors
        else:
            # Collective, and overwrites the rows that gradients arrive in: grad_out is a copy.
            (hidden, route_weights), products = ctx.rows_again(), []
        grads = differentiate_rows(ctx.pool, ctx.plan, ctx.slot_set, grad_out, hidden, route_weights, products)
        return None, None, None, None, *grads


def compute_rows(
    pool: ExpertPool, plan: Plan, slot_set: int, hidden: Tensor, route_weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What `experts` returns, and the rows in use times gate and up: [C, H], [n, F], [n, F]."""
    weights, offsets = _weights(pool, plan, slot_set)
    used = rows_in_use(plan)
    gate, up = _multiply(hidden[:used], weights, offsets)
    out = torch.empty_like(hidden)
    out[:used] = grouped_mm(_activate(gate, up, route_weights[:used, None]), weights["down"], offsets)
    return out, gate, up


def differentiate_rows(
    pool: ExpertPool,
    plan: Plan,
    slot_set: int,
    grad_out: Tensor,
    hidden: Tensor,
    route_weights: Tensor,
    products: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """The backward of `experts`: adds weight gradients to the pool's, and returns those of rows and route weights.

    Args:
        pool, plan, slot_set: of `experts`.
        grad_out: [C, H], of its output.
        hidden, route_weights: its inputs, at least the rows in use.
        products: what `compute_rows` returned with the output, [n or more, F] each; empty: computed again.

    Returns:
        [C, H], undefined past the plan's last offset; [C] fp32.
    """
    weights, offsets = _weights(pool, plan, slot_set)
    used = rows_in_use(plan)
    x, w, grad_y = hidden[:used], route_weights[:used, None], grad_out[:used].contiguous()
    gate, up = (p[:used] for p in products) if products else _multiply(x, weights, offsets)

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

    if pool.grads:
        pool.claim_gradients(plan, slot_set)
        pool.ready_gradients()
        grads = pool.compact_grad_of(slot_set)
        pairs = {"gate": (x, grad_gate), "up": (x, grad_up), "down": (_activate(gate, up, w), grad_y)}
        for name, (left, right) in pairs.items():
            if pool.trains(name):
                add_weight_grad(grads[name], left, right, offsets)
    return grad_hidden, grad_weights


def _multiply(x: Tensor, weights: dict[str, Tensor], offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Rows times gate, and times up."""
    return grouped_mm(x, weights["gate"], offsets), grouped_mm(x, weights["up"], offsets)


def _weights(pool: ExpertPool, plan: Plan, slot_set: int) -> tuple[dict[str, Tensor], Tensor]:
    """Weights and offsets of this rank's groups: the compact view, or all experts when some have no slot."""
    pool.fill_slots(plan, slot_set, force=False, check_updates=False)
    if plan.dims.spills:
        return pool.full_of(slot_set), plan.cu_seqlens
    return pool.compact_of(slot_set), plan.compact_cu_seqlens


def _activate(gate: Tensor, up: Tensor, route_weights: Tensor) -> Tensor:
    """silu(gate) * up * route weight, in fp32, rounded once."""
    a = gate.float()
    return (a * torch.sigmoid(a) * up.float() * route_weights).to(gate.dtype)
