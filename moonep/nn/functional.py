"""Dispatch and combine as differentiable functions: each is the other's backward, with the saved plan.

    forward    dispatch(x)  -> rows -> experts -> rows -> combine -> y
    backward   combine(dx) <- rows <- experts <- rows <- dispatch(dy)

Combine's backward brings the redundant experts' weights back into the slots, since other layers have used them in
between; dispatch's backward ends with the reduction of their gradients to their homes.

Under `torch.compile` both run eagerly, and so does `experts`: graphs end and begin around them. Forward and backward of
`moonep.nn.RoutedExperts`, which is all of it, are one operator each.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moonep.arguments import check_tensor, describe
from moonep.buffer import Buffer
from moonep.nn.checks import check_live_pool, check_or_refuse, check_tokens, check_type
from moonep.nn.graphs import outside_graphs
from moonep.plan import Plan
from moonep.pool import ExpertPool


class Dispatched(NamedTuple):
    """Rows for the experts of this rank: hidden [C, H] payload dtype, route weights [C] fp32, and the plan."""

    hidden: Tensor
    route_weights: Tensor
    plan: Plan


@outside_graphs
def load(pool: ExpertPool, weights: Mapping[str, Tensor] | nn.ParameterDict) -> Tensor:
    """Use a framework's own weights: `pool.load_local` in forward, and the pool's gradients for them in backward.

        weights = {name: w.full_tensor(grad_placements=[Partial()]) for name, w in sharded.items()}  # DTensors
        output, _ = routed(hidden, route_weights, topk_experts, anchor=load(pool, weights))

    Args:
        pool: with `grads=True` and without master parameters.
        weights: {projection: [L, ...] floating dtype}: all projections, of this rank's own experts. Backward gives them
            `local_grad` in their dtype, which is complete over the pool's group, and zeroes it.

    Returns:
        [0]: the `anchor` of `dispatch` or `RoutedExperts`. Their backward comes before this one's.

    Raises:
        ValueError: a projection is missing or has another shape; the pool has no gradients, or masters. It is raised on
            this rank alone: peers wait for it in the dispatch.

    Visible when it returns: to this rank, the weights; to its peers, after the dispatch that follows.

    Moves: forward reads the weights and writes them in the pool's dtype; backward reads `local_grad` (4 bytes a value),
    writes it in the weights' dtype, and zeroes it.
    """
    check_live_pool(pool)
    check_type("weights", weights, Mapping | nn.ParameterDict, "{projection: tensor}")
    if pool.master or not pool.grads:
        given = "master=True" if pool.master else "grads=False"
        raise ValueError(f"pool: given one with {given}, expected one with grads=True and master=False")
    names = [p.name for p in pool.projections]
    if sorted(weights) != sorted(names):
        raise ValueError(f"weights: given {sorted(weights)}, expected all of {names}")
    for name, weight in weights.items():
        shape = list(pool.local[name].shape)
        if not isinstance(weight, Tensor) or not weight.is_floating_point() or list(weight.shape) != shape:
            raise ValueError(f"weights[{name!r}]: given {describe(weight)}, expected {shape} of a floating dtype")
    # The anchor keeps backward coming when all weights are frozen: what was added to `local_grad` must not stay.
    return _Load.apply(pool, make_anchor(pool.local[names[0]].device), *(weights[name] for name in names))


def make_anchor(device: torch.device) -> Tensor:
    """An empty tensor that requires grad, so that backward runs when neither tokens nor route weights do.

    On the device of the experts: whoever calls backward on another stream than forward's then waits for it, as with any
    parameter.
    """
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.float32, device=device, requires_grad=True)


@outside_graphs
def dispatch(
    buffer: Buffer,
    hidden: Tensor,
    route_weights: Tensor,
    topk_experts: Tensor,
    pool: ExpertPool | None = None,
    *,
    anchor: Tensor | None = None,
    slot_set: int = 0,
    zero_copy: bool = False,
) -> Dispatched:
    """Send tokens to their experts' rows. Collective, in forward and in backward.

    Args:
        buffer: of this layer shape.
        hidden: [s, H] payload dtype.
        route_weights: [s, K] fp32.
        topk_experts: [s, K] int32 or int64, contiguous; -1 = no assignment.
        pool: whose slot gradients are reduced home at the end of backward; None: not at all.
        anchor: any tensor that requires grad, such as an expert parameter. Backward runs only when an input requires
            grad: with frozen inputs and router the gradients of redundant experts would never go home. It gets none.
            With a framework's own weights: what `load` returned.
        slot_set: which of the pool's slots.
        zero_copy: `hidden` of the result is a view of the Buffer's rows, valid until its next fresh dispatch. Whoever
            saves it for backward and uses it after that gets an error.

    Returns:
        hidden [C, H] payload dtype, route weights [C] fp32, plan. Rows past the plan's last offset are undefined.

    Raises:
        ValueError: a bad argument; nothing has been sent. Peers raise PeerError.
        PeerError, PeerTimeout: another rank failed or did not come; in backward, too.

    Visible when it returns: all rows that this rank computes. When backward returns, `pool.local_grad` is complete.

    Moves: see `Buffer.dispatch`; backward is a combine and, with a pool, a reduction.
    """
    check_type("buffer", buffer, Buffer, "a Buffer")
    check_or_refuse(
        buffer, "dispatch", _check_dispatch, buffer, hidden, route_weights, topk_experts, pool, anchor, slot_set
    )
    args = (buffer, pool, slot_set, zero_copy, hidden.contiguous(), route_weights.contiguous(), topk_experts, anchor)
    return Dispatched(*_Dispatch.apply(*args))


@outside_graphs
def combine(buffer: Buffer, plan: Plan, hidden: Tensor, pool: ExpertPool | None = None, *, slot_set: int = 0) -> Tensor:
    """Sum each token's rows back at its rank, unweighted. Collective, in forward and in backward.

    Args:
        buffer: that made the plan.
        plan: of the dispatch.
        hidden: [C, H] payload dtype, the experts' output.
        pool: whose slots get this plan's weights again in backward; None: not at all.
        slot_set: which of the pool's slots.

    Returns:
        [s, H] payload dtype.

    Raises:
        ValueError: a bad argument. Peers raise PeerError.
        PeerError, PeerTimeout: another rank failed or did not come; in backward, too.

    Visible when it returns: the sums of this rank's tokens. When backward returns, gradients of all rows that this rank
    computed are there, and with a pool its slots have this plan's weights.

    Moves: see `Buffer.combine`; backward is a dispatch with the plan and, with a pool, a prefetch.
    """
    check_type("buffer", buffer, Buffer, "a Buffer")
    check_or_refuse(buffer, "combine", _check_combine, buffer, hidden, pool, slot_set)
    return _Combine.apply(buffer, pool, slot_set, plan, hidden.contiguous())


def _check_dispatch(
    buffer: Buffer,
    hidden: object,
    route_weights: object,
    topk_experts: object,
    pool: ExpertPool | None,
    anchor: object,
    slot_set: int,
) -> None:
    check_tokens(buffer, hidden, route_weights, topk_experts)
    check_type("anchor", anchor, Tensor | NoneType, "None or a tensor")
    if pool is not None:
        buffer._check_pool(pool, slot_set)


def _check_combine(buffer: Buffer, hidden: object, pool: ExpertPool | None, slot_set: int) -> None:
    d, device = buffer.dims, buffer._backend.device
    check_tensor("hidden", hidden, (d.C, d.H), (buffer.dtype,), device, contiguous=False)
    if pool is not None:
        buffer._check_pool(pool, slot_set)


class _Load(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pool: ExpertPool, anchor: Tensor, *weights: Tensor) -> Tensor:
        ctx.pool, ctx.dtypes = pool, [w.dtype for w in weights]
        pool.load_local({p.name: w for p, w in zip(pool.projections, weights, strict=True)})
        return torch.zeros_like(anchor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = []
        for p, dtype, wanted in zip(ctx.pool.projections, ctx.dtypes, ctx.needs_input_grad[2:], strict=True):
            own = ctx.pool.local_grad[p.name]
            grads.append(torch.empty(own.shape, dtype=dtype, device=own.device).copy_(own) if wanted else None)
            own.zero_()
        return None, None, *grads


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        buffer: Buffer,
        pool: ExpertPool | None,
        slot_set: int,
        zero_copy: bool,
        hidden: Tensor,
        route_weights: Tensor,
        topk_experts: Tensor,
        anchor: Tensor | None,
    ) -> tuple[Tensor, Tensor, Plan]:
        rows, weights, _, plan = buffer.dispatch(hidden, route_weights, topk_experts, zero_copy=zero_copy)
        ctx.buffer, ctx.pool, ctx.slot_set, ctx.plan = buffer, pool, slot_set, plan
        return rows, weights, plan

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor, _: None) -> tuple[Tensor | None, ...]:
        grads = differentiate_dispatch(ctx.buffer, ctx.plan, ctx.pool, ctx.slot_set, grad_rows, grad_weights)
        return None, None, None, None, *grads, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Buffer, pool: ExpertPool | None, slot_set: int, plan: Plan, hidden: Tensor) -> Tensor:
        ctx.buffer, ctx.pool, ctx.slot_set, ctx.plan = buffer, pool, slot_set, plan
        return buffer.combine(plan, hidden)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, differentiate_combine(ctx.buffer, ctx.plan, ctx.pool, ctx.slot_set, grad_output)


def differentiate_dispatch(
    buffer: Buffer, plan: Plan, pool: ExpertPool | None, slot_set: int, grad_rows: Tensor, grad_weights: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The backward of `dispatch`: gradients of tokens and route weights; slot gradients go home."""
    grads = buffer.combine(plan, grad_rows.contiguous(), grad_weights.contiguous())[:2]
    if pool is not None and pool.grads:
        buffer.reduce(plan, pool, slot_set=slot_set)
    return grads


def differentiate_combine(
    buffer: Buffer, plan: Plan, pool: ExpertPool | None, slot_set: int, grad_output: Tensor
) -> Tensor:
    """The backward of `combine`: weights come back into the slots, and gradients to the rows."""
    if pool is not None:
        # Before the dispatch, not after it: then slots that no other layer has used since are not copied again.
        buffer.prefetch(plan, pool, slot_set=slot_set)
    return buffer.dispatch(grad_output.contiguous(), plan=plan)[0]
