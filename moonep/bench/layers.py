"""One layer of routed experts, forward and backward, of MoonEP and of its peers: `moonep bench --suite layers`.

Routing is given, so there is no router. Every rank has its own tokens, ids and route weights, and its home experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from moonep.bench.comparison import Checked, Line
from moonep.bench.hosts import GateError, Hosts
from moonep.bench.layer_gate import DENSE_TOLERANCE, TOLERANCE, Input, Result, check_result, dense_result
from moonep.bench.layer_movers import AllToAllMover
from moonep.bench.layer_peers import (
    LAYERS,
    NO_PREFETCH,
    OVERLAPS,
    Layer,
    MoonEPLayer,
    PeerLayer,
    SharedLayer,
    make_calls,
    result_of,
    run_layer,
)
from moonep.bench.layer_world import LayerComparison, LayerWorld, make_input, meeting
from moonep.bench.routings import Routing

KINDS = LAYERS | OVERLAPS
# Multiplications of a projection: up to here layers are compared with a dense one, too.
DENSE_WORK = {"cuda": 1 << 37, "cpu": 1 << 30}


@dataclass(frozen=True)
class LayerBatch(Input):
    """One rank's input, and what it must give: by `all_to_all`, and by a dense layer where that is small."""

    want: Result
    dense: Result | None


@dataclass(frozen=True)
class Layers(LayerComparison):
    """Layers of routed experts. Letters: `moonep.dims`.

    Attributes:
        peers: names in `LAYERS` or `OVERLAPS`.
    """

    peers: tuple[str, ...] = tuple(LAYERS)

    def operations(self, name: str) -> tuple[str, ...]:
        return KINDS[name].operations

    def line(self, R: int, name: str, operation: str, routing: Routing) -> Line:
        kind = KINDS[name]
        return {**super().line(R, name, operation, routing), "peer": kind.peer, "variant": kind.variant}

    def open_peer(self, name: str, world: LayerWorld) -> Layer:
        return KINDS[name].open(world)

    def make_batch(self, world: LayerWorld, routing: Routing, hosts: Hosts) -> tuple[LayerBatch, Line]:
        batch, about = make_input(world, routing, hosts)
        reference = PeerLayer(world, AllToAllMover(world.E, world.R))
        got = result_of(reference, batch, world.pool, meeting(world, hosts))
        want = replace(got, grad_weights={name: grad.clone() for name, grad in got.grad_weights.items()})
        dense = None
        if world.R * self.S * self.K * self.H * self.F <= DENSE_WORK[world.device.type]:
            every = hosts.exchange([tensor.detach().cpu() for tensor in _tensors(batch)])
            inputs = [Input(*(tensor.to(world.device) for tensor in parts)) for parts in every]
            dense = dense_result(inputs, {name: full[: world.E] for name, full in world.pool.full.items()}, world.rank)
        return LayerBatch(*_tensors(batch), want, dense), about

    def check(self, world: LayerWorld, name: str, peer: Layer, batch: LayerBatch, hosts: Hosts) -> Checked:
        got = result_of(peer, batch, world.pool, meeting(world, hosts))
        world.buffer.check()
        wanted = {"all_to_all": (batch.want, TOLERANCE)}
        if batch.dense is not None:
            wanted["dense"] = (batch.dense, DENSE_TOLERANCE)
        errors = {}
        for layer, (want, tolerance) in wanted.items():
            all_of_it = peer.add_shared(want, batch) if isinstance(peer, SharedLayer) else want
            errors[layer] = check_result(got, all_of_it, tolerance)
        hosts.meet()  # what a rank finds wrong, its peers hear of here, and not in the middle of a layer
        if isinstance(peer, MoonEPLayer) and NO_PREFETCH in self.operations(name):
            check_in_place(peer, batch)
        hosts.meet()
        counts = hosts.exchange(peer.count(batch))
        about: Line = {key: max(count[key] for count in counts) for key in counts[0]}
        about["errors"] = _largest(hosts.exchange(errors))
        return Checked(make_calls(peer, batch, self.operations(name)), about)


def check_in_place(layer: MoonEPLayer, batch: LayerBatch) -> None:
    """The layer without prefetch and reduction: all but weight gradients is right, as the slots still hold weights."""
    with layer.weights_in_place():
        output, grad_hidden, grad_route_weights = run_layer(layer, batch)
    try:
        got = Result(output.detach(), grad_hidden, grad_route_weights, {})
        check_result(got, batch.want, TOLERANCE, of_weights=False)
    except GateError as error:
        raise GateError(f"without prefetch: {error}") from None


def _largest(errors: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Of all ranks: against which layer, of which tensor."""
    return {
        layer: {name: float(f"{max(rank[layer][name] for rank in errors):.3g}") for name in of}
        for layer, of in errors[0].items()
    }


def _tensors(batch: Input) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return batch.hidden, batch.route_weights, batch.ids, batch.grad
