"""Every kernel compiles for every architecture, without a GPU, as the launchers would launch it."""

from __future__ import annotations

import os
import re
from itertools import product
from typing import Any

import pytest
import torch

from moonep.dims import Balance, Dims
from moonep.kernels import bulk_grads, bulk_weights, grouped, swiglu
from moonep.kernels import launch as launching
from moonep.testing.launches import Launch, fake_backend, negated_in_minima_of_three, record_launches
from moonep.weights import SlotReduction, SlotWeights, add_gradients, clear_gradients, move_weights

pytestmark = pytest.mark.slow
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process, not compiled", allow_module_level=True)

SIZES = {
    "R2-E384": (Dims(S=8192, K=8, E=384, R=2, H=7168, B=192), torch.bfloat16),
    "R1-E16": (Dims(S=64, K=2, E=16, R=1, H=256, B=16), torch.bfloat16),
    "R4-E28-no-slots": (Dims(S=33, K=3, E=28, R=4, H=1440, B=0, P=16), torch.bfloat16),
    "R8-E64-spill-tolerance": (Dims(S=512, K=6, E=64, R=8, H=2880, B=3, balance=Balance.parse(0.01)), torch.float16),
}
VECTORS = {"_send_rows_kernel", "_expand_rows_kernel", "_copy_used_kernel", "_push_partials_kernel"}
VECTORS |= {"_sum_partials_kernel", "_fill_slots_kernel", "_add_slots_kernel", "_clear_slots_kernel"}


def all_launches(d: Dims, dtype: torch.dtype, movers: str = "portable", early: bool = False) -> list[Launch]:
    """Every operation once, recorded."""
    backend = fake_backend(d, dtype, movers=movers, early=early)
    x, ids, weights = torch.zeros(64, d.H, dtype=dtype), torch.zeros(64, d.K, dtype=torch.int32), torch.zeros(64, d.K)
    full, own = torch.zeros(d.G, 4, 8, dtype=torch.bfloat16), torch.zeros(d.L, 4, 8)
    slots, slots_bf16 = torch.zeros(d.R, d.B, 4, 8), torch.zeros(d.R, d.B, 4, 8, dtype=torch.bfloat16)
    with record_launches() as launches:
        plan = backend.dispatch(x, weights, ids, torch.zeros(d.E, dtype=torch.int32), owner=1)
        backend.dispatch(x, None, ids.long(), None, owner=1)
        backend.dispatch_with_plan(plan, x, None, sync=True)
        backend.copy_rows(backend.forward, plan)
        backend.combine(plan, torch.zeros(d.C, d.H, dtype=dtype), torch.zeros(d.C), sync=True)
        backend.barrier.refuse("bad")
        move_weights([SlotWeights(full, full[d.E :])], plan)
        move_weights([SlotWeights(own.bfloat16(), slots_bf16, pushed=True)], plan)
        for gradient in (own, own.bfloat16()):
            add_gradients([SlotReduction(gradient, slots)], plan)
        clear_gradients([SlotReduction(own, slots)], plan)
    return launches


@pytest.mark.parametrize(("size", "arch"), [*product(SIZES, (80, 90, 100))])
def test_every_kernel_compiles_with_wide_accesses_and_system_scope_barriers(size, arch):
    launches = all_launches(*SIZES[size])
    driven = len({launch.name for launch in launches})
    assert driven >= (14 if SIZES[size][0].B else 11), f"only {driven} kernels: a launcher is not driven here"
    for launch in launches:
        ptx = launch.compile(arch).asm["ptx"]
        if launch.name in VECTORS:
            assert ".v4.b32" in ptx or ".v4.u32" in ptx or ".v4.f32" in ptx, f"{launch.name}: no 16-byte accesses"
        assert negated_in_minima_of_three(ptx) == [], launch.name
        if launch.name == "_barrier_kernel":
            assert "sys.release" in ptx and "sys.acquire" in ptx, "signals must order memory for the whole system"
            assert "gpu.release" not in ptx and "gpu.acquire" not in ptx


