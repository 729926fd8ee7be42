"""Train a small MoE language model with MoonEP, on CPU or GPUs.

    torchrun --nproc-per-node=4 examples/train_moe.py --steps 200 --log-dir runs/a --checkpoint-every 50
    torchrun --nproc-per-node=2 examples/train_moe.py --steps 200 --log-dir runs/a --resume runs/a/checkpoints
    python examples/train_moe.py    # one rank

Ranks are parallel twice: experts are spread over them, and each takes its share of the batch through its copy of
everything else. So the gradients of experts are complete where the expert lives, while all others are summed over the
ranks. A checkpoint loads on any number of ranks that divides experts and batch.

The host waits for the device only in steps that are logged or saved.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn

from moonep.nn import MoE, clip_grad_norm_, expert_parameters, sharded_state

BYTES = 256  # the vocabulary


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=200)
    add("--batch", type=int, default=32, help="sequences in a step, of all ranks together")
    sizes = {"context": 64, "layers": 3, "hidden": 64, "heads": 4, "ffn": 128, "experts": 16, "top-k": 2}
    for name, default in sizes.items():
        add(f"--{name}", type=int, default=default)
    add("--token-padding", type=int, default=16, help="an expert's rows are padded to a multiple of this")
    add("--aux-loss", type=float, default=0.0, help="coefficient; it is a mean of each rank's, so it depends on ranks")
    add("--learning-rate", type=float, default=3e-3)
    add("--warmup", type=int, default=10, help="steps; then the rate follows a cosine to a tenth at --steps")
    add("--clip", type=float, default=1.0, help="largest norm of all gradients")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of expert rows and weights, and attention")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--seed", type=int, default=0)
    add("--log-dir", type=Path, default=Path("runs/moe"))
    add("--log-every", type=int, default=10, help="steps")
    add("--checkpoint-every", type=int, default=0, help="steps; 0: never. Into LOG_DIR/checkpoints")
    add("--resume", type=Path, help="a checkpoint, or a folder of them: the last. Give the other options again")
    return parser.parse_args(arguments)


class LanguageModel(nn.Module):
    """Bytes [batch, context] int64 -> logits of each next byte [batch, context, 256]."""

    def __init__(self, args: argparse.Namespace, ranks: int):
        super().__init__()
        H = args.hidden
        self.byte, self.position = nn.Embedding(BYTES, H), nn.Embedding(args.context, H)
        self.blocks = nn.ModuleList(Block(args, ranks, layer) for layer in range(args.layers))
        self.norm, self.head = nn.RMSNorm(H), nn.Linear(H, BYTES, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.byte(inputs) + self.position.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    """Causal attention, then the mixture of experts. Parameters and residuals are float32."""

    def __init__(self, args: argparse.Namespace, ranks: int, layer: int):
        super().__init__()
        H, self.heads, self.dtype = args.hidden, args.heads, getattr(torch, args.dtype)
        self.attention_norm, self.moe_norm = nn.RMSNorm(H), nn.RMSNorm(H)
        self.qkv, self.out = nn.Linear(H, 3 * H, bias=False), nn.Linear(H, H, bias=False)
        sizes = {"max_tokens": args.batch // ranks * args.context, "token_padding": args.token_padding}
        options = {"dtype": self.dtype, "backend": args.device, "seed": args.seed + 1000 * (layer + 1)}
        self.moe = MoE(H, args.ffn, args.experts, args.top_k, **sizes, **options)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype != torch.float32):
            x = x + self.attend(self.attention_norm(x))
        return x + self.moe(self.moe_norm(x))

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Batches:
    """Random pieces of Python's help texts. A batch depends on the step alone: nothing to save, for any ranks."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
        self.text = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
        self.size, self.offsets, self.seed = args.batch, torch.arange(args.context + 1, device=device), args.seed
        self.generator = torch.Generator(device)

    def draw(self, step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """This rank's share of a step's batch: bytes, and the byte that follows each, [batch / ranks, context]."""
        self.generator.manual_seed(self.seed * 1_000_003 + step)
        places = len(self.text) - len(self.offsets) + 1
        starts = torch.randint(places, (self.size, 1), generator=self.generator, device=self.text.device)
        pieces = self.text[starts.chunk(ranks)[rank] + self.offsets].long()
        return pieces[:, :-1], pieces[:, 1:]


def rate_of(step: int, args: argparse.Namespace) -> float:
    """The learning rate: warm-up, then half a cosine down to a tenth. Steps count from 1."""
    if step <= args.warmup:
        return args.learning_rate * step / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def sum_over_ranks(tensors: list[Tensor]) -> None:
    """Add up tensors over the ranks in place, in one all-reduce."""
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat)
    for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


