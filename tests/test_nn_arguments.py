"""A bad argument of a layer or its pieces on one rank: ValueError there, PeerError on its peers, at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from outcomes import end_of
from test_nn import F_, H, K, L, S, make_layer

import moonep
from moonep.nn import MoE, RoutedExperts, Router, functional
from moonep.nn.experts import experts


def assert_refused(ends: list[tuple[str, str, float]], expected: str) -> None:
    """Rank 1 gave it, and rank 0 heard of it at once."""
    (peer, heard, seconds), (own, said, _) = ends
    assert (own, peer) == ("ValueError", "PeerError"), ends
    assert re.match(expected, said), said
    assert re.search(expected, heard), heard
    assert seconds < 10


BAD_LAYERS: dict[str, tuple[dict[str, Any], str]] = {
    "hidden": ({"hidden": "32"}, "hidden: given '32', expected an integer >= 1"),
    "width of a row": ({"hidden": 31}, "hidden: given 31, a row of 124 bytes; expected a multiple of 16 bytes"),
    "ffn": ({"ffn": 0}, "ffn: given 0, expected an integer >= 1"),
    "num_experts": ({"num_experts": 7}, "num_experts: given 7, expected a multiple of the 2 ranks"),
    "top_k": ({"top_k": 9}, "top_k: given 9, expected 1 to num_experts = 8"),
    "top_k beyond what there is": ({"top_k": 33, "num_experts": 64}, "top_k: given 33, expected at most 32"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens: given 0, expected an integer >= 1"),
    "too many tokens": ({"max_tokens": 1 << 24}, "max_tokens: given 16777216, which needs"),
    "dtype": ({"dtype": torch.int8}, "dtype: given torch.int8, expected one of"),
    "router": ({"router": "argmax"}, "router: given 'argmax', expected one of 'softmax', 'sigmoid'"),
    "route_scale": ({"route_scale": "x"}, "route_scale: given str 'x', expected a finite number"),
    "shared_ffn": ({"shared_ffn": -1}, "shared_ffn: given -1, expected an integer >= 0"),
    "save": ({"save": "all"}, "save: given 'all', expected one of 'rows', 'inputs', 'tokens'"),
    "overlap": ({"overlap": ["combine"]}, r"overlap: given \['combine'\], expected True, False, or a collection"),
    "mapped overlap": ({"overlap": {"reduce": False}}, "overlap: given {'reduce': False}, expected True, False, or"),
    "one overlap": ({"overlap": "reduce"}, "overlap: given 'reduce', expected True, False, or a collection"),
    "B": ({"B": 1}, "B: given 1, expected at least 4: every redundant expert has a gradient"),
    "token_padding": ({"token_padding": 0}, "token_padding: given 0, expected an integer >= 1"),
    "balance": ({"balance": "often"}, "balance: given 'often', expected"),
    "slot_set": ({"slot_set": 1}, "slot_set: given 1, expected 0 to 0"),
    "slot_sets": ({"slot_sets": 0}, "slot_sets: given 0, expected an integer >= 1"),
    "backend": ({"backend": "gpu"}, "backend: given 'gpu', expected one of"),
    "seed": ({"seed": None}, "seed: given None, expected an integer of 64 bits"),
    "timeout_s": ({"timeout_s": -1}, "timeout_s: given -1, expected a number of seconds above 0"),
    "buffer": ({"buffer": "shared"}, "buffer: given str, expected None or a Buffer"),
}
SIZES = {"hidden": H, "ffn": F_, "num_experts": 8, "top_k": K, "max_tokens": S, "dtype": torch.float32}
SIZES |= {"token_padding": 8, "timeout_s": 30.0}


def make_badly(bad: dict[str, Any]) -> tuple[Any, Any]:
    """Rank 1 makes a layer of bad arguments; then both make a good one."""
    changed = bad if dist.get_rank() == 1 else {}
    return end_of(lambda: MoE(**{**SIZES, **changed})), end_of(lambda: MoE(**SIZES)(torch.zeros(3, H)))


@pytest.mark.parametrize("name", BAD_LAYERS)
def test_a_bad_argument_of_one_rank_s_layer_is_refused_on_all(ranks, name):
    bad, expected = BAD_LAYERS[name]
    results = ranks(2).run(make_badly, bad)
    assert_refused([first for first, _ in results], expected)
    assert [good[0] for _, good in results] == ["", ""], "a refused construction does not spoil the next one"


@pytest.mark.parametrize(("name", "other"), [("save", "tokens"), ("shared_ffn", 8), ("hidden", 64), ("ffn", 32)])
def test_layers_that_differ_between_ranks_are_refused_with_all_values(ranks, name, other):
    for first, good in ranks(2).run(make_badly, {name: other}):
        assert first[0] == "ValueError" and first[1].startswith(f"{name}: given rank 0: "), first
        assert good[0] == ""


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "hidden": ({"hidden": 64}, "hidden: given 64, expected 32, as the Buffer"),
    "num_experts": ({"num_experts": 16}, "num_experts: given 16, expected 8, as the Buffer"),
    "top_k": ({"top_k": 1}, "top_k: given 1, expected 2, as the Buffer"),
    "max_tokens": ({"max_tokens": 32}, "max_tokens: given 32, expected 33, as the Buffer"),
    "dtype": ({"dtype": torch.bfloat16}, "dtype: given torch.bfloat16, expected torch.float32, as the Buffer"),
    "balance": ({"balance": "auto"}, r"balance: given Balance\(.*\), expected Balance\(.*\), as the Buffer"),
    "token_padding": ({"token_padding": 16}, "token_padding: given 16, expected 8, as the Buffer"),
    "B": ({"B": 5}, "B: given 5, expected 4, as the Buffer"),
    "no Buffer": ({"buffer": None}, r"buffer: given rank 0: 'Buffer \d+', rank 1: None, expected the same on"),
    "slot_set": ({"slot_set": 2}, "slot_set: given 2, expected 0 to 0"),
}


def give_buffer(bad: dict[str, Any]) -> tuple[Any, Any]:
    """Rank 1's layer does not go with the Buffer that it is given."""
    buffer = moonep.Buffer(S, H, K, 8, 2, token_padding=8, dtype=torch.float32)
    good: dict[str, Any] = {name: value for name, value in SIZES.items() if name != "token_padding"}
    good |= {"buffer": buffer}
    changed = bad if dist.get_rank() == 1 else {}
    first = end_of(lambda: MoE(**{**good, **changed}))
    return first, end_of(lambda: MoE(**good)(torch.zeros(3, H)))


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_layer_that_does_not_go_with_its_buffer_is_refused_on_all_ranks(ranks, name):
    bad, expected = DIFFERENT[name]
    results = ranks(2).run(give_buffer, bad)
    if name == "no Buffer":
        assert all(first[0] == "ValueError" and re.match(expected, first[1]) for first, _ in results), results
    else:
        assert_refused([first for first, _ in results], expected)
    assert [good[0] for _, good in results] == ["", ""]


