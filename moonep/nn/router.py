"""The router: which experts a token goes to, and with what weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

SCORES = ("softmax", "sigmoid")


class Routing(NamedTuple):
    """Router output: expert ids [s, K] int64, route weights [s, K] fp32, auxiliary loss [] fp32."""

    topk_experts: Tensor
    route_weights: Tensor
    aux_loss: Tensor


class Router(nn.Module):
    """Scores every expert, picks the top K, and weighs them by their scores. In fp32, under autocast, too.

    Args:
        hidden: H.
        num_experts: E.
        top_k: K.
        score: "softmax" over the experts, or "sigmoid" of each.
        normalize: route weights of a token sum to 1.
        scale: factor on the route weights.

    Attributes:
        bias: [E] fp32, added to the scores for the choice only, not in the weights. `update_bias` moves it so that
            loads become equal without an auxiliary loss (Wang et al., 2024, "Auxiliary-Loss-Free Load Balancing").
    """

    bias: Tensor

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
    ):
        super().__init__()
        if score not in SCORES:
            raise ValueError(f"router: given {score!r}, expected one of {', '.join(map(repr, SCORES))}")
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k: given {top_k}, expected 1 to num_experts = {num_experts}")
        self.top_k, self.score, self.normalize, self.scale = top_k, score, normalize, scale
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, dtype=torch.float))
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float))

    def forward(self, x: Tensor) -> Routing:
        """x: [s, H] any floating dtype."""
        with torch.autocast(x.device.type, enabled=False):
            return self._choose(x)

    def _choose(self, x: Tensor) -> Routing:
        logits = nn.functional.linear(x.float(), self.weight.float())
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        ids = (scores + self.bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        return Routing(ids, weights * self.scale, self._aux_loss(scores, ids))

    def _aux_loss(self, scores: Tensor, ids: Tensor) -> Tensor:
        """E * sum_e (share of assignments) * (mean probability): 1 when equal (Fedus et al., 2021)."""
        if not len(scores):
            return scores.sum()
        E = scores.shape[1]
        # Not bincount: on a GPU it waits for the device.
        share = torch.zeros(E, dtype=torch.float, device=ids.device).scatter_add_(
            0, ids.flatten(), torch.ones_like(ids, dtype=torch.float).flatten()
        )
        share /= ids.numel()
        probability = (scores / scores.sum(-1, keepdim=True)).mean(0)
        return E * (share * probability).sum()

    @torch.no_grad()
    def update_bias(self, load: Tensor, rate: float) -> None:
        """Raise the bias of experts below the mean load by `rate`, lower it for those above. load: [E]."""
        load = load.float()
        self.bias += rate * torch.sign(load.mean() - load)
