"""Layers beside peers: every row is measured, no wrong gradient has a time, and goals find their lines."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from test_bench import load
from typer.testing import CliRunner

import moonep
from moonep.bench import goals, layer_goals, layer_memory, results
from moonep.bench.comparison import Comparison
from moonep.bench.exchange import Exchange
from moonep.bench.hosts import GateError, Hosts
from moonep.bench.layer_gate import Result, check_result, row_error
from moonep.bench.layer_memory import PeakMemory
from moonep.bench.layer_peers import LAYERS, OVERLAPS, MoonEPLayer, run_layer
from moonep.bench.layer_suite import compare_layers
from moonep.bench.layer_world import make_input
from moonep.bench.layers import DENSE_WORK, Layers
from moonep.bench.loading import Loading
from moonep.bench.products import Products
from moonep.bench.routings import Routing
from moonep.bench.settings import EAGER
from moonep.bench.side_by_side import compare
from moonep.bench.suites import Sweep
from moonep.bench.transformer import Transformer
from moonep.cli.app import app

HOT = Routing("hot_rank", 1.5)
SMALL: dict[str, Any] = {"sms": None, "device": "cpu", "samples": 2, "P": 8, "peer_timeout_s": 5.0}
LAYER = Layers(24, 16, 2, 8, (HOT,), F=8, **SMALL)
BOTH = replace(LAYER, peers=("moonep", "all_to_all"))


def lines_of(comparison: Comparison, number: int, spoil: str | None = None) -> list[dict[str, Any]]:
    """The lines on rank 0. `spoil` names what gives a wrong result: on rank 1, or where that would hang, on all."""
    lines: list[dict[str, Any]] = []

    def scaled(function: Any) -> Any:
        return lambda *args, **options: tuple(result.mul_(1.05) for result in function(*args, **options))

    def lost(self: Any, plan: Any, pool: Any, *_: Any, slot_set: int = 0, **__: Any) -> None:
        pool.release_gradients(slot_set)

    def doubled(self: Any, grad: Any, x: Any, grad_y: Any, fresh: int = 0) -> None:
        grad[0] += 1

    second = dist.get_rank() == 1
    targets: dict[str | None, tuple[str, Any]] = {
        "token gradient": ("moonep.nn.layer.differentiate_rows", scaled),
        "reduction": ("moonep.Buffer.reduce", lambda _: lost),
        "weight gradient": ("moonep.nn.products.TorchProducts.add_weight_grad", lambda _: doubled),
        "shared": ("moonep.bench.layer_peers.start", lambda _: lambda function, x, *, beside: lambda: 2 * function(x)),
        "loading": (
            "moonep.ExpertPool.load_local",
            lambda load: lambda self, tensors: load(self, {name: t for name, t in tensors.items() if name != "down"}),
        ),
        "loss": (
            "moonep.bench.transformer_layers.GroupedMoE.forward",
            lambda forward: lambda self, x: forward(self, x) * 9,
        ),
    }
    if spoil is None or not (second or spoil in ("reduction", "loss")):
        compare(comparison, number, report=lines.append)
    else:
        path, make = targets[spoil]
        module, _, name = path.rpartition(".")
        owner = sys.modules.get(module) or getattr(sys.modules[module.rpartition(".")[0]], module.rpartition(".")[2])
        with patch.object(owner, name, make(getattr(owner, name))):
            compare(comparison, number, report=lines.append)
    return [line for line in lines if "busy" not in line]


def test_every_layer_is_gated_and_timed_and_a_missing_library_is_named(ranks):
    lines, others = ranks(2).run(lines_of, replace(LAYER, routings=(Routing("hot_rank", 1.0), HOT)), 200)
    assert others == []  # rank 0 reports
    want = {(kind.peer, kind.variant, operation) for kind in LAYERS.values() for operation in kind.operations}
    missing = [line for line in lines if line["peer"] == "deepep_v2"]
    assert all("No module named 'deep_ep'" in line["unavailable"] for line in missing) and len(missing) == 6
    timed = [line for line in lines if line["peer"] != "deepep_v2"]
    assert all(line["samples"] == 2 and line["median_us"] > 0 and line["F"] == 8 for line in timed), timed
    assert {(line["peer"], line["variant"], line["operation"]) for line in lines} == want
    tensors = {"output", *(f"gradient of {name}" for name in ("tokens", "route weights", "gate", "up", "down"))}
    for line in timed:
        assert {layer: set(of) for layer, of in line["errors"].items()} == {"all_to_all": tensors, "dense": tensors}
        assert 0 < max(line["errors"]["dense"].values()) < 0.03
    hot = {line["peer"]: line for line in timed if line["routing"]["value"] == 1.5 and line["operation"] == "layer"}
    assert hot["moonep"]["copies"] > 0 and hot["moonep"]["rank_imbalance"] == pytest.approx(1.5, rel=0.03)
    unpadded = [line["rows"] for line in timed if line["variant"] == "unpadded" and line["routing"]["value"] == 1.5]
    assert set(unpadded) == {72}  # the hot rank's own assignments


def open_overlaps() -> dict[str, tuple[set[str], int]]:
    """What overlaps, and how many weights of its own have gradients when it runs, by kind."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = LAYER.open(rank, size, torch.device("cpu"))
    batch, _ = make_input(world, HOT, Hosts(rank, size, 20.0, "overlaps"))
    found = {}
    for name, kind in OVERLAPS.items():
        layer, differentiated = kind.open(world), []
        assert isinstance(layer, MoonEPLayer)
        for weight in layer.parameters():
            assert isinstance(weight, torch.nn.Parameter)
            weight.register_hook(differentiated.append)
        run_layer(layer, batch)
        found[name] = set(layer.routed.overlap), len(differentiated)
    LAYER.close(world)
    return found


