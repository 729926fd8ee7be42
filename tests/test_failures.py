"""Failures: a bad argument is a ValueError where it was given and a PeerError elsewhere; a lost peer is a PeerTimeout.

Nothing hangs, and nobody goes on with garbage. Each scenario runs on every rank and returns an `End` for each call.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from test_contract import DEVICE_BACKENDS, use_device
from torch import Tensor

from moonep import Buffer, ExpertPool, Plan
from moonep.errors import PeerError, PeerTimeout
from moonep.memory import barrier as barrier_module
from moonep.memory import barrier as barrier_words
from moonep.memory.barrier import Barrier
from moonep.memory.peers import Peers
from moonep.planner import policy
from moonep.testing.ranks import PerRank, RankDied

BACKENDS = ("cpu",)
R, CULPRIT = 3, 1
S, H, K, E, L, B, P = 4, 8, 2, 6, 2, 2, 4
SIZES = {"S": S, "H": H, "K": K, "E": E, "num_ep_ranks": R, "token_padding": P, "B": B}
SHAPE = (3, 4)
LONG_S, LIMIT_S = 20.0, 1.0  # a limit that no test reaches, and one that tests wait for
SLACK_S = 4.0  # what a busy machine may add


@dataclass(frozen=True)
class End:
    """How a call ended: what it raised (None: nothing), and how long it took."""

    error: str | None
    text: str = ""
    rank: int | None = None
    operation: str | None = None
    seconds: float = 0.0


def end_of(call: Callable[[], Any]) -> End:
    start = time.monotonic()
    try:
        call()
    except BaseException as error:
        rank, operation = getattr(error, "rank", None), getattr(error, "operation", None)
        return End(type(error).__name__, str(error), rank, operation, time.monotonic() - start)
    return End(None, seconds=time.monotonic() - start)


class Rank:
    """What a rank works with: all tokens choose expert 0, so that every rank but the first has a redundant expert."""

    def __init__(self, backend: str, timeout_s: float = LONG_S, **changed: Any):
        self.backend = backend
        self.timeout_s = timeout_s
        self.buffer = Buffer(**{**SIZES, **changed}, backend=backend, timeout_s=timeout_s)
        self.x = torch.ones(S, H, dtype=torch.bfloat16)
        self.w = torch.ones(S, K)
        self.topk = torch.zeros(S, K, dtype=torch.int32)
        self.rows, self.weights, _, self.plan = self.buffer.dispatch(self.x, self.w, self.topk)

    @property
    def index(self) -> int:
        return self.buffer.rank

    def pool_of(self, grads: bool = True, **changed: Any) -> ExpertPool:
        arguments = {"shapes": {"gate": SHAPE}, "E": E, "B": B, "dtype": torch.float32, "shared": False, **changed}
        return ExpertPool(**arguments, grads=grads, backend=self.backend, timeout_s=self.timeout_s)

    @cached_property
    def pool(self) -> ExpertPool:
        return self.pool_of()

    @cached_property
    def inference_pool(self) -> ExpertPool:
        return self.pool_of(grads=False)

    @cached_property
    def other_plan(self) -> Plan:
        """A plan of another Buffer."""
        return Rank(self.backend, self.timeout_s).plan

    def good(self, operation: str) -> None:
        """The operation as it should be called. Collective."""
        buffer, plan, pool = self.buffer, self.plan, self.pool
        {
            "dispatch": lambda: buffer.dispatch(self.x, self.w, self.topk),
            "dispatch with plan": lambda: buffer.dispatch(self.x, self.w, plan=plan),
            "combine": lambda: buffer.combine(plan, self.rows, self.weights),
            "prefetch": lambda: buffer.prefetch_weight(
                plan, local_gate_weight=pool.local["gate"], gate_prefetch_buffer=pool.reduce_buffer["gate"]
            ),
            "reduce": lambda: buffer.reduce(plan, pool),
            "barrier": buffer.barrier,
            "destroy": buffer.destroy,
        }[operation]()


@dataclass(frozen=True)
class Bad:
    """A call with one bad argument, and what its message says: the argument, what was given, what was expected."""

    operation: str
    call: Callable[[Rank], Any]
    argument: str
    given: str
    expected: str


def _dispatch(argument: str, value: Callable[[Rank], Any], given: str, expected: str, **others: Any) -> Bad:
    def call(r: Rank) -> Any:
        good = {"hidden_sh": r.x, "route_weights_sk": r.w, "topk_experts_sk": r.topk}
        return r.buffer.dispatch(**{**good, argument: value(r)})

    return Bad("dispatch", call, argument, given, expected)


def _reuse(argument: str, value: Callable[[Rank], Any], given: str, expected: str) -> Bad:
    def call(r: Rank) -> Any:
        return r.buffer.dispatch(**{"hidden_sh": r.x, "plan": r.plan, argument: value(r)})

    return Bad("dispatch with plan", call, argument, given, expected)


def _combine(argument: str, value: Callable[[Rank], Any], given: str, expected: str, **others: Any) -> Bad:
    def call(r: Rank) -> Any:
        good = {"plan": r.plan, "hidden_nvsh": r.rows, "route_weights_nvs": r.weights}
        return r.buffer.combine(**{**good, argument: value(r)}, **others)

    return Bad("combine", call, argument, given, expected)


def _prefetch(argument: str, given: str, expected: str, **tensors: Callable[[Rank], Any]) -> Bad:
    def call(r: Rank) -> Any:
        return r.buffer.prefetch_weight(r.plan, **{name: tensor(r) for name, tensor in tensors.items()})

    return Bad("prefetch", call, argument, given, expected)


def _reduce(argument: str, given: str, expected: str, **tensors: Callable[[Rank], Any]) -> Bad:
    def call(r: Rank) -> Any:
        return r.buffer.reduce_grad(r.plan, **{name: tensor(r) for name, tensor in tensors.items()})

    return Bad("reduce", call, argument, given, expected)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


def _local(r: Rank) -> Tensor:
    return r.pool.local["gate"]


def _full(r: Rank) -> Tensor:
    return r.pool.full["gate"]


def _local_grad(r: Rank) -> Tensor:
    return r.pool.local_grad["gate"]


def _symmetric(r: Rank) -> Tensor:
    return r.pool.reduce_buffer["gate"]


BAD: dict[str, Bad] = {
    # dispatch
    "hidden dtype": _dispatch("hidden_sh", lambda r: r.x.float(), "float32", "bfloat16"),
    "hidden width": _dispatch("hidden_sh", lambda r: r.x.repeat(1, 2), "[4, 16]", "[s, 8]"),
    "hidden dimensions": _dispatch("hidden_sh", lambda r: r.x[0], "[8]", "[s, 8]"),
    "hidden device": _dispatch("hidden_sh", lambda r: r.x.to("meta"), "meta", "cpu"),
    "hidden layout": _dispatch("hidden_sh", lambda r: _transposed(r.x), "not contiguous", "contiguous"),
    "hidden type": _dispatch("hidden_sh", lambda r: r.x.tolist(), "list", "[s, 8]"),
    "too many tokens": Bad(
        "dispatch",
        lambda r: r.buffer.dispatch(r.x.repeat(2, 1), None, r.topk.repeat(2, 1)),
        "hidden_sh",
        "s = 8",
        "at most S = 4",
    ),
    "weights dtype": _dispatch("route_weights_sk", lambda r: r.w.bfloat16(), "bfloat16", "float32"),
    "weights shape": _dispatch("route_weights_sk", lambda r: r.w[:3], "[3, 2]", "[4, 2]"),
    "weights device": _dispatch("route_weights_sk", lambda r: r.w.to("meta"), "meta", "cpu"),
    "weights layout": _dispatch("route_weights_sk", lambda r: _transposed(r.w), "not contiguous", "contiguous"),
    "no ids": _dispatch("topk_experts_sk", lambda r: None, "None", "expert ids"),
    "ids dtype": _dispatch("topk_experts_sk", lambda r: r.topk.float(), "float32", "int32 or int64"),
    "ids shape": _dispatch("topk_experts_sk", lambda r: r.topk[:, :1].contiguous(), "[4, 1]", "[4, 2]"),
    "flat ids shape": _dispatch("topk_experts_sk", lambda r: r.topk.flatten()[:7], "[7]", "[8]"),
    "ids device": _dispatch("topk_experts_sk", lambda r: r.topk.to("meta"), "meta", "cpu"),
    "ids layout": _dispatch("topk_experts_sk", lambda r: _transposed(r.topk), "not contiguous", "contiguous"),
    "id too large": _dispatch("topk_experts_sk", lambda r: r.topk + torch.eye(4, 2).int() * E, "6", "0 to 5"),
    "id too small": _dispatch("topk_experts_sk", lambda r: r.topk - torch.eye(4, 2).int() * 2, "-2", "-1 (no"),
    "counts disagree": _dispatch(
        "tokens_per_expert", lambda r: torch.tensor([7, 0, 1, 0, 0, 0]), "7 for expert 0", "expected 8"
    ),
    "counts shape": _dispatch("tokens_per_expert", lambda r: torch.zeros(5).int(), "[5]", "[6]"),
    "counts dtype": _dispatch("tokens_per_expert", lambda r: torch.zeros(6), "float32", "int32 or int64"),
    "counts device": _dispatch("tokens_per_expert", lambda r: torch.zeros(6, device="meta").int(), "meta", "cpu"),
    # dispatch with a plan
    "reused plan type": _reuse("plan", lambda r: r.plan.dst, "Tensor", "Plan"),
    "reused plan of another Buffer": _reuse("plan", lambda r: r.other_plan, "another Buffer", "this Buffer"),
    "ids with a plan": _reuse("topk_experts_sk", lambda r: r.topk, "with a plan", "None"),
    "counts with a plan": _reuse("tokens_per_expert", lambda r: torch.zeros(6).int(), "with a plan", "None"),
    "fewer tokens than the plan": _reuse("hidden_sh", lambda r: r.x[:3], "[3, 8]", "[4, 8]"),
    "reused weights shape": _reuse("route_weights_sk", lambda r: r.w[:3], "[3, 2]", "[4, 2]"),
    # combine
    "plan of another Buffer": _combine("plan", lambda r: r.other_plan, "another Buffer", "this Buffer"),
    "no plan": _combine("plan", lambda r: None, "NoneType", "Plan"),
    "rows dtype": _combine("hidden_nvsh", lambda r: r.rows.float(), "float32", "bfloat16"),
    "rows shape": _combine("hidden_nvsh", lambda r: r.rows[:-1], "[19, 8]", "[20, 8]"),
    "rows device": _combine("hidden_nvsh", lambda r: r.rows.to("meta"), "meta", "cpu"),
    "rows layout": _combine("hidden_nvsh", lambda r: _transposed(r.rows), "not contiguous", "contiguous"),
    "row weights dtype": _combine("route_weights_nvs", lambda r: r.weights.double(), "float64", "float32"),
    "row weights shape": _combine("route_weights_nvs", lambda r: r.weights[:, None], "[20, 1]", "[20]"),
    "foreign zero copy": _combine("hidden_nvsh", lambda r: r.rows, "a tensor of its own", "a view", zero_copy=True),
    "foreign zero copy of weights": _combine(
        "route_weights_nvs", lambda r: r.weights, "a tensor of its own", "a view", router_weights_zero_copy=True
    ),
    "zero copy of no weights": _combine(
        "route_weights_nvs", lambda r: None, "None", "a view", router_weights_zero_copy=True
    ),
    # bare weights
    "unknown weight": _prefetch("full_side_weight", "given", "full_gate_weight", full_side_weight=_full),
    "a gradient for a weight": _prefetch("full_gate_grad", "given", "full_gate_weight", full_gate_grad=_full),
    "no weight": _prefetch("weights", "nothing", "full_gate_weight"),
    "full weight rows": _prefetch("full_up_weight", "[7, 3, 4]", "[8, ...]", full_up_weight=lambda r: _full(r)[1:]),
    "full weight device": _prefetch(
        "full_up_weight", "meta", "cpu", full_up_weight=lambda r: torch.empty(E + B, *SHAPE, device="meta")
    ),
    "local weight alone": _prefetch("up_prefetch_buffer", "None", "[3, 2, 3, 4]", local_up_weight=_local),
    "local weight rows": _prefetch(
        "local_up_weight",
        "[3, 3, 4]",
        "[2, ...]",
        local_up_weight=lambda r: _full(r)[:3],
        up_prefetch_buffer=_symmetric,
    ),
    "prefetch buffer dtype": _prefetch(
        "up_prefetch_buffer",
        "float32",
        "bfloat16",
        local_up_weight=lambda r: _local(r).bfloat16(),
        up_prefetch_buffer=_symmetric,
    ),
    "prefetch buffer shape": _prefetch(
        "up_prefetch_buffer",
        "[3, 1, 3, 4]",
        "[3, 2, 3, 4]",
        local_up_weight=_local,
        up_prefetch_buffer=lambda r: _symmetric(r)[:, :1],
    ),
    # bare gradients
    "unknown gradient": _reduce("full_side_grad", "given", "full_gate_grad", full_side_grad=_full),
    "no gradient": _reduce("grads", "nothing", "full_gate_grad"),
    "gradient without buffer": _reduce("up_reduce_buffer", "None", "[3, 2, 3, 4] float32", local_up_grad=_local_grad),
    "buffer without gradient": _reduce("local_up_grad", "None", "[2, ...]", up_reduce_buffer=_symmetric),
    "reduce buffer dtype": _reduce(
        "down_reduce_buffer",
        "bfloat16",
        "float32",
        local_down_grad=_local_grad,
        down_reduce_buffer=lambda r: _symmetric(r).bfloat16(),
    ),
    "gradient rows": _reduce(
        "full_down_grad", "[2, 3, 4]", "[8, ...]", full_down_grad=_local_grad, down_reduce_buffer=_symmetric
    ),
    "gradient device": _reduce(
        "local_down_grad",
        "meta",
        "cpu",
        local_down_grad=lambda r: _local_grad(r).to("meta"),
        down_reduce_buffer=_symmetric,
    ),
    # pools
    "pool without gradients": Bad(
        "reduce", lambda r: r.buffer.reduce(r.plan, r.inference_pool), "pool", "without gradients", "grads=True"
    ),
    "slot set": Bad("reduce", lambda r: r.buffer.reduce(r.plan, r.pool, slot_set=1), "slot_set", "1", "0 to 0"),
    "reduce with the plan of another Buffer": Bad(
        "reduce", lambda r: r.buffer.reduce(r.other_plan, r.pool), "plan", "another Buffer", "this Buffer"
    ),
}


def prepare(rank: Rank) -> None:
    """Make what is made collectively, before only one rank makes a mistake."""
    rank.pool, rank.inference_pool, rank.other_plan  # noqa: B018


def refuse_alone(backend: str, bad: Bad) -> dict[str, Any]:
    """One rank gives the bad argument while its peers call the same operation rightly."""
    rank = Rank(backend)
    prepare(rank)
    mine = rank.index == CULPRIT
    return {
        "call": end_of(lambda: bad.call(rank) if mine else rank.good(bad.operation)),
        "next": end_of(rank.buffer.barrier),
        "destroy": end_of(rank.buffer.destroy),
        "destroyed": rank.buffer.destroyed,
    }


def refuse_together(backend: str, bad: Bad) -> dict[str, Any]:
    """All ranks give the bad argument, twice, then call rightly."""
    rank = Rank(backend)
    prepare(rank)
    return {
        "first": end_of(lambda: bad.call(rank)),
        "second": end_of(lambda: bad.call(rank)),
        "good": end_of(lambda: rank.good(bad.operation)),
        "dispatch": end_of(lambda: rank.good("dispatch")),
        "destroy": end_of(rank.buffer.destroy),
    }


def refuse_all(backend: str, alone: bool) -> dict[str, dict[str, Any]]:
    """Every bad argument, each with a Buffer of its own."""
    refuse = refuse_alone if alone else refuse_together
    return {name: refuse(backend, bad) for name, bad in BAD.items()}


@pytest.fixture(scope="module", params=BACKENDS)
def alone(request, ranks) -> list[dict[str, dict[str, End]]]:
    return ranks(R).run(refuse_all, request.param, True)


@pytest.fixture(scope="module", params=BACKENDS)
def together(request, ranks) -> list[dict[str, dict[str, End]]]:
    return ranks(R).run(refuse_all, request.param, False)


def assert_names_the_argument(end: End, bad: Bad) -> None:
    assert end.error == "ValueError", end
    assert end.text.startswith(f"{bad.argument}: given ") or end.text.startswith(f"{bad.argument}: given, "), end.text
    given, expected = end.text.split("expected", 1)
    assert bad.given in given, end.text
    assert bad.expected in f"expected{expected}", end.text


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_on_one_rank_is_its_value_error_and_its_peers_peer_error(alone, name):
    bad = BAD[name]
    for r, ends in enumerate(alone):
        end = ends[name]["call"]
        if r == CULPRIT:
            assert_names_the_argument(end, bad)
        else:
            assert (end.error, end.rank, end.operation) == ("PeerError", CULPRIT, bad.operation), end
            assert f"{bad.argument}: given" in end.text
            assert ends[name]["next"].error == "PeerError"
            assert ends[name]["destroy"].error is None
        assert end.seconds < LONG_S / 2
        assert ends[name]["destroyed"]
        assert ends[name]["next"].error == "PeerError", "nobody goes on without the others"


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_on_all_ranks_leaves_the_buffer_usable(together, name):
    for ends in together:
        assert_names_the_argument(ends[name]["first"], BAD[name])
        assert_names_the_argument(ends[name]["second"], BAD[name])
        assert [ends[name][call].error for call in ("good", "dispatch", "destroy")] == [None] * 3, ends[name]


BAD_PREFETCH: dict[str, Bad] = {
    "plan of another Buffer": Bad(
        "prefetch", lambda r: r.buffer.prefetch(r.other_plan, r.pool), "plan", "another Buffer", "this Buffer"
    ),
    "slot set": Bad("prefetch", lambda r: r.buffer.prefetch(r.plan, r.pool, slot_set=2), "slot_set", "2", "0 to 0"),
    "pool of other sizes": Bad(
        "prefetch", lambda r: r.buffer.prefetch(r.plan, r.pool_of(E=9, B=3)), "pool", "9, 3, 3", "6, 2, 3"
    ),
    "destroyed pool": Bad(
        "prefetch", lambda r: r.buffer.prefetch(r.plan, _destroyed(r.pool_of())), "pool", "destroyed", "live"
    ),
}


def _destroyed(pool: ExpertPool) -> ExpertPool:
    pool.destroy()
    return pool


def refuse_prefetch(backend: str, name: str) -> dict[str, End]:
    rank = Rank(backend)
    prepare(rank)
    return {"bad": end_of(lambda: BAD_PREFETCH[name].call(rank)), "good": end_of(lambda: rank.good("combine"))}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", BAD_PREFETCH)
def test_a_bad_prefetch_is_refused(ranks, backend, name):
    for ends in ranks(R).run(refuse_prefetch, backend, name):
        assert_names_the_argument(ends["bad"], BAD_PREFETCH[name])
        assert ends["good"].error is None


def reduce_without_slots(backend: str) -> dict[str, End]:
    rank = Rank(backend, B=1)
    pool = rank.pool_of(grads=False, B=1)
    tensors = {"local_gate_grad": torch.zeros(L, *SHAPE), "gate_reduce_buffer": torch.zeros(R, 1, *SHAPE)}
    return {
        "reduce_grad": end_of(lambda: rank.buffer.reduce_grad(rank.plan, **tensors)),
        "reduce": end_of(lambda: rank.buffer.reduce(rank.plan, pool)),
        "combine": end_of(lambda: rank.good("combine")),
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_need_a_slot_for_every_redundant_expert(ranks, backend):
    for ends in ranks(R).run(reduce_without_slots, backend):
        assert re.match(r"B: given 1, expected B >= .*2", ends["reduce_grad"].text), ends
        assert [ends[call].error for call in ("reduce_grad", "reduce", "combine")] == ["ValueError", "ValueError", None]


def use_after_destroy(backend: str) -> dict[str, End]:
    rank = Rank(backend)
    buffer, plan, pool = rank.buffer, rank.plan, rank.pool
    buffer.destroy()
    calls: dict[str, Callable[[], Any]] = {
        "dispatch": lambda: rank.good("dispatch"),
        "dispatch with plan": lambda: rank.good("dispatch with plan"),
        "combine": lambda: rank.good("combine"),
        "prefetch": lambda: buffer.prefetch(plan, pool),
        "prefetch_weight": lambda: rank.good("prefetch"),
        "reduce": lambda: rank.good("reduce"),
        "reduce_grad": lambda: buffer.reduce_grad(
            plan, local_gate_grad=pool.local_grad["gate"], gate_reduce_buffer=pool.reduce_buffer["gate"]
        ),
        "barrier": buffer.barrier,
        "hidden_nvsh_buffer_view": lambda: buffer.hidden_nvsh_buffer_view,
        "router_weight_buffer_view": lambda: buffer.router_weight_buffer_view,
        "destroy": buffer.destroy,
    }
    return {name: end_of(call) for name, call in calls.items()}


DESTROYED_CALLS = ("dispatch", "dispatch with plan", "combine", "prefetch", "prefetch_weight", "reduce", "reduce_grad")
DESTROYED_CALLS += ("barrier", "hidden_nvsh_buffer_view", "router_weight_buffer_view")


@pytest.fixture(scope="module", params=BACKENDS)
def destroyed(request, ranks) -> list[dict[str, End]]:
    return ranks(R).run(use_after_destroy, request.param)


@pytest.mark.parametrize("call", DESTROYED_CALLS)
def test_a_destroyed_buffer_refuses(destroyed, call):
    for ends in destroyed:
        assert ends[call].error == "ValueError", ends[call]
        assert "given a destroyed Buffer" in ends[call].text and "expected a live one" in ends[call].text


def test_destroying_twice_is_harmless(destroyed):
    assert [ends["destroy"].error for ends in destroyed] == [None] * R


BAD_BUFFER: dict[str, tuple[dict[str, Any], str]] = {
    "E not divisible": ({"E": 7}, r"E: given 7, expected a multiple of num_ep_ranks = 3"),
    "E of another type": ({"E": "6"}, r"E: given '6', expected an integer"),
    "no tokens": ({"S": 0}, r"S: given 0, expected an integer >= 1"),
    "too large": ({"S": 1 << 24}, r"S: given 16777216, which needs .* expected less than 2\^24"),
    "K": ({"K": 33}, r"K: given 33, expected at most 32"),
    "H": ({"H": 12}, r"H: given 12, a row of 24 bytes; expected a multiple of 16 bytes"),
    "token_padding": ({"token_padding": 0}, r"token_padding: given 0, expected an integer >= 1"),
    "B": ({"B": -1}, r"B: given -1, expected an integer >= 0"),
    "dtype": ({"dtype": torch.int32}, r"dtype: given torch.int32, expected one of torch.bfloat16"),
    "balance": ({"balance": "often"}, r"balance: given 'often', expected 'exact', 'auto' or a tolerance"),
    "negative balance": (
        {"balance": -0.1},
        r"balance: given -0.1, expected 'exact', 'auto' or a tolerance between 0 and 1",
    ),
    "balance that is no number": ({"balance": float("nan")}, r"balance: given nan, expected"),
    "infinite balance": ({"balance": float("inf")}, r"balance: given inf, expected"),
    "backend": ({"backend": "gpu"}, r"backend: given 'gpu', expected one of 'cuda', 'cpu', 'interpreter'"),
    "domains": ({"domains": [[0, 1], [2]]}, r"domains: given .*, expected None"),
    "num_sms": ({"num_sms": 0}, r"num_sms: given 0, expected None or an integer >= 1"),
    "num_sms that is no integer": ({"num_sms": 1.5}, r"num_sms: given 1.5, expected None or an integer >= 1"),
    "num_local_sms": ({"num_local_sms": -1}, r"num_local_sms: given -1, expected None or an integer >= 1"),
}
BAD_POOL: dict[str, tuple[dict[str, Any], str]] = {
    "E": ({"E": 7}, r"E: given 7, expected a multiple of the 3 ranks"),
    "slots for gradients": ({"B": 1}, r"B: given 1, expected .*>= 2.*grads=True"),
    "shapes": ({"shapes": {}}, r"shapes: given none, expected at least one projection"),
    "shape": ({"shapes": {"up": (3, 0)}}, r"shapes\['up'\]: given \(3, 0\), expected a tuple of positive integers"),
    "a shape that is none": ({"shapes": {"up": 5}}, r"shapes\['up'\]: given 5, expected"),
    "dtype": ({"dtype": {"up": torch.float32}}, r"dtype\['gate'\]: given None, expected a torch.dtype"),
    "integers with gradients": ({"dtype": torch.uint8}, r"dtype\['gate'\]: given torch.uint8 .*expected a floating"),
    "slot_sets": ({"slot_sets": 0}, r"slot_sets: given 0, expected an integer >= 1"),
    "master": ({"master": True, "grads": False}, r"master: given True with grads=False, expected grads=True"),
}
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "S": (4, 5),
    "H": (8, 16),
    "K": (2, 1),
    "E": (6, 9),
    "token_padding": (4, 8),
    "B": (2, 1),
    "dtype": (torch.bfloat16, torch.float16),
    "balance": ("exact", 0.01),
}


def construct(backend: str, what: str, changed: dict[str, Any]) -> dict[str, End]:
    """With other arguments on some ranks, then without them."""

    def make(arguments: dict[str, Any]) -> Any:
        if what == "Buffer":
            return Buffer(**{**SIZES, "backend": backend, "timeout_s": LIMIT_S, **arguments})
        good = {"shapes": {"gate": SHAPE}, "E": E, "B": B, "dtype": torch.float32, "grads": True}
        return ExpertPool(**{**good, "backend": backend, "timeout_s": LIMIT_S, **arguments})

    return {"bad": end_of(lambda: make(changed)), "good": end_of(lambda: make({}).destroy())}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("on", ["one rank", "all ranks"])
@pytest.mark.parametrize(
    ("what", "name"), [("Buffer", name) for name in BAD_BUFFER] + [("ExpertPool", name) for name in BAD_POOL]
)
def test_bad_arguments_of_a_constructor_are_refused_everywhere(ranks, backend, on, what, name):
    changed, pattern = (BAD_BUFFER if what == "Buffer" else BAD_POOL)[name]
    per_rank = PerRank([changed if on == "all ranks" or r == CULPRIT else {} for r in range(R)])
    results = ranks(R).run(construct, backend, what, per_rank)
    if any(ends["good"].error for ends in results):
        ranks(R).close()  # the group is out of step: the next test gets a new one
    for r, ends in enumerate(results):
        if per_rank[r]:
            assert ends["bad"].error == "ValueError" and re.match(pattern, ends["bad"].text), ends["bad"]
        else:
            assert (ends["bad"].error, ends["bad"].rank, ends["bad"].operation) == ("PeerError", CULPRIT, what)
            assert re.search(pattern, ends["bad"].text), ends["bad"]
        assert ends["good"].error is None, "a refused construction does not spoil the next one"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", DIFFERENT)
def test_sizes_that_differ_between_ranks_are_refused_with_all_values(ranks, backend, name):
    ours, theirs = DIFFERENT[name]
    per_rank = PerRank([{name: theirs if r == CULPRIT else ours} for r in range(R)])
    for ends in ranks(R).run(construct, backend, "Buffer", per_rank):
        assert ends["bad"].error == "ValueError" and ends["bad"].text.startswith(f"{name}: given rank 0: "), ends["bad"]
        assert ends["bad"].text.endswith("expected the same on every rank")
        if name != "balance":
            assert str(ours) in ends["bad"].text and str(theirs) in ends["bad"].text
        assert ends["good"].error is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_number_of_ranks_that_is_not_the_groups_is_refused(ranks, backend):
    for ends in ranks(R).run(construct, backend, "Buffer", {"num_ep_ranks": 2, "E": 6}):
        assert ends["bad"].error == "ValueError"
        assert re.match(r"num_ep_ranks: given 2 with a group of 3, expected the size of the group", ends["bad"].text)
        assert ends["good"].error is None


def differ(backend: str, common: str, odd: str) -> tuple[End, End, float]:
    rank = Rank(backend)
    rank.pool  # noqa: B018
    end = end_of(lambda: rank.good(odd if rank.index == CULPRIT else common))
    after = end_of(rank.buffer.barrier) if not rank.buffer.destroyed else End("PeerError")
    return end, after, end_of(rank.buffer.destroy).seconds


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("common", "odd"),
    [
        ("dispatch", "combine"),
        ("dispatch", "dispatch with plan"),
        ("combine", "reduce"),
        ("reduce", "barrier"),
        ("barrier", "dispatch"),
        ("prefetch", "combine"),
        ("combine", "destroy"),
    ],
)
def test_different_operations_are_a_peer_error_that_names_both(ranks, backend, common, odd):
    for r, (end, after, destroy_s) in enumerate(ranks(R).run(differ, backend, common, odd)):
        mine, theirs = (odd, common) if r == CULPRIT else (common, odd)
        assert (end.error, end.operation) == ("PeerError", mine), end
        assert f"called {theirs} instead" in end.text
        assert r == CULPRIT or end.rank == CULPRIT
        assert end.seconds < LONG_S / 2 and destroy_s < SLACK_S
        assert after.error == "PeerError"


def skip_prefetch(backend: str) -> tuple[End, list[float]]:
    """A rank leaves out a prefetch that would move nothing there; a slow peer then comes late with its partial sums."""
    rank = Rank(backend, timeout_s=LIMIT_S)
    if rank.index == 0:
        original = Barrier.wait

        def wait_and_dawdle(barrier: Barrier) -> None:
            original(barrier)
            time.sleep(0.3)

        Barrier.wait = wait_and_dawdle
    output = torch.zeros(S, H)
    try:
        rank.pool  # noqa: B018
        next_rank = (rank.index + 1) % R * L
        rows, _, _, plan = rank.buffer.dispatch(rank.x, None, torch.full_like(rank.topk, next_rank))
        if rank.index != CULPRIT:
            rank.buffer.prefetch(plan, rank.pool)
        end = end_of(lambda: output.copy_(rank.buffer.combine(plan, rows)[0]))
    finally:
        if rank.index == 0:
            Barrier.wait = original
    return end, output.flatten().tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_leaves_out_a_prefetch_gets_the_right_sum_or_an_error(ranks, backend):
    for end, output in ranks(R).run(skip_prefetch, backend):
        assert end.error in ("PeerError", "PeerTimeout") or output == [float(K)] * (S * H)


def raise_in_the_middle(backend: str, error: BaseException) -> dict[str, End]:
    rank = Rank(backend)
    original = policy.allocate

    def fail(*_: Any) -> None:
        raise error

    if rank.index == CULPRIT:
        policy.allocate = fail
    try:
        ends = {"call": end_of(lambda: rank.good("dispatch"))}
    finally:
        policy.allocate = original
    return ends | {
        "next": end_of(rank.buffer.barrier),
        "check": end_of(rank.buffer.check),
        "destroy": end_of(rank.buffer.destroy),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "error", [RuntimeError("out of luck"), ValueError("out of luck"), KeyboardInterrupt("out of luck")], ids=repr
)
def test_an_exception_in_the_middle_is_its_own_and_its_peers_peer_error_at_once(ranks, backend, error):
    for r, ends in enumerate(ranks(R).run(raise_in_the_middle, backend, error)):
        end = ends["call"]
        if r == CULPRIT:
            assert (end.error, end.text) == (type(error).__name__, "out of luck")
        else:
            assert (end.error, end.rank, end.operation) == ("PeerError", CULPRIT, "dispatch"), end
            assert "out of luck" in end.text
            assert ends["check"].error == "PeerError" and ends["destroy"].error is None
        assert end.seconds < LONG_S / 2
        assert ends["next"].error == "PeerError"
        assert ends["destroy"].seconds < SLACK_S


def say_why(backend: str, refuse: bool) -> dict[str, End]:
    """The culprit refuses a dispatch, or fails between its barriers; on a GPU peers learn of it when they check."""
    device = use_device(backend)
    R = torch.distributed.get_world_size()
    buffer = Buffer(4, 8, 1, R, R, token_padding=1, backend=backend, timeout_s=LONG_S)
    x, ids = torch.ones(4, 8, dtype=torch.bfloat16, device=device), torch.zeros(4, 1, dtype=torch.int32, device=device)

    def dispatch() -> None:
        buffer.dispatch(x, None, ids)
        buffer.check()

    def fail(*_: Any) -> None:
        raise RuntimeError("out of luck")

    dispatch()
    if buffer.rank == CULPRIT and refuse:
        x = x.float()
    elif buffer.rank == CULPRIT:
        buffer._backend.forward.touch = fail  # when its peers cannot but wait for it

    def meet() -> None:
        buffer.barrier()
        buffer.check()

    return {"call": end_of(dispatch), "next": end_of(meet), "destroy": end_of(buffer.destroy)}


def assert_peers_know_why(results: list[dict[str, End]], refuse: bool) -> None:
    kind, text = ("ValueError", "hidden_sh: given") if refuse else ("RuntimeError", "out of luck")
    for r, ends in enumerate(results):
        end = ends["call"]
        if r == CULPRIT:
            assert end.error == kind and text in end.text
        else:
            assert (end.error, end.rank, end.operation) == ("PeerError", CULPRIT, "dispatch"), end
            assert f"{'refused its arguments' if refuse else 'failed'}: {text}" in end.text, end
        assert ends["next"].error == "PeerError"
        assert ends["destroy"].error is None and ends["destroy"].seconds < SLACK_S


@pytest.mark.parametrize("refuse", [True, False], ids=["refused", "failed"])
@pytest.mark.parametrize("backend", DEVICE_BACKENDS)
def test_peers_know_what_the_error_was(ranks, backend, refuse):
    assert_peers_know_why(ranks(2).run(say_why, backend, refuse), refuse)


@pytest.mark.slow
@pytest.mark.parametrize("refuse", [True, False], ids=["refused", "failed"])
def test_peers_of_a_gpu_barrier_know_what_the_error_was(interpreters, refuse):
    assert_peers_know_why(interpreters(2).run(say_why, "interpreter", refuse), refuse)


def look_away(backend: str) -> dict[str, Any]:
    """Give ids out of range, then call nothing for a while; what was logged meanwhile, and what is raised after."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("moonep").addHandler(handler)
    buffer = Buffer(4, 8, 1, 2, 1, token_padding=1, backend=backend)
    x, ids = torch.ones(4, 8, dtype=torch.bfloat16), torch.full((4, 1), 7, dtype=torch.int32)

    def replay() -> None:
        with buffer.watch(interval_s=0.01):
            try:
                buffer.dispatch(x, None, ids)
            finally:
                time.sleep(0.1)

    end = end_of(replay)
    names = [thread.name for thread in threading.enumerate()]
    good = end_of(lambda: buffer.dispatch(x, None, ids * 0))
    return {"end": end, "good": good, "lines": lines, "names": names}


