"""RoutedExperts: what an MoE layer does between its router and its output, in eager mode and under torch.compile."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from moonep.arguments import describe
from moonep.buffer import Buffer
from moonep.errors import NotCopied
from moonep.nn import functional, layer, operators
from moonep.nn.checks import check_choice, check_or_refuse, check_tokens, check_type, chosen
from moonep.nn.experts import check_pool
from moonep.nn.graphs import outside_graphs
from moonep.plan import Plan
from moonep.pool import ExpertPool
from moonep.weights import PROJECTIONS


class Routed(NamedTuple):
    """What routed experts give: output [s, H], and load [R, E] int32: assignments of each expert by source rank."""

    output: Tensor
    load: Tensor


class RoutedExperts(NotCopied):
    """Dispatch, prefetch, experts and combine in one call, for models with a router of their own.

    Collective, like its backward (`moonep.nn.layer`). A compiler sees one operator, and another in backward
    (`moonep.nn.operators`): `torch.compile(fullgraph=True)` goes through.

    Args:
        buffer: of this layer shape.
        pool: with projections gate [H, F], up [H, F], down [F, H].
        overlap: what runs beside other work; True: all, False: nothing, or some of these names. "prefetch": weights of
            redundant experts arrive while own experts work. "reduce": their gradients leave while the gradient of the
            rows is made. "shared": for `MoE`. Results are equal, bit for bit.

    Attributes:
        buffer, pool: as given.
        overlap: the names.
        plan: of the last call; None before the first.

    Raises:
        ValueError: the pool does not go with the Buffer, or cannot hold gradients of all redundant experts, or a bad
            `overlap`. Peers raise PeerError in their next call.
    """

    def __init__(self, buffer: Buffer, pool: ExpertPool, *, overlap: bool | Collection[str] = True):
        check_type("buffer", buffer, Buffer, "a Buffer")
        check_or_refuse(buffer, "dispatch", _check_pair, buffer, pool, overlap)
        d, F = buffer.dims, pool.local["gate"].shape[2]
        self.buffer, self.pool, self.overlap = buffer, pool, chosen("overlap", overlap, layer.OVERLAP)
        self._number, self._anchor = operators.register(self), functional.make_anchor(pool.local["gate"].device)
        self._sizes = [d.R, d.E, d.B, d.C, d.S, F]
        self._plan: Plan | list[Tensor] | None = None
        self._checked_ddp: Callable[[], nn.Module | None] = lambda: None

    def __call__(
        self,
        hidden: Tensor,
        route_weights: Tensor,
        topk_experts: Tensor,
        *,
        slot_set: int = 0,
        save: str = "rows",
        anchor: Tensor | None = None,
    ) -> Routed:
        """Send tokens through their experts.

        Args:
            hidden: [s, H] payload dtype, s <= S; s may differ by rank and be 0.
            route_weights: [s, K] fp32.
            topk_experts: [s, K] int32 or int64, contiguous; -1 = no assignment.
            slot_set: which of the pool's slots.
            save: what backward needs: "rows" keeps the rows that arrived and the activations; "inputs" keeps the rows,
                and computes activations again; "tokens" keeps only the tokens, and dispatches them again, too.
            anchor: with a framework's own weights: what `functional.load` returned.

        Returns:
            output [s, H] payload dtype, the sum over a token's experts of route weight times expert; load [R, E] int32.

        Raises:
            ValueError: a bad argument, or DistributedDataParallel around it manages the experts; peers raise PeerError.
            PeerError, PeerTimeout: another rank failed or did not come; in backward, too.

        Visible when it returns: the output of this rank's tokens, and `plan`. When backward returns, the pool's
        `local_grad` are complete.
        """
        if not torch.compiler.is_compiling():
            check_or_refuse(
                self.buffer, "dispatch", self._check, hidden, route_weights, topk_experts, slot_set, save, anchor
            )
        else:
            check_choice("save", save, layer.SAVE)
        if anchor is None and any(self.pool.trains(name) for name in PROJECTIONS):
            anchor = self._anchor if torch.compiler.is_compiling() else functional.make_anchor(hidden.device)
        if torch.compiler.is_compiling():
            return self._call_operator(hidden, route_weights, topk_experts, anchor, slot_set, save)
        if not torch.is_grad_enabled():
            save = layer.NOTHING
        output = _Routed.apply(self, slot_set, save, hidden, route_weights, topk_experts, anchor)
        assert self.plan is not None
        return Routed(output, self.plan.load)

    def _check(
        self,
        hidden: object,
        route_weights: object,
        topk_experts: object,
        slot_set: int,
        save: object,
        anchor: object,
    ) -> None:
        if wrong := self.managed_by_ddp():
            raise ValueError(wrong)
        self.buffer._check_pool(self.pool, slot_set)
        check_tokens(self.buffer, hidden, route_weights, topk_experts)
        check_choice("save", save, layer.SAVE)
        check_type("anchor", anchor, Tensor | NoneType, "None or a tensor")

    def managed_by_ddp(self) -> str:
        """What is wrong when DistributedDataParallel has this rank's own experts among its parameters; else ""."""
        ddp = DistributedDataParallel._get_active_ddp_module()
        if ddp is None or ddp is self._checked_ddp():
            return ""
        managed = {id(p) for p in ddp._module_parameters}
        if any(id(p) in managed for p in self.pool.master.values()):
            return (
                "model: given DistributedDataParallel over experts, which made those of all its ranks equal, expected "
                "it to leave them out: make the model anew and call moonep.nn.exclude_experts_from_ddp(model) before "
                "wrapping it"
            )
        self._checked_ddp = weakref.ref(ddp)
        return ""

    def _call_operator(
        self,
        hidden: Tensor,
        route_weights: Tensor,
        topk_experts: Tensor,
        anchor: Tensor | None,
        slot_set: int,
        save: str,
    ) -> Routed:
        results = operators.routed_experts(
            operators.ORDER.last,
            self._number,
            hidden,
            route_weights,
            topk_experts,
            anchor,
            slot_set,
            save if torch.is_grad_enabled() else layer.NOTHING,
            self._sizes,
        )
        plan = self._plan = list(results[1 + operators.NUM_SAVED :])
        operators.ORDER.last = plan[-1]
        return Routed(results[0], plan[0])

    @property
    def plan(self) -> Plan | None:
        """Of the last call, on this rank; None before the first."""
        if isinstance(self._plan, list):
            _, packed, key = self._plan
            self._plan = self.buffer.plan_of(packed, int(key))
        return self._plan

    def refuse(self, name: str, given: object, expected: str) -> Tensor:
        """Raise ValueError for an argument, in place of a call; peers that are in it raise PeerError."""
        if not (torch.compiler.is_compiling() and isinstance(given, Tensor)):
            _refuse(self.buffer, "dispatch", f"{name}: given {describe(given)}, expected {expected}")
        return operators.refuse(self._number, name, given, expected)


