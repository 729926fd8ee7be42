"""One layer of routed experts behind one interface: MoonEP's, and the same on other ways to move rows.

All use the same home experts' weights and add to the same fp32 gradients: those of one `ExpertPool`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor

import moonep
from moonep.bench.comparison import PAYLOAD_SEED
from moonep.bench.layer_gate import Input, Result
from moonep.bench.layer_movers import AllToAllMover, DeepEPMover, Mover, routed_experts
from moonep.bench.layer_world import LayerWorld
from moonep.nn import RoutedExperts
from moonep.nn.beside import start
from moonep.nn.layer import OVERLAP, PREFETCH, REDUCE, SHARED
from moonep.nn.moe import SharedExpert
from moonep.plan import Plan
from moonep.weights import PROJECTIONS

FORWARD, BACKWARD, LAYER = "layer_forward", "layer_backward", "layer"
NO_PREFETCH = "layer_no_prefetch"


class Layer(Protocol):
    """One layer. Collective."""

    def forward(self, batch: Input) -> Tensor:
        """The output [s, H]; differentiable with respect to tokens and route weights."""

    def before_backward(self) -> None:
        """What happens between a layer's forward and its backward in a model of several layers."""

    def count(self, batch: Input) -> dict[str, int]:
        """What this rank computes: `rows`, with padding, and in MoonEP `copies` of other ranks' experts."""

    def parameters(self) -> Sequence[Tensor]:
        """What has gradients of its own: not tokens, not route weights, not the pool's experts."""

    def close(self) -> None:
        """Give memory back."""


class MoonEPLayer:
    """`moonep.nn.RoutedExperts`.

    Args:
        world: with pool and Buffer.
        save, overlap: as for `RoutedExperts`.
    """

    def __init__(self, world: LayerWorld, save: str, overlap: bool | Collection[str] = True):
        self.pool, self.buffer, self.save = world.pool, world.buffer, save
        self.routed = RoutedExperts(world.buffer, world.pool, overlap=overlap)

    def forward(self, batch: Input) -> Tensor:
        return self.routed(batch.hidden, batch.route_weights, batch.ids, save=self.save).output

    def before_backward(self) -> None:
        """Other layers have used the slots: backward must bring the weights again."""
        for slots in self.pool._slots[0].values():
            slots.holder = None

    def count(self, batch: Input) -> dict[str, int]:
        plan = self.routed.plan
        assert plan is not None
        return {"rows": int(plan.cu_seqlens[-1]), "copies": int((plan.experts_to_copy[plan.rank] >= 0).sum())}

    @contextmanager
    def weights_in_place(self) -> Iterator[None]:
        """Inside, slots count as filled, and gradients of redundant experts stay where they are.

        Outputs are right as long as the slots still hold the weights of an earlier call with the same routing.
        """
        pool = self.pool

        def keep_slots(plan: Plan, slot_set: int, *_: Any, **__: Any) -> None:
            pool.mark_filled(plan, slot_set, PROJECTIONS)

        def keep_gradients(*_: Any, slot_set: int = 0, **__: Any) -> None:
            pool.release_gradients(slot_set)

        with patch.object(pool, "fill_slots", keep_slots), patch.object(self.buffer, "reduce", keep_gradients):
            yield

    def parameters(self) -> Sequence[Tensor]:
        return ()

    def close(self) -> None:
        pass


class SharedLayer(MoonEPLayer):
    """`MoonEPLayer` with a shared expert as wide as one of the others.

    Args:
        world: with pool and Buffer.
        overlap: as for `MoE`.
    """

    def __init__(self, world: LayerWorld, overlap: Collection[str]):
        super().__init__(world, "rows", overlap)
        H, F = world.pool.local["gate"].shape[1:]
        self.shared = SharedExpert(H, F).to(world.device, world.dtype)
        generator = torch.Generator(world.device).manual_seed(PAYLOAD_SEED)
        with torch.no_grad():
            for weight in self.shared.parameters():
                weight.normal_(0, weight.shape[1] ** -0.5, generator=generator)

    def forward(self, batch: Input) -> Tensor:
        shared = start(self.shared, batch.hidden, beside=SHARED in self.routed.overlap)
        return super().forward(batch) + shared()

    def add_shared(self, want: Result, batch: Input) -> Result:
        """What must come of it, if `want` must come of the other experts."""
        output = self.shared(batch.hidden)
        (grad_hidden,) = torch.autograd.grad(output, batch.hidden, batch.grad)
        return replace(want, output=want.output + output.detach(), grad_hidden=want.grad_hidden + grad_hidden)

    def parameters(self) -> Sequence[Tensor]:
        return list(self.shared.parameters())


