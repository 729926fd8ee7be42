"""The contract: every backend does what the reference says, bit for bit, in every case of `moonep.testing.cases`.

`steps` runs on every rank and names what comes out; `specify` gives the same names from the reference. The ranks run
once for each case; each test compares its share of the names. Whatever a backend fails to write is NaN: allocators are
poisoned, and the row buffers are filled with NaN before each operation.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import zip_longest
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moonep import Buffer, ExpertPool, Plan, reference
from moonep.dims import Dims
from moonep.errors import PeerTimeout
from moonep.memory.barrier import Barrier
from moonep.plan import check_plan
from moonep.planner import policy
from moonep.testing.asserts import assert_equal, poisoned_allocators
from moonep.testing.cases import BY_NAME, CASES, Case, popular
from moonep.testing.ranks import PerRank, RankDied

BACKENDS = ("cpu",)
NO_GPU = "no CUDA device: the cuda backend is not run here"
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU))
# A GPU runs what asks the backend for results; the rest of this file looks into CPU processes.
DEVICE_BACKENDS = ("cpu", pytest.param("cuda", marks=ON_GPU))
SHAPES = {"gate": (4, 8), "up": (24,)}
DTYPES = {"gate": torch.float32, "up": torch.bfloat16}
PLAN_FIELDS = (
    "load",
    "alloc",
    "experts_to_copy",
    "cu_seqlens",
    "zero_fill_ranges",
    "remote_stats",
    "dst",
    "sends",
    "tokens",
    "arrivals",
)

# What the names of a rank's results begin with.
PARTS = ("nothing", "plan", "fresh", "reuse", "other", "again", "zero_copy", "zero_copy_reuse", "forms", "unsynced")
PARTS += ("prefetch", "prefetch_full", "prefetch_pushed", "home", "reduce", "reduce_full", "reduce_local")

SIZED = [(case, R) for case in CASES for R in case.ranks]
SIZED_IDS = [f"{case.name}-R{R}" for case, R in SIZED]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Inputs:
    """One rank's tensors, the same wherever they are made.

    x, w: hidden [s, H] and route weights [s, K], with zeros of both signs, infinities, NaN and a denormal among them.
    grad, grad_w: the same for a reused plan; other_x: hidden of a second routing.
    y, y_w, y2: what the experts put out, [C, H] and [C].
    weights: {projection: [L, ...]}; own, slots: fp32 gradients {projection: [L, ...]}, {projection: [B, ...]}.
    """

    x: Tensor
    w: Tensor
    grad: Tensor
    grad_w: Tensor
    other_x: Tensor
    y: Tensor
    y_w: Tensor
    y2: Tensor
    weights: dict[str, Tensor]
    own: dict[str, Tensor]
    slots: dict[str, Tensor]

    def to(self, device: torch.device) -> Inputs:
        """The same on a device."""
        return Inputs(**{f.name: on_device(getattr(self, f.name), device) for f in fields(self)})

    @staticmethod
    def of(case: Case, d: Dims, rank: int, s: int, other_s: int) -> Inputs:
        generator = torch.Generator().manual_seed(rank)

        def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        return Inputs(
            x=_with_specials(draw(s, d.H, dtype=case.dtype)),
            w=_with_specials(draw(s, d.K)),
            grad=draw(s, d.H, dtype=case.dtype),
            grad_w=draw(s, d.K),
            other_x=draw(other_s, d.H, dtype=case.dtype),
            y=draw(d.C, d.H, dtype=case.dtype),
            y_w=_with_specials(draw(d.C)),
            y2=draw(d.C, d.H, dtype=case.dtype),
            weights={name: draw(d.L, *shape, dtype=DTYPES[name]) for name, shape in SHAPES.items()},
            own={name: draw(d.L, *shape) for name, shape in SHAPES.items()},
            slots={name: draw(d.B, *shape) for name, shape in SHAPES.items()},
        )


def on_device(value: Any, device: torch.device) -> Any:
    """Tensors, also in dictionaries and tuples, moved to a device; anything else as it is."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: on_device(item, device) for key, item in value.items()}
    return tuple(on_device(item, device) for item in value) if isinstance(value, tuple) else value


def use_device(backend: str) -> torch.device:
    """This rank's device."""
    if backend != "cuda":
        return torch.device("cpu")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def finished(event: Any) -> bool:
    """Whether the event has happened once the host has waited for it."""
    event.synchronize()
    return event.query()


def _with_specials(tensor: Tensor) -> Tensor:
    specials = torch.tensor([-0.0, torch.inf, torch.nan, 1e-45, -torch.inf, 0.0])[: tensor.numel()]
    tensor.view(-1)[: len(specials)] = specials.to(tensor.dtype)
    return tensor


def second_routing(case: Case, R: int) -> list[Tensor]:
    """Another routing of the same sizes; some ranks bring one token less."""
    ids = popular(case.S, R * case.L, case.K, R, spread=1.0, seed=7)
    return [topk[: case.S - r % 2] for r, topk in enumerate(ids)]


def only_real(tensor: Tensor, plan: Plan) -> Tensor:
    """A copy in which padding rows and rows past the last offset are NaN: nobody may read them."""
    copy = tensor.clone()
    copy[int(plan.cu_seqlens[-1]) :] = torch.nan
    for first, count in plan.zero_fill_ranges.tolist():
        copy[first : first + count] = torch.nan
    return copy


Named = Iterator[tuple[str, Any]]


def run_case(backend: str, name: str, R: int, topk: Tensor, other: Tensor) -> dict[str, Any]:
    """All steps of a case on this rank."""
    topks = on_device((topk, other), use_device(backend))
    with poisoned_allocators(), movers_for(backend, name, R):
        return {key: on_device(value, CPU) for key, value in steps(backend, BY_NAME[name], R, *topks)}


# Cases in which ranks that share a GPU move rows by bulk copies, too. Their kernels wait for peers, and GPUs that are
# shared take turns of milliseconds: all cases would take an hour.
BULK_ON_SHARED_GPUS = {"balanced", "ragged", "hot-home", "float32-wide", "wide-rows-4"}


@contextmanager
def movers_for(backend: str, name: str, R: int) -> Iterator[None]:
    shared = backend == "cuda" and torch.cuda.device_count() < R
    with pytest.MonkeyPatch.context() as patch:
        if shared and name not in BULK_ON_SHARED_GPUS:
            patch.setenv("MOONEP_MOVERS", "portable")
        yield


