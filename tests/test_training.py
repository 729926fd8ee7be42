"""What training loops ask of models with experts: the norm of all ranks' gradients, and checkpoints for any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from moonep.nn import (
    MoE,
    clip_grad_norm_,
    exclude_experts_from_ddp,
    expert_parameters,
    sharded_state,
    sum_expert_grads,
)

E, H, F, K, S = 8, 16, 24, 2, 16


class Model(nn.Module):
    """A layer of experts between replicated ones."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(H, H)
        self.moe = MoE(H, F, E, K, max_tokens=S, dtype=dtype, token_padding=8, seed=seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.first(x))


def whole(own: Tensor) -> Tensor:
    """[L, ...] of every rank -> [E, ...]"""
    parts = [torch.empty(own.shape, dtype=own.dtype) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.detach().contiguous())
    return torch.cat(parts)


def clip(max_norm: float) -> dict[str, float]:
    """Random gradients; the norm that is returned, that of the whole model, and that after clipping."""
    model = Model()
    own = expert_parameters(model)
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        if p not in own:
            p.grad = torch.randn(p.shape, generator=generator)
    for p in own:
        p.grad.copy_(torch.randn(p.shape))

    def measure() -> float:
        grads = [whole(p.grad) if p in own else p.grad for p in model.parameters()]
        return float(torch.cat([g.flatten() for g in grads]).norm())

    before, given = measure(), clip_grad_norm_(model, max_norm)
    return {"given": given.item(), "before": before, "after": measure(), "experts": len(own)}


@pytest.mark.parametrize("R", [1, 2, 4])
def test_the_norm_counts_every_rank_s_experts_and_all_else_once(ranks, R):
    for max_norm in (1.0, 1e6):
        results = ranks(R).run(clip, max_norm)
        for result in results:
            assert result["given"] == results[0]["given"], "equal on all ranks"
            assert result["given"] == pytest.approx(result["before"], rel=1e-5)
            assert result["after"] == pytest.approx(min(max_norm, result["before"]), rel=1e-5)
            assert result["experts"] == 3


def take_step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """One step, on the same tokens for any number of ranks."""
    R, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(S, H, generator=torch.Generator().manual_seed(5)).chunk(R)[rank]
    model(x).square().sum().backward()
    for p in model.parameters():
        if p not in expert_parameters(model):
            dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()


def gather(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything that a checkpoint should bring back, of all ranks together."""
    own, values = expert_parameters(model), {}
    for name, p in model.named_parameters():
        values[name] = whole(p) if p in own else p.detach().clone()
        for key, value in optimizer.state[p].items():
            values[f"{name}/{key}"] = whole(value) if p in own and value.shape == p.shape else value.clone()
    return values | {f"buffer {name}": b.clone() for name, b in model.named_buffers() if name != "moe.load"}


def save(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    model = Model(dtype, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    take_step(model, optimizer)
    model.moe.router.bias.fill_(0.25)
    dcp.save(sharded_state(model, optimizer), checkpoint_id=path)
    return gather(model, optimizer)


def load(path: Path, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, bool]]:
    model = Model(dtype, seed=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    dcp.load(sharded_state(model, optimizer), checkpoint_id=path)
    loaded = gather(model, optimizer)
    model(torch.randn(1, H))
    pool = model.moe.pool
    follow = {name: torch.equal(pool.local[name], master.detach().to(dtype)) for name, master in pool.master.items()}
    return loaded, follow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_of_two_ranks_loads_on_any_number(ranks, tmp_path, dtype):
    saved = ranks(2).run(save, tmp_path, dtype)[0]
    assert saved["moe.experts.gate/exp_avg"].shape == (E, H, F)
    for R in (1, 2, 4):
        for loaded, follow in ranks(R).run(load, tmp_path, dtype):
            assert loaded.keys() == saved.keys()
            assert all(torch.equal(loaded[name], saved[name]) for name in saved), R
            assert all(follow.values()), "compute weights follow in the next forward"


def make_state(late: bool) -> dict[str, bool]:
    """Ask for the state of an optimizer that has none, or none of one parameter."""
    model = Model(seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    if late:
        take_step(model, optimizer)
        del optimizer.state[model.first.bias]
    kept = gather(model, optimizer)
    grads = [p.grad for p in model.parameters()]
    state = sharded_state(model, optimizer)["optimizer"]
    made = gather(model, optimizer)
    return {
        "all parameters have a state": state.keys() == dict(model.named_parameters()).keys(),
        "what was there has not changed": all(torch.equal(made[name], kept[name]) for name in kept),
        "what was not is zero": all(not value.any() for name, value in made.items() if name not in kept),
        "gradients are what they were": all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True)),
    }


@pytest.mark.parametrize("late", [False, True])
def test_missing_optimizer_state_is_made_as_zeros_and_nothing_else_changes(ranks, late):
    for seen in ranks(2).run(make_state, late):
        assert all(seen.values()), [name for name, right in seen.items() if not right]


def test_a_state_that_cannot_be_saved_is_refused():
    model = nn.Linear(2, 2, bias=False)
    other = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match=r"optimizer: given a parameter \[3\] that is not one of the model"):
        sharded_state(model, other)
    optimizer = torch.optim.AdamW(model.parameters())
    sharded_state(model, optimizer)
    optimizer.state[model.weight]["count"] = 3
    with pytest.raises(ValueError, match="optimizer: given count = 3 of weight, expected a tensor"):
        sharded_state(model, optimizer)


def test_a_model_works_without_a_process_group(tmp_path):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, H)).sum().backward()
    assert clip_grad_norm_(model, 1.0) > 0
    assert sharded_state(model, optimizer)["model"]["moe.experts.up"].shape == (E, H, F)
    assert "optimizer" not in sharded_state(model)


def test_what_is_no_model_optimizer_group_or_number_is_refused():
    model: Any = nn.Linear(2, 2)
    group: Any = None
    for call in (
        expert_parameters,
        sharded_state,
        exclude_experts_from_ddp,
        lambda none: clip_grad_norm_(none, 1.0),
        lambda none: sum_expert_grads(none, group),
    ):
        with pytest.raises(ValueError, match=r"model: given NoneType, expected a torch.nn.Module"):
            call(group)
    with pytest.raises(ValueError, match=r"optimizer: given str, expected None or a torch.optim.Optimizer"):
        sharded_state(model, "adam")  # type: ignore[arg-type]
    for max_norm in (None, "1", -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"max_norm: given .*, expected a number >= 0"):
            clip_grad_norm_(model, max_norm)  # type: ignore[arg-type]
    assert clip_grad_norm_(model, float("inf")) == 0
    with pytest.raises(ValueError, match="group: given NoneType, expected a process group"):
        sum_expert_grads(model, group)
