"""The grouped products of a layer against torch's, on the same operands: the groups of a plan.

gemm         [C, H] x [G, H, F] -> [C, F], the rows of each group with its weight
weight_grad  [C, H], [C, F] -> [G, H, F]: ours adds to fp32 gradients in place, torch's makes bf16 ones
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moonep.bench.comparison import Checked, Line
from moonep.bench.hosts import Hosts, Unavailable
from moonep.bench.layer_gate import TOLERANCE, check_rows
from moonep.bench.layer_world import LayerComparison, LayerWorld, make_input
from moonep.bench.routings import Routing
from moonep.nn import grouped

GEMM, WEIGHT_GRAD = "gemm", "weight_grad"
PEERS = ("moonep", "torch")


@dataclass(frozen=True)
class Operands:
    """Rows [C, H] of which those below `ends[-1]` are in use, their gradients [C, F], weights and ends of the groups.

    Attributes:
        weight: [G, H, F].
        grad: [G, H, F] fp32.
        ends: [G] int32.
        padding: groups have multiples of so many rows.
    """

    rows: Tensor
    grad_rows: Tensor
    weight: Tensor
    grad: Tensor
    ends: Tensor
    padding: int


@dataclass(frozen=True)
class Product:
    """One way to multiply rows: gemm gives [C, F], weight_grad [G, H, F]."""

    gemm: Callable[[Operands], Tensor]
    weight_grad: Callable[[Operands], Tensor]

    def close(self) -> None:
        """Nothing to give back."""


def open_ours() -> Product:
    """`moonep.nn.grouped`."""

    def add(o: Operands) -> Tensor:
        grouped.add_weight_grad(o.grad, o.rows, o.grad_rows, o.ends, o.padding)
        return o.grad

    return Product(lambda o: grouped.grouped_mm(o.rows, o.weight, o.ends), add)


def open_torch() -> Product:
    """`torch.nn.functional.grouped_mm`. Raises Unavailable where this torch has none."""
    if not hasattr(F, "grouped_mm"):
        raise Unavailable(f"torch {torch.__version__} has no torch.nn.functional.grouped_mm")
    return Product(
        lambda o: F.grouped_mm(o.rows, o.weight, offs=o.ends),
        lambda o: F.grouped_mm(o.rows.t(), o.grad_rows, offs=o.ends),
    )


@dataclass(frozen=True)
class Products(LayerComparison):
    """Products of the rows that arrive in a layer."""

    peers: tuple[str, ...] = PEERS

    def operations(self, name: str) -> tuple[str, ...]:
        return (GEMM, WEIGHT_GRAD)

    def line(self, R: int, name: str, operation: str, routing: Routing) -> Line:
        return {**super().line(R, name, operation, routing), "peer": name, "variant": None}

    def open_peer(self, name: str, world: LayerWorld) -> Product:
        return open_ours() if name == "moonep" else open_torch()

    def make_batch(self, world: LayerWorld, routing: Routing, hosts: Hosts) -> tuple[Operands, Line]:
        batch, about = make_input(world, routing, hosts)
        hidden, weights, ids = batch.hidden.detach(), batch.route_weights.detach(), batch.ids
        rows, _, _, plan = world.buffer.dispatch(hidden, weights, ids)
        world.buffer.prefetch(plan, world.pool)
        ends = plan.compact_cu_seqlens
        used = int(ends[-1])
        if world.device.type == "cuda":
            rows[used:] = 0  # a layer multiplies all that there is room for: how many are in use, only the device knows
        else:
            rows = rows[:used]
        generator = torch.Generator(world.device).manual_seed(world.rank)
        grad_rows = torch.randn(len(rows), self.F, device=world.device, generator=generator).to(world.dtype)
        weight, grad = world.pool.compact["gate"], world.pool.compact_grad["gate"]
        return Operands(rows, grad_rows, weight, grad, ends, plan.dims.P), {**about, "rows": used}

    def check(self, world: LayerWorld, name: str, peer: Product, batch: Operands, hosts: Hosts) -> Checked:
        batch.grad.zero_()
        check_products(batch, peer.gemm(batch), peer.weight_grad(batch))
        return Checked({GEMM: lambda: peer.gemm(batch), WEIGHT_GRAD: lambda: peer.weight_grad(batch)}, {})


def check_products(o: Operands, product: Tensor, grad: Tensor) -> None:
    """Compare with products of one group after the other in fp32. Raises GateError."""
    ends = o.ends.tolist()
    for g, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        if end > begin:
            rows, grad_rows = o.rows[begin:end].float(), o.grad_rows[begin:end].float()
            check_rows(f"{GEMM}, group {g}", product[begin:end], rows @ o.weight[g].float(), TOLERANCE)
            check_rows(f"{WEIGHT_GRAD}, group {g}", grad[g], rows.t() @ grad_rows, TOLERANCE)
