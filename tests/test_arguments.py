"""Arguments of constructors and of pools: a ValueError that names them here, and at once a PeerError at a peer."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from outcomes import end_of

from moonep import Buffer, ExpertPool
from moonep.errors import PeerError, PeerTimeout
from moonep.testing.ranks import PerRank

R, CULPRIT = 2, 1
GOOD: dict[str, dict[str, Any]] = {
    "Buffer": {"S": 4, "H": 8, "K": 1, "E": 4, "num_ep_ranks": R, "token_padding": 1},
    "ExpertPool": {"shapes": {"up": (8, 4)}, "E": 4},
}
LONG_S, SOON_S = 30.0, 5.0  # a limit that no test reaches, and what a busy machine may take

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("Buffer", {"timeout_s": -1.0}, "timeout_s: given -1.0, expected a number of seconds above 0"),
    ("Buffer", {"timeout_s": "soon"}, "timeout_s: given soon, expected a number of seconds above 0"),
    ("Buffer", {"comm_stream_priority": "high"}, "comm_stream_priority: given 'high', expected an integer"),
    ("ExpertPool", {"timeout_s": None}, "timeout_s: given None, expected a number of seconds above 0"),
    ("ExpertPool", {"dtype": "bf16"}, "dtype: given str 'bf16', expected a torch.dtype or {projection: torch.dtype}"),
    ("ExpertPool", {"dtype": None}, "dtype: given NoneType None, expected a torch.dtype or"),
    ("ExpertPool", {"shapes": [(8, 4)]}, "shapes: given list [(8, 4)], expected at least one projection"),
    ("ExpertPool", {"shapes": None}, "shapes: given NoneType None, expected at least one projection"),
    ("ExpertPool", {"shapes": {("up", 0): (8, 4)}}, "shapes: given the name tuple ('up', 0), expected a string"),
]


def construct(what: str, changed: dict[str, Any]) -> list[tuple[str, str, float]]:
    """With other arguments on one rank, then without them."""
    kind = {"Buffer": Buffer, "ExpertPool": ExpertPool}[what]

    def make(arguments: dict[str, Any]) -> Any:
        return kind(**{**GOOD[what], "backend": "cpu", "timeout_s": LONG_S, **arguments})

    return [end_of(lambda: make(changed)), end_of(lambda: make({}).destroy())]


@pytest.mark.parametrize(("what", "changed", "message"), BAD)
def test_a_bad_argument_of_one_rank_is_at_once_a_peer_error_of_the_other(ranks, what, changed, message):
    results = ranks(R).run(construct, what, PerRank([changed if r == CULPRIT else {} for r in range(R)]))
    for r, ((error, text, seconds), after) in enumerate(results):
        assert error == ("ValueError" if r == CULPRIT else "PeerError"), text
        assert text.startswith(message if r == CULPRIT else f"{what}: rank {CULPRIT}: {message}")
        assert seconds < SOON_S and after[0] == "", after


def give_groups(groups: list[Any]) -> list[tuple[str, str, float]]:
    made = {"Buffer": Buffer, "ExpertPool": ExpertPool}
    return [
        end_of(lambda kind=kind, what=what, group=group: kind(**{**GOOD[what], "backend": "cpu", "group": group}))
        for what, kind in made.items()
        for group in groups
    ]


def test_what_is_no_process_group_is_refused_by_name(ranks):
    for ends in ranks(R).run(give_groups, ["x", 3, [0, 1]]):
        for error, text, _ in ends:
            assert error == "ValueError"
            assert text.startswith("group: given ") and text.endswith("expected None or a live process group"), text
    error, text, _ = give_groups(["x"])[0]
    assert (error, text) == ("ValueError", "group: given str 'x', expected None or a live process group")


@pytest.fixture
def alone() -> tuple[Buffer, ExpertPool, Any]:
    buffer = Buffer(4, 8, 1, 2, 1, token_padding=1, backend="cpu")
    pool = ExpertPool(
        {"up": (8, 8), "scale": (3,)}, 2, dtype={"up": torch.bfloat16, "scale": torch.uint8}, backend="cpu"
    )
    plan = buffer.dispatch(torch.zeros(4, 8).bfloat16(), None, torch.zeros(4, 1, dtype=torch.int32))[3]
    return buffer, pool, plan


def test_what_a_pool_cannot_load_is_refused_and_nothing_is_written(alone):
    pool = alone[1]
    before = {name: own.clone() for name, own in pool.local.items()}
    right = torch.ones(2, 3, dtype=torch.uint8)
    for tensors, message in (
        ([right], r"tensors: given list .*, expected \{projection: tensor\}"),
        ({"scale": right, "up": torch.ones(2, 8, 8).long()}, r"tensors\['up'\]: given \[2, 8, 8\] int64 .* floating"),
        ({"scale": right, "up": 1.0}, r"tensors\['up'\]: given float 1.0, expected \[2, 8, 8\]"),
        ({"scale": right.float()}, r"tensors\['scale'\]: given \[2, 3\] float32 .*, expected \[2, 3\] uint8"),
    ):
        with pytest.raises(ValueError, match=message):
            pool.load_local(tensors)
    assert all(torch.equal(own, before[name]) for name, own in pool.local.items())
    pool.load_local({"up": torch.ones(2, 8, 8).double(), "scale": right})
    assert bool((pool.local["up"] == 1).all()) and torch.equal(pool.local["scale"], right)


SLOT_SET_CALLS = {
    **{
        name: lambda pool, plan, slot_set, name=name: getattr(pool, name)(slot_set)
        for name in ("full_of", "compact_of", "compact_grad_of", "full_grad_of", "reduce_buffer_of")
    },
    **{
        name: lambda pool, plan, slot_set, name=name: getattr(pool, name)(plan, slot_set)
        for name in ("fill_slots", "holds", "check_slots", "claim_gradients")
    },
}


@pytest.mark.parametrize("name", SLOT_SET_CALLS)
def test_a_slot_set_that_a_pool_lacks_and_a_destroyed_pool_are_refused_by_name(alone, name):
    _, pool, plan = alone
    for slot_set in (5, -1, "a", None):
        with pytest.raises(ValueError, match=r"slot_set: given .*, expected 0 to 0"):
            SLOT_SET_CALLS[name](pool, plan, slot_set)
    SLOT_SET_CALLS[name](pool, plan, 0)
    pool.destroy()
    for call in (lambda: SLOT_SET_CALLS[name](pool, plan, 0), lambda: pool.load_local({}), pool.sync_if_updated):
        with pytest.raises(ValueError, match="pool: given a destroyed ExpertPool, expected a live one"):
            call()


def test_experts_with_a_slot_set_that_their_pool_lacks_are_refused():
    from moonep.nn import experts

    buffer = Buffer(4, 8, 1, 2, 1, token_padding=1, dtype=torch.float32, backend="cpu")
    shapes = {"gate": (8, 4), "up": (8, 4), "down": (4, 8)}
    pool = ExpertPool(shapes, 2, dtype=torch.float32, backend="cpu")
    ids = torch.zeros(4, 1, dtype=torch.int32)
    rows, weights, _, plan = buffer.dispatch(torch.zeros(4, 8), torch.ones(4, 1), ids)
    with pytest.raises(ValueError, match="slot_set: given 9, expected 0 to 0"):
        experts(pool, plan, rows, weights, slot_set=9)


def test_unknown_or_no_tensors_are_refused_with_what_was_given_and_both_forms(alone):
    buffer, pool, plan = alone
    up = pool.full["up"]
    weights = "expected full_gate_weight, or local_gate_weight with gate_prefetch_buffer"
    grads = "expected full_gate_grad or local_gate_grad, with gate_reduce_buffer"
    for call, given, message in (
        (buffer.prefetch_weight, {"foo": up}, rf"foo: given \[4, 8, 8\] bfloat16 on cpu.*, {weights}"),
        (buffer.prefetch_weight, {"foo": 3}, f"foo: given int 3, {weights}"),
        (buffer.prefetch_weight, {}, f"weights: given nothing, {weights}"),
        (buffer.reduce_grad, {"foo": 3}, f"foo: given int 3, {grads}"),
        (buffer.reduce_grad, {}, f"grads: given nothing, {grads}"),
    ):
        with pytest.raises(ValueError, match=message):
            call(plan, **given)
    assert buffer.usable


def test_errors_keep_their_attributes_when_they_are_raised_again_pickled_and_copied():
    failed, late = PeerError(2, "combine", "gone"), PeerTimeout(1, "reduce", "late", 3, 0.5)
    for make in (lambda e: e.again(), lambda e: pickle.loads(pickle.dumps(e)), copy.copy):
        assert vars(make(failed)) == {"rank": 2, "peer": 2, "operation": "combine", "message": "gone"}
        assert vars(make(late)) == vars(late)
        assert str(make(late)) == "reduce: rank 1: late" and type(make(late)) is PeerTimeout
    assert (late.peer, late.waiting_rank, late.waited_s) == (1, 3, 0.5)
    assert PeerTimeout(1, "reduce", "late").waited_s is None


def wait_in_vain(limit_s: float) -> list[PeerTimeout]:
    """Rank 0 waits for rank 1: while a Buffer is made, and in an operation."""
    caught: list[PeerTimeout] = []
    mine = dist.get_rank() != CULPRIT
    arguments = {**GOOD["Buffer"], "backend": "cpu", "timeout_s": limit_s}
    buffer = Buffer(**arguments)
    for wait in (buffer.barrier, lambda: Buffer(**arguments)):
        try:
            if mine:
                wait()
        except PeerTimeout as error:
            caught.append(error.again())
    return caught


def test_a_timeout_says_who_waited_for_whom_in_what_and_how_long(ranks):
    limit_s = 0.5
    waiting, absent = ranks(R).run(wait_in_vain, limit_s)
    ranks(R).close()  # the group is out of step: the next test gets a new one
    assert absent == [] and [error.operation for error in waiting] == ["barrier", "Buffer"]
    for error in waiting:
        assert (error.rank, error.peer, error.waiting_rank) == (1, 1, 0)
        assert error.waited_s is not None and limit_s <= error.waited_s < limit_s + SOON_S
        assert "did not arrive within 0.5 s" in str(error) and "rank 0 waited" in str(error)
