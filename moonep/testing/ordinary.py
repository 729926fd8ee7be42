"""Ordinary expert parallelism, as one writes it by hand: what MoonEP is compared with.

A rank computes its home experts' rows and no others, however many the router sends there: up to R x S x min(K, L). How
many rows go where is known only on the device, so every layer call waits for the host to read the counts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moonep.nn.router import Router


class OrdinaryMoE(nn.Module):
    """`moonep.nn.MoE` without redundant experts: the same router, experts and initial weights, rows where they fall.

    Collective, like its backward.

    Args:
        hidden, ffn: H and F. Experts are SwiGLU: down(silu(x gate) * (x up)).
        num_experts, top_k: E and K.
        group: process group; None: all ranks, or this process alone. Where it cannot exchange the rows of a GPU (Gloo),
            they travel through the host.
        dtype: of rows and compute weights; None: that of the input. Parameters are fp32.
        router: "softmax" or "sigmoid" scores.
        normalize_topk, route_scale: see `Router`.
        seed: of the initial weights: those of `MoE` with the same seed, for any number of ranks.

    Attributes:
        router: `Router`; replicated.
        experts: nn.ParameterDict gate [L, H, F], up [L, H, F], down [L, F, H]: fp32 parameters of this rank's experts.
            Gradients are complete after backward: do not reduce them over the group.
        rows: rows that this rank computed in the last forward.
        aux_loss: [] the last forward's auxiliary loss.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        num_experts: int,
        top_k: int,
        group: dist.ProcessGroup | None = None,
        *,
        dtype: torch.dtype | None = None,
        router: str = "softmax",
        normalize_topk: bool = True,
        route_scale: float = 1.0,
        seed: int = 0,
    ):
        super().__init__()
        alone = group is None and not dist.is_initialized()
        self.group, self.dtype = group, dtype
        self.R, self.rank = (1, 0) if alone else (dist.get_world_size(group), dist.get_rank(group))
        if num_experts % self.R:
            raise ValueError(
                f"num_experts: given {num_experts}, expected a multiple of the {self.R} ranks of the group"
            )
        self.E, self.L = num_experts, num_experts // self.R
        self.router = Router(hidden, num_experts, top_k, score=router, normalize=normalize_topk, scale=route_scale)
        shapes = {"gate": (hidden, ffn), "up": (hidden, ffn), "down": (ffn, hidden)}
        weights = {name: nn.Parameter(torch.empty(self.L, *shape)) for name, shape in shapes.items()}
        self.experts = nn.ParameterDict(weights)
        self.rows = 0
        self.aux_loss: Tensor | None = None
        self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """The random draws of `MoE.reset_parameters`, in its order."""
        generator = torch.Generator().manual_seed(seed)
        nn.init.normal_(self.router.weight, std=0.02, generator=generator)
        for parameter in self.experts.values():
            one = torch.empty(parameter.shape[1:])
            for e in range(self.E):
                one.normal_(0, 1 / math.sqrt(one.shape[0]), generator=generator)
                if e // self.L == self.rank:
                    parameter[e % self.L].copy_(one)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., H] any floating dtype, any number of tokens, which may differ by rank -> [..., H] in x's dtype."""
        tokens = x.reshape(-1, x.shape[-1])
        ids, weights, self.aux_loss = self.router(tokens)
        order = ids.flatten().argsort(stable=True)
        counts_E = torch.bincount(ids.flatten(), minlength=self.E)
        counts_RL = self._exchange(counts_E, [self.L] * self.R, [self.L] * self.R).view(self.R, self.L)
        sent, received = counts_E.view(self.R, self.L).sum(1).tolist(), counts_RL.sum(1).tolist()

        payload = tokens if self.dtype is None else tokens.to(self.dtype)
        rows = self._exchange(payload[order // ids.shape[1]], sent, received)
        row_weights = self._exchange(weights.flatten()[order], sent, received)
        rows = self._experts(rows, row_weights, counts_RL)
        rows = self._exchange(rows, received, sent)
        self.rows = sum(received)
        by_assignment = rows[order.argsort()].view(*ids.shape, x.shape[-1])
        return by_assignment.float().sum(1).to(x.dtype).view(x.shape)

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        if self.R == 1:
            return rows
        through_host = rows.is_cuda and dist.get_backend(self.group) == "gloo"
        arrived = _AllToAll.apply(rows.cpu() if through_host else rows, sent, received, self.group)
        return arrived.to(rows.device)

    def _experts(self, rows: Tensor, row_weights: Tensor, counts_RL: Tensor) -> Tensor:
        """Rows [n, H] ordered by (source rank, expert), as they arrive -> the experts' output in the same order."""
        expert = torch.arange(self.L, device=rows.device).repeat(self.R).repeat_interleave(counts_RL.flatten())
        order = expert.argsort(stable=True)
        counts = counts_RL.sum(0).tolist()
        groups = zip(rows[order].split(counts), row_weights[order].split(counts), strict=True)
        # Experts without rows take part: their gradients are zeros, and a rank without rows joins in backward.
        return torch.cat([self._expert(e, *group) for e, group in enumerate(groups)])[order.argsort()]

    def _expert(self, e: int, rows: Tensor, row_weights: Tensor) -> Tensor:
        gate, up, down = (self.experts[name][e].to(rows.dtype) for name in ("gate", "up", "down"))
        activation = F.silu((rows @ gate).float()) * (rows @ up).float() * row_weights[:, None]
        return activation.to(rows.dtype) @ down


class _AllToAll(torch.autograd.Function):
    """all_to_all_single along dim 0; its backward sends the gradients back the same way."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _AllToAll.apply(grad, ctx.received, ctx.sent, ctx.group), None, None, None