_refuse = outside_graphs(Buffer.refuse)


def _check_pair(buffer: Buffer, pool: ExpertPool, overlap: object) -> None:
    """Raise a ValueError unless the pool goes with the Buffer, and the names are names."""
    H = buffer.dims.H
    chosen("overlap", overlap, layer.OVERLAP)
    check_pool(pool, buffer.dims)
    for p in pool.projections:
        if p.dtype != buffer.dtype:
            raise ValueError(f"pool: given {p.name} of {p.dtype}, expected {buffer.dtype}, as the Buffer")
        if p.name == "gate" and p.shape[0] != H:
            raise ValueError(f"pool: given gate {list(p.shape)}, expected [{H}, F], as H of the Buffer")


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        routed: RoutedExperts,
        slot_set: int,
        save: str,
        hidden: Tensor,
        route_weights: Tensor,
        topk_experts: Tensor,
        anchor: Tensor | None,
    ) -> Tensor:
        ctx.routed, ctx.options = routed, {"slot_set": slot_set, "save": save, "overlap": routed.overlap}
        output, saved, ctx.plan = layer.forward(
            routed.buffer, routed.pool, hidden, route_weights, topk_experts, **ctx.options
        )
        ctx.save_for_backward(*saved)
        routed._plan = ctx.plan
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        routed, saved = ctx.routed, ctx.saved_tensors
        grads = layer.backward(routed.buffer, routed.pool, ctx.plan, grad_output, saved, **ctx.options)
        return None, None, None, *grads, None, None
