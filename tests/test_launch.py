"""Repeated launches give Triton's launcher what a launch through Triton gives it, argument by argument.

No GPU is needed: kernels are not compiled, and Triton's launcher is the real one around a C function that takes notes.
"""

from __future__ import annotations

import gc
import os
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process, not compiled", allow_module_level=True)

import triton
from triton.backends.nvidia import driver
from triton.runtime.jit import JITFunction

from moonep.backends import open_backend
from moonep.dims import Dims
from moonep.kernels.launch import Given, Launch, Launches
from moonep.plan import Plan, PlanLayout
from moonep.testing.launches import fake_backend, record_launches

D = Dims(S=64, K=4, E=16, R=2, H=64, B=8)
STREAM = 77


class OtherLauncher(driver.CudaLauncher):
    """Of a version of Triton that is not known."""


class Compiled:
    """A kernel as Triton returns it, whose launches are noted: name, grid, stream and arguments."""

    def __init__(self, kernel: JITFunction, args: tuple[Any, ...], kind: type, notes: list[tuple[Any, ...]]):
        names = [p.name for p in kernel.params]
        described = [hasattr(arg, "block_shape") for arg in args]
        signature = {n: "tensordesc<i32[1, 1]>" if d else "*i32" for n, d in zip(names, described, strict=False)}
        meta = {"swizzle": 0, "elem_size": 4, "elem_type": 4, "block_size": [1, 1], "fp4_padded": False}
        metas = [meta] * sum(described)

        def c_function(*args: Any) -> None:
            x, y, z, stream, function, cooperative, pdl, scratch, profile, packed, *hooks = args[:13]
            assert (function, cooperative, pdl, scratch, profile, packed) == (5, False, True, None, None, (4, 1, 0))
            assert hooks == [None] * 3
            notes.append((kernel.fn.__name__, (x, y, z), stream, [as_c(arg) for arg in args[13:]]))

        self.function, self.packed_metadata = 5, (4, 1, 0)
        self.src, self.metadata = SimpleNamespace(signature=signature), SimpleNamespace(tensordesc_meta=metas)
        self.run = object.__new__(kind)
        self.run.__dict__.update(
            launch=driver.wrap_handle_tensordesc(c_function, signature, metas),
            global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
            launch_cooperative_grid=False, launch_pdl=True, num_ctas=1,
        )  # fmt: skip


class Anywhere(int):
    """The address of nothing: equal to any."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int)

    __hash__ = int.__hash__


def as_c(arg: Any) -> Any:
    """What C sees."""
    if isinstance(arg, Tensor):
        return arg.data_ptr() if arg.numel() else Anywhere()
    return arg


@pytest.fixture(params=[driver.CudaLauncher, OtherLauncher], ids=["known", "unknown"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What is launched, in order, and how many times Triton was asked."""
    here = SimpleNamespace(notes=[], asked=0)

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Compiled:
        here.asked += 1
        compiled = Compiled(kernel, args, request.param, here.notes)
        constants = [options[p.name] for p in kernel.params if p.name in options]
        x, y, z = (*grid, 1, 1)[:3]
        head = (STREAM, compiled.function, compiled.packed_metadata, None, None, None)
        compiled.run(x, y, z, *head, *args, *constants)
        return compiled

    encode = SimpleNamespace(fill_tma_descriptor=lambda *args: ("tma", *map(str, args)))
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(type(triton.runtime.driver), "active", SimpleNamespace(utils=encode))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    return here


