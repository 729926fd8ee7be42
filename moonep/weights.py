"""Moving the weights of redundant experts into slots, and their gradients home. One projection at a time.

Both forms that callers hold weights in are reduced to two small classes: where the weights come from and where the
slots are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moonep.arguments import describe
from moonep.dims import Dims
from moonep.plan import Plan

PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True, eq=False)
class SlotWeights:
    """The weights of one projection and the slots to fill.

    Attributes:
        weights: [E + B, ...] seen by all (slots are its last B rows), or, if `pushed`, this rank's [L, ...].
        slots: [B, ...] of this rank, or, if `pushed`, [R, B, ...] of all ranks.
        pushed: homes write into the slots of others; else each rank reads from the homes.
    """

    weights: Tensor
    slots: Tensor
    pushed: bool = False


@dataclass(frozen=True, eq=False)
class SlotReduction:
    """The gradients of one projection.

    Attributes:
        own: [L, ...] of own experts.
        slots: [R, B, ...] fp32, of all ranks' slots.
        wanted: False: slots are cleared, but not added to `own`.
    """

    own: Tensor
    slots: Tensor
    wanted: bool = True


def move_weights(moves: Sequence[SlotWeights], plan: Plan, num_sms: int | None = None) -> None:
    """Copy weights into slots: all of them pulled, or all pushed.

    Args:
        moves: the projections.
        plan: says which slot holds which expert.
        num_sms: multiprocessors that a kernel may use; None: all.
    """
    d = plan.dims
    if plan.status is not None:
        from moonep.kernels import bulk_weights
        from moonep.kernels import weights as kernels

        push, programs = moves[0].pushed, _programs(plan, num_sms)
        in_bulk = [m for m in moves if not push and _in_bulk(plan) and bulk_weights.takes(m.weights, m.slots)]
        for m in in_bulk:
            bulk_weights.fill_slots(m.weights, m.slots, plan.experts_to_copy, plan.status, plan.rank, programs)
        moves = [m for m in moves if m not in in_bulk]
        if not moves:
            return
        table = kernels.weights_table([m.weights for m in moves], [m.slots for m in moves], push)
        kernels.fill_slots(table, plan.experts_to_copy, plan.status, plan.rank, d.L, push, programs)
        return
    for r, b, e in _used_slots(plan):
        for move in moves:
            if move.pushed and d.home(e) == plan.rank:
                move.slots[r, b].copy_(move.weights[e % d.L])
            elif not move.pushed and r == plan.rank:
                move.slots[b].copy_(move.weights[e])


def add_gradients(reductions: Sequence[SlotReduction], plan: Plan, num_sms: int | None = None) -> None:
    """Add the slots that hold own experts to their gradients: ascending (rank, slot), in fp32, rounded once."""
    d, reductions = plan.dims, [r for r in reductions if r.wanted]
    if plan.status is not None:
        from moonep.kernels import bulk_weights
        from moonep.kernels import weights as kernels

        programs = _programs(plan, num_sms)
        in_bulk = [r for r in reductions if _in_bulk(plan) and bulk_weights.takes(r.own, r.slots)]
        for each in in_bulk:
            bulk_weights.add_slots(each.own, each.slots, plan.experts_to_copy, plan.status, plan.rank, programs)
        others = [r for r in reductions if r not in in_bulk]
        for dtype in {r.own.dtype for r in others}:
            some = [r for r in others if r.own.dtype == dtype]
            table = kernels.gradients_table([r.own for r in some], [r.slots for r in some])
            kernels.add_slots(table, plan.experts_to_copy, plan.status, plan.rank, d.L, dtype, programs)
        return
    for reduction in reductions:
        sums: dict[int, Tensor] = {}
        for r, b, e in _used_slots(plan):
            if d.home(e) == plan.rank:
                own = reduction.own[e % d.L]
                total = sums.setdefault(e, own if own.dtype == torch.float32 else own.float())
                total.add_(reduction.slots[r, b])
        if reduction.own.dtype != torch.float32:
            for e, total in sums.items():
                reduction.own[e % d.L].copy_(total)


def clear_gradients(reductions: Sequence[SlotReduction], plan: Plan, num_sms: int | None = None) -> None:
    """Zero the slots of this rank that were read."""
    if plan.status is not None:
        from moonep.kernels import weights as kernels

        table = kernels.gradients_table([r.own for r in reductions], [r.slots for r in reductions])
        kernels.clear_slots(table, plan.experts_to_copy, plan.status, plan.rank, _programs(plan, num_sms))
        return
    for r, b, _ in _used_slots(plan):
        if r == plan.rank:
            for reduction in reductions:
                reduction.slots[r, b].zero_()


def _in_bulk(plan: Plan) -> bool:
    """Whether large experts are moved by bulk copies, as rows are."""
    from moonep.backends.movers import copies_in_bulk

    return copies_in_bulk(plan.dst.device)


def _programs(plan: Plan, num_sms: int | None) -> int:
    """One program a multiprocessor: `num_sms`, or all."""
    from moonep.backends.movers import count_multiprocessors

    return num_sms or count_multiprocessors(plan.dst.device)


def _used_slots(plan: Plan) -> list[tuple[int, int, int]]:
    """(rank, slot, expert) of each slot that is used, ascending."""
    slots = plan.experts_to_copy.tolist()
    return [(r, b, e) for r, experts in enumerate(slots) for b, e in enumerate(experts) if e >= 0]


def weight_forms(
    given: dict[str, Tensor], dims: Dims, device: torch.device
) -> tuple[list[SlotWeights], list[SlotWeights]]:
    """Sort the keyword arguments of `Buffer.prefetch_weight`. -> pulled, pushed"""
    d = dims
    forms: list[SlotWeights] = []
    rest = dict(given)
    for name in PROJECTIONS:
        if (full := rest.pop(f"full_{name}_weight", None)) is not None:
            _check_rows(f"full_{name}_weight", full, (d.G,), device)
            forms.append(SlotWeights(full, full[d.E :]))
        local, buffer = rest.pop(f"local_{name}_weight", None), rest.pop(f"{name}_prefetch_buffer", None)
        if local is not None or buffer is not None:
            _check_rows(f"local_{name}_weight", local, (d.L,), device)
            _check_rows(f"{name}_prefetch_buffer", buffer, (d.R, d.B), device, like=local)
            assert local is not None and buffer is not None
            forms.append(SlotWeights(local, buffer, pushed=True))
    _check_used("weights", rest, len(forms), "full_gate_weight, or local_gate_weight with gate_prefetch_buffer")
    return [f for f in forms if not f.pushed], [f for f in forms if f.pushed]


def gradient_forms(given: dict[str, Tensor], dims: Dims, rank: int, device: torch.device) -> list[SlotReduction]:
    """Sort the keyword arguments of `Buffer.reduce_grad`."""
    d = dims
    forms = []
    rest = dict(given)
    for name in PROJECTIONS:
        full, local = rest.pop(f"full_{name}_grad", None), rest.pop(f"local_{name}_grad", None)
        buffer = rest.pop(f"{name}_reduce_buffer", None)
        if full is None and local is None and buffer is None:
            continue
        if full is not None:
            _check_rows(f"full_{name}_grad", full, (d.G,), device)
            own = full[rank * d.L : (rank + 1) * d.L]
        else:
            _check_rows(f"local_{name}_grad", local, (d.L,), device)
            assert local is not None
            own = local
        _check_rows(f"{name}_reduce_buffer", buffer, (d.R, d.B), device, like=own, dtype=torch.float32)
        assert buffer is not None
        forms.append(SlotReduction(own, buffer))
    _check_used("grads", rest, len(forms), "full_gate_grad or local_gate_grad, with gate_reduce_buffer")
    return forms


def _check_rows(
    name: str,
    tensor: Tensor | None,
    leading: tuple[int, ...],
    device: torch.device,
    like: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Leading dimensions as planned; trailing ones (and dtype) as in the tensor that it goes with."""
    right = isinstance(tensor, Tensor) and tuple(tensor.shape[: len(leading)]) == leading
    right = right and isinstance(tensor, Tensor) and tensor.device.type == device.type
    trailing = "..."
    if like is not None:
        dtype = like.dtype if dtype is None else dtype
        trailing = ", ".join(map(str, like.shape[1:]))
        right = right and isinstance(tensor, Tensor) and tensor.shape[len(leading) :] == like.shape[1:]
    if dtype is not None:
        right = right and isinstance(tensor, Tensor) and tensor.dtype == dtype
    if not right:
        wanted = "" if dtype is None else f" {str(dtype).removeprefix('torch.')}"
        expected = f"[{', '.join(map(str, leading))}, {trailing}]{wanted} on {device}"
        raise ValueError(f"{name}: given {describe(tensor)}, expected {expected}")


def _check_used(kind: str, rest: dict[str, Tensor], num_forms: int, expected: str) -> None:
    for name, value in rest.items():
        raise ValueError(f"{name}: given {describe(value)}, expected {expected} (also up, down)")
    if not num_forms:
        raise ValueError(f"{kind}: given nothing, expected {expected} (also up, down)")
