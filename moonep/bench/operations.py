"""What is timed: the operations of one Buffer for one routing, each with its preparation, its check and its bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import moonep
from moonep.bench.gate import Expected, row_factor
from moonep.bench.hosts import Unavailable
from moonep.bench.weights import Weights, expert_bytes
from moonep.plan import NO_ARRIVAL

TOKENS, GRADIENTS = 0, 1  # variants of the payload
BARRIERS, PLANS = 50, 10  # calls in one graph: a launch of a graph costs more than such an operation

WITHOUT_WEIGHTS = (
    *("plan", "barrier", "dispatch", "dispatch_with_plan", "send_only", "combine", "dispatch_combine", "dispatch_host"),
)
WITH_WEIGHTS = ("prefetch", "reduce_grad", "forward", "backward")
OPERATIONS = (*WITHOUT_WEIGHTS, *WITH_WEIGHTS)


@dataclass(frozen=True)
class Operation:
    """One thing to time.

    Attributes:
        call: what is timed; returns its outputs.
        prepare: puts inputs in place and poison where outputs go; nothing of it is timed.
        check: raises a GateError if what `call` returned, or left in the Buffer, is wrong.
        logical_bytes: of the rows that the rank with most computes.
        physical_bytes: that the rank with most sends over the links; a token travels once to a rank.
        repeat: calls in one graph.
        host_only: the time is the host's, until the call returns.
    """

    call: Callable[[], Any]
    prepare: Callable[[], None]
    check: Callable[[Any], None]
    logical_bytes: int = 0
    physical_bytes: int = 0
    repeat: int = 1
    host_only: bool = False


class Layer:
    """One Buffer with one routing, its inputs, and its weights if there are any.

    Args:
        buffer: whose operations are timed.
        expected: what they must give.
        weights: for prefetch and reduce_grad.
        meet: waits until all ranks are here and their devices idle.
    """

    def __init__(self, buffer: moonep.Buffer, expected: Expected, weights: Weights | None, meet: Callable[[], None]):
        self.buffer, self.expected, self.weights, self.meet = buffer, expected, weights, meet
        self.x = expected.tokens(buffer.rank, TOKENS)
        self.grad = expected.tokens(buffer.rank, GRADIENTS)
        self.route_weights = expected.route_weights(buffer.rank)
        self.topk = expected.topks[buffer.rank].to(expected.device)
        self.plan: moonep.Plan = self._dispatch()[3]

    def operation(self, name: str) -> Operation:
        """An operation by name.

        Raises:
            Unavailable: this Buffer, backend or setting does not have it.
        """
        if name in WITH_WEIGHTS and self.weights is None:
            raise Unavailable(f"{name} needs expert weights, and this setting has none")
        return getattr(self, f"_op_{name}")()

    # What the calls are made of.

    def _dispatch(self) -> tuple[Any, ...]:
        return self.buffer.dispatch(
            self.x, self.route_weights, self.topk, zero_copy=True, router_weights_zero_copy=True
        )

    def _dispatch_with_plan(self) -> Any:
        return self.buffer.dispatch(self.grad, plan=self.plan, zero_copy=True)

    def _combine(self, plan: moonep.Plan) -> Tensor:
        return self.buffer.combine(plan, self.buffer.hidden_nvsh_buffer_view, zero_copy=True)[0]

    def _prefetch(self, plan: moonep.Plan) -> None:
        assert self.weights is not None
        self.buffer.prefetch(plan, self.weights.pool, force=True)

    def _reduce(self) -> None:
        assert self.weights is not None
        self.buffer.reduce(self.plan, self.weights.pool)

    # Preparations.

    def _poison(self, *regions: str) -> None:
        """NaN where rows are going to arrive."""
        for name in regions:
            region = getattr(self.buffer._backend, name)
            region.rows.fill_(torch.nan)
            region.weights.fill_(torch.nan)
        self.meet()

    def _fill_outputs(self, shift: int) -> None:
        """Put into the rows that combine reads what experts would: the token that belongs there, times a factor."""
        hidden, _, cu_seqlens, _ = self._dispatch()
        factor = row_factor(shift, self.expected.dtype)
        target = self.buffer.hidden_nvsh_buffer_view
        used = int(cu_seqlens[-1])
        for at in range(0, used, 8192):
            row = torch.arange(at, min(at + 8192, used), device=hidden.device)
            target[at : at + len(row)] = hidden[at : at + len(row)] * factor(self.buffer.rank, row)[:, None]
        self.meet()

    # Checks.

    def _check_dispatched(self, output: tuple[Any, ...]) -> None:
        hidden, route_weights, _, plan = output
        self.expected.check_plan(plan)
        self.expected.check_rows(hidden, route_weights, plan.arrivals, TOKENS)

    def _check_combined(self, output: Tensor) -> None:
        self.expected.check_combined(output, row_factor(0, self.expected.dtype), TOKENS)

    # The operations.

    def _op_plan(self) -> Operation:
        make_plan = getattr(self.buffer._backend, "plan", None)
        if make_plan is None:
            raise Unavailable(f"the {self.buffer.backend} backend does not plan apart from dispatch")
        return Operation(
            call=lambda: make_plan(self.topk, None, self.buffer._id),
            prepare=lambda: None,
            check=self.expected.check_plan,
            repeat=PLANS,
        )

    def _op_barrier(self) -> Operation:
        return Operation(self.buffer.barrier, lambda: None, lambda _: self.buffer.check(), repeat=BARRIERS)

    def _op_dispatch(self) -> Operation:
        return Operation(
            self._dispatch, lambda: self._poison("forward"), self._check_dispatched, *self._dispatch_bytes()
        )

    def _op_dispatch_host(self) -> Operation:
        return Operation(self._dispatch, lambda: self._poison("forward"), self._check_dispatched, host_only=True)

    def _op_dispatch_with_plan(self) -> Operation:
        return Operation(
            self._dispatch_with_plan,
            lambda: self._poison("gradient"),
            lambda output: self.expected.check_rows(output[0], None, None, GRADIENTS),
            *self._dispatch_bytes(),
        )

    def _op_send_only(self) -> Operation:
        """Dispatch with a plan that copies nothing within a rank: what crosses the links, alone."""
        plan = self.plan.changed(
            arrivals=torch.full_like(self.plan.arrivals, NO_ARRIVAL),
            zero_fill_ranges=torch.zeros_like(self.plan.zero_fill_ranges),
        )
        _, physical = self._dispatch_bytes()
        return Operation(
            lambda: self.buffer.dispatch(self.grad, plan=plan, zero_copy=True),
            lambda: self._poison("gradient"),
            lambda output: self.expected.check_primaries(output[0], GRADIENTS),
            physical,
            physical,
        )

    def _op_combine(self) -> Operation:
        def prepare() -> None:
            self._fill_outputs(shift=5)  # first with other rows, so that nothing is right by what was left behind
            self._combine(self.plan)
            self._fill_outputs(shift=0)

        return Operation(lambda: self._combine(self.plan), prepare, self._check_combined, *self._combine_bytes())

    def _op_dispatch_combine(self) -> Operation:
        def call() -> tuple[Any, Tensor]:
            dispatched = self._dispatch()
            return dispatched, self._combine(dispatched[3])

        def prepare() -> None:
            self._fill_outputs(shift=0)
            self._poison("forward")

        def check(output: tuple[Any, Tensor]) -> None:
            self._check_dispatched(output[0])
            self._check_combined(output[1])

        return Operation(call, prepare, check, *self._sum(self._dispatch_bytes(), self._combine_bytes()))

    def _op_prefetch(self) -> Operation:
        weights = self._weights

        def prepare() -> None:
            weights.clear_slots()
            self.meet()

        moved = max(self.expected.copies_R) * self._expert_bytes(self.expected.dtype.itemsize)
        return Operation(
            call=lambda: self._prefetch(self.plan),
            prepare=prepare,
            check=lambda _: weights.check_slots(self.expected.experts_to_copy_RB),
            logical_bytes=moved,
            physical_bytes=moved,
        )

    def _op_reduce_grad(self) -> Operation:
        weights, slots = self._weights, self.expected.experts_to_copy_RB

        def prepare() -> None:
            weights.fill_gradients(slots)
            self.meet()

        moved = self._most_copies_served() * self._expert_bytes(4)
        return Operation(
            call=self._reduce,
            prepare=prepare,
            check=lambda _: weights.check_reduced(slots),
            logical_bytes=moved,
            physical_bytes=moved,
        )

    def _op_forward(self) -> Operation:
        weights = self._weights

        def call() -> tuple[Any, Tensor]:
            dispatched = self._dispatch()
            self._prefetch(dispatched[3])
            return dispatched, self._combine(dispatched[3])

        def prepare() -> None:
            self._fill_outputs(shift=0)
            weights.clear_slots()
            self._poison("forward")

        def check(output: tuple[Any, Tensor]) -> None:
            self._check_dispatched(output[0])
            weights.check_slots(self.expected.experts_to_copy_RB)
            self._check_combined(output[1])

        return Operation(call, prepare, check, *self._sum(self._dispatch_bytes(), self._combine_bytes()))

    def _op_backward(self) -> Operation:
        weights, slots = self._weights, self.expected.experts_to_copy_RB

        def call() -> Tensor:
            self._dispatch_with_plan()
            self._prefetch(self.plan)
            grad = self._combine(self.plan)
            self._reduce()
            return grad

        def prepare() -> None:
            weights.clear_slots()
            weights.fill_gradients(slots)
            self._poison("gradient")

        def check(grad: Tensor) -> None:
            self.expected.check_rows(self.buffer.hidden_nvsh_buffer_view, None, None, GRADIENTS)
            weights.check_slots(slots)
            self.expected.check_combined(grad, None, GRADIENTS)
            weights.check_reduced(slots)

        return Operation(call, prepare, check, *self._sum(self._dispatch_bytes(), self._combine_bytes()))

    # Bytes.

    @property
    def _weights(self) -> Weights:
        assert self.weights is not None
        return self.weights

    @property
    def _row_bytes(self) -> int:
        return self.expected.dims.H * self.expected.dtype.itemsize

    def _dispatch_bytes(self) -> tuple[int, int]:
        transfers = self.expected.transfers_RR.clone().fill_diagonal_(0)
        return self.expected.most_rows * self._row_bytes, int(transfers.sum(1).max()) * self._row_bytes

    def _combine_bytes(self) -> tuple[int, int]:
        transfers = self.expected.transfers_RR.clone().fill_diagonal_(0)
        return self.expected.most_rows * self._row_bytes, int(transfers.sum(0).max()) * self._row_bytes

    def _sum(self, *parts: tuple[int, int]) -> tuple[int, int]:
        return sum(p[0] for p in parts), sum(p[1] for p in parts)

    def _expert_bytes(self, itemsize: int) -> int:
        H, F = self._weights.pool.projections[0].shape
        return expert_bytes(H, F, itemsize)

    def _most_copies_served(self) -> int:
        """Slots of other ranks that hold experts of the rank with most of them."""
        experts = self.expected.experts_to_copy_RB
        homes = experts[experts >= 0] // self.expected.dims.L
        return int(torch.bincount(homes, minlength=1).max())