@pytest.mark.slow
def test_a_watched_buffer_logs_what_the_device_reports_and_raises_it_after(interpreters):
    (seen,) = interpreters(1).run(look_away, "interpreter")
    assert seen["end"].error == "ValueError" and seen["end"].text.startswith("topk_experts_sk: given ids out of range")
    assert seen["lines"] == [f"rank 0: ValueError: {seen['end'].text}"]
    assert seen["good"].error is None
    assert "moonep-watchdog" not in seen["names"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_watched_buffer_without_errors_logs_nothing(ranks, backend):
    (seen,) = ranks(1).run(look_away, backend)
    assert seen["end"].error == "ValueError"  # of the call itself
    assert seen["lines"] == [] and seen["good"].error is None


class Preempted:
    """A page that is read slowly once: the reader loses the processor after a certain word."""

    def __init__(self, page: Any, after: int):
        self.page, self.after = page, after

    def __getitem__(self, index: int) -> int:
        word = self.page[index]
        if index == self.after:
            self.after = -1
            time.sleep(0.6)
        return word


def refuse_around(backend: str) -> End:
    """Refuse, barrier, refuse on both ranks; rank 0 is preempted in the barrier until rank 1 has refused again."""
    buffer = Buffer(**{**SIZES, "num_ep_ranks": 2}, backend=backend, timeout_s=LONG_S)
    refusals = [end_of(lambda: buffer.combine(None, None))]
    pages = buffer._backend.barrier._pages
    if buffer.rank == 0:
        pages[1] = Preempted(pages[1], barrier_module._REFUSED)
    else:
        time.sleep(0.2)
    end = end_of(buffer.barrier)
    refusals.append(end_of(lambda: buffer.combine(None, None)))
    time.sleep(0.8)
    assert [refusal.error for refusal in refusals] == ["ValueError"] * 2 or end.error, refusals
    return end


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_refusal_of_the_next_operation_is_not_taken_for_one_of_this(ranks, backend):
    assert [end.error for end in ranks(2).run(refuse_around, backend)] == [None, None]


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(owner: Any, name: str, call: int, after: bool = False) -> None:
    """Be killed in the given call (counted from 1) of a function from now on, before or after its work."""
    original, calls = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            die()
        result = original(*args, **kwargs)
        if calls == call:
            die()
        return result

    setattr(owner, name, counted)


def lose_peer(backend: str, operation: str, wait: int) -> dict[str, Any]:
    """The culprit is killed in the operation: in its first wait for peers, or in the second, having sent half."""
    rank = Rank(backend, timeout_s=LIMIT_S)
    rank.pool  # noqa: B018
    rank.buffer.barrier()
    if rank.index == CULPRIT:
        die_at(Barrier, "wait", wait)
    buffer = rank.buffer
    ends: dict[str, Any] = {"call": end_of(lambda: rank.good(operation))}
    if operation != "destroy":
        for name in ("dispatch", "combine", "reduce", "barrier"):
            ends[name] = end_of(lambda name=name: rank.good(name))
        ends["check"] = end_of(buffer.check)
    ends["destroy"] = end_of(buffer.destroy)
    ends["destroyed"] = buffer.destroyed
    return ends


WAITS = [(operation, wait) for operation in ("dispatch", "combine", "reduce", "prefetch") for wait in (1, 2)]
WAITS += [("dispatch with plan", 2), ("barrier", 1), ("destroy", 1)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("operation", "wait"), WAITS, ids=[f"{operation}-{wait}" for operation, wait in WAITS])
def test_a_rank_killed_in_an_operation_is_a_timeout_on_every_survivor(ranks, backend, operation, wait):
    outcomes = ranks(R).run(lose_peer, backend, operation, wait, raise_errors=False)
    for r, outcome in enumerate(outcomes):
        if r == CULPRIT:
            assert isinstance(outcome.error, RankDied) and outcome.error.exitcode == -signal.SIGKILL
            continue
        assert outcome.ok, outcome.report
        ends = outcome.value
        end = ends["call"]
        assert (end.error, end.rank, end.operation) == ("PeerTimeout", CULPRIT, operation), end
        assert LIMIT_S * 0.9 < end.seconds < LIMIT_S + SLACK_S
        for name in ends.keys() & {"dispatch", "combine", "reduce", "barrier", "check"}:
            assert ends[name].error in ("PeerError", "PeerTimeout") and ends[name].seconds < LIMIT_S, (name, ends[name])
        assert ends["destroy"].error is None and ends["destroy"].seconds < LIMIT_S
        assert ends["destroyed"]


DEATHS_IN_CONSTRUCTOR: dict[str, tuple[Any, str, int, bool]] = {
    "before the sizes are compared": (Peers, "all_gather", 1, False),
    "before it offers its memory": (Peers, "all_gather", 2, False),
    "when all have offered their memory": (Peers, "all_gather", 2, True),
    "when it has connected": (socket.socket, "connect", 1, True),
    "when it has said who it is": (socket.socket, "sendall", 1, True),
}


def count_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def lose_peer_in_constructor(backend: str, what: str, death: str) -> dict[str, Any]:
    Rank(backend, timeout_s=LONG_S).buffer.destroy()
    files = count_files()
    if torch.distributed.get_rank() == CULPRIT:
        owner, name, call, after = DEATHS_IN_CONSTRUCTOR[death]
        die_at(owner, name, call, after)
    arguments = {"E": E, "B": B, "backend": backend, "timeout_s": LIMIT_S}
    if what == "Buffer":
        end = end_of(lambda: Buffer(**{**SIZES, **arguments}))
    else:
        end = end_of(lambda: ExpertPool({"gate": SHAPE}, grads=True, **arguments))
    return {"end": end, "leaked files": count_files() - files}


@pytest.fixture(scope="module", params=[(b, what) for b in BACKENDS for what in ("Buffer", "ExpertPool")], ids=str)
def constructor(request) -> tuple[str, str]:
    return request.param


@pytest.fixture(scope="module", params=DEATHS_IN_CONSTRUCTOR)
def construction(request, constructor, ranks) -> tuple[str, list[dict[str, Any]]]:
    """What the survivors report when a rank is killed while it constructs."""
    outcomes = ranks(R).run(lose_peer_in_constructor, *constructor, request.param, raise_errors=False)
    assert isinstance(outcomes[CULPRIT].error, RankDied)
    survivors = [outcome for r, outcome in enumerate(outcomes) if r != CULPRIT]
    assert all(outcome.ok for outcome in survivors), survivors
    return constructor[1], [outcome.value for outcome in survivors]


def test_a_rank_killed_in_a_constructor_is_named_by_every_survivor_in_time(construction):
    what, survivors = construction
    for survivor in survivors:
        end = survivor["end"]
        assert end.error in ("PeerTimeout", "PeerError"), end  # an error at once is better than a timeout
        assert (end.rank, end.operation) == (CULPRIT, what), end
        assert end.seconds < LIMIT_S + SLACK_S


def test_a_failed_constructor_leaves_no_file_open(construction):
    for survivor in construction[1]:
        assert survivor["leaked files"] <= 0  # gloo closes its connection to the dead rank


def come_late(backend: str) -> list[End]:
    """One rank comes too late to a constructor; then all try again."""
    arguments = {**SIZES, "backend": backend, "timeout_s": LIMIT_S}
    if torch.distributed.get_rank() == CULPRIT:
        time.sleep(1.5 * LIMIT_S)
    ends = [end_of(lambda: Buffer(**arguments))]
    torch.distributed.barrier()
    return [*ends, end_of(lambda: Buffer(**arguments))]


@pytest.mark.parametrize("backend", BACKENDS)
def test_after_a_constructor_timed_out_the_next_one_works_or_names_a_peer(ranks, backend):
    results = ranks(R).run(come_late, backend)
    ranks(R).close()  # the group may be out of step: the next test gets a new one
    for first, second in results:
        assert first.error == "PeerTimeout" and first.operation == "Buffer", first
        assert second.error in (None, "PeerError", "PeerTimeout"), second


def use_views(backend: str) -> dict[str, End]:
    """What backward says about views of the row buffers that were, or were not, overwritten before it."""
    rank = Rank(backend)
    buffer = rank.buffer
    # All tokens go to the next rank: what is written into a region comes from peers alone.
    rank.topk = torch.full_like(rank.topk, (rank.index + 1) % R * L)
    plan = buffer.dispatch(rank.x, rank.w, rank.topk)[3]
    views = {"zero_copy": True, "router_weights_zero_copy": True}
    ends: dict[str, End] = {}

    def fresh() -> tuple[Tensor, Tensor, Plan]:
        rows, weights, _, new_plan = buffer.dispatch(rank.x, rank.w, rank.topk, **views)
        return rows, weights, new_plan

    def reused() -> tuple[Tensor, Tensor]:
        rows, weights, _, _ = buffer.dispatch(rank.x, rank.w, plan=plan, **views)
        return rows, weights

    def backward_after(name: str, saved: Tensor, *between: Callable[[], Any]) -> None:
        defined = saved[: int(plan.cu_seqlens[-1])]
        factor = torch.ones((), dtype=saved.dtype, requires_grad=True)
        loss = (defined * factor).sum()
        for call in between:
            call()
        ends[name] = end_of(loss.backward)
        if ends[name].error is None:
            assert factor.grad == defined.numel(), "all that was saved is 1"

    ones, ones_C = torch.ones_like(rank.rows), torch.ones_like(rank.weights)
    backward_after("legal: at once", fresh()[0])
    backward_after("legal: reuse in between", fresh()[0], reused, lambda: buffer.combine(plan, ones, ones_C))
    backward_after("legal: a copy", buffer.dispatch(rank.x, None, rank.topk)[0], fresh, reused)
    backward_after("stale: fresh dispatch", fresh()[0], fresh)
    backward_after("stale: copying fresh dispatch", fresh()[0], lambda: buffer.dispatch(rank.x, None, rank.topk))
    backward_after("stale: weights, fresh dispatch", fresh()[1], fresh)
    rows, _, new_plan = fresh()
    backward_after("stale: consumed by combine", rows, lambda: buffer.combine(new_plan, rows, zero_copy=True))
    backward_after("legal: gradient rows, fresh dispatch in between", reused()[0], fresh)
    backward_after("stale: gradient rows, reuse", reused()[0], reused)
    backward_after("stale: gradient weights, reuse", reused()[1], reused)
    view = buffer.hidden_nvsh_buffer_view
    view.copy_(ones)
    backward_after("stale: expert output, reuse", view, reused)
    view.copy_(ones)
    backward_after(
        "stale: expert output, consumed",
        view,
        lambda: buffer.combine(plan, buffer.hidden_nvsh_buffer_view, zero_copy=True),
    )
    view.copy_(ones)
    backward_after("legal: expert output, fresh dispatch", view, fresh)
    buffer.destroy()
    return ends


VIEWS = (
    "legal: at once",
    "legal: reuse in between",
    "legal: a copy",
    "legal: gradient rows, fresh dispatch in between",
    "legal: expert output, fresh dispatch",
    "stale: fresh dispatch",
    "stale: copying fresh dispatch",
    "stale: weights, fresh dispatch",
    "stale: consumed by combine",
    "stale: gradient rows, reuse",
    "stale: gradient weights, reuse",
    "stale: expert output, reuse",
    "stale: expert output, consumed",
)


@pytest.fixture(scope="module", params=BACKENDS)
def viewed(request, ranks) -> list[dict[str, End]]:
    return ranks(R).run(use_views, request.param)


@pytest.mark.parametrize("use", VIEWS)
def test_stale_views_raise_in_backward_and_legal_use_does_not(viewed, use):
    for ends in viewed:
        if use.startswith("legal"):
            assert ends[use].error is None, ends[use]
        else:
            assert ends[use].error == "RuntimeError" and "modified by an inplace operation" in ends[use].text


def test_errors_survive_pickling():
    for error in (PeerError(2, "combine", "gone"), PeerTimeout(1, "reduce", "late")):
        assert type(error).__reduce__(error)[0] is type(error)


@pytest.fixture
def small_buffer() -> Buffer:
    return Buffer(4, 8, 1, 2, 1, token_padding=1, backend="cpu")


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "x", None])
def test_times_must_be_finite_and_positive(small_buffer, seconds):
    with pytest.raises(ValueError, match=r"timeout_s: given .*, expected a number of seconds above 0"):
        Buffer(4, 8, 1, 2, 1, backend="cpu", timeout_s=seconds)
    with pytest.raises(ValueError, match=r"timeout_s: given .*, expected a number of seconds above 0"):
        ExpertPool({"up": (8, 8)}, 2, backend="cpu", timeout_s=seconds)
    with (
        pytest.raises(ValueError, match=r"interval_s: given .*, expected a number of seconds above 0"),
        small_buffer.watch(interval_s=seconds),
    ):
        pytest.fail("nothing watches here")