def make_buffer(backend: str, case: Case, R: int, group: dist.ProcessGroup | None = None) -> Buffer:
    d = case.dims(R)
    return Buffer(
        d.S,
        d.H,
        d.K,
        d.E,
        R,
        token_padding=d.P,
        B=d.B,
        group=group,
        dtype=case.dtype,
        backend=backend,
        balance=case.balance,
        timeout_s=30.0,
    )


def steps(
    backend: str, case: Case, R: int, topk: Tensor, other: Tensor, group: dist.ProcessGroup | None = None
) -> Named:
    buffer = make_buffer(backend, case, R, group)
    d = buffer.dims
    given = Inputs.of(case, d, buffer.rank, len(topk), len(other)).to(topk.device)
    # A call without tokens gives views of the forward region to fill with NaN.
    nothing = buffer.dispatch(given.x[:0], given.w[:0], topk[:0], zero_copy=True, router_weights_zero_copy=True)
    yield "nothing.cu_seqlens", nothing[2]
    yield "nothing.output", buffer.combine(nothing[3], nothing[0])[0]
    regions = [*nothing[:2], buffer.hidden_nvsh_buffer_view, buffer.router_weight_buffer_view]

    def poison() -> None:
        buffer.barrier()
        for region in regions:
            region.fill_(torch.nan)

    poison()
    rows, weights, cu_seqlens, plan = buffer.dispatch(given.x, given.w, topk)
    yield from _plan("plan", plan)
    yield "fresh.cu_seqlens", cu_seqlens
    yield from _arrived("fresh", rows, weights, plan)
    yield from _combined("fresh", buffer.combine(plan, only_real(given.y, plan), only_real(given.y_w, plan)))

    poison()
    rows, weights, cu_seqlens, same_plan = buffer.dispatch(given.grad, given.grad_w, plan=plan)
    yield "reuse.same", cu_seqlens is None and same_plan is plan
    yield from _arrived("reuse", rows, weights, plan)
    yield from _combined("reuse", buffer.combine(plan, only_real(given.y2, plan)))

    rows, weights, _, other_plan = buffer.dispatch(given.other_x, None, other)
    yield from _plan("other.plan", other_plan)
    yield from _arrived("other", rows, weights, other_plan)
    buffer.combine(other_plan, torch.full_like(rows, torch.nan))  # leaves NaN in what combine goes through

    poison()
    rows, weights, _, _ = buffer.dispatch(given.grad, given.grad_w, plan=plan.clone())
    yield from _arrived("again", rows, weights, plan)
    yield from _combined("again", buffer.combine(plan, only_real(given.y, plan), only_real(given.y_w, plan)))

    poison()
    yield from _zero_copy(buffer, given, topk, regions)
    yield from _other_forms(buffer, given, topk)
    yield from _weights(backend, buffer, plan, given, group)
    buffer.destroy()


def _plan(prefix: str, plan: Plan) -> Named:
    for field in PLAN_FIELDS:
        yield f"{prefix}.{field}", getattr(plan, field)


def _arrived(prefix: str, rows: Tensor, weights: Tensor | None, plan: Plan) -> Named:
    used = int(plan.cu_seqlens[-1])
    yield f"{prefix}.shape", list(rows.shape)
    yield f"{prefix}.rows", rows[:used].clone()
    if weights is not None:
        yield f"{prefix}.weights_shape", list(weights.shape)
    yield f"{prefix}.weights", None if weights is None else weights[:used].clone()


def _combined(prefix: str, result: tuple[Tensor, Tensor | None, Any], event: bool = False) -> Named:
    output, weights, done = result
    yield f"{prefix}.output", output
    yield f"{prefix}.weights_back", weights
    yield f"{prefix}.event", (done is not None and finished(done)) if event else done


def _zero_copy(buffer: Buffer, given: Inputs, topk: Tensor, regions: list[Tensor]) -> Named:
    views = {"zero_copy": True, "router_weights_zero_copy": True}
    rows, weights, cu_seqlens, plan = buffer.dispatch(given.x, given.w, topk, **views)
    yield "zero_copy.cu_seqlens", cu_seqlens
    yield "zero_copy.same", [t.data_ptr() for t in (rows, weights)] == [t.data_ptr() for t in regions[:2]]
    yield from _arrived("zero_copy", rows, weights, plan)
    rows.copy_(only_real(given.y, plan))  # the experts work in place
    weights.copy_(only_real(given.y_w, plan))
    yield from _combined("zero_copy", buffer.combine(plan, rows, weights, **views))

    rows, weights, _, _ = buffer.dispatch(given.grad, given.grad_w, plan=plan, **views)
    yield "zero_copy_reuse.same", [t.data_ptr() for t in (rows, weights)] == [t.data_ptr() for t in regions[2:]]
    yield from _arrived("zero_copy_reuse", rows, weights, plan)
    buffer.hidden_nvsh_buffer_view.copy_(only_real(given.y2, plan))
    yield from _combined("zero_copy_reuse", buffer.combine(plan, buffer.hidden_nvsh_buffer_view, zero_copy=True))


def _other_forms(buffer: Buffer, given: Inputs, topk: Tensor) -> Named:
    counts = torch.bincount(topk[topk >= 0].flatten(), minlength=buffer.dims.E).int()
    flat = topk.long().flatten()
    rows, weights, _, plan, event = buffer.dispatch(given.x, None, flat, counts, async_finish=True)
    event.wait()
    yield "forms.event", finished(event)
    yield from _plan("forms.plan", plan)
    yield from _arrived("forms", rows, weights, plan)
    result = buffer.combine(plan, only_real(given.y, plan), only_real(given.y_w, plan), async_finish=True)
    result[2].synchronize()
    yield from _combined("forms", result, event=True)

    buffer.barrier()  # stands in for the barriers that are left out
    rows, weights, _, _, event = buffer.dispatch(
        given.grad, given.grad_w, plan=plan, async_finish=True, inter_rank_sync=False
    )
    yield "unsynced.arrived", finished(event)
    yield from _arrived("unsynced", rows, weights, plan)
    buffer.barrier()
    yield from _combined("unsynced", buffer.combine(plan, only_real(given.y2, plan), inter_rank_sync=False))