def test_overlaps_are_what_they_are_called(ranks):
    both = {"prefetch", "reduce"}
    assert ranks(2).run(open_overlaps) == 2 * [
        {
            "all_beside": ({*both, "shared"}, 0),
            "in_turn": (set(), 0),
            "prefetch_beside": ({"prefetch"}, 0),
            "reduce_beside": ({"reduce"}, 0),
            "shared_beside": ({*both, "shared"}, 3),
            "shared_in_turn": (both, 3),
        }
    ]


@pytest.mark.parametrize(
    ("imbalance", "maxvio", "want"),
    [
        ((1.0, 1.9), (10.0,), ("hot_rank", 1.9)),
        ((1.0,), (0.2, 10.0), ("lognormal", 10.0)),
        ((1.0,), (), ("hot_rank", 1.0)),
    ],
)
def test_overlaps_are_measured_with_the_most_skewed_routing(imbalance, maxvio, want):
    for R, peers in ((2, tuple(OVERLAPS)), (1, ("shared_beside", "shared_in_turn"))):
        compared = compare_layers(sweep(imbalance=imbalance, maxvio=maxvio), R, "cpu", 2, 9)
        (overlaps,) = [c for c in compared if set(c.peers) <= set(OVERLAPS)]
        assert overlaps.peers == peers
        assert [(routing.kind, routing.value) for routing in overlaps.routings] == [want]


def test_what_overlaps_is_timed_one_by_one_and_the_shared_expert_is_checked_too(ranks):
    overlaps = replace(LAYER, peers=tuple(OVERLAPS))
    lines = ranks(2).run(lines_of, overlaps, 212)[0]
    assert [line["variant"] for line in lines if line["median_us"] > 0] == [kind.variant for kind in OVERLAPS.values()]
    assert all(0 < line["errors"]["dense"]["output"] < 0.03 for line in lines)
    lines = ranks(2).run(lines_of, overlaps, 213, "shared")[0]
    wrong = [line["variant"] for line in lines if "output: a row differs" in line.get("gate", "")]
    assert wrong == ["shared beside", "shared in turn"]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [("token gradient", "gradient of tokens: a row differs by 0.05"), ("reduction", "gradient of gate: a row differs")],
)
def test_a_layer_with_a_wrong_gradient_has_no_time_and_its_peer_does(ranks, spoil, says):
    lines = ranks(2).run(lines_of, BOTH, 201 if spoil == "reduction" else 202, spoil)[0]
    ours = [line for line in lines if line["peer"] == "moonep"]
    assert len(ours) == 4 and all(says in line["gate"] and "median_us" not in line for line in ours)
    assert sum("median_us" in line for line in lines if line["peer"] == "all_to_all") == 3