@pytest.mark.parametrize(("size", "arch"), [*product(["R2-E384", "R8-E64-spill-tolerance"], (90, 100))])
def test_bulk_movers_compile_and_order_memory(size, arch):
    launches = [launch for launch in all_launches(*SIZES[size], movers="bulk") if launch.kernel.is_gluon()]
    assert {launch.name for launch in launches} == {"_dispatch_kernel", "_combine_kernel"}
    assert len(launches) == 4, "dispatch with and without weights and with a plan, combine"
    for launch in launches:
        ptx = launch.compile(arch).asm["ptx"]
        assert "cp.async.bulk.tensor.4d" in ptx
        assert "sys.release" in ptx and "sys.acquire" in ptx, "flags must order memory for the whole system"
        assert "fence.proxy.async.global" in ptx, "bulk loads must see what a flag stands for"
        if launch.name == "_dispatch_kernel":
            assert "cp.async.bulk.wait_group 0;" in ptx, "a flag must come after the stores, not after their reads"
        else:
            assert "st.global.v4.b32" in ptx, "partial sums must be written 16 bytes at a time"
        assert negated_in_minima_of_three(ptx) == [], launch.name


WAITS_FOR_PEERS = {"_agree_kernel", "_barrier_kernel"}
MOVES = {"_dispatch_kernel", "_combine_kernel"}
GLOBAL_ACCESS = re.compile(r"\b(?:ld\.(?:\w+\.)*global|st\.(?:\w+\.)*global|atom\.|red\.|cp\.async)")


@pytest.mark.parametrize(("size", "arch"), [("R2-E384", 90), ("R8-E64-spill-tolerance", 100)])
def test_kernels_that_start_early_touch_nothing_before_the_one_before_has_ended(size, arch):
    launches = [x for x in all_launches(*SIZES[size], movers="bulk", early=True) if x.early]
    assert {x.name for x in launches} >= WAITS_FOR_PEERS | MOVES | {"_count_blocks_kernel", "_assign_rows_kernel"}
    for launch in launches:
        assert launch.constants["EARLY"]
        ptx = launch.compile(arch).asm["ptx"]
        wait, admit = ptx.find("griddepcontrol.wait"), ptx.find("griddepcontrol.launch_dependents")
        touched = [access.start() for access in GLOBAL_ACCESS.finditer(ptx)]
        assert 0 <= wait < touched[0], launch.name
        assert (admit > wait) == (launch.name not in MOVES), "movers keep their multiprocessors to the end"
        if launch.name in WAITS_FOR_PEERS:
            assert 0 <= ptx.find("sys.acquire") < admit, (
                "who is admitted keeps multiprocessors while this waits for peers"
            )


def call_bulk_weights(dtype: torch.dtype, lines: int) -> None:
    """Weights of a dtype into slots, and gradients home."""
    weights, slots = torch.zeros(12, lines, 256, dtype=dtype), torch.zeros(2, 4, lines, 256)
    copies, status = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    bulk_weights.fill_slots(weights, weights[8:], copies, status, 0, 16)
    bulk_weights.add_slots(slots[0].clone(), slots, copies, status, 0, 16)


