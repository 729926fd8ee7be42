"""The operators that `torch.compile` sees in place of routed experts: forward and backward are one operator each.

What happens between the router and the output is collective, has state (slots, gradient rows, barriers) and sizes that
only the device knows. A compiler sees none of it but this:

    moonep::routed_experts           tokens, route weights, ids -> output, what backward needs, the plan
    moonep::routed_experts_backward  gradient of the output, the same -> gradients of tokens and route weights
    moonep::refuse                   a ValueError here, a PeerError at peers

**State.** `RoutedExperts` is known by a number in a tensor, so that equal layers share one compiled graph. It is looked
up among those that live; nothing here keeps one alive.

**Plans** cross as their tensors, with their key in a tensor on the host. They live as long as the graph holds them and
are saved for backward like any tensor, so any number of forwards may precede their backwards, or have none.

**Order.** Ranks must call collectives in the same order, and must not leave one out because nobody uses its result
(weight gradients are added to the pool's rows). So each operator claims to write to an order tensor: a compiler then
keeps them all, in the order in which they were called. Backward has another one than forward, since a tensor that
backward needs must not be written by later forwards.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moonep.arguments import describe
from moonep.nn.experts import compute_rows, differentiate_rows
from moonep.nn.functional import differentiate_combine, differentiate_dispatch

if TYPE_CHECKING:
    from moonep.nn.routed import RoutedExperts

ROWS, TOKENS, NOTHING = "rows", "tokens", "nothing"  # what is saved for backward
SAVE = (ROWS, TOKENS)

NUM_SAVED = 4  # rows, their route weights, and their products with gate and up
NUM_PLAN_TENSORS = 8

# Nobody writes to them: see "Order".
ORDER, BACKWARD_ORDER = torch.zeros(1, device="cpu"), torch.zeros(1, device="cpu")

_numbers = itertools.count(1)
_living: weakref.WeakValueDictionary[int, RoutedExperts] = weakref.WeakValueDictionary()


def register(routed: RoutedExperts) -> Tensor:
    """Make an object known to the operators. -> its number [] int64 on the host"""
    number = next(_numbers)
    _living[number] = routed
    return torch.tensor(number, device="cpu")


def _find(number: Tensor) -> RoutedExperts:
    routed = _living.get(int(number))
    if routed is None:
        raise ValueError("layer: given one that is gone, expected it to live until its last backward")
    return routed


_tags = [torch.Tag.pt2_compliant_tag]
if hasattr(torch.Tag, "cudagraph_unsafe"):
    _tags.append(torch.Tag.cudagraph_unsafe)  # a replay would not run what happens on the host

_library = torch.library.Library("moonep", "DEF")
_library.define(
    "routed_experts(Tensor(a!) order, Tensor backward_order, Tensor number, Tensor hidden, Tensor route_weights, "
    "Tensor topk_experts, Tensor? anchor, int slot_set, str save, int[] sizes) -> "
    f"({', '.join(['Tensor'] * (1 + NUM_SAVED + NUM_PLAN_TENSORS + 1))})",
    tags=_tags,
)
_library.define(
    "routed_experts_backward(Tensor(a!) order, Tensor number, Tensor grad_output, Tensor[] saved, Tensor[] plan, "
    "Tensor key, int slot_set, str save, int top_k) -> (Tensor, Tensor)",
    tags=_tags,
)
_library.define("refuse(Tensor(a!) order, Tensor number, str name, Tensor given, str expected) -> Tensor", tags=_tags)


@torch.no_grad()
def _run(
    order: Tensor,
    backward_order: Tensor,
    number: Tensor,
    hidden: Tensor,
    route_weights: Tensor,
    topk_experts: Tensor,
    anchor: Tensor | None,
    slot_set: int,
    save: str,
    sizes: Sequence[int],
) -> tuple[Tensor, ...]:
    """Dispatch, prefetch, experts, combine: see `RoutedExperts`.

    Args:
        order, backward_order: ORDER and BACKWARD_ORDER.
        number: of the `RoutedExperts`.
        hidden, route_weights, topk_experts: of `functional.dispatch`.
        anchor: so that backward runs when neither tokens nor route weights require grad.
        slot_set: which of the pool's slots.
        save: "rows", "tokens" or "nothing".
        sizes: R, E, B, C, F: of the outputs.

    Returns:
        output [s, H]; rows [C, H], route weights [C], products with gate and up [C, F], each [0] unless save is
        "rows", undefined past the plan's last offset; the plan's tensors; its key [] int64 on the host.
    """
    routed = _find(number)
    buffer, pool = routed.buffer, routed.pool
    pool.sync_if_updated()
    tokens, weights = hidden.contiguous(), route_weights.contiguous()
    rows, row_weights, _, plan = buffer.dispatch(tokens, weights, topk_experts, zero_copy=save != ROWS)
    buffer.prefetch(plan, pool, slot_set=slot_set)
    out, *products = compute_rows(pool, plan, slot_set, rows, row_weights)
    output = buffer.combine(plan, out)[0]
    saved = [hidden.new_empty(0) for _ in range(NUM_SAVED)]
    if save == ROWS:
        saved = [rows, row_weights, *(_extend(product, len(rows)) for product in products)]
    return output, *saved, *plan.tensors(), torch.tensor(plan.key, device="cpu")


@torch.no_grad()
def _run_backward(
    order: Tensor,
    number: Tensor,
    grad_output: Tensor,
    saved: Sequence[Tensor],
    plan: Sequence[Tensor],
    key: Tensor,
    slot_set: int,
    save: str,
    top_k: int,
) -> tuple[Tensor, Tensor]:
    """The backward of `_run`; adds weight gradients to the pool's and reduces those of redundant experts home.

    Args:
        order: BACKWARD_ORDER.
        number, slot_set, save: of the forward.
        grad_output: [s, H].
        saved: rows, route weights and products; if save is "tokens": tokens and route weights.
        plan, key: of the forward.
        top_k: K.

    Returns:
        Gradients of tokens [s, H] and route weights [s, K] fp32.
    """
    routed = _find(number)
    buffer, pool, its_plan = routed.buffer, routed.pool, routed.buffer.plan_of(plan, int(key))
    grad_rows = differentiate_combine(buffer, its_plan, pool, slot_set, grad_output)
    if save == TOKENS:
        tokens, weights = saved
        rows, row_weights, _, _ = buffer.dispatch(tokens, weights, plan=its_plan, zero_copy=True)
        products: list[Tensor] = []
    else:
        rows, row_weights, *products = saved
    grads = differentiate_rows(pool, its_plan, slot_set, grad_rows, rows, row_weights, products)
    grad_hidden, grad_weights = differentiate_dispatch(buffer, its_plan, pool, slot_set, *grads)
    assert grad_weights is not None
    return grad_hidden, grad_weights


def _refuse(order: Tensor, number: Tensor, name: str, given: Tensor, expected: str) -> Tensor:
    """Raise a ValueError in place of the dispatch; peers that are in it raise PeerError."""
    _find(number).buffer.refuse("dispatch", f"{name}: given {describe(given)}, expected {expected}")
    raise AssertionError("refuse returned")


def _extend(rows: Tensor, count: int) -> Tensor:
    """`rows` as the first of `count`; the others are undefined."""
    if len(rows) == count:
        return rows
    extended = rows.new_empty(count, *rows.shape[1:])
    extended[: len(rows)] = rows
    return extended


def _run_fake(
    order: Tensor,
    backward_order: Tensor,
    number: Tensor,
    hidden: Tensor,
    route_weights: Tensor,
    topk_experts: Tensor,
    anchor: Tensor | None,
    slot_set: int,
    save: str,
    sizes: Sequence[int],
) -> tuple[Tensor, ...]:
    R, E, B, C, F = sizes
    H = hidden.shape[1]
    saved = [hidden.new_empty(0) for _ in range(NUM_SAVED)]
    if save == ROWS:
        saved = [hidden.new_empty(C, H), route_weights.new_empty(C), hidden.new_empty(C, F), hidden.new_empty(C, F)]
    plan_shapes = [(R, E), (E, R), (R, B), (E + B,), (E + B, 2), (2,), (topk_experts.numel(),), (C,)]
    plan = [hidden.new_empty(shape, dtype=torch.int32) for shape in plan_shapes]
    return hidden.new_empty(hidden.shape), *saved, *plan, torch.empty((), dtype=torch.int64, device="cpu")


def _run_backward_fake(
    order: Tensor,
    number: Tensor,
    grad_output: Tensor,
    saved: Sequence[Tensor],
    plan: Sequence[Tensor],
    key: Tensor,
    slot_set: int,
    save: str,
    top_k: int,
) -> tuple[Tensor, Tensor]:
    s = grad_output.shape[0]
    return grad_output.new_empty(grad_output.shape), grad_output.new_empty(s, top_k, dtype=torch.float32)


def _refuse_fake(order: Tensor, number: Tensor, name: str, given: Tensor, expected: str) -> Tensor:
    return torch.empty_like(given)


def _below_autograd(*args: Any) -> tuple[Tensor, ...]:
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.moonep.routed_experts(*args)


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        output, *others = _below_autograd(*args)
        _, backward_order, number, hidden, route_weights, topk_experts, _, slot_set, save, _ = args
        saved, plan, key = others[:NUM_SAVED], others[NUM_SAVED:-1], others[-1]
        ctx.num_saved = NUM_SAVED if save == ROWS else 2
        ctx.save_for_backward(number, key, *(saved if save == ROWS else (hidden, route_weights)), *plan)
        ctx.order, ctx.slot_set, ctx.save, ctx.top_k = backward_order, slot_set, save, topk_experts.shape[1]
        ctx.mark_non_differentiable(*others)
        return output, *others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        number, key, *tensors = ctx.saved_tensors
        saved, plan = tensors[: ctx.num_saved], tensors[ctx.num_saved :]
        grads = torch.ops.moonep.routed_experts_backward(
            ctx.order, number, grad_output, saved, plan, key, ctx.slot_set, ctx.save, ctx.top_k
        )
        return None, None, None, *grads, None, None, None, None, None


def _run_with_autograd(*args: Any) -> tuple[Tensor, ...]:
    needed = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
    return _RoutedExperts.apply(*args) if needed else _below_autograd(*args)


for _name, _kernel, _fake in (
    ("routed_experts", _run, _run_fake),
    ("routed_experts_backward", _run_backward, _run_backward_fake),
    ("refuse", _refuse, _refuse_fake),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"moonep::{_name}", _fake, lib=_library)
_library.impl("routed_experts", _run_with_autograd, "Autograd")
