"""Every kernel compiles for every architecture, without a GPU, as the launchers would launch it."""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch

from moonep.dims import Balance, Dims
from moonep.testing.launches import Launch, fake_backend, negated_in_minima_of_three, record_launches
from moonep.weights import SlotReduction, SlotWeights, add_gradients, clear_gradients, move_weights

pytestmark = pytest.mark.slow
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process, not compiled", allow_module_level=True)

SIZES = {
    "R2-E384": (Dims(S=8192, K=8, E=384, R=2, H=7168, B=192), torch.bfloat16),
    "R4-E28-no-slots": (Dims(S=33, K=3, E=28, R=4, H=1440, B=0, P=16), torch.bfloat16),
    "R8-E64-spill-tolerance": (Dims(S=512, K=6, E=64, R=8, H=2880, B=3, balance=Balance.parse(0.01)), torch.float16),
}
VECTORS = {"_send_rows_kernel", "_expand_rows_kernel", "_copy_used_kernel", "_push_partials_kernel"}
VECTORS |= {"_sum_partials_kernel", "_fill_slots_kernel", "_add_slots_kernel", "_clear_slots_kernel"}


def all_launches(d: Dims, dtype: torch.dtype, movers: str = "portable") -> list[Launch]:
    """Every operation once, recorded."""
    backend = fake_backend(d, dtype, movers=movers)
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
    assert driven >= (15 if SIZES[size][0].B else 12), f"only {driven} kernels: a launcher is not driven here"
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
