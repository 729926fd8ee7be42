"""The operators that `torch.compile` sees in place of routed experts: forward and backward are one operator each.

What happens between the router and the output is collective, has state (slots, gradient rows, barriers) and sizes that
only the device knows. A compiler sees none of it but this:

    moonep::routed_experts           tokens, route weights, ids -> output, what backward needs, the plan
    moonep::routed_experts_backward  gradient of the output, the same -> gradients of tokens and route weights
    moonep::refuse                   a ValueError here, a PeerError at peers

**State.** `RoutedExperts` is known by a number in a tensor, so that equal layers share one compiled graph. It is looked
up among those that live; nothing here keeps one alive.

**Plans** cross as one tensor, with their key in another on the host. They live as long as the graph holds them and
are saved for backward like any tensor, so any number of forwards may precede their backwards, or have none.

**Order.** Ranks must call collectives in the same order, and compilers do move calls that do not depend on each other.
So they do depend: each forward takes the key of the forward before it, and each backward what the backward before it in
the same graph returned (`Lane`). None may be left out because nobody uses its result, for weight gradients are added to
the pool's rows: `ORDER` keeps the keys, and what a backward returns is also the gradient of an empty tensor (`anchor`).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, library

from moonep.arguments import describe
from moonep.dims import Dims
from moonep.nn import layer
from moonep.nn.layer import INPUTS, ROWS, TOKENS
from moonep.plan import PlanLayout

if TYPE_CHECKING:
    from moonep.nn.routed import RoutedExperts

NUM_SAVED = 4  # rows, their route weights, and their products with gate and up

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


class Order:
    """The order of forwards in this process: `last` is the key of the last one's plan."""

    def __init__(self) -> None:
        self.last = torch.tensor(0, device="cpu")


ORDER = Order()


class Lane:
    """The order of backwards in one graph: `last` is what the last one returned; None before the first.

    Forwards of one graph find their lane at the key that they pass on, while the graph is made.
    """

    def __init__(self) -> None:
        self.last: Tensor | None = None

    @staticmethod
    def of(after: Tensor, key: Tensor) -> Lane:
        lane = getattr(after, "_moonep_lane", None) or Lane()
        after._moonep_lane = key._moonep_lane = lane  # type: ignore[attr-defined]
        return lane


_tags = [torch.Tag.pt2_compliant_tag]
if hasattr(torch.Tag, "cudagraph_unsafe"):
    _tags.append(torch.Tag.cudagraph_unsafe)  # a replay would not run what happens on the host