def test_small_layers_are_compared_with_a_dense_one_so_a_product_that_all_share_may_not_be_wrong(ranks):
    lines = ranks(2).run(lines_of, BOTH, 203, "weight gradient")[0]
    assert len(lines) == 7 and all("gradient of gate: a row differs" in line["gate"] for line in lines)


def test_products_are_timed_beside_torch(ranks):
    products = Products(24, 16, 2, 8, (HOT,), F=8, **SMALL)
    lines = ranks(2).run(lines_of, products, 204)[0]
    assert {(line["peer"], line["operation"]) for line in lines if line["median_us"] > 0} == {
        (peer, operation) for peer in ("moonep", "torch") for operation in ("gemm", "weight_grad")
    }
    lines = ranks(2).run(lines_of, products, 205, "weight gradient")[0]
    assert ["gate" in line for line in lines] == [True, True, False, False]
    assert "weight_grad, group" in lines[0]["gate"]


def test_loading_of_weights_is_checked_and_timed(ranks):
    loading = Loading(24, 16, 2, 8, (HOT,), F=8, **SMALL)
    (line,) = ranks(2).run(lines_of, loading, 210)[0]
    assert line["operation"] == "load_local" and line["median_us"] > 0
    assert line["physical_bytes"] == 4 * 3 * 16 * 8 * 2 * 2, "experts, projections, H, F, bytes, read and written"
    (line,) = ranks(2).run(lines_of, loading, 211, "loading")[0]
    assert "load_local, down" in line["gate"] and "median_us" not in line


def test_memory_is_not_told_without_a_gpu(ranks):
    peers = ("moonep", "all_to_all")
    memory = PeakMemory(24, 16, 2, 8, (Routing("hot_rank", 1.0),), F=8, steps=12, peers=peers, **SMALL)
    lines = ranks(2).run(lines_of, memory, 206)[0]
    assert [(line["peer"], line["growth"], line["steps"]) for line in lines] == [
        ("moonep", None, 12),
        ("all_to_all", None, 12),
    ]


def test_growth_is_of_the_peak_with_what_pool_and_buffer_hold(monkeypatch):
    peaks = iter([100, 150])
    monkeypatch.setattr(layer_memory, "_peak_bytes", lambda *_: next(peaks))
    monkeypatch.setattr(layer_memory, "meeting", lambda *_: lambda: None)
    memory = {"weights": 200, "gradients": 200, "total": 900}
    holder = SimpleNamespace(memory=lambda: memory, check=lambda: None)
    world: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"), pool=holder, buffer=holder)
    peer = PeakMemory(24, 16, 2, 8, (HOT,), steps=20)
    batches: Any = [None] * 3
    layer: Any = object.__new__(MoonEPLayer)
    found = peer.check(world, "moonep", layer, batches, Hosts(0, 1, 1.0, "growth")).found["peak_memory"]
    assert found == {"first_bytes": 1900, "peak_bytes": 1950, "growth": 1.0263}
    peaks = iter([100, 50])
    found = peer.check(world, "all_to_all", object(), batches, Hosts(0, 1, 1.0, "growth")).found["peak_memory"]
    assert found == {"first_bytes": 500, "peak_bytes": 500, "growth": 1.0}