@pytest.mark.parametrize("arch", (90, 100))
def test_weights_move_in_bulk_with_several_loads_on_their_way(arch):
    with record_launches() as launches:
        call_bulk_weights(torch.float32, 64)
    assert len(launches) == 2
    for launch in launches:
        compiled = launch.compile(arch)
        boxes = compiled.metadata.shared // (4 * bulk_weights.LINES * bulk_weights.WIDTH)
        pairs = launch.name == "_add_slots_bulk_kernel"
        ahead = 2 * (bulk_weights.ADD_STAGES - 1) if pairs else bulk_weights.STAGES - 1
        assert boxes == ahead + 1, f"{launch.name}: loads are not pipelined"
        assert compiled.metadata.shared <= 227 * 1024
        assert ".bulk_group" in compiled.asm["ptx"], "stores must be bulk copies"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradients_on_hopper_are_added_by_the_copy_engine(dtype):
    x, z, grad = torch.zeros(64, 7168, dtype=dtype), torch.zeros(64, 2048, dtype=dtype), torch.zeros(2, 7168, 2048)
    with record_launches() as launches:
        tiles = grouped.Tiles.lay(torch.zeros(2, dtype=torch.int32), 64, 2, grouped.blocks_for(dtype, 9))
        bulk_grads.add_weight_grad(tiles, x, z, grad, 128)
    compiled = launches[-1].compile(90)
    ptx = compiled.asm["ptx"]
    teams = bulk_grads.TEAMS.value
    assert ptx.count("wgmma.mma_async") == teams * bulk_grads.DEPTH // 16, "one a step of 16, of all columns"
    assert ptx.count("cp.reduce.async.bulk.tensor") == teams * bulk_grads.PARTS.value
    inits = re.findall(r"mbarrier.init\S* \[\S+\], (\d+);", ptx)
    waited_for = bulk_grads.STAGES + bulk_grads.TOLD.value  # full and said by the loader, empty and heard by each team
    assert sorted(inits) == ["1"] * waited_for + [str(teams)] * waited_for
    assert compiled.metadata.shared <= 227 * 1024
    assert not re.search(r"\b(STL|LDL)\b", compiled.asm["sass"]), "registers are spilled"


def call_products(dtype: torch.dtype, major: int, G: int = 6) -> None:
    """All products and activations of a layer."""
    C, H, F = 1024, 7168, 2048
    x, z = torch.zeros(C, H, dtype=dtype), torch.zeros(C, F, dtype=dtype)
    weight, grad = torch.zeros(G, H, F, dtype=dtype), torch.zeros(1, H, F).expand(G, H, F)
    offsets, route_weights = torch.zeros(G, dtype=torch.int32), torch.zeros(C)
    tiles = grouped.Tiles.lay(offsets, C, 2, grouped.blocks_for(dtype, major))
    grouped.multiply(tiles, [(x, weight)], z)
    grouped.multiply(tiles, [(z, weight), (z, weight)], x, transposed=True, part=grouped.OTHER_GROUPS)
    for padding in (1, 128):
        grouped.add_weight_grad(tiles, x, z, grad, padding)
    swiglu.activate(z, z, route_weights, offsets)
    swiglu.differentiate(z, z, z, route_weights, offsets)