def _weights(backend: str, buffer: Buffer, plan: Plan, given: Inputs, group: dist.ProcessGroup | None) -> Named:
    d, rank = buffer.dims, buffer.rank
    grads = not d.spills
    settings = {"group": group, "backend": backend, "shared": False, "timeout_s": 30.0}
    pool = ExpertPool(SHAPES, d.E, d.B, DTYPES, grads=grads, **settings)
    # A symmetric [R, B, ...] tensor of our own, for the form that pushes weights: another pool's reduce buffer.
    symmetric = torch.empty(d.R, 0, *SHAPES["gate"], device=given.x.device)
    if d.B:
        symmetric = ExpertPool(SHAPES, d.R, d.B, torch.float32, grads=True, **settings).reduce_buffer["gate"]
    pool.load_local(given.weights)

    def empty_slots() -> None:
        for name in SHAPES:
            pool.full[name][d.E :] = torch.nan

    def filled(prefix: str) -> Named:
        for name in SHAPES:
            yield f"{prefix}.{name}", pool.full[name][d.E :].clone()
            yield f"{prefix}.compact.{name}", pool.compact[name][d.L :].clone()

    empty_slots()
    buffer.barrier()  # all ranks have loaded their weights
    yield "prefetch.event", buffer.prefetch(plan, pool)
    yield from filled("prefetch")
    for name in SHAPES:
        yield f"home.full.{name}", pool.full[name][: d.E].clone()
        yield f"home.compact.{name}", pool.compact[name][: d.L].clone()
    empty_slots()
    full = {f"full_{name}_weight": tensor for name, tensor in pool.full.items()}
    yield "prefetch_full.event", finished(buffer.prefetch_weight(plan, async_finish=True, **full))
    yield from filled("prefetch_full")
    symmetric[rank] = torch.nan
    buffer.prefetch_weight(plan, local_gate_weight=pool.local["gate"], gate_prefetch_buffer=symmetric)
    yield "prefetch_pushed.gate", symmetric[rank].clone()

    if grads:
        yield from _gradients(buffer, plan, pool, given)


def _gradients(buffer: Buffer, plan: Plan, pool: ExpertPool, given: Inputs) -> Named:
    d, rank = buffer.dims, buffer.rank
    mine = slice(rank * d.L, (rank + 1) * d.L)
    buffers = {f"{name}_reduce_buffer": tensor for name, tensor in pool.reduce_buffer.items()}

    def reduced(prefix: str, own: dict[str, Tensor]) -> Named:
        for name in SHAPES:
            yield f"{prefix}.own.{name}", own[name].clone()
            yield f"{prefix}.slots.{name}", pool.reduce_buffer[name][rank].clone()

    for name in SHAPES:
        pool.compact_grad[name][: d.L], pool.compact_grad[name][d.L :] = given.own[name], given.slots[name]
    yield "reduce.event", buffer.reduce(plan, pool)
    yield from reduced("reduce", pool.local_grad)

    for name in SHAPES:
        pool.full_grad[name][mine], pool.full_grad[name][d.E :] = given.own[name], given.slots[name]
        # A weight-gradient kernel may write anything to the rows of other homes: nobody sees it.
        pool.full_grad[name][: mine.start], pool.full_grad[name][mine.stop : d.E] = torch.nan, torch.nan
    full = {f"full_{name}_grad": tensor for name, tensor in pool.full_grad.items()}
    yield "reduce_full.event", finished(buffer.reduce_grad(plan, async_finish=True, **full, **buffers))
    yield from reduced("reduce_full", pool.local_grad)

    own = {name: tensor.to(DTYPES[name]) for name, tensor in given.own.items()}
    for name in SHAPES:
        pool.reduce_buffer[name][rank] = given.slots[name]
    buffer.reduce_grad(plan, **{f"local_{name}_grad": tensor for name, tensor in own.items()}, **buffers)
    yield from reduced("reduce_local", own)


@dataclass(frozen=True)
class Routed:
    """A case with its routings, planned by the reference, and the inputs of all ranks."""

    d: Dims
    topk: list[Tensor]
    other: list[Tensor]
    plans: list[Plan]
    given: list[Inputs]

    def each(self, name: str) -> list[Any]:
        return [getattr(inputs, name) for inputs in self.given]


@lru_cache(maxsize=4)
def routed(name: str, R: int) -> Routed:
    case = BY_NAME[name]
    d = case.dims(R)
    topk, other = case.route(R), second_routing(case, R)
    given = [Inputs.of(case, d, r, len(topk[r]), len(other[r])) for r in range(R)]
    return Routed(d, topk, other, reference.make_plans(topk, d), given)


@lru_cache(maxsize=4)
def specify(name: str, R: int) -> list[dict[str, Any]]:
    """What `steps` names, for every rank."""
    at, d = routed(name, R), BY_NAME[name].dims(R)
    plans = at.plans
    rows, weights = reference.dispatch(plans, at.each("x"), at.each("w"))
    grad_rows, grad_weights = reference.dispatch(plans, at.each("grad"), at.each("grad_w"))
    other_plans = reference.make_plans(at.other, d)
    other_rows, _ = reference.dispatch(other_plans, at.each("other_x"))
    outputs, weights_back = reference.combine(plans, at.each("y"), at.each("y_w"))
    outputs2, _ = reference.combine(plans, at.each("y2"))
    expected = []
    for r, plan in enumerate(plans):
        used, other_used = int(plan.cu_seqlens[-1]), int(other_plans[r].cu_seqlens[-1])
        arrived = {"shape": [d.C, d.H], "rows": rows[r][:used]}
        with_weights = {"weights_shape": [d.C], "weights": weights[r][:used]}
        reused = {
            "shape": [d.C, d.H],
            "rows": grad_rows[r][:used],
            "weights_shape": [d.C],
            "weights": grad_weights[r][:used],
        }
        combined = {"output": outputs[r], "weights_back": weights_back[r], "event": None}
        combined2 = {"output": outputs2[r], "weights_back": None, "event": None}
        fields = {field: getattr(plan, field) for field in PLAN_FIELDS}
        fresh = {"cu_seqlens": plan.cu_seqlens, **arrived, **with_weights, **combined}
        parts = {
            "nothing": {"cu_seqlens": torch.zeros_like(plan.cu_seqlens), "output": rows[r][:0]},
            "plan": fields,
            "fresh": fresh,
            "reuse": {"same": True, **reused, **combined2},
            "other.plan": {field: getattr(other_plans[r], field) for field in PLAN_FIELDS},
            "other": {"shape": [d.C, d.H], "rows": other_rows[r][:other_used], "weights": None},
            "again": {**reused, **combined},
            "zero_copy": {"same": True, **fresh},
            "zero_copy_reuse": {"same": True, **reused, **combined2},
            "forms": {**arrived, "weights": None, **combined, "event": True},
            "forms.plan": fields,
            "unsynced": {"arrived": True, **reused, **combined2},
            **specify_slots(at, r),
            **({} if d.spills else specify_gradients(at, r)),
        }
        expected.append({f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()})
    return expected