class PeerLayer:
    """`routed_experts` on a mover.

    Args:
        world: with the pool.
        mover: brings rows to their home ranks.
    """

    def __init__(self, world: LayerWorld, mover: Mover):
        self.pool, self.mover = world.pool, mover

    def forward(self, batch: Input) -> Tensor:
        pool = self.pool
        tokens = (batch.hidden, batch.route_weights, batch.ids)
        return routed_experts(self.mover, pool.local, lambda: (pool.local_grad, ()), *tokens)

    def before_backward(self) -> None:
        pass

    def count(self, batch: Input) -> dict[str, int]:
        return {"rows": len(self.mover.send(batch.hidden.detach(), batch.route_weights.detach(), batch.ids).rows)}

    def parameters(self) -> Sequence[Tensor]:
        return ()

    def close(self) -> None:
        if isinstance(self.mover, DeepEPMover):
            self.mover.close()


@dataclass(frozen=True)
class Kind:
    """How lines call a layer, what is timed of it, and how it is opened. `open` raises Unavailable."""

    peer: str
    variant: str
    operations: tuple[str, ...]
    open: Callable[[LayerWorld], Layer]


def _all_to_all(world: LayerWorld, padding: int) -> Layer:
    return PeerLayer(world, AllToAllMover(world.E, world.R, padding))


_PARTS = (LAYER, FORWARD, BACKWARD)
LAYERS = {
    "moonep": Kind("moonep", "rows", (*_PARTS, NO_PREFETCH), lambda w: MoonEPLayer(w, "rows")),
    "all_to_all": Kind("all_to_all", "unpadded", _PARTS, lambda w: _all_to_all(w, 1)),
    "deepep_v2": Kind("deepep_v2", "padded", _PARTS, lambda w: PeerLayer(w, DeepEPMover(w))),
    "moonep_tokens": Kind("moonep", "tokens", (LAYER,), lambda w: MoonEPLayer(w, "tokens")),
    "all_to_all_padded": Kind("all_to_all", "padded", (LAYER,), lambda w: _all_to_all(w, w.buffer.dims.P)),
}
"""By name. `variant` is what MoonEP saves for backward, and whether a peer pads its groups."""

OVERLAPS = {
    "all_beside": Kind("moonep", "all beside", (LAYER,), lambda w: MoonEPLayer(w, "rows")),
    "in_turn": Kind("moonep", "in turn", (LAYER,), lambda w: MoonEPLayer(w, "rows", [])),
    "prefetch_beside": Kind("moonep", "prefetch beside", (LAYER,), lambda w: MoonEPLayer(w, "rows", [PREFETCH])),
    "reduce_beside": Kind("moonep", "reduce beside", (LAYER,), lambda w: MoonEPLayer(w, "rows", [REDUCE])),
    "shared_beside": Kind("moonep", "shared beside", (LAYER,), lambda w: SharedLayer(w, OVERLAP)),
    "shared_in_turn": Kind("moonep", "shared in turn", (LAYER,), lambda w: SharedLayer(w, [PREFETCH, REDUCE])),
}
"""The same layer; `variant` is what runs beside other work. The last two have a shared expert."""
OVERLAPS_OF_ONE_RANK = ("shared_beside", "shared_in_turn")
"""Nothing is prefetched or reduced there."""


def run_layer(layer: Layer, batch: Input) -> tuple[Tensor, ...]:
    """Forward and backward: output, and gradients of tokens and route weights. Adds weight gradients to the pool's."""
    output = layer.forward(batch)
    layer.before_backward()
    inputs = (batch.hidden, batch.route_weights, *layer.parameters())
    return output, *torch.autograd.grad(output, inputs, batch.grad)[:2]


def result_of(layer: Layer, batch: Input, pool: moonep.ExpertPool, meet: Callable[[], None]) -> Result:
    """What a layer gives, with gradients that start from zero. Weight gradients are those of the pool, not copies."""
    for grad in pool.compact_grad.values():
        grad.zero_()
    meet()  # peers read the slots' gradients of this rank
    output, grad_hidden, grad_route_weights = run_layer(layer, batch)
    meet()
    return Result(output.detach(), grad_hidden, grad_route_weights, pool.local_grad)


def make_calls(layer: Layer, batch: Input, operations: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """What is timed, by operation. Backward alone runs again and again over a graph that is kept."""
    calls: dict[str, Callable[[], Any]] = {
        LAYER: lambda: run_layer(layer, batch),
        FORWARD: lambda: layer.forward(batch),
    }
    if BACKWARD in operations:
        output = layer.forward(batch)

        def backward() -> None:
            layer.before_backward()
            torch.autograd.grad(output, (batch.hidden, batch.route_weights), batch.grad, retain_graph=True)

        calls[BACKWARD] = backward
    if isinstance(layer, MoonEPLayer):

        def without_moves() -> None:
            with layer.weights_in_place():
                run_layer(layer, batch)

        calls[NO_PREFETCH] = without_moves
    return {operation: calls[operation] for operation in operations}