@library.custom_op(
    "moonep::routed_experts",
    mutates_args=(),
    schema="(Tensor after, Tensor number, Tensor hidden, Tensor route_weights, Tensor topk_experts, Tensor? anchor, "
    f"int slot_set, str save, int[] sizes) -> ({', '.join(['Tensor'] * (1 + NUM_SAVED + 3))})",
    tags=_tags,
)
@torch.no_grad()
def routed_experts(
    after: Tensor,
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
        after: [] int64 on the host: the key that the previous call returned.
        number: of the `RoutedExperts`.
        hidden, route_weights, topk_experts: of `functional.dispatch`.
        anchor: of `functional.make_anchor` or `load`; None: backward only runs when tokens or route weights require
            grad.
        slot_set: which of the pool's slots.
        save: one of `layer.SAVE`, or "nothing".
        sizes: R, E, B, C, S, F: of the outputs.

    Returns:
        output [s, H]; rows [C, H], route weights [C], products with gate and up [C, F], undefined past the plan's last
        offset, or [0] where `save` does not ask for them; the load [R, E] int32; the plan, packed; its key [] int64 on
        the host.
    """
    routed = _find(number)
    if wrong := routed.managed_by_ddp():
        routed.buffer.refuse("dispatch", wrong)
    output, kept, plan = layer.forward(
        routed.buffer,
        routed.pool,
        hidden,
        route_weights,
        topk_experts,
        slot_set=slot_set,
        save=save,
        overlap=routed.overlap,
    )
    saved = [hidden.new_empty(0) for _ in range(NUM_SAVED)]
    if save != TOKENS:  # tokens are inputs
        saved[: len(kept)] = [_extend(tensor, routed.buffer.dims.C) for tensor in kept]
    with torch.inference_mode(False):  # the next call may save it for backward
        key = torch.tensor(plan.key, device="cpu")
    return output, *saved, plan.load.clone(), plan.packed, key


@library.custom_op(
    "moonep::routed_experts_backward",
    mutates_args=(),
    schema="(Tensor before, Tensor number, Tensor grad_output, Tensor[] saved, Tensor plan, Tensor key, "
    "int slot_set, str save, int top_k) -> (Tensor, Tensor, Tensor)",
    tags=_tags,
)
@torch.no_grad()
def routed_experts_backward(
    before: Tensor,
    number: Tensor,
    grad_output: Tensor,
    saved: Sequence[Tensor],
    plan: Tensor,
    key: Tensor,
    slot_set: int,
    save: str,
    top_k: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of `routed_experts`: adds weight gradients to the pool's, and redundant experts' go home.

    Args:
        before: what the backward before it returned, or any tensor.
        number, slot_set, save: of the forward.
        grad_output: [s, H].
        saved: of `layer.forward`.
        plan, key: of the forward.
        top_k: K.

    Returns:
        Gradients of tokens [s, H], of route weights [s, K] fp32, and of the anchor [0].
    """
    routed = _find(number)
    grad_hidden, grad_weights = layer.backward(
        routed.buffer,
        routed.pool,
        routed.buffer.plan_of(plan, int(key)),
        grad_output,
        saved,
        slot_set=slot_set,
        save=save,
        overlap=routed.overlap,
    )
    return grad_hidden, grad_weights, torch.zeros(0, dtype=torch.float32, device="cpu")


@library.custom_op("moonep::refuse", mutates_args=(), tags=_tags)
def refuse(number: Tensor, name: str, given: Tensor, expected: str) -> Tensor:
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


@routed_experts.register_fake
def _(
    after: Tensor,
    number: Tensor,
    hidden: Tensor,
    route_weights: Tensor,
    topk_experts: Tensor,
    anchor: Tensor | None,
    slot_set: int,
    save: str,
    sizes: Sequence[int],
) -> tuple[Tensor, ...]:
    R, E, B, C, S, F = sizes
    H, (s, K) = hidden.shape[1], route_weights.shape
    saved = [hidden.new_empty(0) for _ in range(NUM_SAVED)]
    if save in (ROWS, INPUTS):
        saved[:2] = [hidden.new_empty(C, H), route_weights.new_empty(C)]
    if save == ROWS:
        saved[2:] = [hidden.new_empty(C, F), hidden.new_empty(C, F)]
    load = hidden.new_empty(R, E, dtype=torch.int32)
    plan = hidden.new_empty(PlanLayout(Dims(S=S, K=K, E=E, R=R, H=H, B=B)).length(s), dtype=torch.int32)
    return hidden.new_empty(hidden.shape), *saved, load, plan, torch.empty((), dtype=torch.int64, device="cpu")


@routed_experts_backward.register_fake
def _(
    before: Tensor,
    number: Tensor,
    grad_output: Tensor,
    saved: Sequence[Tensor],
    plan: Tensor,
    key: Tensor,
    slot_set: int,
    save: str,
    top_k: int,
) -> tuple[Tensor, Tensor, Tensor]:
    s = grad_output.shape[0]
    grad_weights = grad_output.new_empty(s, top_k, dtype=torch.float32)
    return grad_output.new_empty(grad_output.shape), grad_weights, torch.empty(0, dtype=torch.float32, device="cpu")


@refuse.register_fake
def _(number: Tensor, name: str, given: Tensor, expected: str) -> Tensor:
    return torch.empty_like(given)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    after, number, hidden, route_weights, topk_experts, anchor, slot_set, save, _ = inputs
    saved, (plan, key) = output[1 : 1 + NUM_SAVED], output[-2:]
    tensors = {ROWS: saved, INPUTS: saved[:2]}.get(save, (hidden, route_weights))
    ctx.save_for_backward(number, key, plan, *tensors)
    ctx.lane = Lane.of(after, key)
    ctx.slot_set, ctx.save, ctx.top_k = slot_set, save, topk_experts.shape[1]
    ctx.device = None if anchor is None else anchor.device
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros for those


def _differentiate(ctx: Any, grad_output: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    number, key, plan, *saved = ctx.saved_tensors
    before = key if ctx.lane.last is None else ctx.lane.last
    grad_hidden, grad_weights, grad_anchor = routed_experts_backward(
        before, number, grad_output, saved, plan, key, ctx.slot_set, ctx.save, ctx.top_k
    )
    ctx.lane.last = grad_anchor
    grad_of_anchor = grad_anchor.to(ctx.device) if ctx.needs_input_grad[5] else None
    return None, None, grad_hidden, grad_weights, None, grad_of_anchor, None, None, None


routed_experts.register_autograd(_differentiate, setup_context=_save)