class Clock:
    """Seconds of each phase of a step: on a GPU between events in its stream."""

    def __init__(self, device: torch.device):
        self.cuda, self.marks = device.type == "cuda", []
        self.mark("start")

    def mark(self, phase: str) -> None:
        """A phase ends here."""
        now = torch.cuda.Event(enable_timing=True) if self.cuda else time.perf_counter()
        if self.cuda:
            now.record()
        self.marks.append((phase, now))

    def seconds(self) -> dict[str, float]:
        """Waits for the device."""
        if self.cuda:
            torch.cuda.synchronize()
        pairs = pairwise(self.marks)
        return {f"seconds/{phase}": a.elapsed_time(b) / 1000 if self.cuda else b - a for (_, a), (phase, b) in pairs}


class Log:
    """Scalars by step: for TensorBoard if it is installed, else lines of JSON in scalars.jsonl."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.board, self.lines = None, folder / "scalars.jsonl"
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        if self.board is None:
            with self.lines.open("a") as file:
                file.write(json.dumps({"step": step, **scalars}) + "\n")
            return
        for name, value in scalars.items():
            self.board.add_scalar(name, value, step)
        self.board.flush()


def balance_of(layers: list[MoE]) -> dict[str, float]:
    """What the last plans say of all ranks' loads, by layer. Waits for the device."""
    scalars = {}
    for i, layer in enumerate(layers):
        stats = layer.plan.stats().host()
        for name in ("rows_before", "rows_after"):
            rows = stats[name]
            scalars |= {f"layer{i}/{name}_max": max(rows), f"layer{i}/{name}_mean": sum(rows) / len(rows)}
            scalars |= {f"layer{i}/{name}/rank{rank}": count for rank, count in enumerate(rows)}
        scalars[f"layer{i}/redundant_experts"] = sum(stats["redundant_experts"])
        scalars |= {f"layer{i}/{name}": stats[name] for name in ("imbalance_before", "imbalance_after", "maxvio")}
    return scalars


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Read a checkpoint, or the last one in a folder, whatever the number of ranks that wrote it. Returns its step."""
    complete = sorted(file.parent for file in [*path.glob(".metadata"), *path.glob("*/.metadata")])
    if not complete:
        raise SystemExit(f"--resume: given {path}, expected a checkpoint or a folder of checkpoints")
    state = {**sharded_state(model, optimizer), "step": 0}
    dcp.load(state, checkpoint_id=complete[-1])
    return state["step"]


def join(args: argparse.Namespace) -> torch.device:
    """Join the ranks that torchrun started, or be the only one. Returns this rank's device."""
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo", **alone)
    return device


def train(args: argparse.Namespace, device: torch.device) -> None:
    """The training, on every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if args.batch % ranks or args.experts % ranks:
        raise SystemExit(f"--batch {args.batch}, --experts {args.experts}: expected multiples of the {ranks} ranks")
    torch.manual_seed(args.seed)
    model = LanguageModel(args, ranks).to(device)  # made on the CPU: the same weights on every rank
    layers = [block.moe for block in model.blocks]
    experts = expert_parameters(model)
    replicated = [p for p in model.parameters() if p not in experts]
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    done = load(args.resume, model, optimizer) if args.resume else 0
    compiled = torch.compile(model, fullgraph=True) if args.compile else model
    batches, log = Batches(args, device), Log(args.log_dir) if rank == 0 else None

    for step in range(done + 1, args.steps + 1):
        inputs, targets = batches.draw(step, rank, ranks)
        clock = Clock(device)
        loss = F.cross_entropy(compiled(inputs).flatten(0, 1), targets.flatten())
        mean = loss.detach() / ranks
        total = (loss + args.aux_loss * sum(layer.aux_loss for layer in layers)) / ranks
        clock.mark("forward")
        total.backward()
        clock.mark("backward")
        sum_over_ranks([*(p.grad for p in replicated), mean])
        norm = clip_grad_norm_(model, args.clip)
        rate = optimizer.param_groups[0]["lr"] = rate_of(step, args)
        optimizer.step()
        optimizer.zero_grad()
        clock.mark("step")
        if log is not None and step % args.log_every == 0:
            scalars = {"loss": mean.item(), "gradient_norm": norm.item(), "learning_rate": rate}
            log.write(step, scalars | balance_of(layers) | clock.seconds())
            print(f"step {step}: loss {scalars['loss']:.4f}, gradient norm {scalars['gradient_norm']:.3f}")
        if args.checkpoint_every and step % args.checkpoint_every == 0:
            path = args.log_dir / "checkpoints" / f"step-{step:07}"
            dcp.save({**sharded_state(model, optimizer), "step": step}, checkpoint_id=path)


if __name__ == "__main__":
    arguments = parse()
    train(arguments, join(arguments))
    dist.destroy_process_group()
