"""Products of grouped rows by kernels are those of torch: in the interpreter, and with a GPU there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from moonep.nn import grouped, products
from moonep.nn.products import Job, KernelProducts, TorchProducts

POISON = float("nan")
# Rows of groups; padding; a row past the last offset is poison.
GROUPS = {
    "ragged": ([3, 0, 70, 1, 0], 1),
    "padded": ([64, 0, 128, 64], 64),
    "one row": ([0, 0, 1], 1),
    "none": ([0, 0], 1),
}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Case:
    """Inputs of all products. What is not to be read is NaN."""

    def __init__(self, groups: list[int], H: int, F: int, dtype: torch.dtype, device: str, stride: int = 0):
        g = torch.Generator().manual_seed(1)
        self.offsets = torch.tensor(groups).cumsum(0).int().to(device)
        self.used, self.G = sum(groups), len(groups)
        self.C = self.used + 5

        def rows(width: int) -> Tensor:
            made = torch.randn(self.C, width, generator=g).to(dtype)
            made[self.used :] = POISON
            return made.to(device)

        def weight(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            """Distances between groups are not dense."""
            size = shape[0] * shape[1]
            memory = torch.full((self.G, size + stride), POISON, dtype=dtype)
            memory[:, :size] = torch.randn(self.G, size, generator=g).mul(shape[1] ** -0.5).to(dtype)
            memory = memory.to(device)
            return memory.as_strided((self.G, *shape), (size + stride, shape[1], 1))

        self.x, self.grad_y = rows(H), rows(H)
        self.route_weights = torch.rand(self.C, generator=g).to(device)
        self.weights = {"gate": weight(H, F), "up": weight(H, F), "down": weight(F, H)}
        self.grads = {n: weight(*w.shape[1:], dtype=torch.float32) for n, w in self.weights.items()}


def relative(got: Tensor, want: Tensor) -> float:
    """Largest difference over largest value; infinite if something is not finite."""
    if not want.numel():
        return 0.0
    error = float((got.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-6))
    return error if error == error else float("inf")


def compare(groups: list[int], padding: int, H: int, F: int, dtype: torch.dtype, device: str, overlap: bool) -> Any:
    """Forward and backward by kernels and by torch, in fp32 products. -> relative errors, and whether order was kept"""
    case = Case(groups, H, F, dtype, device, stride=8)
    exact = Case(groups, H, F, torch.float32, "cpu")
    for name in ("x", "grad_y"):
        getattr(exact, name).copy_(getattr(case, name))
    for name in case.weights:
        exact.weights[name].copy_(case.weights[name])
        exact.grads[name].copy_(case.grads[name])
    untouched = {n: grad.clone() for n, grad in case.grads.items()}
    calls: list[str] = []
    first = len(groups) // 2

    def run(kind: type[Any], c: Case, **options: Any) -> dict[str, Tensor]:
        def choose(weights: Any, offsets: Tensor, rows: list[Tensor], first: int | None, token_padding: int) -> Any:
            options = (rows[0], first, token_padding) if kind is KernelProducts else (len(rows[0]),)
            return kind(offsets, *options)

        real, grouped.choose = grouped.choose, choose
        try:
            x = c.x.clone()
            y, gate, up = grouped.compute(c.weights, c.offsets, x, c.route_weights, token_padding=padding, **options)
            grad_x, grad_w = grouped.differentiate(
                c.weights,
                c.grads,
                c.offsets,
                c.grad_y.clone(),
                x,
                c.route_weights,
                (gate, up),
                token_padding=padding,
                weights_done=lambda: calls.append("done"),
                in_place=True,
                **options,
            )
        finally:
            grouped.choose = real
        n = c.used
        return {"y": y[:n], "gate": gate[:n], "grad_x": grad_x[:n], "grad_w": grad_w, **c.grads}

    options = {"first": first, "ready": calls.append} if overlap else {}
    got, want = run(KernelProducts, case, **options), run(TorchProducts, exact)
    errors = {name: relative(got[name].cpu(), want[name]) for name in want}
    empty = [g for g, rows in enumerate(groups) if not rows]
    kept = all(torch.equal(case.grads[n][g], untouched[n][g]) for n in case.grads for g in empty)
    return errors, kept, calls


@pytest.mark.slow
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_kernels_equal_torch_in_the_interpreter(interpreters, groups, dtype):
    rows, padding = GROUPS[groups]
    errors, kept, _ = interpreters(1).run(compare, rows, padding, 72, 40, dtype, "cpu", False)[0]
    assert max(errors.values()) < TOLERANCE[dtype], errors
    assert kept, "groups without rows are not touched"


@pytest.mark.slow
def test_first_groups_do_not_wait_in_the_interpreter(interpreters):
    errors, _, calls = interpreters(1).run(compare, *GROUPS["ragged"], 72, 40, torch.float32, "cpu", True)[0]
    assert max(errors.values()) < TOLERANCE[torch.float32], errors
    forward_and_backward = ["gate", "up", "down", "down", "done", "gate", "up"]
    assert calls == [*forward_and_backward, "done"], "then without waiting"


def start_from_zero(groups: list[int], padding: int, device: str) -> list[float]:
    """Weight gradients of which the first groups start from NaN. -> errors against torch, and what was not to change"""
    case = Case(groups, 72, 40, torch.float32, device, stride=8)
    grad, fresh = case.grads["gate"], 3
    grad[:fresh] = POISON
    wanted = torch.zeros(grad.shape)
    wanted[fresh:] = grad[fresh:].cpu()
    g = torch.Generator().manual_seed(3)
    x, grad_y = (torch.randn(case.C, n, generator=g) for n in (72, 40))
    TorchProducts(case.offsets.cpu(), case.C).add_weight_grad(wanted, x, grad_y)
    products = KernelProducts(case.offsets, case.x, None, padding)
    products.add_weight_grad(grad, x.to(device), grad_y.to(device), fresh=fresh)
    by_torch = Case(groups, 72, 40, torch.float32, "cpu").grads["gate"]
    by_torch[:fresh] = POISON
    TorchProducts(case.offsets.cpu(), case.C).add_weight_grad(by_torch, x, grad_y, fresh=fresh)
    return [relative(each.cpu(), wanted) for each in (grad, by_torch)]


@pytest.mark.slow
@pytest.mark.parametrize("groups", ["ragged", "padded"])
def test_gradients_that_start_from_zero_are_written_in_the_interpreter(interpreters, groups):
    errors = interpreters(1).run(start_from_zero, *GROUPS[groups], "cpu")[0]
    assert max(errors) < TOLERANCE[torch.float32], errors


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: kernels are interpreted here")
@pytest.mark.parametrize("groups", ["ragged", "padded"])
def test_gradients_that_start_from_zero_are_written_on_a_gpu(groups):
    errors = start_from_zero(*GROUPS[groups], "cuda")
    assert max(errors) < TOLERANCE[torch.float32], errors


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: kernels are interpreted here")
@pytest.mark.parametrize("groups", [*GROUPS, "large"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("overlap", [False, True])
def test_kernels_equal_torch_on_a_gpu(groups, dtype, overlap):
    rows, padding = {**GROUPS, "large": ([384, 0, 1280, 128, 256], 128)}[groups]
    errors, kept, _ = compare(rows, padding, 1096, 520, dtype, "cuda", overlap)
    assert max(errors.values()) < TOLERANCE[dtype], errors
    assert kept, "groups without rows are not touched"


MANY = [[384, 0, 1280, 128, 0, 0, 256, 0], [64], [0, 0, 0], [0] * 70 + [128, 64]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: Hopper's copy engine is not interpreted")
@pytest.mark.parametrize("shape", [(72, 40), (520, 1096), (2048, 4096)])
@pytest.mark.parametrize(
    ("groups", "dtype"), [(groups, torch.bfloat16) for groups in MANY] + [(MANY[0], torch.float16)]
)
def test_weight_gradients_by_bulk_copies_have_the_same_bits(shape, groups, dtype):
    if torch.cuda.get_device_capability()[0] != products.HOPPER:
        pytest.skip("the tensor cores of Hopper are needed")
    from moonep.kernels import bulk_grads
    from moonep.kernels import grouped as kernels

    case = Case(groups, *shape, dtype, "cuda", stride=8)
    want, got = case.grads["gate"], Case(groups, *shape, dtype, "cuda", stride=8).grads["gate"]

    def add(by: Any, grad: Tensor, fresh: int) -> kernels.Tiles:
        tiles = kernels.Tiles.lay(case.offsets, case.C, 2, kernels.blocks_for(dtype, products.HOPPER))
        for _ in range(2):  # again: the counters must be 0
            by.add_weight_grad(tiles, case.x, case.grad_y, grad, 64, fresh)
        return tiles

    for fresh in (0, len(groups) // 2, len(groups)):
        for by, grad in ((kernels, want), (bulk_grads, got)):
            grad[:fresh] = POISON
            tiles = add(by, grad, fresh)
        assert torch.equal(got, want), f"fresh {fresh}: {int((got != want).sum())} differ"
        assert tiles.counters.tolist() == [0, 0]

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add(bulk_grads, got, 0)
    for _ in range(3):
        graph.replay()
        add(kernels, want, 0)
    assert torch.equal(got, want)


def test_torch_is_used_where_kernels_cannot_be():
    case = Case([3, 4], 8, 8, torch.float32, "cpu")
    assert isinstance(products.choose(case.weights, case.offsets, [case.x], None, 1), TorchProducts)


def test_kernels_take_operands_of_one_dtype_that_are_dense_and_aligned(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    case = Case([3, 4], 16, 24, torch.bfloat16, "cpu", stride=8)
    rows, weight = case.x, case.weights["gate"]
    wide = torch.zeros(case.C, 32, dtype=torch.bfloat16)
    assert products._kernels_take([rows, weight])
    for other in (
        rows.half(),
        wide[:, :16],
        rows.t().contiguous().t(),
        wide.flatten()[1 : 1 + rows.numel()].view_as(rows),
    ):
        assert not products._kernels_take([rows, other, weight])
    assert not products._kernels_take([rows, weight.half()])
    assert not products._kernels_take([rows, weight.transpose(1, 2)])
    monkeypatch.setenv("MOONEP_PRODUCTS", "torch")
    assert not products._kernels_take([rows, weight])
    monkeypatch.setenv("MOONEP_PRODUCTS", "fast")
    with pytest.raises(ValueError, match="MOONEP_PRODUCTS: given 'fast', expected 'kernels' or 'torch'"):
        products._kernels_take([rows, weight])


def activate_with_strided_weights() -> tuple[bool, bool]:
    """Route weights that lie apart: one for all rows, and a column."""
    case = Case([3, 4], 16, 24, torch.float32, "cpu")
    gate, up = torch.randn(case.C, 24), torch.randn(case.C, 24)
    equal = []
    for strided in (torch.full((1,), 0.5).expand(case.C), torch.rand(case.C, 2)[:, 0]):
        for w in (strided, strided.contiguous()):
            kernels = KernelProducts(case.offsets, case.x, None, 1)
            equal.append([kernels.activate(gate, up, w)[: case.used], *kernels.differentiate(gate, gate, up, w)])
    used = case.used
    return tuple(
        all(torch.equal(a[:used], b[:used]) for a, b in zip(equal[i], equal[i + 1], strict=True)) for i in (0, 2)
    )


@pytest.mark.slow
def test_route_weights_may_have_any_stride_in_the_interpreter(interpreters):
    assert interpreters(1).run(activate_with_strided_weights)[0] == (True, True)


def test_several_pairs_are_added_before_rounding():
    g = torch.Generator().manual_seed(2)
    x, w = torch.randn(6, 16, generator=g).bfloat16(), torch.randn(2, 16, 8, generator=g).bfloat16()
    offsets = torch.tensor([2, 6], dtype=torch.int32)
    one, two = TorchProducts(offsets, 6), Job([(x, w), (x, w)])
    product = one.multiply(Job([(x, w)]))[0]
    torch.testing.assert_close(one.multiply(two)[0].float(), 2 * product.float(), rtol=0, atol=0)