def specify_slots(at: Routed, r: int) -> dict[str, dict[str, Any]]:
    slots, home = {}, {}
    for name in SHAPES:
        every = [weights[name] for weights in at.each("weights")]
        held = torch.full((at.d.B, *SHAPES[name]), torch.nan, dtype=DTYPES[name])
        for b, weight in reference.prefetch(at.plans, every)[r].items():
            held[b] = weight
        slots |= {name: held, f"compact.{name}": held}
        home |= {f"full.{name}": torch.cat(every), f"compact.{name}": every[r]}
    return {
        "prefetch": {"event": None, **slots},
        "prefetch_full": {"event": True, **slots},
        "prefetch_pushed": {"gate": slots["gate"]},
        "home": home,
    }


def specify_gradients(at: Routed, r: int) -> dict[str, dict[str, Any]]:
    exact, rounded = {}, {}
    for name in SHAPES:
        own, slots = ([grads[name] for grads in at.each(kind)] for kind in ("own", "slots"))
        for result, dtype in ((exact, torch.float32), (rounded, DTYPES[name])):
            grads, rest = reference.reduce_grad(at.plans, [g.to(dtype) for g in own], slots)
            result |= {f"own.{name}": grads[r], f"slots.{name}": rest[r]}
    return {"reduce": {"event": None, **exact}, "reduce_full": {"event": True, **exact}, "reduce_local": rounded}


@dataclass(frozen=True)
class Comparison:
    """Of one case: what the ranks of a backend got, and what the reference says."""

    case: Case
    d: Dims
    observed: list[dict[str, Any]]
    expected: list[dict[str, Any]]

    def check(self, *prefixes: str) -> None:
        """Equal in all that is named `prefix.*`."""
        compare(self.observed, self.expected, prefixes)


def compare(observed: list[dict[str, Any]], expected: list[dict[str, Any]], prefixes: tuple[str, ...]) -> None:
    compared = 0
    for r, (got, want) in enumerate(zip(observed, expected, strict=True)):
        for name, value in want.items():
            if name.startswith(tuple(f"{prefix}." for prefix in prefixes)):
                equal_by_name(f"rank {r}: {name}", got[name], value)
                compared += 1
    assert compared, f"nothing is named {prefixes}"


def equal_by_name(name: str, got: Any, want: Any) -> None:
    if isinstance(want, Tensor):
        assert_equal(name, got, want)
    else:
        assert got == want, f"{name}: got {got!r}, want {want!r}"


@pytest.fixture(
    scope="module",
    params=[
        *[pytest.param(("cpu", case.name, R), id=f"cpu-{case.name}-R{R}") for case, R in SIZED],
        *[pytest.param(("cuda", case.name, R), id=f"cuda-{case.name}-R{R}", marks=ON_GPU) for case, R in SIZED],
    ],
)
def ran(request, ranks) -> Comparison:
    backend, name, R = request.param
    at = routed(name, R)
    observed = ranks(R).run(run_case, backend, name, R, PerRank(at.topk), PerRank(at.other))
    return Comparison(BY_NAME[name], at.d, observed, specify(name, R))


def test_each_rank_reports_what_the_reference_specifies(ran):
    for got, want in zip(ran.observed, ran.expected, strict=True):
        assert sorted(got) == sorted(want)


def test_plans_equal_the_reference(ran):
    ran.check("plan", "other.plan")


def test_a_call_without_any_token_moves_nothing(ran):
    ran.check("nothing")


def test_fresh_rows_and_route_weights_arrive_and_their_padding_is_zero(ran):
    ran.check("fresh", "other")


def test_a_reused_plan_sends_gradient_rows_to_the_same_places(ran):
    ran.check("reuse")


def test_a_plan_still_works_after_a_different_dispatch(ran):
    ran.check("again")


def test_zero_copy_changes_nothing_but_the_storage(ran):
    ran.check("zero_copy", "zero_copy_reuse")


def test_flat_int64_ids_given_counts_and_events_change_nothing(ran):
    ran.check("forms")


def test_barriers_that_the_caller_stands_in_for_can_be_left_out(ran):
    ran.check("unsynced")


def test_slots_hold_copies_of_the_home_weights_in_every_form_and_unused_slots_are_untouched(ran):
    ran.check("prefetch", "prefetch_full", "prefetch_pushed")


def test_every_expert_is_readable_at_its_row_of_full(ran):
    ran.check("home")


def test_slot_gradients_are_added_to_their_homes_in_every_form_and_only_consumed_slots_are_zeroed(ran):
    if ran.d.spills:
        assert not any(name.startswith("reduce") for name in ran.observed[0])
    else:
        ran.check("reduce", "reduce_full", "reduce_local")


@pytest.fixture(scope="module", params=[(case.name, R) for case, R in SIZED], ids=[f"reference-{x}" for x in SIZED_IDS])
def at(request) -> Routed:
    return routed(*request.param)


def test_reference_plans_keep_every_invariant(at):
    assert check_plan(at.plans) == []


