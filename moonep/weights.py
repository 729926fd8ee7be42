"""Moving the weights of redundant experts into slots, and their gradients home. One projection at a time.

Both forms that callers hold weights in are reduced to two small classes: where the weights come from and where the
slots are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moonep.arguments import describe
from moonep.dims import Dims
from moonep.plan import Plan

PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
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

    def move(self, plan: Plan) -> None:
        """Copy what this rank copies."""
        d = plan.dims
        for r, experts in enumerate(plan.experts_to_copy.tolist()):
            for b, e in enumerate(experts):
                if e < 0:
                    continue
                if self.pushed and d.home(e) == plan.rank:
                    self.slots[r, b].copy_(self.weights[e % d.L])
                elif not self.pushed and r == plan.rank:
                    self.slots[b].copy_(self.weights[e])


@dataclass(frozen=True)
class SlotReduction:
    """The gradients of one projection: own experts' [L, ...], and all ranks' slots' [R, B, ...] fp32."""

    own: Tensor
    slots: Tensor

    def add(self, plan: Plan) -> None:
        """Add the slots that hold own experts, ascending (rank, slot), in fp32, rounded once."""
        d = plan.dims
        sums: dict[int, Tensor] = {}
        for r, experts in enumerate(plan.experts_to_copy.tolist()):
            for b, e in enumerate(experts):
                if e >= 0 and d.home(e) == plan.rank:
                    own = self.own[e % d.L]
                    sums.setdefault(e, own if own.dtype == torch.float32 else own.float()).add_(self.slots[r, b])
        for e, total in sums.items():
            if self.own.dtype != torch.float32:
                self.own[e % d.L].copy_(total)

    def clear(self, plan: Plan) -> None:
        """Zero this rank's slots that were read."""
        for b, e in enumerate(plan.experts_to_copy[plan.rank].tolist()):
            if e >= 0:
                self.slots[plan.rank, b].zero_()


def weight_forms(given: dict[str, Tensor], dims: Dims) -> list[SlotWeights]:
    """Sort the keyword arguments of `Buffer.prefetch_weight`."""
    d = dims
    forms = []
    rest = dict(given)
    for name in PROJECTIONS:
        if (full := rest.pop(f"full_{name}_weight", None)) is not None:
            _check_rows(f"full_{name}_weight", full, (d.G,))
            forms.append(SlotWeights(full, full[d.E :]))
        local, buffer = rest.pop(f"local_{name}_weight", None), rest.pop(f"{name}_prefetch_buffer", None)
        if local is not None or buffer is not None:
            _check_rows(f"local_{name}_weight", local, (d.L,))
            _check_rows(f"{name}_prefetch_buffer", buffer, (d.R, d.B), like=local)
            assert local is not None and buffer is not None
            forms.append(SlotWeights(local, buffer, pushed=True))
    _check_used(rest, forms, [f"full_{p}_weight" for p in PROJECTIONS])
    return forms


def gradient_forms(given: dict[str, Tensor], dims: Dims, rank: int) -> list[SlotReduction]:
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
            _check_rows(f"full_{name}_grad", full, (d.G,))
            own = full[rank * d.L : (rank + 1) * d.L]
        else:
            _check_rows(f"local_{name}_grad", local, (d.L,))
            assert local is not None
            own = local
        _check_rows(f"{name}_reduce_buffer", buffer, (d.R, d.B), like=own, dtype=torch.float32)
        assert buffer is not None
        forms.append(SlotReduction(own, buffer))
    _check_used(rest, forms, [f"full_{p}_grad and {p}_reduce_buffer" for p in PROJECTIONS])
    return forms


def _check_rows(
    name: str,
    tensor: Tensor | None,
    leading: tuple[int, ...],
    like: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Leading dimensions as planned; trailing ones (and dtype) as in the tensor that it goes with."""
    right = isinstance(tensor, Tensor) and tuple(tensor.shape[: len(leading)]) == leading
    trailing = "..."
    if like is not None:
        dtype = like.dtype if dtype is None else dtype
        trailing = ", ".join(map(str, like.shape[1:]))
        right = right and isinstance(tensor, Tensor) and tensor.shape[len(leading) :] == like.shape[1:]
    if dtype is not None:
        right = right and isinstance(tensor, Tensor) and tensor.dtype == dtype
    if not right:
        wanted = "" if dtype is None else f" {str(dtype).removeprefix('torch.')}"
        expected = f"[{', '.join(map(str, leading))}, {trailing}]{wanted}"
        raise ValueError(f"{name}: given {describe(tensor)}, expected {expected}")


def _check_used(rest: dict[str, Tensor], forms: list[SlotWeights] | list[SlotReduction], expected: list[str]) -> None:
    if rest:
        raise ValueError(f"{next(iter(rest))}: given, expected one of {', '.join(expected)}")
    if not forms:
        raise ValueError(f"weights: given nothing, expected at least one of {', '.join(expected)}")
