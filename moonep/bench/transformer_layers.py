"""The MoE layers of the small transformer: MoonEP's, and an ordinary one with the same grouped products."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moonep.bench.layer_movers import AllToAllMover, routed_experts
from moonep.cli.demo_training import Settings
from moonep.nn import MoE
from moonep.testing.ordinary import OrdinaryMoE


def make_layer(name: str, s: Settings, number: int) -> MoE | OrdinaryMoE:
    """A layer on its device, with the same weights whatever its kind."""
    sizes = (s.hidden, s.ffn, s.experts, s.top_k)
    if name == "moonep":
        return FastMoE(
            *sizes, max_tokens=s.tokens, dtype=s.payload, token_padding=s.token_padding, backend=s.device,
            seed=s.seed_of(number),
        )  # fmt: skip
    with torch.device(s.device):
        return GroupedMoE(*sizes, dtype=s.payload, seed=s.seed_of(number))


@torch.no_grad()
def draw(router: nn.Module, experts: nn.ParameterDict, seed: int, rank: int) -> None:
    """Initial weights, on the device: drawing billions of numbers on the host takes longer than the benchmark."""
    weight = router.weight
    assert isinstance(weight, Tensor)
    weight.normal_(0, 0.02, generator=torch.Generator(weight.device).manual_seed(seed))
    generator = torch.Generator(weight.device).manual_seed(seed + 1 + rank)
    for parameter in experts.values():
        parameter.copy_(torch.empty(parameter.shape, device=weight.device).normal_(0, 1, generator=generator))
        parameter *= parameter.shape[1] ** -0.5


class FastMoE(MoE):
    """`MoE` with weights of `draw`."""

    def reset_parameters(self, seed: int) -> None:
        draw(self.router, self.experts, seed, self.pool.rank)
        self.pool.sync()


class GroupedMoE(OrdinaryMoE):
    """`OrdinaryMoE` with MoonEP's grouped products, weights cast once a forward, and gradients added in place."""

    def reset_parameters(self, seed: int) -> None:
        draw(self.router, self.experts, seed, self.rank)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        ids, route_weights, self.aux_loss = self.router(tokens)
        weights = {name: parameter.detach().to(self.dtype) for name, parameter in self.experts.items()}
        mover = AllToAllMover(self.E, self.R, group=self.group)
        payload = tokens.to(self.dtype)
        return routed_experts(mover, weights, self._grads, payload, route_weights, ids).to(x.dtype).view(x.shape)

    def _grads(self) -> tuple[dict[str, Tensor], list[str]]:
        fresh = [name for name, parameter in self.experts.items() if parameter.grad is None]
        for name in fresh:
            self.experts[name].grad = torch.empty_like(self.experts[name])
        return {name: parameter.grad for name, parameter in self.experts.items() if parameter.grad is not None}, fresh
