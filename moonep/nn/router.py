"""The router: which experts a token goes to, and with what weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from moonep.arguments import check_count, describe
from moonep.nn.checks import check_choice, check_number

SCORES = ("softmax", "sigmoid")


def check_choices(hidden: int, num_experts: int, top_k: int) -> None:
    """Raise a ValueError unless top_k of so many experts can be chosen."""
    for name, value in (("hidden", hidden), ("num_experts", num_experts), ("top_k", top_k)):
        check_count(name, value, 1)
    if top_k > num_experts:
        raise ValueError(f"top_k: given {top_k}, expected 1 to num_experts = {num_experts}")


class Routing(NamedTuple):
    """Router output for a rank's tokens: expert ids [s, K] int64, route weights [s, K] fp32, auxiliary loss [] fp32."""

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
        weight: [E, H] fp32 parameter; `MoE` and the caller initialize it. Replicated: equal on all ranks.
        bias: [E] fp32, added to the scores for the choice only, not in the weights. `update_bias` moves it so that
            loads become equal without an auxiliary loss (Wang et al., 2024, "Auxiliary-Loss-Free Load Balancing").

    Raises:
        ValueError: a bad argument.
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
        check_choices(hidden, num_experts, top_k)
        check_choice("score", score, SCORES)
        check_number("scale", scale)
        self.top_k, self.score, self.normalize, self.scale = top_k, score, normalize, scale
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, dtype=torch.float))
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float))

    def forward(self, x: Tensor) -> Routing:
        """Choose experts for tokens.

        Args:
            x: [s, H] any floating dtype, on the router's device.

        Returns:
            Ids, weights and loss, for the tokens of this rank alone.

        Raises:
            ValueError: another x.
        """
        H = self.weight.shape[1]
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() != 2 or x.shape[1] != H:
            raise ValueError(f"x: given {describe(x)}, expected [s, {H}] of a floating dtype")
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
        """Raise the bias of experts below the mean load by `rate`, lower it for those above.

        Args:
            load: [E] any dtype, assignments of each expert: those of all ranks, for a bias that is equal on all.
            rate: how far.

        Raises:
            ValueError: another load.
        """
        if not isinstance(load, Tensor) or load.shape != self.bias.shape:
            raise ValueError(f"load: given {describe(load)}, expected [{len(self.bias)}]")
        load = load.float()
        self.bias += rate * torch.sign(load.mean() - load)