BAD_CALLS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no x": ("layer", {"x": None}, r"x: given NoneType None, expected \[\.\.\., 32\] of a floating dtype on cpu"),
    "x on another device": ("layer", {"x": torch.zeros(4, H, device="meta")}, r"x: given \[4, 32\] float32 on meta"),
    "too many x": ("layer", {"x": torch.zeros(S + 1, H)}, r"x: given \[34, 32\] .*expected at most max_tokens = 33"),
    "hidden": ("routed", {"hidden": torch.zeros(4, H + 1)}, r"hidden: given \[4, 33\] .*expected \[s, 32\] float32"),
    "hidden that is none": ("routed", {"hidden": [1]}, r"hidden: given list \[1\], expected \[s, 32\] float32"),
    "too many hidden": (
        "routed",
        {"hidden": torch.zeros(S + 1, H)},
        "hidden: given 34 tokens, expected at most S = 33",
    ),
    "route_weights": ("routed", {"route_weights": None}, r"route_weights: given NoneType None, expected \[4, 2\]"),
    "topk_experts": ("routed", {"topk_experts": torch.zeros(4, K)}, r"topk_experts: given \[4, 2\] float32"),
    "anchor": ("routed", {"anchor": 1}, "anchor: given int, expected None or a tensor"),
    "save": ("routed", {"save": None}, "save: given None, expected one of"),
    "slot_set": ("routed", {"slot_set": 1}, "slot_set: given 1, expected 0 to 0"),
    "dispatched hidden": ("dispatch", {"hidden": None}, r"hidden: given NoneType None, expected \[s, 32\] float32"),
    "dispatched route_weights": ("dispatch", {"route_weights": None}, "route_weights: given NoneType None"),
    "dispatched topk_experts": ("dispatch", {"topk_experts": None}, "topk_experts: given NoneType None"),
    "pool": ("dispatch", {"pool": "x"}, "pool: given str, expected an ExpertPool"),
    "slot_set of dispatch": ("dispatch", {"slot_set": -1}, "slot_set: given -1, expected 0 to 0"),
    "combined hidden": ("combine", {"hidden": None}, r"hidden: given NoneType None, expected \["),
    "combined rows": ("combine", {"hidden": torch.zeros(3, H)}, r"hidden: given \[3, 32\] .*expected \["),
    "pool of combine": ("combine", {"pool": "x"}, "pool: given str, expected an ExpertPool"),
    "slot_set of combine": ("combine", {"slot_set": 1}, "slot_set: given 1, expected 0 to 0"),
    "plan": ("combine", {"plan": None}, "plan: given NoneType, expected the Plan that dispatch returned"),
}


