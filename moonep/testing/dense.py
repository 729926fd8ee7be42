"""A dense mixture of experts in one process: what every parallel one must equal."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def dense_moe(x: Tensor, topk_experts: Tensor, route_weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Sum over a token's experts of route weight * down(silu(x gate) * (x up)). Differentiable.

    Args:
        x: [s, H].
        topk_experts: [s, K] expert ids; -1 = no assignment.
        route_weights: [s, K].
        gate, up, down: [E, H, F], [E, H, F], [E, F, H].

    Returns:
        [s, H]
    """
    y = torch.zeros_like(x)
    for e in range(len(gate)):
        token, k = (topk_experts == e).nonzero(as_tuple=True)
        rows = x[token]
        rows = (F.silu(rows @ gate[e]) * (rows @ up[e])) @ down[e]
        y = y.index_add(0, token, rows * route_weights[token, k, None].to(rows.dtype))
    return y
