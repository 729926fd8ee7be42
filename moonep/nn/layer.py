"""Routed experts, forward and backward, on tensors that are not differentiated: what eager mode and operators share.

    forward    dispatch | prefetch beside own experts | slots' experts | combine
    backward   dispatch | prefetch beside own experts | slots' experts | weight gradients |
               reduce beside the gradient of the rows | combine

What is beside something runs on the Buffer's communication stream, if `overlap` names it. Prefetch is awaited before a
slot is read. Weight gradients are made before the gradient of the rows, so that those of redundant experts travel
meanwhile; combine follows the reduction, as operations of a Buffer follow each other, so nothing else has to wait for
it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from moonep.buffer import Buffer
from moonep.nn import grouped
from moonep.nn.experts import compute_rows, differentiate_rows
from moonep.plan import Plan
from moonep.pool import ExpertPool

# What is saved for backward: rows and activations; rows; tokens, which are dispatched again; nothing.
ROWS, INPUTS, TOKENS, NOTHING = "rows", "inputs", "tokens", "nothing"
SAVE = (ROWS, INPUTS, TOKENS)

# What can run beside other work: weights of redundant experts, their gradients, and, in a `MoE`, the shared expert.
PREFETCH, REDUCE, SHARED = "prefetch", "reduce", "shared"
OVERLAP = (PREFETCH, REDUCE, SHARED)


@torch.no_grad()
def forward(
    buffer: Buffer,
    pool: ExpertPool,
    hidden: Tensor,
    route_weights: Tensor,
    topk_experts: Tensor,
    *,
    slot_set: int,
    save: str,
    overlap: Collection[str],
) -> tuple[Tensor, list[Tensor], Plan]:
    """Send tokens through their experts. Collective.

    Args:
        buffer, pool, slot_set: of the layer.
        hidden, route_weights, topk_experts: of `Buffer.dispatch`.
        save: ROWS, INPUTS, TOKENS or NOTHING.
        overlap: of OVERLAP; PREFETCH: beside own experts.

    Returns:
        Output [s, H]; what backward needs: (rows [C, H], route weights [C]), and, if `save` is ROWS, (rows times gate,
        rows times up) [n, F], or, if it is TOKENS, (hidden, route_weights); the plan.
    """
    pool.sync_if_updated(training=save != NOTHING)
    tokens, weights = hidden.contiguous(), route_weights.contiguous()
    keep = save in (ROWS, INPUTS)
    rows, row_weights, _, plan = buffer.dispatch(
        tokens, weights, topk_experts, zero_copy=not keep, router_weights_zero_copy=not keep
    )
    ready = _prefetch(buffer, plan, pool, slot_set, overlap, grouped.ORDER)
    target = buffer.hidden_nvsh_buffer_view
    out, *products = compute_rows(pool, plan, slot_set, rows, row_weights, out=target, ready=ready)
    output = buffer.combine(plan, out, zero_copy=True)[0]
    saved = {ROWS: [rows, row_weights, *products], INPUTS: [rows, row_weights], TOKENS: [tokens, weights], NOTHING: []}
    return output, saved[save], plan


@torch.no_grad()
def backward(
    buffer: Buffer,
    pool: ExpertPool,
    plan: Plan,
    grad_output: Tensor,
    saved: Sequence[Tensor],
    *,
    slot_set: int,
    save: str,
    overlap: Collection[str],
) -> tuple[Tensor, Tensor]:
    """The backward of `forward`: adds weight gradients to the pool's, and redundant experts' go home. Collective.

    Args:
        buffer, pool, plan, saved, slot_set, save: of `forward`.
        grad_output: [s, H].
        overlap: of OVERLAP; PREFETCH: beside own experts; REDUCE: beside the gradient of the rows.

    Returns:
        Gradients of tokens [s, H] and of route weights [s, K] fp32.
    """
    held = pool.holds(plan, slot_set)  # before a dispatch: slots that no other layer has used since are still right
    in_buffer = save != TOKENS
    grad_rows = buffer.dispatch(grad_output.contiguous(), plan=plan, zero_copy=in_buffer)[0]
    if save == TOKENS:
        tokens, weights = saved
        rows, row_weights, _, _ = buffer.dispatch(
            tokens, weights, plan=plan, zero_copy=True, router_weights_zero_copy=True
        )
        products: Sequence[Tensor] = ()
    else:
        rows, row_weights, *products = saved
    # After all dispatches, which would wait for it.
    order = grouped.BACKWARD_ORDER if save == ROWS else grouped.ORDER
    ready = None if held else _prefetch(buffer, plan, pool, slot_set, overlap, order)

    def reduce() -> None:
        if pool.grads:
            buffer.reduce(plan, pool, async_finish=REDUCE in overlap, slot_set=slot_set)

    grads = differentiate_rows(
        pool, plan, slot_set, grad_rows, rows, row_weights, products, in_place=True, ready=ready, weights_done=reduce
    )
    grad_hidden, grad_weights, _ = buffer.combine(plan, *grads, zero_copy=in_buffer)
    assert grad_weights is not None
    return grad_hidden, grad_weights


def _prefetch(
    buffer: Buffer, plan: Plan, pool: ExpertPool, slot_set: int, overlap: Collection[str], order: Sequence[str]
) -> grouped.Ready | None:
    """Fill the slots: what is used first comes first. Returns what waits for a projection's; None: no need to."""
    if PREFETCH not in overlap or buffer.dims.max_redundant == 0:
        buffer.prefetch(plan, pool, slot_set=slot_set)
        return None
    events = {name: buffer.prefetch(plan, pool, True, slot_set=slot_set, projections=[name]) for name in order}

    def ready(name: str) -> None:
        event = events[name]
        assert event is not None
        event.wait()

    return ready
