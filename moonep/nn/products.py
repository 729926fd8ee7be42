"""Two ways to multiply grouped rows with their experts' weights: this library's kernels on GPUs, and torch.

On a CPU the rows in use are known, and the others left alone. On a GPU knowing them would mean waiting for the device:
all C rows are there, and those past the last offset are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from moonep import environment
from moonep.dims import ROW_ALIGNMENT_BYTES

HOPPER = 9  # major compute capability

Pair = tuple[Tensor, Tensor]  # rows, and weights of all groups


class Job(NamedTuple):
    """Products to add up.

    Attributes:
        pairs: rows [C, K] and weights [G, K, N] or, if `transposed`, [G, N, K].
        out: [C, N] to put them; None: a new tensor.
        ready: called before the weights of groups that are not the first are used; None: they are ready.
    """

    pairs: Sequence[Pair]
    out: Tensor | None = None
    transposed: bool = False
    ready: Callable[[], None] | None = None


class Products(Protocol):
    """What `moonep.nn.grouped` is made of, for one layer call's groups."""

    def multiply(self, *jobs: Job) -> list[Tensor]:
        """[n or C, N] of each job."""

    def activate(self, gate: Tensor, up: Tensor, route_weights: Tensor) -> Tensor:
        """silu(gate) * up * route weight, in fp32, rounded once."""

    def differentiate(
        self, grad_z: Tensor, gate: Tensor, up: Tensor, route_weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of gate and up, what `activate` returned, and the gradient of route weights [C] fp32."""

    def add_weight_grad(self, grad: Tensor, x: Tensor, grad_y: Tensor, fresh: int = 0) -> None:
        """grad[g] += x^T grad_y over the rows of group g, in fp32. Groups without rows are not touched.

        The first `fresh` groups start from zero, whatever `grad` holds.
        """

    def all_rows(self, rows: Tensor) -> Tensor:
        """A result of `multiply` as [C, N]."""


def choose(
    weights: Mapping[str, Tensor], offsets: Tensor, rows: Sequence[Tensor], first: int | None, token_padding: int
) -> Products:
    """The kernels where they can run and nothing speaks for torch; see `MOONEP_PRODUCTS`.

    Args:
        weights: of all groups.
        offsets: [G] int32.
        rows: what is multiplied; the first has C of them.
        first: how many groups come first; None: all.
        token_padding: groups have multiples of so many rows.
    """
    if rows[0].is_cuda and _kernels_take([*rows, *weights.values()]):
        return KernelProducts(offsets, rows[0], first, token_padding)
    return TorchProducts(offsets, len(rows[0]))


def _kernels_take(operands: Sequence[Tensor]) -> bool:
    from moonep.backends import movers
    from moonep.kernels import grouped as kernels

    device, dtype = operands[0].device, operands[0].dtype
    # Not measured there: torch's own are known to be good.
    by_torch = movers.capability(device) >= 10 and dtype == torch.bfloat16
    asked = environment.products()
    if asked not in (None, "kernels", "torch"):
        raise ValueError(f"MOONEP_PRODUCTS: given {asked!r}, expected 'kernels' or 'torch'")
    if (asked or ("torch" if by_torch else "kernels")) == "torch":
        return False
    return all(kernels.takes(t) and t.dtype == dtype for t in operands)


class KernelProducts:
    """The kernels of `moonep.kernels.grouped` and `moonep.kernels.swiglu`; on Hopper, of `bulk_grads`, too."""

    def __init__(self, offsets: Tensor, hidden: Tensor, first: int | None, token_padding: int):
        from moonep.backends import movers
        from moonep.kernels import grouped as kernels

        self._offsets, self._token_padding = offsets, token_padding
        split = len(offsets) if first is None else first
        major = movers.capability(hidden.device)
        self._on_hopper = major == HOPPER
        self._tiles = kernels.Tiles.lay(offsets, len(hidden), split, kernels.blocks_for(hidden.dtype, major))

    def multiply(self, *jobs: Job) -> list[Tensor]:
        from moonep.kernels import grouped as kernels

        outs = []
        for job in jobs:
            x, weight = job.pairs[0]
            width = weight.shape[1 if job.transposed else 2]
            out = x.new_empty(len(x), width) if job.out is None else job.out
            part = kernels.ALL if job.ready is None else kernels.FIRST_GROUPS
            kernels.multiply(self._tiles, job.pairs, out, transposed=job.transposed, part=part)
            outs.append(out)
        for job, out in zip(jobs, outs, strict=True):
            if job.ready is not None:
                job.ready()
                kernels.multiply(self._tiles, job.pairs, out, transposed=job.transposed, part=kernels.OTHER_GROUPS)
        return outs

    def activate(self, gate: Tensor, up: Tensor, route_weights: Tensor) -> Tensor:
        from moonep.kernels import swiglu

        return swiglu.activate(gate, up, route_weights, self._offsets)

    def differentiate(
        self, grad_z: Tensor, gate: Tensor, up: Tensor, route_weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from moonep.kernels import swiglu

        return swiglu.differentiate(grad_z, gate, up, route_weights, self._offsets)

    def add_weight_grad(self, grad: Tensor, x: Tensor, grad_y: Tensor, fresh: int = 0) -> None:
        from moonep.kernels import grouped as kernels

        add = kernels.add_weight_grad
        if self._on_hopper:
            from moonep.kernels import bulk_grads

            add = bulk_grads.add_weight_grad if bulk_grads.takes(self._tiles, x, self._token_padding) else add
        add(self._tiles, x, grad_y, grad, self._token_padding, fresh)

    def all_rows(self, rows: Tensor) -> Tensor:
        return rows


class TorchProducts:
    """torch's grouped_mm where it exists and takes the operands; a product a group elsewhere, which waits for a GPU."""

    def __init__(self, offsets: Tensor, capacity: int):
        self._offsets, self._capacity = offsets, capacity
        self._used = capacity if offsets.is_cuda else int(offsets[-1])

    def multiply(self, *jobs: Job) -> list[Tensor]:
        outs = []
        for pairs, out, transposed, ready in jobs:
            if ready is not None:
                ready()
            total: Tensor | None = None
            for x, weight in pairs:
                product = self._product(x[: self._used], weight.transpose(1, 2) if transposed else weight)
                if len(pairs) > 1:
                    product = product.float() if total is None else total.add_(product)
                total = product
            assert total is not None
            if out is not None:
                out[: self._used] = total
            outs.append(total.to(pairs[0][0].dtype) if out is None else out)
        return outs

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        if hasattr(F, "grouped_mm") and len(x) and _torch_takes(x) and _torch_takes(weight):
            return F.grouped_mm(x, weight, offs=self._offsets)
        product = x.new_zeros(len(x), weight.shape[2])
        for group, rows in self._groups():
            torch.mm(x[rows], weight[group], out=product[rows])
        return product

    def _groups(self) -> list[tuple[int, slice]]:
        """(group, its rows) of every group that has rows."""
        ends = self._offsets.tolist()
        return [(g, slice(b, e)) for g, (b, e) in enumerate(zip([0, *ends[:-1]], ends, strict=True)) if e > b]

    def activate(self, gate: Tensor, up: Tensor, route_weights: Tensor) -> Tensor:
        a = gate[: self._used].float()
        return (a * torch.sigmoid(a) * up[: self._used].float() * route_weights[: self._used, None]).to(gate.dtype)

    def differentiate(
        self, grad_z: Tensor, gate: Tensor, up: Tensor, route_weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        used, dtype = self._used, gate.dtype
        g, a, b, w = grad_z[:used].float(), gate[:used].float(), up[:used].float(), route_weights[:used, None]
        s = torch.sigmoid(a)
        grad_weights = route_weights.new_zeros(self._capacity)
        grad_weights[:used] = (g * (a * s * b)).sum(1)
        g = g * w
        grad_up = (g * a * s).to(dtype)
        grad_gate = (g * b * s * (1 + a * (1 - s))).to(dtype)
        return grad_gate, grad_up, (a * s * b * w).to(dtype), grad_weights

    def add_weight_grad(self, grad: Tensor, x: Tensor, grad_y: Tensor, fresh: int = 0) -> None:
        grad[:fresh].zero_()
        taken = x.dtype == torch.bfloat16 and _torch_takes(x) and _torch_takes(grad_y)
        if grad.is_cuda and taken and hasattr(F, "grouped_mm"):
            product = F.grouped_mm(x.t(), grad_y, offs=self._offsets)  # rounded to bf16
            has_rows = torch.diff(self._offsets, prepend=self._offsets.new_zeros(1)) > 0
            grad += torch.where(has_rows[:, None, None], product, 0)
            return
        for group, rows in self._groups():
            grad[group].addmm_(x[rows].float().t(), grad_y[rows].float())

    def all_rows(self, rows: Tensor) -> Tensor:
        if len(rows) == self._capacity:
            return rows
        every = rows.new_empty(self._capacity, rows.shape[1])
        every[: len(rows)] = rows
        return every


def _torch_takes(operand: Tensor) -> bool:
    """What grouped_mm demands of dtype and strides."""
    aligned = all(n == 1 or n * operand.itemsize % ROW_ALIGNMENT_BYTES == 0 for n in operand.stride()[-2:])
    return operand.dtype in (torch.bfloat16, torch.float16, torch.float32) and aligned
