"""ExpertPool: one address range over all ranks' memory, its other views, and what its slots hold."""

from __future__ import annotations

import io
import math
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moonep import Buffer, ExpertPool, StaleSlotsError
from moonep.pool import row_stride

E, L, H, F = 8, 4, 16, 24
SHAPES = {"up": (H, F), "scale": (3,)}


def make_pool(**options: object) -> ExpertPool:
    return ExpertPool(SHAPES, E=E, dtype={"up": torch.bfloat16, "scale": torch.float32}, backend="cpu", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("row_bytes", [1, 16, 100, 4096, 4097, 73728])
@pytest.mark.parametrize("L", [1, 2, 3, 4, 7, 256, 1025])
@pytest.mark.parametrize("granule", [4096, 2 << 20])
def test_experts_of_a_rank_fill_whole_granules_with_aligned_rows(row_bytes, L, granule):
    stride = row_stride(row_bytes, L, granule)
    assert stride >= row_bytes
    assert stride % 16 == 0 and L * stride % granule == 0
    step = math.lcm(granule // math.gcd(L, granule), 16)
    assert stride - row_bytes < step, "no more padding than the granule demands"


def write_and_look() -> dict[str, bool]:
    """Write through one view, look through the others, on two ranks."""
    rank = dist.get_rank()
    pool = make_pool(grads=True)
    pool.local["up"].fill_(rank + 1)
    pool.full["up"][E:] = 9
    dist.barrier()
    seen = {
        "full spans all ranks": torch.equal(pool.full["up"][:E, 0, 0].float(), torch.tensor([1.0] * L + [2.0] * L)),
        "compact is own experts, then slots": pool.compact["up"][:, 0, 0].tolist() == [rank + 1.0] * L + [9.0] * L,
        "rows are dense": pool.full["up"][0].is_contiguous(),
        "local has storage of its own": pool.local["up"].untyped_storage().nbytes() < L * 3 * 4096,
    }
    dist.barrier()
    pool.full_grad["up"][:] = float("nan")  # all rows, as a kernel that writes zeros for empty groups would
    pool.full_grad["up"][rank * L : (rank + 1) * L] = rank + 1
    pool.full_grad["up"][E:] = 10 + rank
    dist.barrier()
    seen |= {
        "peers' gradients are out of reach": bool((pool.local_grad["up"] == rank + 1).all()),
        "slots' gradients are the reduce buffer": pool.reduce_buffer["up"][:, 0, 0, 0].tolist() == [10.0, 11.0],
        "compact_grad is the same memory": pool.compact_grad["up"][:, 0, 0].tolist()
        == [rank + 1.0] * L + [10.0 + rank] * L,
    }
    pool.destroy()
    return seen


def test_views_of_a_pool_show_the_memory_that_they_should(ranks):
    for seen in ranks(2).run(write_and_look):
        assert all(seen.values()), [name for name, right in seen.items() if not right]


def saved_bytes() -> int:
    pool = make_pool()
    file = io.BytesIO()
    torch.save(pool.local["up"].clone(), file)
    return len(file.getvalue())


def test_saving_own_experts_does_not_save_the_others(ranks):
    assert all(size < 2 * L * H * F * 2 + 4096 for size in ranks(2).run(saved_bytes))


def count_copies() -> dict[str, int]:
    """How often a prefetch copies: the slots are marked before, so that a copy is seen."""
    R, rank = dist.get_world_size(), dist.get_rank()
    pool, other = make_pool(master=True, grads=True), make_pool(master=True, grads=True)
    buffer = Buffer(8, H, 1, E, R, token_padding=1, dtype=torch.float32, backend="cpu")
    ids = torch.zeros(8, 1, dtype=torch.int32)  # expert 0 takes all: rank 1 computes half of it
    plan = buffer.dispatch(torch.zeros(8, H), None, ids)[3]

    def copied(*what: object, **options: object) -> int:
        pool.full["up"][E:] = -1
        for call in what:
            call()  # type: ignore[operator]
        buffer.prefetch(plan, pool, **options)  # type: ignore[arg-type]
        return int((pool.full["up"][E:] != -1).any()) if rank == 1 else -1

    results = {
        "first": copied(),
        "again": copied(),
        "forced": copied(force=True),
        "after a barrier": copied(buffer.barrier),
        "after load_local": copied(lambda: pool.load_local({"up": torch.ones(L, H, F)})),
        "after sync": copied(pool.sync),
        "after another pool": copied(lambda: buffer.prefetch(plan, other)),
        "after a dispatch": copied(lambda: buffer.dispatch(torch.zeros(8, H), None, ids)),
        "of a clone": copied(),
    }
    buffer.destroy()
    return results


def test_a_prefetch_copies_exactly_when_the_slots_may_be_out_of_date(ranks):
    results = ranks(2).run(count_copies)[1]
    assert results == {
        "first": 1,
        "again": 0,
        "forced": 1,
        "after a barrier": 1,
        "after load_local": 1,
        "after sync": 1,
        "after another pool": 1,
        "after a dispatch": 1,
        "of a clone": 0,
    }


def use_stale_slots() -> list[str]:
    R, rank = dist.get_world_size(), dist.get_rank()
    pool = make_pool()
    buffer = Buffer(8, H, 1, E, R, token_padding=1, dtype=torch.float32, backend="cpu")
    plans = [buffer.dispatch(torch.zeros(8, H), None, torch.full((8, 1), e))[3] for e in (0, 1)]
    messages = []
    buffer.prefetch(plans[0], pool)
    for plan in (plans[0].clone(), plans[1]):
        try:
            pool.check_slots(plan)
            messages.append("")
        except StaleSlotsError as error:
            messages.append(str(error))
    buffer.destroy()
    return messages if rank == 1 else ["", "another plan"]


def test_slots_of_another_plan_are_an_error_that_says_what_to_do(ranks):
    for same, another in ranks(2).run(use_stale_slots):
        assert same == ""
        assert "another plan" in another


def load_and_sync() -> dict[str, bool]:
    pool = make_pool(grads=True, master=True)
    values = {name: torch.randn(L, *shape) for name, shape in SHAPES.items()}
    pool.load_local(values)
    seen = {
        "compute weights are rounded": torch.equal(pool.local["up"], values["up"].bfloat16()),
        "masters are not": torch.equal(pool.master["up"].detach(), values["up"]),
        "fp32 masters are the compute weights": pool.master["scale"].data_ptr() == pool.local["scale"].data_ptr(),
        "gradients are the pool's": pool.master["up"].grad is not None
        and pool.master["up"].grad.data_ptr() == pool.local_grad["up"].data_ptr(),
    }
    with torch.no_grad():
        pool.master["up"].mul_(2)
    pool.sync_if_updated()
    seen["sync follows"] = torch.equal(pool.local["up"], (values["up"] * 2).bfloat16())
    held = pool.memory()
    seen["memory adds up"] = held["total"] == sum(v for k, v in held.items() if k != "total") and held["slots"] > 0
    pool.destroy()
    return seen


def test_parameters_are_fp32_masters_that_compute_weights_follow(ranks):
    for seen in ranks(2).run(load_and_sync):
        assert all(seen.values()), [name for name, right in seen.items() if not right]


def prefetch_beside_graphs() -> dict[str, int]:
    """How often weights are copied when graphs write the slots, too. Captured or not is what is said here."""
    R, rank = dist.get_world_size(), dist.get_rank()
    pool = make_pool(shared=False)
    buffer = Buffer(8, H, 1, E, R, token_padding=1, dtype=torch.float32, backend="cpu")
    plan = buffer.dispatch(torch.zeros(8, H), None, torch.zeros(8, 1, dtype=torch.int32))[3]

    def copied(captured: bool) -> int:
        pool.full["up"][E:] = -1
        with patch("moonep.pool._capturing", lambda _: captured):
            held = pool.holds(plan, 0)
            buffer.prefetch(plan, pool)
        copies = int((pool.full["up"][E:] != -1).any()) if rank == 1 else -1
        assert rank == 0 or held != bool(copies)
        return copies

    results = {
        "eagerly": copied(False),
        "eagerly again": copied(False),
        "then in a graph": copied(True),
        "again in the graph": copied(True),
        "eagerly after that": copied(False),
        "again, as the graph may have been replayed": copied(False),
    }
    buffer.destroy()
    return results


def test_what_is_copied_eagerly_and_in_graphs_does_not_count_for_the_other(ranks):
    assert list(ranks(2).run(prefetch_beside_graphs)[1].values()) == [1, 0, 1, 0, 1, 1]


def sync_in_graphs() -> list[bool]:
    """Whether compute weights are written by what a graph captures."""
    pool = make_pool(grads=True, master=True)
    pool.load_local({name: torch.ones_like(own) for name, own in pool.local.items()})
    pool.sync()

    def written(captured: bool, training: bool) -> bool:
        pool.local["up"].fill_(-1)
        with patch("moonep.pool._capturing", lambda _: captured):
            pool.sync_if_updated(training)
        return bool((pool.local["up"] != -1).all())

    seen = [written(True, False), written(True, True), written(False, True)]
    with torch.no_grad():
        pool.master["up"].mul_(2)
    seen += [written(True, False), written(False, True), written(False, True)]
    pool.destroy()
    return seen


def test_a_graph_for_training_copies_masters_whenever_it_is_replayed(ranks):
    (seen,) = ranks(1).run(sync_in_graphs)
    assert seen[:3] == [False, True, False]
    assert seen[3:] == [True, True, False], "what was captured has not been done yet"


def load_wrong(name: str, value: Tensor) -> str:
    pool = make_pool()
    try:
        pool.load_local({name: value})
    except ValueError as error:
        return str(error)
    return ""


def test_wrong_tensors_are_not_loaded(ranks):
    (message,) = ranks(1).run(load_wrong, "up", torch.zeros(2, 2))
    assert message.startswith("tensors['up']: given [2, 2] float32 on cpu, expected [8, 16, 24]")
    (message,) = ranks(1).run(load_wrong, "down", torch.zeros(2, 2))
    assert message == "tensors: given 'down', expected one of 'up', 'scale'"


def test_a_pool_works_without_a_process_group():
    pool = ExpertPool({"up": (4, 4)}, E=3, dtype=torch.float32, grads=True, backend="cpu")
    pool.local["up"].fill_(5)
    assert (pool.full["up"][:3] == 5).all()
    buffer = Buffer(2, 4, 1, 3, 1, dtype=torch.float32, backend="cpu")
    rows, _, cu_seqlens, plan = buffer.dispatch(torch.ones(2, 4), None, torch.tensor([[0], [2]]))
    buffer.prefetch(plan, pool, projections=["up"])
    for wrong in ("up", ["down"], 3):
        with pytest.raises(ValueError, match=r"projections: given .*, expected None or some of \['up'\]"):
            buffer.prefetch(plan, pool, projections=wrong)
    buffer.reduce(plan, pool)
    assert cu_seqlens.tolist() == [128, 128, 256, 256, 256, 256]
    assert rows[0].tolist() == [1.0] * 4
    pool.destroy()
    buffer.destroy()
