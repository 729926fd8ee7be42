"""The gate of layers: outputs and all gradients equal those of another layer, and of a dense one where that is small.

They cannot be equal bit for bit: rows are summed in other orders and rounded at other places. What is compared is the
norm of the difference of each row (a token, or an expert's weights) with the norm of the row, or the mean norm of rows
where that is more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moonep.bench.hosts import GateError
from moonep.testing.dense import dense_moe

TOLERANCE = 0.01  # bf16, between layers that round alike but for the order of sums
DENSE_TOLERANCE = 0.03  # bf16, from fp32: activations are rounded, too
_ELEMENTS = 1 << 26  # compared at once


@dataclass(frozen=True)
class Input:
    """One rank's input: hidden [s, H], route weights [s, K] fp32, ids [s, K], and the output's gradient [s, H]."""

    hidden: Tensor
    route_weights: Tensor
    ids: Tensor
    grad: Tensor


@dataclass(frozen=True)
class Result:
    """What a layer gives on one rank.

    Attributes:
        output: [s, H].
        grad_hidden: [s, H].
        grad_route_weights: [s, K].
        grad_weights: {projection: [L, ...]} of this rank's experts, complete.
    """

    output: Tensor
    grad_hidden: Tensor
    grad_route_weights: Tensor
    grad_weights: Mapping[str, Tensor]


def dense_result(inputs: Sequence[Input], weights: Mapping[str, Tensor], rank: int) -> Result:
    """What the layer must give on a rank, in fp32.

    Args:
        inputs: of all ranks.
        weights: gate [E, H, F], up [E, H, F], down [E, F, H].
        rank: whose result.
    """
    leaves = {name: weight.float().requires_grad_() for name, weight in weights.items()}
    hidden = [each.hidden.detach().float().requires_grad_() for each in inputs]
    route_weights = [each.route_weights.detach().clone().requires_grad_() for each in inputs]
    ids = torch.cat([each.ids for each in inputs])
    output = dense_moe(torch.cat(hidden), ids, torch.cat(route_weights), **leaves)
    output.backward(torch.cat([each.grad for each in inputs]).float())
    before, L = sum(len(x) for x in hidden[:rank]), len(leaves["gate"]) // len(inputs)
    grads = {name: _grad(leaf)[rank * L : (rank + 1) * L] for name, leaf in leaves.items()}
    own = output.detach()[before : before + len(hidden[rank])]
    return Result(own, _grad(hidden[rank]), _grad(route_weights[rank]), grads)


def _grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def check_result(got: Result, want: Result, tolerance: float, of_weights: bool = True) -> dict[str, float]:
    """The largest `row_error` of each tensor. Raises a GateError that names what is wrong.

    Args:
        got, want: on this rank.
        tolerance: of `row_error`.
        of_weights: also compare weight gradients.
    """
    pairs = {
        "output": (got.output, want.output),
        "gradient of tokens": (got.grad_hidden, want.grad_hidden),
        "gradient of route weights": (got.grad_route_weights, want.grad_route_weights),
    }
    if of_weights:
        pairs |= {
            f"gradient of {name}": (got.grad_weights[name], want.grad_weights[name]) for name in want.grad_weights
        }
    return {name: check_rows(name, ours, theirs, tolerance) for name, (ours, theirs) in pairs.items()}


def check_rows(name: str, got: Tensor, want: Tensor, tolerance: float) -> float:
    """`row_error` [n, ...]. Raises a GateError if it is more than the tolerance."""
    error = row_error(got, want)
    if not error <= tolerance:  # NaN as well
        raise GateError(f"{name}: a row differs by {error:.3g} of its norm, allowed {tolerance:g}")
    return error


def row_error(got: Tensor, want: Tensor) -> float:
    """The largest over rows of |got - want| / |want|, with the mean norm for rows of less. [n, ...], n > 0."""
    if got.shape != want.shape:
        return torch.inf
    at_once = max(1, _ELEMENTS // want[0].numel())
    parts = list(zip(got.split(at_once), want.split(at_once), strict=True))
    differences = torch.cat([(a.float() - b.float()).flatten(1).norm(dim=1) for a, b in parts])
    norms = torch.cat([b.float().flatten(1).norm(dim=1) for _, b in parts])
    typical = norms.square().mean().sqrt().clamp(min=torch.finfo(torch.float).tiny)
    return float((differences / torch.maximum(norms, typical)).max())
