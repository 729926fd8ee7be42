"""What `moonep demo` runs on every rank: a small language model with mixture-of-experts layers, and its training loop.

The model predicts the next byte of English text. It is an ordinary decoder (attention, then a feed-forward block) whose
feed-forward blocks are MoE layers, spread over the ranks: either `OrdinaryMoE`, in which a rank computes whatever the
router sends to its experts, or `moonep.nn.MoE`, in which every rank computes the same number of rows. All else is the
same: weights, data, optimizer. Nothing asks the router to spread its load, so it soon prefers some experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moonep.nn import MoE, Routing
from moonep.plan import Plan
from moonep.testing.ordinary import OrdinaryMoE
from moonep.testing.ranks import send

BYTES = 256  # the vocabulary
WARMUP_STEPS = 10
FIRST_STEPS = 10
# By dtype. Two trainings sum in different orders, so their losses differ by rounding. Training amplifies that, hence
# the first steps. Seen on CPU: 5e-7 in float32; in bfloat16 4e-3, which is also its distance from float32.
LOSS_BOUND = {"float32": 1e-4, "bfloat16": 2e-2}
SEED_OF_LAYERS, SEED_OF_RANKS = 1000, 1_000_000  # far enough apart that no two generators start alike


@dataclass(frozen=True)
class Settings:
    """Sizes of the model and of the training."""

    ranks: int
    steps: int
    seed: int = 0
    layers: int = 3
    hidden: int = 64
    ffn: int = 128
    experts: int = 16
    top_k: int = 2
    heads: int = 4
    context: int = 64
    batch: int = 8
    token_padding: int = 16
    learning_rate: float = 3e-3
    device: str = "cpu"
    dtype: str = "float32"  # of rows and expert weights; all else is float32

    @property
    def tokens(self) -> int:
        """S: tokens that a rank brings in a step."""
        return self.batch * self.context

    @property
    def rows(self) -> int:
        """S x K: what a rank computes in a layer when all compute the same."""
        return self.tokens * self.top_k

    @property
    def most_rows(self) -> int:
        """What a rank may have to compute in a layer with ordinary EP: all ranks' tokens, for all its experts."""
        return self.ranks * self.tokens * min(self.top_k, self.experts // self.ranks)

    @property
    def payload(self) -> torch.dtype:
        """`dtype`, as torch has it."""
        return getattr(torch, self.dtype)

    def seed_of(self, layer: int) -> int:
        """Of a layer's initial weights."""
        return self.seed + layer * SEED_OF_LAYERS


@dataclass(frozen=True)
class StepDone:
    """What a rank tells after each step: its loss (the ranks' mean) and its largest number of rows in a layer."""

    step: int
    loss: float
    rows: int


@dataclass
class Record:
    """What one rank saw in a training.

    Attributes:
        loss: mean over ranks, by step.
        rows: rows that this rank computed, by step and layer.
        padding: rows of zeros between its experts' rows, by step and layer.
        imbalance_before, imbalance_after: max / mean of the ranks' rows in MoonEP's plan, by step and layer.
        redundant_experts: experts that all ranks computed away from their home, by step and layer.
        memory: bytes that this rank held for communication and experts in MoonEP.
        first_routing: [s, K], the experts that the first layer's router chose in the first step.
        seconds: of all steps.
    """

    loss: list[float] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    padding: list[list[int]] = field(default_factory=list)
    imbalance_before: list[list[float]] = field(default_factory=list)
    imbalance_after: list[list[float]] = field(default_factory=list)
    redundant_experts: list[list[int]] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    first_routing: Tensor = field(default_factory=lambda: torch.empty(0))
    seconds: float = 0.0


def train_ordinary(settings: Settings) -> Record:
    """Train with ordinary expert parallelism."""
    s = settings
    layers = [
        OrdinaryMoE(s.hidden, s.ffn, s.experts, s.top_k, dtype=s.payload, seed=s.seed_of(layer))
        for layer in range(s.layers)
    ]

    def record_rows(record: Record) -> None:
        record.rows.append([layer.rows for layer in layers])

    return train(settings, layers, record_rows)


def train_moonep(settings: Settings) -> Record:
    """Train with MoonEP: all that differs is the layer."""
    s = settings
    use_device(s)
    layers = [
        MoE(
            s.hidden,
            s.ffn,
            s.experts,
            s.top_k,
            max_tokens=s.tokens,
            dtype=s.payload,
            token_padding=s.token_padding,
            backend=s.device,
            seed=s.seed_of(layer),
        )
        for layer in range(s.layers)
    ]

    def record_plans(record: Record) -> None:
        add_plans(record, [layer.plan for layer in layers if layer.plan is not None])

    record = train(settings, layers, record_plans)
    record.memory = held_memory(layers)
    return record


def train(settings: Settings, layers: Sequence[OrdinaryMoE | MoE], record_step: Callable[[Record], None]) -> Record:
    """The training loop. Every rank has its own batches; all have the same model but for their own experts."""
    record, device = Record(), use_device(settings)
    remember_first_routing(layers[0].router, record)
    torch.manual_seed(settings.seed)
    model = LanguageModel(settings, layers).to(device)  # made on the CPU: the same weights on any device
    # Expert gradients are complete where the expert lives. Those of all other parameters are each rank's share.
    replicated = [p for name, p in model.named_parameters() if ".experts." not in name]
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    batches = Batches(settings, dist.get_rank())
    start = time.perf_counter()
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (step + 1) / WARMUP_STEPS)
        inputs, targets = (tensor.to(device) for tensor in batches.draw())
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss = loss / settings.ranks  # so that gradients summed over ranks are those of the mean loss
        loss.backward()
        mean_loss = sum_over_ranks([p.grad for p in replicated], loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        record.loss.append(mean_loss)
        record_step(record)
        send(StepDone(step, mean_loss, max(record.rows[-1])))
    record.seconds = time.perf_counter() - start
    return record


def use_device(settings: Settings) -> torch.device:
    """This rank's device, made the current one: ranks share GPUs when there are fewer."""
    if settings.device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return torch.device(settings.device)


def sum_over_ranks(gradients: list[Tensor | None], loss: Tensor) -> float:
    """Add up replicated gradients in place, and the loss, in one all-reduce on the host. Returns the loss."""
    tensors = [g for g in gradients if g is not None]
    flat = torch.cat([*(g.flatten() for g in tensors), loss.view(1)]).cpu()
    dist.all_reduce(flat)
    *sums, total = flat.split([*(g.numel() for g in tensors), 1])
    for gradient, summed in zip(tensors, sums, strict=True):
        gradient.copy_(summed.view_as(gradient))
    return total.item()


class LanguageModel(nn.Module):
    """Bytes [batch, context] int64 -> logits of each next byte [batch, context, 256]."""

    def __init__(self, settings: Settings, layers: Iterable[nn.Module]):
        super().__init__()
        H = settings.hidden
        self.byte, self.position = nn.Embedding(BYTES, H), nn.Embedding(settings.context, H)
        self.blocks = nn.ModuleList(Block(H, settings.heads, layer) for layer in layers)
        self.norm, self.head = nn.RMSNorm(H), nn.Linear(H, BYTES, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.byte(inputs) + self.position(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    """Causal attention, then the mixture of experts."""

    def __init__(self, hidden: int, heads: int, moe: nn.Module):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.moe_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x))
        return x + self.moe(self.moe_norm(x))

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Batches:
    """Random pieces of the text, others on each rank."""

    def __init__(self, settings: Settings, rank: int):
        self.batch, self.context = settings.batch, settings.context
        self.text = load_text()
        self.generator = torch.Generator().manual_seed(settings.seed + (rank + 1) * SEED_OF_RANKS)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Inputs [batch, context], and the byte that follows each of them."""
        starts = torch.randint(len(self.text) - self.context, (self.batch, 1), generator=self.generator)
        pieces = self.text[starts + torch.arange(self.context + 1)].long()
        return pieces[:, :-1], pieces[:, 1:]


def load_text() -> Tensor:
    """The help texts that come with every Python: almost half a megabyte of English. [n] uint8."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def remember_first_routing(router: nn.Module, record: Record) -> None:
    """Keep the experts that `router` chooses in its first forward."""

    def keep(module: nn.Module, inputs: tuple[Tensor], routing: Routing) -> None:
        if not len(record.first_routing):
            record.first_routing = routing.topk_experts

    router.register_forward_hook(keep)


def add_plans(record: Record, plans: list[Plan]) -> None:
    """Add what the plans of all layers in one step say."""
    counted = [count_rows(plan) for plan in plans]
    record.rows.append([rows for rows, _ in counted])
    record.padding.append([padding for _, padding in counted])
    stats = [plan.stats() for plan in plans]
    record.imbalance_before.append([s.imbalance_before.item() for s in stats])
    record.imbalance_after.append([s.imbalance_after.item() for s in stats])
    record.redundant_experts.append([int(s.redundant_experts.sum()) for s in stats])


def count_rows(plan: Plan) -> tuple[int, int]:
    """Rows that arrived for this rank's experts, and the rows of zeros between them.

    What arrived is counted, not what was planned: the sender of a row writes its arrival.
    """
    rows = int((plan.arrivals >= 0).sum())
    return rows, int(plan.cu_seqlens[-1]) - rows


def held_memory(layers: list[MoE]) -> dict[str, int]:
    """Bytes on this rank. All layers share a Buffer, and the slots and reduce buffers for redundant experts."""
    pools = [layer.pool.memory() for layer in layers]
    return {
        "receive_buffer_rows": layers[0].buffer.dims.C,
        "buffer_bytes": sum(b.memory()["total"] for b in {layer.buffer for layer in layers}),
        "expert_weights_and_gradients_bytes": sum(p["weights"] + p["masters"] + p["gradients"] for p in pools),
        "redundant_experts_bytes": max(p["slots"] + p["reduce_buffers"] for p in pools),
    }