def call_badly(operation: str, bad: dict[str, Any]) -> tuple[str, str, float]:
    """Rank 1 gives a call of a layer, or of its pieces, what it cannot take."""
    layer = make_layer(3, timeout_s=30.0)
    x = torch.zeros(4, H)
    ids, weights, _ = layer.router(x)
    tokens = {"hidden": x, "route_weights": weights, "topk_experts": ids}
    calls: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "layer": (layer, {"x": x}),
        "routed": (layer.routed, tokens),
        "dispatch": (functional.dispatch, {"buffer": layer.buffer, "pool": layer.pool, **tokens}),
    }
    if operation == "combine":
        sent = functional.dispatch(layer.buffer, x, weights, ids, layer.pool)
        rows = {"plan": sent.plan, "hidden": sent.hidden, "pool": layer.pool}
        calls["combine"] = functional.combine, {"buffer": layer.buffer, **rows}
    call, good = calls[operation]
    return end_of(lambda: call(**{**good, **(bad if dist.get_rank() == 1 else {})}))


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_argument_of_one_rank_s_call_is_refused_on_all(ranks, name):
    operation, bad, expected = BAD_CALLS[name]
    assert_refused(ranks(2).run(call_badly, operation, bad), expected)


def pair_badly(bad: dict[str, Any]) -> tuple[str, str, float]:
    """Rank 1 gives routed experts what they cannot take; rank 0 calls its own."""
    layer = make_layer(3, timeout_s=30.0)
    if dist.get_rank() == 1:
        return end_of(lambda: RoutedExperts(layer.buffer, **{"pool": layer.pool, **bad}))
    return end_of(lambda: layer(torch.zeros(4, H)))


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ({"pool": None}, "pool: given NoneType, expected an ExpertPool"),
        ({"overlap": None}, "overlap: given None, expected True, False, or a collection"),
    ],
)
def test_routed_experts_that_one_rank_could_not_make_are_heard_of_by_its_peers(ranks, bad, expected):
    assert_refused(ranks(2).run(pair_badly, bad), expected)


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ({"hidden": 0}, "hidden: given 0, expected an integer >= 1"),
        ({"num_experts": "4"}, "num_experts: given '4', expected an integer >= 1"),
        ({"top_k": 5}, "top_k: given 5, expected 1 to num_experts = 4"),
        ({"score": "x"}, "score: given 'x', expected one of 'softmax', 'sigmoid'"),
        ({"scale": float("nan")}, "scale: given float nan, expected a finite number"),
    ],
)
def test_a_router_refuses_bad_arguments(bad, expected):
    with pytest.raises(ValueError, match=expected):
        Router(**{"hidden": 8, "num_experts": 4, "top_k": 1, **bad})


def test_a_router_refuses_tokens_and_loads_of_other_shapes():
    router = Router(8, 4, 1)
    for x in (None, torch.zeros(3, 7), torch.zeros(8), torch.zeros(3, 8, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"x: given .*, expected \[s, 8\] of a floating dtype"):
            router(x)
    for load in (None, torch.zeros(3), torch.zeros(2, 4)):
        with pytest.raises(ValueError, match=r"load: given .*, expected \[4\]"):
            router.update_bias(load, 0.1)


def test_experts_and_load_refuse_other_types():
    layer = MoE(H, F_, L, K, max_tokens=4, dtype=torch.float32, token_padding=8, backend="cpu")
    x = torch.zeros(4, H)
    ids, weights, _ = layer.router(x)
    rows, row_weights, plan = functional.dispatch(layer.buffer, x, weights, ids)
    with pytest.raises(ValueError, match="plan: given NoneType, expected the Plan that dispatch returned"):
        experts(layer.pool, None, rows, row_weights)
    with pytest.raises(ValueError, match="pool: given str, expected an ExpertPool"):
        experts("x", plan, rows, row_weights)
    with pytest.raises(ValueError, match="slot_set: given 1, expected 0 to 0"):
        experts(layer.pool, plan, rows, row_weights, slot_set=1)
    pool = moonep.ExpertPool({"up": (3, 2)}, E=2, grads=True, backend="cpu")
    with pytest.raises(ValueError, match="pool: given NoneType, expected an ExpertPool"):
        functional.load(None, {})
    with pytest.raises(ValueError, match=r"weights: given Tensor, expected \{projection: tensor\}"):
        functional.load(pool, x)
    for weight in (None, torch.zeros(3, 3, 2), torch.zeros(2, 3, 2, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"weights\['up'\]: given .*, expected \[2, 3, 2\] of a floating dtype"):
            functional.load(pool, {"up": weight})