def test_training_steps_of_both_layers_have_the_same_losses_and_a_wrong_one_has_no_time(ranks):
    biases = (Routing("router_bias", 0.0), Routing("router_bias", 0.05))
    small = Transformer(32, 32, 2, 16, biases, F=8, layers=2, **SMALL)
    lines = ranks(2).run(lines_of, small, 207)[0]
    assert [line["peer"] for line in lines] == ["moonep", "all_to_all"] * 2
    for line in lines:
        assert line["tokens_per_s"] == pytest.approx(64 / line["median_us"] * 1e6, rel=0.01)
    assert [line["rank_imbalance"] for line in lines[2:]] == [2.0, 2.0]
    lines = ranks(2).run(lines_of, replace(small, routings=biases[:1]), 208, "loss")[0]
    assert lines[0]["gate"].startswith("rank 0: loss: ") and lines[1]["median_us"] > 0


def count_moves() -> list[int]:
    """Calls that copy weights and that add gradients: of a layer, and of one whose weights are in place."""
    world = BOTH.open(dist.get_rank(), 2, torch.device("cpu"))
    batch, _ = make_input(world, HOT, Hosts(dist.get_rank(), 2, 10.0, "count moves"))
    layer = MoonEPLayer(world, "rows")
    counts = []
    with (
        patch("moonep.pool.move_weights", side_effect=moonep.pool.move_weights) as moved,
        patch("moonep.buffer.add_gradients", side_effect=moonep.buffer.add_gradients) as added,
    ):
        run_layer(layer, batch)
        counts += [moved.call_count, added.call_count]
        with layer.weights_in_place():
            run_layer(layer, batch)
        counts += [moved.call_count, added.call_count]
        run_layer(layer, batch)
        counts += [moved.call_count, added.call_count]
    BOTH.close(world)
    return counts


def test_weights_move_in_both_directions_and_not_at_all_when_they_are_left_out(ranks):
    assert ranks(2).run(count_moves) == [[6, 1, 6, 1, 12, 2]] * 2, "weights a projection at a time"


def exchange_numbers(padding: int) -> list[Any]:
    """What arrives, when each assignment is 100 * rank + its number, and what comes back."""
    rank = dist.get_rank()
    ids = torch.tensor([[[3, 0], [1, 3]], [[0, 3], [3, 2]]][rank])
    exchange = Exchange.plan(ids, 4, 2, padding)
    values = 100.0 * rank + torch.arange(1, 5)
    arrived = exchange.send(values[exchange.order])
    return [arrived.tolist(), exchange.ends.tolist(), torch.equal(exchange.back(arrived), values)]


def test_exchanged_rows_are_grouped_by_expert_in_the_order_of_sources_and_find_back(ranks):
    assert ranks(2).run(exchange_numbers, 1) == [
        [[2.0, 101.0, 3.0], [2, 3], True],
        [[104.0, 1.0, 4.0, 102.0, 103.0], [1, 5], True],
    ]
    assert ranks(2).run(exchange_numbers, 4) == [
        [[2.0, 101.0, 0, 0, 3.0, 0, 0, 0], [4, 8], True],
        [[104.0, 0, 0, 0, 1.0, 4.0, 102.0, 103.0], [4, 8], True],
    ]


