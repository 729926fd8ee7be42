"""Weights and gradients by bulk copies: the same bits as by loads and stores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from moonep.kernels import bulk_weights, weights

R, L, B = 3, 4, 4
E = R * L
LINES = bulk_weights.LINES
POISON = -7.0
# A slot each, none, several copies of one expert, on ranks that are not in order of experts.
COPIES = [[5, 4, -1, -1], [0, 3, 9, -1], [5, -1, 0, -1]]
SIZES = {"whole boxes": 3 * LINES, "a part of a box": 2 * LINES + 5, "less than a box": 3}


def make_rows(shape: tuple[int, ...], lines: int, device: str, seed: int, gap: int = 8) -> Tensor:
    """Random rows [*shape, lines, WIDTH] fp32 with `gap` numbers between them."""
    size = lines * bulk_weights.WIDTH
    count = torch.Size(shape).numel()
    memory = torch.full((count, size + gap), POISON)
    memory[:, :size] = torch.randn(count, size, generator=torch.Generator().manual_seed(seed))
    leading = [torch.Size(shape[i + 1 :]).numel() * (size + gap) for i in range(len(shape))]
    return memory.to(device).as_strided((*shape, lines, bulk_weights.WIDTH), (*leading, bulk_weights.WIDTH, 1))


def whole(rows: Tensor) -> Tensor:
    """All of the memory, gaps as well."""
    return torch.empty(0, device=rows.device).set_(rows.untyped_storage()).clone().cpu()


def run(kind: str, lines: int, programs: int, device: str, status: int) -> list[tuple[int, bool]]:
    """Both ways on every rank. -> (rank, whether all memory is equal)"""
    copies = torch.tensor(COPIES, dtype=torch.int32, device=device)
    word = torch.tensor([status], dtype=torch.int32, device=device)
    equal = []
    for rank in range(R):
        results = []
        for bulk in (True, False):
            if kind == "fill":
                source, target = make_rows((E + B,), lines, device, 1), make_rows((B,), lines, device, 2)
                if bulk:
                    bulk_weights.fill_slots(source, target, copies, word, rank, programs)
                else:
                    table = weights.weights_table([source], [target], False)
                    weights.fill_slots(table, copies, word, rank, L, False, programs)
            else:
                source, target = make_rows((R, B), lines, device, 1), make_rows((L,), lines, device, 2)
                if bulk:
                    bulk_weights.add_slots(target, source, copies, word, rank, programs)
                else:
                    table = weights.gradients_table([target], [source])
                    weights.add_slots(table, copies, word, rank, L, torch.float32, programs)
            results.append(whole(target))
        before = whole(make_rows(tuple(target.shape[:-2]), lines, "cpu", 2))
        changed = not torch.equal(results[1], before)
        assert changed == (status == 0)
        equal.append((rank, torch.equal(*results)))
    return equal


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["fill", "add"])
def test_bulk_copies_equal_loads_and_stores_in_the_interpreter(interpreters, kind, size):
    for programs, status in ((2, 0), (7, 0), (2, 5)):
        found = interpreters(1).run(run, kind, SIZES[size], programs, "cpu", status)[0]
        assert found == [(rank, True) for rank in range(R)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: kernels are interpreted here")
@pytest.mark.parametrize("size", [*SIZES, "large"])
@pytest.mark.parametrize("kind", ["fill", "add"])
def test_bulk_copies_equal_loads_and_stores_on_a_gpu(kind, size):
    for programs, status in ((1, 0), (16, 0), (132, 0), (16, 5)):
        found = run(kind, {**SIZES, "large": 701}[size], programs, "cuda", status)
        assert found == [(rank, True) for rank in range(R)]


def test_what_is_moved_by_bulk_copies_are_large_dense_aligned_rows():
    lines = bulk_weights._MIN_BOXES * LINES
    rows, slots = make_rows((L,), lines, "cpu", 1), make_rows((R, B), lines, "cpu", 2)
    assert bulk_weights.takes(rows, slots)
    assert not bulk_weights.takes(rows.bfloat16(), slots), "gradients in bf16 are rounded by the other kernel"
    assert bulk_weights.takes(rows.bfloat16().repeat(1, 2, 1), slots.bfloat16().repeat(1, 1, 2, 1))
    assert not bulk_weights.takes(rows[:, 1:], slots[:, :, 1:]), "too small"
    assert not bulk_weights.takes(rows[:, :, :-1], slots[:, :, :-1]), "neither dense nor whole lines"
    assert not bulk_weights.takes(make_rows((L,), lines, "cpu", 1, gap=2), slots), "not aligned"