@pytest.fixture
def compare(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Makes every call also launch what it would if it came first, and compares. `repeated`: calls without Triton."""
    run = Launches.run

    def run_both(self: Launches, options: Any, given: Any, plan: Plan | None = None) -> None:
        begin, asked = len(machine.notes), machine.asked
        run(self, options, given, plan)
        got = [note for note in machine.notes[begin:] if note[1][0]]
        machine.repeated.append(machine.asked == asked)
        tensors = given if plan is None else {**given, **plan.views}
        begin = len(machine.notes)
        for launch in self._make()(*options):
            launch.run(tensors)
        assert got == machine.notes[begin:]
        machine.last = dict((note[0], note) for note in got)

    machine.repeated = []
    monkeypatch.setattr(Launches, "run", run_both)
    return machine


def draw(rows: int, columns: int, dtype: torch.dtype, shift: int = 0) -> Tensor:
    """[rows, columns], contiguous, `shift` elements off a good address."""
    return torch.zeros(rows * columns + shift, dtype=dtype)[shift:].view(rows, columns)


def calls(backend: Any, s: int, ids: torch.dtype, shift: int, weights: bool, counts: torch.dtype | None) -> None:
    """All operations, with tensors of their own."""
    x, topk = draw(s, D.H, torch.bfloat16, shift), draw(s, D.K, ids, shift)
    w = draw(s, D.K, torch.float32, shift) if weights else None
    for operation in ("dispatch", "dispatch with plan", "combine", "barrier"):
        backend.barrier.begin(operation)
        if operation == "dispatch":
            plan = backend.dispatch(x, w, topk, None if counts is None else draw(1, D.E, counts)[0], owner=1)
            backend.copy_rows(backend.forward, plan)
        elif operation == "dispatch with plan":
            for sync in (False, True):
                backend.dispatch_with_plan(plan, x, w, sync)
        elif operation == "combine":
            row_weights = torch.zeros(D.C) if weights else None
            for sync in (False, True):
                backend.combine(plan, draw(D.C, D.H, torch.bfloat16, shift), row_weights, sync)
        else:
            backend.barrier.wait()


@pytest.mark.parametrize("movers", ["bulk", "portable"])
def test_repeated_launches_give_what_first_ones_give_whatever_comes(compare, movers):
    backend = fake_backend(D, torch.bfloat16, movers=movers)
    kinds = [(torch.int32, 0, True, None), (torch.int64, 0, True, torch.int32), (torch.int32, 1, False, torch.int64)]
    for kind in kinds:
        calls(backend, 64, *kind)
        compare.repeated.clear()
        for s in (64, 5, 16, 0, 1):
            ids, shift, weights, counts = kind
            calls(backend, s, ids, shift, weights, counts)
        assert all(compare.repeated[:20]), "a call of a known kind went through Triton"


def test_what_triton_compiles_apart_is_made_apart(compare):
    backend = fake_backend(D, torch.bfloat16, movers="bulk")
    x, w = draw(8, D.H, torch.bfloat16), draw(8, D.K, torch.float32)
    given = {
        "first": (w, draw(8, D.K, torch.int32), None),
        "no weights": (None, draw(8, D.K, torch.int32), None),
        "other weights": (draw(8, D.K, torch.float32, 1), draw(8, D.K, torch.int32), None),
        "wide ids": (w, draw(8, D.K, torch.int64), None),
        "other ids": (w, draw(8, D.K, torch.int32, 2), None),
        "counts": (w, draw(8, D.K, torch.int32), draw(1, D.E, torch.int32)[0]),
        "wide counts": (w, draw(8, D.K, torch.int32), draw(1, D.E, torch.int64)[0]),
        "other counts": (w, draw(8, D.K, torch.int32), draw(1, D.E, torch.int32, 3)[0]),
    }
    for again in (False, True):
        for name, args in given.items():
            backend.dispatch(x, *args, owner=1)
            assert compare.repeated.pop() == again, name
    backend.dispatch(draw(3, D.H, torch.bfloat16, 1), w[:3], draw(3, D.K, torch.int32), None, owner=1)
    assert compare.repeated.pop(), "other tokens, not even at a good address, are of no other kind"


def test_operations_are_numbered_and_a_capture_has_no_number(compare, monkeypatch):
    backend = fake_backend(D, torch.bfloat16, movers="portable")
    numbers = []
    for capturing in (False, False, True, False):
        with monkeypatch.context() as m:
            m.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
            m.setattr(backend.barrier, "_on_gpu", True)
            backend.barrier.begin("barrier")
            backend.barrier.wait()
        args = compare.last["_barrier_kernel"][3]
        numbers.append(args[9])
    assert numbers == [1, 2, -1, 4]
    assert compare.repeated == [False, True, True, True]


def test_no_tensor_of_a_call_outlives_it(machine):
    backend = fake_backend(D, torch.bfloat16, movers="bulk")
    topk, x = draw(8, D.K, torch.int32), draw(8, D.H, torch.bfloat16)
    for _ in range(2):
        plan = backend.dispatch(x, None, topk, None, owner=1)
    kept = {arg.data_ptr() for launch in launches_of(backend) for arg in launch.args if isinstance(arg, Tensor)}
    assert kept, "nothing was looked at"
    assert not kept & {topk.data_ptr(), x.data_ptr(), plan.packed.data_ptr()}


def launches_of(backend: Any) -> list[Launch]:
    return [launch for made in backend._dispatching._ready.values() for launch in made]


def test_an_integer_that_a_kernel_specialises_on_cannot_be_given(machine):
    backend = fake_backend(D, torch.bfloat16, movers="bulk")
    kernel = launches_of_kernel(backend, "_count_blocks_kernel").kernel
    args = [Given("topk"), backend.status, Given("number"), Given("number")]
    with pytest.raises(AssertionError, match="host_status is specialised on"):
        Launch(kernel, (1,), args, NB=1, E=1, K=1, KP=1, TB=1).run({"topk": backend.status, "number": 3})


def launches_of_kernel(backend: Any, name: str) -> Launch:
    backend.dispatch(draw(8, D.H, torch.bfloat16), None, draw(8, D.K, torch.int32), None, owner=1)
    backend.dispatch(draw(8, D.H, torch.bfloat16), None, draw(8, D.K, torch.int32), None, owner=1)
    return next(launch for launch in launches_of(backend) if launch.kernel.fn.__name__ == name)


@pytest.mark.parametrize("d", [D, Dims(S=5, K=1, E=1, R=1, H=8, B=0), Dims(S=7, K=3, E=10, R=5, H=8, B=1)])
def test_a_plan_is_one_allocation_whose_length_says_how_many_tokens(d):
    layout = PlanLayout(d)
    for s in range(d.S + 1):
        packed = layout.empty(s, torch.device("cpu"))
        plan = Plan(layout, 0, 1, packed)
        assert plan.num_tokens == s
        used = torch.zeros_like(packed)
        for name, view in plan.views.items():
            assert view.data_ptr() == plan.addresses[name] or not view.numel(), name
            assert (plan.addresses[name] - packed.data_ptr()) % 16 == 0, name
            begin = view.storage_offset()
            assert used[begin : begin + view.numel()].sum() == 0, f"{name} overlaps"
            used[begin : begin + view.numel()] = 1
            view.fill_(len(name))
            assert view.is_contiguous() and getattr(plan, name) is view
            assert (packed[begin : begin + view.numel()] == len(name)).all()
        assert plan.dst.shape == (s * d.K,) and plan.sends.shape == (s * d.W,)
        assert list(plan.views) == list(layout.names) and len(plan.views) == 10


def test_a_changed_plan_is_another_with_one_tensor_replaced():
    layout = PlanLayout(D)
    plan = Plan(layout, 1, 1, layout.empty(3, torch.device("cpu")).zero_())
    changed = plan.changed(dst=torch.ones(3 * D.K, dtype=torch.int32))
    assert changed.key == plan.key and changed.packed.data_ptr() != plan.packed.data_ptr()
    assert changed.dst.sum() == 3 * D.K and plan.dst.sum() == 0
    assert changed.packed.sum() == 3 * D.K


@pytest.mark.parametrize("movers", ["portable", "bulk"])
def test_a_backend_goes_with_its_last_reference(movers):
    """Not when Python looks for cycles: its memory is a GPU's, of which Python knows nothing."""
    gc.disable()
    try:
        backend = fake_backend(D, torch.bfloat16, movers=movers)
        x, ids, weights = torch.zeros(5, D.H, dtype=torch.bfloat16), torch.zeros(5, D.K, dtype=torch.int32), None
        with record_launches():
            plan = backend.dispatch(x, weights, ids, None, owner=1)
            backend.dispatch_with_plan(plan, x, weights, sync=True)
            backend.combine(plan, torch.zeros(D.C, D.H, dtype=torch.bfloat16), None, sync=True)
            backend.copy_rows(backend.forward, plan)
            backend.barrier.wait()
        parts = [weakref.ref(part) for part in (backend, backend.barrier, backend.movers, backend.forward.rows)]
        del backend, plan
        assert [part() for part in parts] == [None] * len(parts)
    finally:
        gc.enable()


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("capable", [True, False])
def test_kernels_start_early_where_the_gpu_can_and_the_caller_does_not_mind(monkeypatch, asked, capable):
    given: list[Any] = []
    monkeypatch.setattr("moonep.backends.gpu.GpuBackend", lambda *args: given.extend(args))
    monkeypatch.setattr("moonep.backends.movers.starts_early", lambda _: capable)
    monkeypatch.setattr("moonep.backends.open_memory", lambda _: SimpleNamespace(device=torch.device("cpu")))
    open_backend("cuda", D, torch.bfloat16, SimpleNamespace(), 1.0, None, None, 0, asked)
    assert given[-1] == (asked and capable)


def test_only_launches_made_for_it_start_early():
    with record_launches() as launches:
        for early in (False, True):
            backend = fake_backend(D, torch.bfloat16, early=early)
            backend.dispatch(torch.zeros(4, D.H, dtype=torch.bfloat16), None, torch.zeros(4, D.K).int(), None, owner=1)
    both = {launch.name: {x.early for x in launches if x.name == launch.name} for launch in launches}
    assert both["_count_blocks_kernel"] == both["_assign_rows_kernel"] == {False, True}
    assert both["_send_rows_kernel"] == {False}