class FakeElasticBuffer:
    """Stands for DeepEP's: rows by `Exchange`, in groups aligned to 4; what `DeepEPMover` expects of it."""

    def __init__(self, group: Any, **_: Any):
        pass

    def dispatch(
        self, x: Any, topk_idx: Any = None, topk_weights: Any = None, handle: Any = None, num_experts: int = 0, **_: Any
    ) -> Any:
        if handle is None:
            exchange = Exchange.plan(topk_idx, num_experts, 2, 128)
            # Sums that end before the padding of a group.
            real = torch.bincount(exchange.place // 128, minlength=len(exchange.source) // 128)
            begins = torch.cat([exchange.ends.new_zeros(1), exchange.ends[:-1]])
            sizes = [int(real[b // 128 : e // 128].sum()) for b, e in zip(begins, exchange.ends, strict=True)]
            psum = begins + torch.tensor(sizes)
            handle = SimpleNamespace(
                exchange=exchange, shape=topk_idx.shape, psum_num_recv_tokens_per_expert=psum.int()
            )
        exchange, K = handle.exchange, handle.shape[1]
        weights = None if topk_weights is None else exchange.send(topk_weights.flatten()[exchange.order])
        return exchange.send(x[exchange.order // K]), None, weights, handle, None

    def combine(self, x: Any, handle: Any, topk_weights: Any = None, **_: Any) -> Any:
        exchange, shape = handle.exchange, handle.shape
        weights = None if topk_weights is None else exchange.back(topk_weights).view(shape)
        return exchange.back(x).view(*shape, x.shape[1]).sum(1), weights, None

    def destroy(self) -> None:
        pass


def lines_with_deepep(comparison: Comparison, number: int) -> list[dict[str, Any]]:
    deep_ep = ModuleType("deep_ep")
    deep_ep.ElasticBuffer = FakeElasticBuffer  # type: ignore[attr-defined]
    with patch.dict(sys.modules, deep_ep=deep_ep):
        return lines_of(comparison, number)


def test_a_library_with_the_surface_of_deepep_is_gated_and_timed(ranks):
    lines = ranks(2).run(lines_with_deepep, replace(LAYER, peers=("deepep_v2",)), 209)[0]
    assert [(line["operation"], line["median_us"] > 0) for line in lines] == [
        ("layer", True),
        ("layer_forward", True),
        ("layer_backward", True),
    ]
    assert all(line["rows"] % 128 == 0 for line in lines)


# The gate.


def test_a_row_counts_by_its_norm_and_small_rows_by_the_mean_norm():
    want = torch.tensor([[3.0, 4.0], [0.0, 0.0], [6.0, 8.0]])
    typical = (want.norm(dim=1).square().mean()).sqrt().item()
    assert row_error(want, want) == 0
    assert row_error(want + torch.tensor([[0.0, 0.0], [0.1, 0.0], [0.0, 0.0]]), want) == pytest.approx(0.1 / typical)
    assert row_error(want + torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 1.0]]), want) == pytest.approx(0.1)
    assert row_error(want[:2], want) == torch.inf


def test_nan_and_each_gradient_are_seen():
    ones = Result(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 1), {"gate": torch.ones(2, 3, 3)})
    check_result(ones, ones, 0.0)
    nan = torch.full((2, 3), torch.nan)
    for wrong, name in (
        (replace(ones, output=nan), "output"),
        (replace(ones, grad_hidden=nan), "gradient of tokens"),
        (replace(ones, grad_route_weights=2 * ones.grad_route_weights), "gradient of route weights"),
        (replace(ones, grad_weights={"gate": torch.zeros(2, 3, 3)}), "gradient of gate"),
    ):
        with pytest.raises(GateError, match=f"^{name}: a row differs"):
            check_result(wrong, ones, 0.01)


# Suite, goals, figures.


def sweep(**options: Any) -> Sweep:
    return Sweep(
        H=7168, K=8, E=384, F=2048, weight_experts=96, tokens=(8192,), sms=(32,), modes=(EAGER,),
        **{"maxvio": (0.2, 1.0, 10.0, 20.0), "imbalance": (1.0, 1.25, 1.5, 1.9), **options},
    )  # fmt: skip


def made_up_lines() -> list[dict[str, Any]]:
    """Lines of the suite on GPUs: moonep takes 1000 us, peers 1000 us times the imbalance or more."""
    about = {"set": "made-up 2026-01-01", "date": "2026-01-01T00:00:00Z", "commit": "made-up", "hardware": {}}
    lines = []
    for comparison in compare_layers(sweep(), 2, "cuda", 21, 200):
        for name in comparison.peers:
            for routing in comparison.routings:
                for line in comparison.lines(2, name, routing):
                    us = 1000.0 * (1.0 if line["peer"] == "moonep" else routing.value)
                    us *= {"padded": 1.5, "tokens": 1.3}.get(line["variant"], 1.0)
                    us *= {"layer_no_prefetch": 0.96, "layer_forward": 0.5}.get(line["operation"], 1.0)
                    measured = {"growth": 1.004} if line["operation"] == "peak_memory" else {"median_us": us}
                    lines.append({**line, **measured, **about})
    return lines


def test_the_suite_measures_every_goal_of_layers():
    values = goals.measured(made_up_lines())
    assert {key: values[key] for key in (goal.key for goal in goals.LAYER_GOALS)} == {
        "layer_ideal_ratio_min": 1.0,
        "layer_vs_a2a_125": 0.8,
        "layer_vs_a2a_190": pytest.approx(1 / 1.9, abs=1e-4),
        "layer_vs_deepep_125": pytest.approx(0.5333),
        "layer_vs_deepep_190": pytest.approx(1 / 1.9 / 1.5, abs=1e-4),
        "exposed_prefetch_fraction": 0.04,
        "gemm_ratio": 1.25,
        "wgrad_ratio": 1.25,
        "peak_memory_growth": 1.004,
    }
    assert values["dispatch_us_32"] is None
    (few,) = {line["S"] for line in made_up_lines() if line["operation"] == "layer"} - {8192}
    assert 2 * few * 8 * 7168 * 2048 <= DENSE_WORK["cuda"], "these are for a dense layer to compare with"
    order = [line["routing"]["kind"] for line in made_up_lines() if line["operation"] == "layer"]
    assert order[0] == "hot_rank"  # what the goals need most comes first


def hand_written(operation: str, kind: str, value: float, us: float, peer: str = "moonep", **other: Any) -> Any:
    line = {**layer_goals.SIZES, "operation": operation, "routing": {"kind": kind, "value": value}, "peer": peer}
    return {**line, "variant": "rows" if peer == "moonep" else "unpadded", "median_us": us, **other}


def test_goals_of_layers_are_read_from_the_newest_lines_and_null_where_one_is_missing():
    balanced = hand_written("layer", "hot_rank", 1.0, 970.0)
    skewed = [hand_written("layer", *routing, 1000.0) for routing in layer_goals.SKEWED]
    assert layer_goals.measured([balanced, *skewed])["layer_ideal_ratio_min"] == 0.97
    assert layer_goals.measured([balanced, *skewed[1:]])["layer_ideal_ratio_min"] is None
    worse = hand_written("layer", "lognormal", 10.0, 1100.0)
    assert layer_goals.measured([balanced, *skewed, worse])["layer_ideal_ratio_min"] == round(970 / 1100, 4)
    other_size = hand_written("layer", "lognormal", 10.0, 9999.0, H=4096)
    too_much = hand_written("layer", "lognormal", 20.0, 9999.0)
    assert layer_goals.measured([balanced, *skewed, other_size, too_much])["layer_ideal_ratio_min"] == 0.97

    theirs = [
        hand_written("layer", "hot_rank", 1.9, 2500.0, "all_to_all"),
        hand_written("layer", "hot_rank", 1.9, 2000.0, "all_to_all", variant="padded"),
    ]
    values = layer_goals.measured([*skewed, *theirs])
    assert values["layer_vs_a2a_190"] == 0.5  # against the faster variant
    assert values["layer_vs_a2a_125"] is None and values["layer_vs_deepep_190"] is None
    without = hand_written("layer_no_prefetch", "hot_rank", 1.9, 940.0)
    assert layer_goals.measured([*skewed, without])["exposed_prefetch_fraction"] == 0.06
    products = [
        hand_written("gemm", "hot_rank", 1.25, 400.0, variant=None),
        hand_written("gemm", "hot_rank", 1.25, 500.0, "torch", variant=None),
    ]
    values = layer_goals.measured(products)
    assert values["gemm_ratio"] == 1.25 and values["wgrad_ratio"] is None
    memory = hand_written("peak_memory", "hot_rank", 1.0, 0.0, growth=1.0)
    grown = hand_written("peak_memory", "hot_rank", 1.0, 0.0, "all_to_all", growth=1.4)
    assert layer_goals.measured([memory, grown])["peak_memory_growth"] == 1.0
    assert layer_goals.measured([{**memory, "growth": None}])["peak_memory_growth"] is None
    failed = {key: value for key, value in memory.items() if key != "growth"} | {"error": "out of memory"}
    assert layer_goals.measured([failed])["peak_memory_growth"] is None
    assert layer_goals.measured([memory, failed])["peak_memory_growth"] == 1.0
    wrong = {**balanced, "gate": "output: a row differs"}
    del wrong["median_us"]
    assert set(layer_goals.measured([wrong, *skewed]).values()) == {None}


def test_a_trace_is_compared_with_its_own_sizes(tmp_path):
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "router.npz"
    numpy.savez_compressed(path, topk_ids=numpy.arange(2 * 12 * 3).reshape(2, 12, 3).astype("u1") % 6)
    *_, of_trace = compare_layers(sweep(traces=(str(path),), trace_layers=(1,)), 2, "cuda", 2, 9)
    assert isinstance(of_trace, Layers)
    assert (of_trace.S, of_trace.K, of_trace.E, of_trace.H, of_trace.F) == (6, 3, 6, 7168, 2048)
    assert [routing.label for routing in of_trace.routings] == ["trace router layer 1"]
    (alone,) = compare_layers(sweep(traces=(str(path),), maxvio=(), imbalance=()), 2, "cuda", 2, 9)
    assert isinstance(alone, Layers) and len(alone.routings) == 2


def test_the_figure_of_layers_is_drawn_from_results(tmp_path):
    pytest.importorskip("matplotlib")
    plot = load("plot")
    assert [path.name for path in plot.draw_all(made_up_lines(), tmp_path, "png")] == ["layers.png"]
    assert (tmp_path / "layers.png").stat().st_size > 1000
    drawn = [text.get_text() for text in plot.draw_layers(made_up_lines()).axes[-1].get_legend().get_texts()]
    assert "moonep, rows" in drawn and not any("beside" in text for text in drawn), "one routing makes no curve"
    without_sweep = [line for line in made_up_lines() if line["routing"]["value"] == 1.9]
    assert plot.draw_all(without_sweep, tmp_path, "png") == []


def test_summary_has_a_key_for_every_goal_of_layers(tmp_path, capsys, monkeypatch):
    results.append(tmp_path / "layers.jsonl", [{**line, "suite": "layers"} for line in made_up_lines()])
    summary = load("summary")
    monkeypatch.setattr(sys, "argv", ["summary.py", "--json", "--results", str(tmp_path)])
    summary.main()
    values = json.loads(capsys.readouterr().out)
    assert values["layer_vs_a2a_125"] == 0.8 and values["plan_us"] is None


def test_the_command_runs_the_suite_on_cpu_and_its_last_line_is_one_json_document(tmp_path):
    sizes = ["--tokens", "16", "--hidden", "16", "--weight-experts", "8", "--experts", "8", "--ffn", "8"]
    options = ["--samples", "2", "--steps", "9", "--imbalance", "1.5", "--output", str(tmp_path / "layers.jsonl")]
    result = CliRunner().invoke(app, ["bench", "--suite", "layers", *sizes, *options, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["failed"] == {"gate": 0, "error": 0, "skipped": 4}
    assert set(report["goals"]) == {goal.key for goal in goals.LAYER_GOALS}
    assert set(report["goals"].values()) == {None}  # other sizes, and no GPU
    operations = {row["operation"] for row in report["rows"]}
    assert operations == {
        "layer", "layer_forward", "layer_backward", "layer_no_prefetch", "gemm", "weight_grad", "peak_memory",
        "training_step", "load_local",
    }  # fmt: skip
    assert "deepep_v2 padded: layer, eager, S=16 E=8, hot_rank 1.5: unavailable: deep_ep" in result.stderr
    assert {row["benchmark"] for row in report["rows"]} == {"layers"}


def test_steps_must_be_more_than_the_first_ones():
    result = CliRunner().invoke(app, ["bench", "--suite", "layers", "--steps", "8"])
    assert result.exit_code == 2 and "--steps: given 8" in " ".join(result.stderr.replace("│", " ").split())