@pytest.mark.parametrize(("dtype", "arch"), [*product((torch.bfloat16, torch.float16, torch.float32), (80, 90, 100))])
def test_products_compile_and_use_what_the_architecture_has(dtype, arch):
    with record_launches() as launches:
        call_products(dtype, arch // 10)
    assert len(launches) == 7
    for launch in launches:
        compiled = launch.compile(arch)
        ptx = compiled.asm["ptx"]
        assert compiled.metadata.shared <= {80: 99, 90: 227, 100: 227}[arch] * 1024
        if launch.name in ("_multiply_kernel", "_add_weight_grad_kernel") and dtype != torch.float32:
            assert {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[arch] in ptx, launch.name
            assert ("cp.async.bulk.tensor" in ptx) == (arch >= 90), launch.name
        if launch.name == "_add_weight_grad_kernel" and arch >= 90:
            assert ".add.v4.f32" in ptx and "st.global.v4" in ptx, "gradients must be added 16 bytes at a time"
        elif launch.name in ("_activate_kernel", "_differentiate_kernel", "_multiply_kernel"):
            assert "st.global.v4.b32" in ptx, f"{launch.name}: no 16-byte stores"
        assert negated_in_minima_of_three(ptx) == [], launch.name


@pytest.mark.parametrize("movers", ["portable", "bulk"])
def test_offsets_between_ranks_have_64_bits(movers):
    """With 8 ranks and production sizes the offset to the last rank's memory does not fit 32 bits."""
    for launch in all_launches(*SIZES["R8-E64-spill-tolerance"], movers=movers):
        if any("stride" in name for name in launch.signature):
            ir = launch.compile(90).asm["ttgir" if launch.kernel.is_gluon() else "ttir"]
            for stride in {name for name, kind in launch.signature.items() if "stride" in name and kind == "i32"}:
                uses = [line for line in ir.splitlines() if re.search(rf"%{stride}\b", line) and "tt.func" not in line]
                wrong = [line for line in uses if "arith.extsi" not in line and "ttg.warp_specialize" not in line]
                assert not wrong, f"{launch.name}: {stride} is used with 32 bits: {wrong[0]}"


def test_calls_of_one_kind_have_equal_signatures(monkeypatch):
    """What tells kinds of calls apart is all that Triton would compile apart."""
    described: dict[launching.Launch, list[Launch]] = {}
    run = launching.Launch.run

    def describe(launch: launching.Launch, values: Any) -> None:
        with record_launches() as launches:
            run(launch, values)
        if launches:
            known = described.setdefault(launch, launches)
            assert known == launches, f"{launch.kernel.fn.__name__}: one kind, two kernels"

    monkeypatch.setattr(launching.Launch, "run", describe)
    d = Dims(S=64, K=4, E=16, R=2, H=64, B=8)
    for dtype, movers in product((torch.bfloat16, torch.float16), ("bulk", "portable")):
        backend = fake_backend(d, dtype, movers=movers)
        for s, ids, shift in product((0, 1, 5, 16), (torch.int32, torch.int64), (0, 1)):
            x, topk = shifted(s, d.H, dtype, shift), shifted(s, d.K, ids, shift)
            weights = shifted(s, d.K, torch.float32, shift)
            for given in (None, shifted(1, d.E, torch.int32, shift)[0], torch.zeros(d.E, dtype=torch.int64)):
                plan = backend.dispatch(x, weights if given is None else None, topk, given, owner=1)
            backend.dispatch_with_plan(plan, x, weights, sync=True)
            for row_weights in (None, torch.zeros(d.C)):
                backend.combine(plan, shifted(d.C, d.H, dtype, shift), row_weights, sync=True)
            backend.copy_rows(backend.forward, plan)
    assert len({launch.kernel for launch in described}) == 15


def shifted(rows: int, columns: int, dtype: torch.dtype, shift: int) -> torch.Tensor:
    """Zeros [rows, columns], contiguous, `shift` elements off a good address."""
    return torch.zeros(rows * columns + shift, dtype=dtype)[shift:].view(rows, columns)


def test_launches_that_share_a_compiled_kernel_have_equal_signatures(monkeypatch):
    """The key of `launch` tells apart all that Triton would compile apart."""
    described: dict[Any, list[Launch]] = {}
    launch = launching.launch

    def describe(kernel: Any, grid: Any, args: Any, varies: Any = (), **constants: Any) -> None:
        with record_launches() as launches:
            launch(kernel, grid, args, varies, **constants)
        key = (kernel.fn.__name__, varies, *constants.items())
        known = described.setdefault(key, launches)
        assert known == launches, f"{kernel.fn.__name__}: one key, two kernels"

    for module in (bulk_weights, grouped, swiglu):
        monkeypatch.setattr(module, "launch", describe)
    for dtype, groups in product((torch.bfloat16, torch.float16, torch.float32), (1, 5, 16)):
        call_products(dtype, 9, groups)
    for dtype, lines in product((torch.bfloat16, torch.float32), (16, 1040)):
        call_bulk_weights(dtype, lines)
    assert len(described) > 20
