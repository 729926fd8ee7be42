"""The experts: a grouped SwiGLU over the rows of this rank, with gradients added straight into the pool's fp32 rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moonep.arguments import check_tensor
from moonep.dims import Dims
from moonep.nn import grouped
from moonep.nn.checks import check_live_pool, check_type
from moonep.nn.graphs import outside_graphs
from moonep.plan import Plan
from moonep.pool import ExpertPool
from moonep.weights import PROJECTIONS


@outside_graphs
def experts(pool: ExpertPool, plan: Plan, hidden: Tensor, route_weights: Tensor, *, slot_set: int = 0) -> Tensor:
    """down(silu(x gate) * (x up) * route weight) for every row, each group of rows with its own expert's weights.

    Args:
        pool: with projections gate [H, F], up [H, F], down [F, H]. Backward adds weight gradients to its
            `compact_grad`, if it was made with `grads=True`.
        plan: of the dispatch that brought the rows.
        hidden: [C, H] the pool's dtype. Rows past the plan's last offset have no influence.
        route_weights: [C] fp32.
        slot_set: which of the pool's slots hold this plan's redundant experts; filled again when they do not.

    Returns:
        [C, H]; rows past the plan's last offset are undefined.

    Raises:
        ValueError: a bad argument, on this rank alone: peers wait for it in the combine.
        StaleSlotsError: in backward: the slots hold gradients of another plan that were not reduced.

    Visible when it returns: to this rank alone. When backward returns, the pool's `compact_grad` has this plan's
    gradients; those of redundant experts go home with `Buffer.reduce`, which the backward of `dispatch` calls.
    """
    check_type("plan", plan, Plan, "the Plan that dispatch returned")
    check_pool(pool, plan.dims)
    pool.check_slot_set(slot_set)
    C, weight = plan.dims.C, pool.local["gate"]
    check_tensor("hidden", hidden, (C, weight.shape[1]), (weight.dtype,), weight.device, contiguous=False)
    check_tensor("route_weights", route_weights, (C,), (torch.float32,), weight.device, contiguous=False)
    return _Experts.apply(pool, plan, slot_set, hidden, route_weights)


def check_pool(pool: ExpertPool, dims: Dims) -> None:
    """Raise a ValueError unless a live pool has these sizes, the projections of `experts`, and room for gradients."""
    check_live_pool(pool)
    if (pool.E, pool.B, pool.R) != (dims.E, dims.B, dims.R):
        raise ValueError(
            f"pool: given E, B, ranks = {pool.E}, {pool.B}, {pool.R}, "
            f"expected those of the Buffer: {dims.E}, {dims.B}, {dims.R}"
        )
    names = [p.name for p in pool.projections]
    if sorted(names) != sorted(PROJECTIONS):
        raise ValueError(f"pool: given projections {names}, expected {list(PROJECTIONS)}")
    shapes = {p.name: p.shape for p in pool.projections}
    for name, expected in (("up", shapes["gate"]), ("down", shapes["gate"][::-1])):
        if len(expected) != 2 or shapes[name] != expected:
            given = f"gate {list(shapes['gate'])} and {name} {list(shapes[name])}"
            raise ValueError(f"pool: given {given}, expected gate [H, F], up [H, F], down [F, H]")
    if pool.grads and dims.spills:
        raise ValueError(f"pool: given B = {pool.B} with gradients, expected B >= {dims.max_redundant}")


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pool: ExpertPool, plan: Plan, slot_set: int, hidden: Tensor, route_weights: Tensor) -> Tensor:
        out, gate, up = compute_rows(pool, plan, slot_set, hidden, route_weights)
        ctx.pool, ctx.plan, ctx.slot_set = pool, plan, slot_set
        # A view made here: if it is one of the Buffer's rows and they are overwritten, autograd says so.
        ctx.save_for_backward(hidden[: len(gate)], route_weights, gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        hidden, route_weights, *products = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        grads = differentiate_rows(ctx.pool, ctx.plan, ctx.slot_set, grad_out, hidden, route_weights, products)
        return None, None, None, *grads


def compute_rows(
    pool: ExpertPool,
    plan: Plan,
    slot_set: int,
    hidden: Tensor,
    route_weights: Tensor,
    *,
    out: Tensor | None = None,
    ready: grouped.Ready | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `experts` returns, and the rows in use times gate and up: [C, H], [n, F], [n, F].

    Args:
        pool, plan, hidden, route_weights, slot_set: of `experts`.
        out, ready: see `grouped.compute`; slots are what waits for `ready`.
    """
    weights, offsets, first, ready = _weights(pool, plan, slot_set, ready)
    return grouped.compute(
        weights, offsets, hidden, route_weights, out=out, first=first, ready=ready, token_padding=plan.dims.P
    )


def differentiate_rows(
    pool: ExpertPool,
    plan: Plan,
    slot_set: int,
    grad_out: Tensor,
    hidden: Tensor,
    route_weights: Tensor,
    products: Sequence[Tensor],
    *,
    in_place: bool = False,
    ready: grouped.Ready | None = None,
    weights_done: Callable[[], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """The backward of `experts`: adds weight gradients to the pool's, and returns those of rows and route weights.

    Args:
        pool, plan, slot_set: of `experts`.
        grad_out, hidden, route_weights, products, in_place, weights_done: see `grouped.differentiate`.
        ready: see there; slots are what waits for it.

    Returns:
        [C, H], undefined past the plan's last offset; [C] fp32.
    """
    weights, offsets, first, ready = _weights(pool, plan, slot_set, ready)
    grads, fresh = {}, []
    if pool.grads:
        pool.claim_gradients(plan, slot_set)
        fresh = pool.ready_gradients(zero=False)
        grads = {name: grad for name, grad in pool.compact_grad_of(slot_set).items() if pool.trains(name)}
    return grouped.differentiate(
        weights,
        grads,
        offsets,
        grad_out,
        hidden,
        route_weights,
        products,
        in_place=in_place,
        fresh=fresh,
        first=first,
        ready=ready,
        weights_done=weights_done,
        token_padding=plan.dims.P,
    )


def _weights(
    pool: ExpertPool, plan: Plan, slot_set: int, ready: grouped.Ready | None
) -> tuple[dict[str, Tensor], Tensor, int | None, grouped.Ready | None]:
    """Weights and offsets of this rank's groups, how many are its own experts, and what the others wait for.

    The compact view, or all experts when some have no slot: then what has none is in between, and nothing waits.
    """
    pool.fill_slots(plan, slot_set, force=False, check_updates=False)
    if not plan.dims.spills:
        return pool.compact_of(slot_set), plan.compact_cu_seqlens, plan.dims.L, ready
    if ready is not None:
        for name in grouped.ORDER:
            ready(name)
    return pool.full_of(slot_set), plan.cu_seqlens, None, None