def test_what_is_no_pool_or_no_slot_set_is_refused_and_the_buffer_stays_usable(small_buffer):
    pool = ExpertPool({"up": (8, 8)}, 2, backend="cpu", grads=True)
    plan = small_buffer.dispatch(torch.zeros(4, 8).bfloat16(), None, torch.zeros(4, 1, dtype=torch.int32))[3]
    for call in (small_buffer.prefetch, small_buffer.reduce):
        with pytest.raises(ValueError, match="pool: given NoneType, expected an ExpertPool"):
            call(plan, None)
        for slot_set in ("a", None, 0.5, 1):
            with pytest.raises(ValueError, match=r"slot_set: given .*, expected 0 to 0"):
                call(plan, pool, slot_set=slot_set)
    assert small_buffer.usable


def test_a_peer_that_refuses_and_then_fails_has_refused_whenever_one_looks():
    """It goes on while its words are read: what it says first must be seen first."""
    refused, broken = (barrier_words._REFUSED, barrier_words._BROKEN)

    class Page(dict):
        def __getitem__(self, word: int) -> int:
            value = super().__getitem__(word)
            if word == refused:  # and now the peer runs
                self[refused], self[broken] = barrier_words.pack_range((3, 3)), 1
            return value

    waiting = object.__new__(barrier_words.Barrier)
    waiting._pages = [Page(dict.fromkeys(range(barrier_words._NUM_WORDS), 0))]
    waiting._number, waiting.operation = 3, "combine"
    waiting._refusals = waiting._failures = [memoryview(bytearray(64))]
    assert not waiting._arrived(0, 1)
    with pytest.raises(PeerError, match="refused its arguments"):
        waiting._arrived(0, 1)