def test_ranks_compute_their_share_or_no_more_than_the_tolerance_allows(at):
    total = sum(int((topk >= 0).sum()) for topk in at.topk)
    rows = at.plans[0].alloc.sum(0).tolist()
    if at.d.balance.exact:
        assert rows == [total // at.d.R + (r < total % at.d.R) for r in range(at.d.R)]
    else:
        assert sum(rows) == total
        assert all(n <= limit for n, limit in zip(rows, policy.limits(total, at.d), strict=True))


def test_rows_lie_in_the_group_of_an_expert_that_their_token_chose(at):
    """Let expert e multiply by f(e): then combine gives the sum over k of f(e_k) x."""
    x = [torch.randint(-3, 4, (len(topk), at.d.H)).float() for topk in at.topk]
    rows, _ = reference.dispatch(at.plans, x)
    factor_E = torch.arange(at.d.E) % 7 + 1.0
    for plan, rows_CH in zip(at.plans, rows, strict=True):
        experts = [*range(at.d.E), *plan.experts_to_copy[plan.rank].tolist()]
        begin = 0
        for e, end in zip(experts, plan.cu_seqlens.tolist(), strict=True):
            rows_CH[begin:end] *= factor_E[e]
            begin = end
    outputs, _ = reference.combine(at.plans, rows)
    for r, topk in enumerate(at.topk):
        factors_sK = torch.where(topk >= 0, factor_E[topk.clamp(min=0)], 0.0)
        assert_equal(f"rank {r}: output", outputs[r], factors_sK.sum(1, keepdim=True) * x[r] + 0.0)  # never -0.0


def test_combine_is_the_transpose_of_dispatch(at):
    """<dispatch(x), y> == <x, combine(y)>: so each is the other's backward."""
    x = [torch.randint(-3, 4, (len(topk), at.d.H)).double() for topk in at.topk]
    y = [torch.randint(-3, 4, (at.d.C, at.d.H)).double() for _ in at.topk]
    rows, _ = reference.dispatch(at.plans, x)
    outputs, _ = reference.combine(at.plans, y)
    assert sum((a * b).sum() for a, b in zip(rows, y, strict=True)) == sum(
        (a * b).sum() for a, b in zip(x, outputs, strict=True)
    )


def test_route_weights_return_to_their_assignments(at):
    w = [torch.rand(topk.shape) for topk in at.topk]
    rows, weights = reference.dispatch(at.plans, at.each("x"), w)
    _, back = reference.combine(at.plans, rows, weights)
    for r, topk in enumerate(at.topk):
        assert_equal(f"rank {r}: route weights", back[r], torch.where(topk >= 0, w[r], 0.0))


def test_reduction_loses_no_gradient(at):
    grads = [torch.randint(-9, 9, (at.d.L, 3)).float() for _ in at.plans]
    slots = [torch.randint(-9, 9, (at.d.B, 3)).float() for _ in at.plans]
    reduced, rest = reference.reduce_grad(at.plans, grads, slots)
    before, after = (sum(t.sum() for t in [*g, *s]) for g, s in ((grads, slots), (reduced, rest)))
    assert before == after
    for r, plan in enumerate(at.plans):
        unused = plan.experts_to_copy[r] < 0
        assert_equal(f"rank {r}: unused slots", rest[r][unused], slots[r][unused])


ROUNDS = 4


def hurried_inputs(case: Case, d: Dims, rank: int, s: int, i: int) -> Inputs:
    """Other inputs in every round."""
    return Inputs.of(case, d, 100 * (i + 1) + rank, s, 0)


@contextmanager
def dawdling(seed: int) -> Iterator[None]:
    """This rank is now and then late at a barrier, or slow to go on after one: so that missing barriers show."""
    original, random = Barrier.wait, Random(seed)

    def wait(barrier: Barrier) -> None:
        time.sleep(random.choice([0.0, 0.0, 0.004]))
        original(barrier)
        time.sleep(random.choice([0.0, 0.0, 0.004]))

    Barrier.wait = wait
    try:
        yield
    finally:
        Barrier.wait = original


def run_hurried(backend: str, name: str, R: int, topk: Tensor, other: Tensor) -> dict[str, Any]:
    """The same operation again and again, with nothing in between but what it does itself."""
    with poisoned_allocators(), dawdling(dist.get_rank()):
        return dict(hurried(backend, BY_NAME[name], R, topk, other))


def hurried(backend: str, case: Case, R: int, topk: Tensor, other: Tensor) -> Named:
    buffer = make_buffer(backend, case, R)
    d, rank = buffer.dims, buffer.rank
    pool = ExpertPool(SHAPES, d.E, d.B, torch.float32, grads=True, shared=False, backend=backend)
    symmetric = pool.reduce_buffer["gate"]
    plan = buffer.dispatch(torch.zeros(len(topk), d.H, dtype=case.dtype), None, topk)[3]
    given = [hurried_inputs(case, d, rank, len(topk), i) for i in range(ROUNDS)]
    results: list[tuple[str, Any]] = []
    for i in range(ROUNDS):
        ids = (topk, other)[i % 2]
        new = hurried_inputs(case, d, rank, len(ids), i)
        rows, weights, _, new_plan = buffer.dispatch(new.x, new.w, ids)
        results += [*_plan(f"dispatch.{i}.plan", new_plan), *_arrived(f"dispatch.{i}", rows, weights, new_plan)]
    for i in range(ROUNDS):
        rows, weights, _, _ = buffer.dispatch(given[i].grad, given[i].grad_w, plan=plan)
        results += _arrived(f"reuse.{i}", rows, weights, plan)
    for i in range(ROUNDS):
        y, y_w = only_real(given[i].y, plan), only_real(given[i].y_w, plan)
        results += _combined(f"combine.{i}", buffer.combine(plan, y, y_w))
    for i in range(ROUNDS):
        buffer.prefetch_weight(plan, local_gate_weight=given[i].weights["gate"], gate_prefetch_buffer=symmetric)
        used = plan.experts_to_copy[rank] >= 0
        results.append((f"prefetch.{i}.gate", symmetric[rank][used].clone()))
    for i in range(ROUNDS):
        pool.compact_grad["gate"][: d.L], pool.compact_grad["gate"][d.L :] = (
            given[i].own["gate"],
            given[i].slots["gate"],
        )
        buffer.reduce(plan, pool)
        results.append((f"reduce.{i}.own", pool.local_grad["gate"].clone()))
    buffer.destroy()
    yield from results


def specify_hurried(name: str, R: int) -> list[dict[str, Any]]:
    case, at = BY_NAME[name], routed(name, R)
    expected: list[dict[str, Any]] = [{} for _ in at.plans]
    for i in range(ROUNDS):
        ids = (at.topk, at.other)[i % 2]
        plans = at.plans if i % 2 == 0 else reference.make_plans(ids, at.d)
        new = [hurried_inputs(case, at.d, r, len(ids[r]), i) for r in range(R)]
        given = [hurried_inputs(case, at.d, r, len(at.topk[r]), i) for r in range(R)]
        rows, weights = reference.dispatch(plans, [g.x for g in new], [g.w for g in new])
        reused = reference.dispatch(at.plans, [g.grad for g in given], [g.grad_w for g in given])
        outputs, back = reference.combine(at.plans, [g.y for g in given], [g.y_w for g in given])
        slots = reference.prefetch(at.plans, [g.weights["gate"] for g in given])
        grads, _ = reference.reduce_grad(at.plans, [g.own["gate"] for g in given], [g.slots["gate"] for g in given])
        for r, plan in enumerate(plans):
            used, reused_rows = int(plan.cu_seqlens[-1]), int(at.plans[r].cu_seqlens[-1])
            held = [*slots[r].values()]
            expected[r] |= {
                **{f"dispatch.{i}.plan.{field}": getattr(plan, field) for field in PLAN_FIELDS},
                f"dispatch.{i}.rows": rows[r][:used],
                f"dispatch.{i}.weights": weights[r][:used],
                f"reuse.{i}.rows": reused[0][r][:reused_rows],
                f"reuse.{i}.weights": reused[1][r][:reused_rows],
                f"combine.{i}.output": outputs[r],
                f"combine.{i}.weights_back": back[r],
                f"prefetch.{i}.gate": torch.stack(held) if held else torch.empty(0, *SHAPES["gate"]),
                f"reduce.{i}.own": grads[r],
            }
    return expected


@pytest.fixture(scope="module", params=[(backend, R) for backend in BACKENDS for R in (2, 4)], ids=str)
def in_a_hurry(request, ranks) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    backend, R = request.param
    name = "some-masked"
    at = routed(name, R)
    observed = ranks(R).run(run_hurried, backend, name, R, PerRank(at.topk), PerRank(at.other))
    return observed, specify_hurried(name, R)


@pytest.mark.parametrize("operation", ["dispatch", "reuse", "combine", "prefetch", "reduce"])
def test_an_operation_can_follow_itself_at_once_although_some_ranks_are_slow(in_a_hurry, operation):
    observed, expected = in_a_hurry
    compare(observed, expected, (operation,))


def interleave(*runs: Named) -> list[dict[str, Any]]:
    """One step of each in turn."""
    results: list[dict[str, Any]] = [{} for _ in runs]
    for named in zip_longest(*runs):
        for result, item in zip(results, named, strict=True):
            result.update([item] if item is not None else [])
    return results


def run_interleaved(
    backend: str, R: int, names: list[str], routings: list[tuple[Tensor, Tensor]]
) -> list[dict[str, Any]]:
    device = use_device(backend)
    with poisoned_allocators():
        cases = zip(names, routings, strict=True)
        runs = (steps(backend, BY_NAME[name], R, *on_device(topks, device)) for name, topks in cases)
        return [on_device(results, CPU) for results in interleave(*runs)]


def run_halves(backend: str, world: str, halves: list[str], worlds: tuple, mine: tuple) -> list[dict[str, Any]]:
    """A Buffer over all four ranks, and one over each half, at once."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = dist.get_rank() // 2
    mine, worlds = on_device((mine, worlds), use_device(backend))
    with poisoned_allocators():
        runs = [
            steps(backend, BY_NAME[halves[half]], 2, *mine, group=groups[half]),
            steps(backend, BY_NAME[world], 4, *worlds),
        ]
        results = [on_device(named, CPU) for named in interleave(*runs)]
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return results


def routings_of(name: str, R: int) -> list[tuple[Tensor, Tensor]]:
    at = routed(name, R)
    return list(zip(at.topk, at.other, strict=True))


@pytest.mark.parametrize("backend", DEVICE_BACKENDS)
@pytest.mark.parametrize("R", [2, 4])
def test_two_buffers_interleaved_do_not_disturb_each_other(ranks, backend, R):
    names = ["hot-home", "some-masked"]
    by_rank = [list(routings) for routings in zip(*(routings_of(name, R) for name in names), strict=True)]
    observed = ranks(R).run(run_interleaved, backend, R, names, PerRank(by_rank))
    for i, name in enumerate(names):
        compare([results[i] for results in observed], specify(name, R), PARTS)


@pytest.mark.parametrize("backend", DEVICE_BACKENDS)
def test_halves_of_a_world_work_beside_each_other_and_beside_the_whole(ranks, backend):
    halves, world = ["hot-home", "ragged"], "extreme-skew"
    mine = [*routings_of(halves[0], 2), *routings_of(halves[1], 2)]
    observed = ranks(4).run(run_halves, backend, world, halves, PerRank(routings_of(world, 4)), PerRank(mine))
    compare([results[1] for results in observed], specify(world, 4), PARTS)
    for half, name in enumerate(halves):
        compare([results[0] for results in observed[2 * half : 2 * half + 2]], specify(name, 2), PARTS)


# Small ones of each kind: the interpreter takes seconds for what a GPU does in microseconds.
INTERPRETED = [
    ("one-token", 3),
    ("odd-sizes", 2),
    ("one-expert-odd", 2),  # fewer slots than redundant experts
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "R"), INTERPRETED)
def test_kernels_in_the_interpreter_do_what_the_reference_says(interpreters, name, R):
    at = routed(name, R)
    observed = interpreters(R).run(run_case, "interpreter", name, R, PerRank(at.topk), PerRank(at.other))
    compare(observed, specify(name, R), PARTS)


def at_odd_addresses(tensor: Tensor) -> Tensor:
    """Equal and contiguous, but one element behind where an allocation begins."""
    return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)


def use_odd_addresses(backend: str, name: str, R: int, topk: Tensor, other: Tensor) -> dict[str, Any]:
    case, device = BY_NAME[name], use_device(backend)
    topk = topk.to(device)
    buffer = make_buffer(backend, case, R)
    given = Inputs.of(case, buffer.dims, buffer.rank, len(topk), len(other)).to(device)
    x, w, grad, y, y_w = map(at_odd_addresses, (given.x, given.w, given.grad, given.y, given.y_w))
    assert x.is_contiguous() and x.data_ptr() % 16
    rows, weights, _, plan = buffer.dispatch(x, w, at_odd_addresses(topk))
    results = dict(_arrived("fresh", rows, weights, plan))
    results |= _combined("fresh", buffer.combine(plan, y, y_w))
    results |= _arrived("reuse", buffer.dispatch(grad, plan=plan)[0], None, plan)
    buffer.destroy()
    return on_device(results, CPU)


@pytest.mark.parametrize("backend", DEVICE_BACKENDS)
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_contiguous_tensors_may_begin_at_any_address(ranks, backend, name):
    R = 2
    at = routed(name, R)
    observed = ranks(R).run(use_odd_addresses, backend, name, R, PerRank(at.topk), PerRank(at.other))
    for got, want in zip(observed, specify(name, R), strict=True):
        for key in ("fresh.rows", "fresh.weights", "fresh.output", "fresh.weights_back", "reuse.rows"):
            equal_by_name(key, got[key], want[key])


def share_slots(backend: str) -> dict[str, Any]:
    def make(shapes: dict[str, tuple[int, ...]] = SHAPES, **options: Any) -> ExpertPool:
        return ExpertPool(shapes, 8, 4, torch.float32, grads=True, backend=backend, **options)

    a, b, own, other = make(), make(), make(shared=False), make({"gate": (4, 9)})
    rank = a.rank
    for pool, value in ((a, 1.0), (own, 2.0), (other, 3.0)):
        pool.full["gate"][8:] = value
        pool.reduce_buffer["gate"][rank] = value
        pool.local["gate"].fill_(10 + value)
    b.local["gate"].fill_(14.0)
    seen = {
        "slots": [p.full["gate"][8:].unique().tolist() for p in (a, b, own, other)],
        "compact slots": [p.compact["gate"][4:].unique().tolist() for p in (a, b, own, other)],
        "reduce buffers": [p.reduce_buffer["gate"][rank].unique().tolist() for p in (a, b, own, other)],
        "compact gradients": [p.compact_grad["gate"][4:].unique().tolist() for p in (a, b, own, other)],
        "home": [p.local["gate"].unique().tolist() for p in (a, b, own, other)],
        "one object": a._slots[0]["gate"] is b._slots[0]["gate"],
        "serials": [p._slots[0]["gate"].serial for p in (a, own)],
    }
    a.destroy()
    del a
    gc.collect()
    seen["after the first is gone"] = b.full["gate"][8:].unique().tolist()
    b.full["gate"][8:] = 5.0
    # Rank 0 keeps the slots alive through a tensor's pool, rank 1 lets go: a new pool must not mix old and new memory.
    slots_before = b.full["gate"][8:]
    kept = b if rank == 0 else None
    del b, pool
    gc.collect()
    new = make()
    new.full["gate"][8:] = 6.0
    new.reduce_buffer["gate"][rank] = 20.0 + rank
    dist.barrier()
    seen["the old slots"] = slots_before.unique().tolist()
    seen["all reduce buffers"] = new.reduce_buffer["gate"].flatten(1).unique(dim=1).tolist()
    seen["new serial"] = new._slots[0]["gate"].serial
    dist.barrier()
    del kept
    return seen


@pytest.mark.parametrize("backend", BACKENDS)
def test_pools_of_equal_shapes_share_slots_and_nothing_else(ranks, backend):
    first, second = ranks(2).run(share_slots, backend)
    for seen in (first, second):
        for memory in ("slots", "compact slots", "reduce buffers", "compact gradients"):
            assert seen[memory] == [[1.0], [1.0], [2.0], [3.0]], memory
        assert seen["home"] == [[11.0], [14.0], [12.0], [13.0]]
        assert seen["one object"]
        assert seen["after the first is gone"] == [1.0]
        assert seen["the old slots"] == [5.0]
        assert seen["all reduce buffers"] == [[20.0], [21.0]]
    assert first["serials"] == second["serials"] and len(set(first["serials"])) == 2
    assert first["new serial"] == second["new serial"] not in first["serials"]


def refill_slots(backend: str, name: str, R: int, topk: Tensor, other: Tensor) -> dict[str, Any]:
    """What the slots hold after prefetches for two plans, repeated, forced, and after weights changed."""
    case = BY_NAME[name]
    buffer = make_buffer(backend, case, R)
    d, rank = buffer.dims, buffer.rank
    pools = [ExpertPool(SHAPES, d.E, d.B, DTYPES, backend=backend) for _ in range(2)]
    weights = [Inputs.of(case, d, rank + 10 * i, 0, 0).weights for i in range(3)]
    for pool, weight in zip(pools, weights, strict=False):
        pool.load_local(weight)
    plans = [buffer.dispatch(torch.zeros(len(ids), d.H, dtype=case.dtype), None, ids)[3] for ids in (topk, other)]
    slots = pools[0].full["gate"][d.E :]
    held: dict[str, Tensor] = {}

    def prefetch(label: str, plan: int, pool: int = 0, **options: Any) -> None:
        buffer.prefetch(plans[plan], pools[pool], **options)
        held[label] = slots.clone()

    slots.fill_(torch.nan)
    prefetch("plan 0", 0)
    prefetch("plan 1", 1)
    prefetch("plan 0 again", 0)
    prefetch("pool 1", 0, pool=1)
    prefetch("pool 0 again", 0)
    slots.fill_(torch.nan)
    prefetch("skipped", 0)
    prefetch("forced", 0, force=True)
    slots.fill_(torch.nan)
    buffer.barrier()  # peers have read the old weights
    pools[0].load_local(weights[2])
    buffer.barrier()
    prefetch("new weights", 0)
    buffer.destroy()
    return held


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefetch_copies_unless_the_slots_hold_the_plans_weights_already(ranks, backend):
    name, R = "hot-home", 4
    at, case = routed(name, R), BY_NAME[name]
    plans = [at.plans, reference.make_plans(at.other, at.d)]
    observed = ranks(R).run(refill_slots, backend, name, R, PerRank(at.topk), PerRank(at.other))
    # label: (plan, whose weights); a slot that a plan does not use is left alone, so only used ones are compared
    contents = {
        "plan 0": (0, 0),
        "plan 1": (1, 0),
        "plan 0 again": (0, 0),
        "pool 1": (0, 1),
        "pool 0 again": (0, 0),
        "forced": (0, 0),
        "new weights": (0, 2),
    }
    for label, (plan, kind) in contents.items():
        weights = [Inputs.of(case, at.d, r + 10 * kind, 0, 0).weights["gate"] for r in range(R)]
        for r, held in enumerate(reference.prefetch(plans[plan], weights)):
            assert held or r == 0 or plan
            for slot, weight in held.items():
                assert_equal(f"rank {r}: {label}: slot {slot}", observed[r][label][slot], weight)
    assert all(held["skipped"].isnan().all() for held in observed)


ODD_SHAPES = {"packed": (5, 3), "scale": (7,), "half": (2, 9), "scalar": (), "wide": (1, 3000)}
ODD_DTYPES = {
    "packed": torch.uint8,
    "scale": torch.float8_e4m3fn,
    "half": torch.float16,
    "scalar": torch.float32,
    "wide": torch.bfloat16,
}


def odd_weights(L: int, rank: int) -> dict[str, Tensor]:
    """Random bytes, as weights of all kinds."""
    generator = torch.Generator().manual_seed(rank)
    return {
        name: torch.randint(256, (L, math.prod(shape) * dtype.itemsize), generator=generator, dtype=torch.uint8)
        .view(dtype)
        .view(L, *shape)
        for (name, shape), dtype in zip(ODD_SHAPES.items(), ODD_DTYPES.values(), strict=True)
    }


def prefetch_odd_weights(backend: str, name: str, R: int, topk: Tensor) -> dict[str, Tensor]:
    case = BY_NAME[name]
    buffer = make_buffer(backend, case, R)
    d = buffer.dims
    pool = ExpertPool(ODD_SHAPES, d.E, d.B, ODD_DTYPES, backend=backend)
    for key, weight in odd_weights(d.L, buffer.rank).items():
        pool.local[key].copy_(weight)
    rows = torch.zeros(len(topk), d.H, dtype=case.dtype)
    plan = buffer.dispatch(rows, None, topk)[3]
    buffer.prefetch(plan, pool)
    slots = {key: _raw(pool.full[key][d.E :]) for key in ODD_SHAPES}
    home = {f"home.{key}": _raw(pool.full[key][: d.E]) for key in ODD_SHAPES}
    buffer.destroy()
    return slots | home


def _raw(tensor: Tensor) -> Tensor:
    """[n, bytes of an element of dim 0]"""
    rows = tensor.contiguous().reshape(len(tensor), -1)
    return rows.view(torch.uint8) if rows.numel() else torch.empty(0, 0, dtype=torch.uint8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_of_any_shape_and_dtype_are_moved_as_bytes(ranks, backend):
    name, R = "hot-home", 4
    at = routed(name, R)
    observed = ranks(R).run(prefetch_odd_weights, backend, name, R, PerRank(at.topk))
    every = [odd_weights(at.d.L, r) for r in range(R)]
    for r, got in enumerate(observed):
        for key in ODD_SHAPES:
            weights = [_raw(weights[key]) for weights in every]
            assert_equal(f"rank {r}: home of {key}", got[f"home.{key}"], torch.cat(weights))
            held = reference.prefetch(at.plans, weights)[r]
            assert held or r == 0
            for slot, weight in held.items():
                assert_equal(f"rank {r}: slot {slot} of {key}", got[key][slot], weight)


def held_by_process() -> dict[str, int]:
    """Open files, and mappings of symmetric memory, of this process."""
    with open("/proc/self/maps") as maps:
        lines = maps.readlines()
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "mappings": sum("moonep" in line for line in lines),
        "named files": sum("/dev/shm" in line for line in lines),
    }


def use_everything(backend: str, name: str, R: int, topk: Tensor, destroy: bool) -> list[dict[str, int]]:
    """Create, use and give up a Buffer and a pool; what the process held with the Buffer, and with both."""
    case = BY_NAME[name]
    buffer = make_buffer(backend, case, R)
    held = [held_by_process()]
    d = buffer.dims
    pool = ExpertPool(SHAPES, d.E, d.B, grads=True, slot_sets=2, backend=backend)
    plan = buffer.dispatch(torch.zeros(len(topk), d.H, dtype=case.dtype), None, topk)[3]
    buffer.prefetch(plan, pool)
    assert pool.full_grad
    buffer.reduce(plan, pool)
    held.append(held_by_process())
    if destroy:
        pool.destroy()
        buffer.destroy()
    return held


def create_and_give_up(backend: str, name: str, R: int, topk: Tensor, destroy: bool) -> list[dict[str, int]]:
    use_everything(backend, name, R, topk, destroy)  # what the first one loads stays
    gc.collect()
    gc.disable()  # memory goes back with the last reference, not some time later
    before = held_by_process()
    for _ in range(8):
        during = use_everything(backend, name, R, topk, destroy)
    after = held_by_process()
    gc.enable()
    return [before, *during, after]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("destroy", [True, False], ids=["destroyed", "dropped"])
@pytest.mark.parametrize("R", [1, 2, 4])
def test_cycles_of_creation_leave_no_file_and_no_mapping(ranks, backend, destroy, R):
    topk = PerRank(routed("some-masked", R).topk)
    for before, *during, after in ranks(R).run(create_and_give_up, backend, "some-masked", R, topk, destroy):
        assert after == before
        assert during[1]["mappings"] > during[0]["mappings"] > before["mappings"] == 0
        assert during[0]["files"] == before["files"], "a Buffer keeps no file open"
        assert [held["named files"] for held in during] == [before["named files"]] * 2


def die_in_dispatch(backend: str, name: str, R: int, topk: Tensor) -> dict[str, dict[str, int]]:
    """Rank 1 is killed between the barriers of a dispatch; the others see it and clean up."""
    case = BY_NAME[name]
    use_everything(backend, name, R, topk, destroy=True)
    held = {"before": held_by_process()}
    d = case.dims(R)
    buffer = Buffer(d.S, d.H, d.K, d.E, R, token_padding=d.P, B=d.B, dtype=case.dtype, backend=backend, timeout_s=0.5)
    pool = ExpertPool(SHAPES, d.E, d.B, grads=True, backend=backend)
    if buffer.rank == 1:
        policy.allocate = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        buffer.dispatch(torch.zeros(len(topk), d.H, dtype=case.dtype), None, topk)
    except PeerTimeout:
        held["broken"] = held_by_process()
    del pool
    buffer.destroy()
    gc.collect()
    held["destroyed"] = held_by_process()
    del buffer
    gc.collect()
    return {**held, "gone": held_by_process()}


@pytest.fixture(scope="module", params=BACKENDS)
def survivors(request, ranks) -> list[dict[str, dict[str, int]]]:
    topk = PerRank(routed("some-masked", 3).topk)
    outcomes = ranks(3).run(die_in_dispatch, request.param, "some-masked", 3, topk, raise_errors=False)
    assert isinstance(outcomes[1].error, RankDied)
    assert outcomes[0].ok and outcomes[2].ok, outcomes
    return [outcomes[0].value, outcomes[2].value]


def test_a_killed_rank_leaves_no_file_and_no_mapping(survivors):
    for held in survivors:
        assert held["broken"]["mappings"] > held["gone"]["mappings"] == held["before"]["mappings"] == 0
        assert held["gone"]["files"] <= held["before"]["files"]  # gloo may have closed its connection to the dead rank
        assert held["broken"]["named files"] == held["before"]["named files"]
    assert not [name for name in os.listdir("/dev/shm") if "moonep" in name]


def test_destroy_after_a_failure_gives_memory_back_even_if_the_buffer_is_still_referenced(survivors):
    for held in survivors:
        assert held["destroyed"]["mappings"] == 0
