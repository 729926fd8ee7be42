"""Training steps of a small transformer: forward, backward and optimizer, with MoonEP's layers and with ordinary ones.

The model of `moonep demo` in bf16, with routers of its own. A bias on some experts of rank 0, in the choice of experts
only, makes that rank hot; the learning rate is so small that it stays as hot as it is.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moonep.bench.comparison import Checked, Comparison, Line
from moonep.bench.hosts import GateError, Hosts
from moonep.bench.peers import World
from moonep.bench.routings import HOT_EXPERTS, Routing
from moonep.bench.timing import Call
from moonep.bench.transformer_layers import make_layer
from moonep.cli.demo_training import LOSS_BOUND, Batches, LanguageModel, Settings
from moonep.nn import MoE
from moonep.nn import Routing as Routed
from moonep.testing.ordinary import OrdinaryMoE
from moonep.testing.routing import expert_load

TRAINING_STEP = "training_step"
CHECKED_STEPS = 3
LEARNING_RATE = 1e-6
CONTEXT, HEAD = 1024, 128  # tokens of a sequence, and width of a head, at most


@dataclass(frozen=True)
class TransformerWorld(World):
    """Of the comparison, with the losses of the first model that was checked, by routing."""

    losses: dict[Routing, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Transformer(Comparison):
    """Training steps. S is the batch of a rank in tokens; routings are of kind "router_bias", their value the bias.

    Attributes:
        F: FFN width.
        P: padding of MoonEP's groups.
        layers: blocks of the model.
    """

    peers: tuple[str, ...] = ("moonep", "all_to_all")
    F: int = 768
    P: int = 128
    layers: int = 4

    def operations(self, name: str) -> tuple[str, ...]:
        return (TRAINING_STEP,)

    def line(self, R: int, name: str, operation: str, routing: Routing) -> Line:
        about = {"F": self.F, "P": self.P, "sms": None, "layers": self.layers, "variant": None}
        return {**super().line(R, name, operation, routing), **about}

    def open(self, rank: int, R: int, device: torch.device) -> TransformerWorld:
        return TransformerWorld(self.S, self.H, self.K, self.E, R, rank, None, device, self.peer_timeout_s)

    def settings(self, R: int) -> Settings:
        """As the demo has them."""
        context = min(self.S, CONTEXT)
        return Settings(
            R,
            steps=0,
            layers=self.layers,
            hidden=self.H,
            ffn=self.F,
            experts=self.E,
            top_k=self.K,
            heads=max(1, self.H // HEAD),
            context=context,
            batch=self.S // context,
            token_padding=self.P,
            device=self.device,
            dtype="bfloat16",
        )

    def open_peer(self, name: str, world: TransformerWorld) -> Trainer:
        settings = self.settings(world.R)
        return Trainer(settings, [make_layer(name, settings, i) for i in range(self.layers)], world)

    def barrier(self, world: TransformerWorld, peers: Mapping[str, Any]) -> Call | None:
        layers = [layer for peer in peers.values() for layer in peer.layers if isinstance(layer, MoE)]
        return layers[0].buffer.barrier if layers else None

    def make_batch(self, world: TransformerWorld, routing: Routing, hosts: Hosts) -> tuple[Routing, Line]:
        """Batches are the text's; a routing is a bias."""
        return routing, {}

    def check(self, world: TransformerWorld, name: str, peer: Trainer, batch: Routing, hosts: Hosts) -> Checked:
        peer.set_bias(batch.value)
        by_rank = hosts.exchange([float(peer.step()) for _ in range(CHECKED_STEPS)])
        losses = [sum(of_ranks) / world.R for of_ranks in zip(*by_rank, strict=True)]
        want, bound = world.losses.setdefault(batch, losses), LOSS_BOUND["bfloat16"]
        if not all(abs(a - b) <= bound for a, b in zip(losses, want, strict=True)):
            raise GateError(f"loss: {losses}, of the other layers {want}, allowed difference {bound:g}")
        choices = hosts.exchange(peer.choices())
        loads = [sum(of_layer).view(world.R, -1).sum(1).double() for of_layer in zip(*choices, strict=True)]
        imbalance = max(float(load.max() / load.mean()) for load in loads)
        return Checked({TRAINING_STEP: peer.step}, {"rank_imbalance": round(imbalance, 4)})

    def derive(self, R: int, median_us: float) -> Line:
        return {"tokens_per_s": round(R * self.S / median_us * 1e6)}

    def close(self, world: TransformerWorld) -> None:
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()


class Trainer:
    """A model, its optimizer and one batch of this rank.

    Args:
        settings: of the model.
        layers: its MoE layers.
        world: this rank's.
    """

    def __init__(self, settings: Settings, layers: Sequence[MoE | OrdinaryMoE], world: World):
        self.layers, self.R = layers, world.R
        torch.manual_seed(settings.seed)
        model = LanguageModel(settings, layers).to(world.device)
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Embedding, nn.RMSNorm)):
                module.to(torch.bfloat16)
        self.model = model
        self.replicated = [p for name, p in model.named_parameters() if ".experts." not in name]
        self.optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=world.device.type == "cuda")
        self.batch = [tensor.to(world.device) for tensor in Batches(settings, world.rank).draw()]

    def step(self) -> Tensor:
        """Forward, backward and optimizer. -> this rank's loss [], on the device"""
        loss = self._loss()
        (loss / self.R).backward()
        self._sum_replicated()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _loss(self) -> Tensor:
        inputs, targets = self.batch
        return F.cross_entropy(self.model(inputs).flatten(0, 1).float(), targets.flatten())

    def _sum_replicated(self) -> None:
        """Expert gradients are complete; those of all other parameters are each rank's share."""
        if self.R == 1:
            return
        for dtype in (torch.bfloat16, torch.float32):
            grads = [p.grad for p in self.replicated if p.grad is not None and p.dtype == dtype]
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat)
            for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))

    def set_bias(self, value: float) -> None:
        """Make the first experts of rank 0 hot in every layer."""
        for layer in self.layers:
            layer.router.bias[:HOT_EXPERTS] = value

    @torch.no_grad()
    def choices(self) -> list[Tensor]:
        """[E] a layer, on the CPU: this rank's assignments in one forward. Collective."""
        loads: list[Tensor] = []

        def count(router: nn.Module, inputs: Any, routed: Routed) -> None:
            loads.append(expert_load([routed.topk_experts], len(self.layers[0].router.bias)).cpu())

        hooks = [layer.router.register_forward_hook(count) for layer in self.layers]
        self._loss()
        for hook in hooks:
            hook.remove()
        return loads

    def close(self) -> None:
        """Give memory back."""
        for layer in self.layers:
            if isinstance(layer, MoE):
                layer.buffer.destroy()
                layer.pool.destroy()
        del self.model, self.optimizer, self.layers, self.replicated
