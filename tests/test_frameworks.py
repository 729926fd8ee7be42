"""What frameworks put around layers with experts: data parallelism, sharding, checkpointing, pipelines, weight sync."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import moonep
from moonep import nn as moonep_nn
from moonep.nn import MoE, RoutedExperts, clip_grad_norm_, expert_parameters, functional, sharded_state
from moonep.testing.dense import dense_moe

H, F, E, K, S = 16, 24, 8, 2, 16
PROJECTIONS = ("gate", "up", "down")
DENSE_F = 16  # experts of 1024 bytes, of which four fill a page: no padding between them, as there is with F
SHAPES = {"gate": (H, F), "up": (H, F), "down": (F, H)}
TOLERANCE = 2e-5  # of the largest value: fp32, sums of about a hundred terms in another order


class Model(nn.Module):
    """A residual layer of experts between replicated ones; the router is skewed enough for redundant experts."""

    def __init__(self, group: dist.ProcessGroup | None = None, ffn: int = F, **options: Any):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(H, H), nn.Linear(H, H)
        options = {"max_tokens": S, "dtype": torch.float32, "token_padding": 8, "seed": 1, **options}
        self.moe = MoE(H, ffn, E, K, group, **options)
        with torch.no_grad():
            self.moe.router.weight.mul_(40)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + self.moe(x))


class DenseModel(nn.Module):
    """The same model with all experts in one process."""

    def __init__(self, model: Model, experts: dict[str, Tensor]):
        super().__init__()
        self.first, self.last = copy.deepcopy(model.first), copy.deepcopy(model.last)
        self.router = nn.Parameter(model.moe.router.weight.detach().clone())
        self.experts = nn.ParameterDict({name: nn.Parameter(w.clone()) for name, w in experts.items()})

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scores, ids = (x @ self.router.t()).softmax(-1).topk(K)
        return self.last(x + dense_moe(x, ids, scores / scores.sum(-1, True), *(self.experts[n] for n in PROJECTIONS)))

    def names(self) -> dict[str, nn.Parameter]:
        """Parameters by the names that `Model` gives them."""
        renamed = {"router": "moe.router.weight", **{f"experts.{n}": f"moe.experts.{n}" for n in PROJECTIONS}}
        return {renamed.get(name, name): p for name, p in self.named_parameters()}


def whole(own: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """[L, ...] of every rank of the group -> [E, ...]"""
    parts = [torch.empty(own.shape, dtype=own.dtype) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own.detach().contiguous(), group=group)
    return torch.cat(parts)


def value(tensor: Tensor) -> Tensor:
    """What all ranks have of a tensor together, if it is a DTensor."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def relative(got: Tensor, want: Tensor) -> float:
    """Largest difference over largest value."""
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-9))


def batch(seed: int, s: int = S) -> list[Tensor]:
    """Tokens of every rank of the world."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, H, generator=generator) for _ in range(dist.get_world_size())]


def mesh_of_two_by_two(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def take_steps(
    model: Model,
    call: Callable[[Tensor], Tensor],
    mesh: DeviceMesh,
    finish: Callable[[], None],
    separate: bool,
    unsynced: Callable[[], AbstractContextManager[Any]] | None = None,
) -> dict[str, float]:
    """Two clipped steps of a model in parallel, and of a dense one on all tokens. -> relative errors

    Args:
        finish: completes gradients after backward.
        separate: experts have an optimizer group of their own.
        unsynced: given, each step is two microbatches, the first in this context.
    """
    ep, rank = mesh["ep"].get_group(), dist.get_rank()
    experts = {name: whole(p, ep) for name, p in model.moe.experts.items()}
    dense = DenseModel(copy_whole(model), experts)
    own = expert_parameters(model)
    groups: list[Any] = [{"params": [p for p in model.parameters() if (p in own) == kind]} for kind in (False, True)]
    options = {"lr": 0.05, "momentum": 0.9, "foreach": separate}
    optimizer = torch.optim.SGD(groups if separate else model.parameters(), **options)
    reference = torch.optim.SGD(dense.parameters(), lr=0.05, momentum=0.9)
    mine = slice(mesh["ep"].get_local_rank() * E // 2, (mesh["ep"].get_local_rank() + 1) * E // 2)
    errors: dict[str, float] = {}

    def compare(what: str, of: Callable[[Tensor], Tensor]) -> None:
        wanted = dense.names()
        for name, p in model.named_parameters():
            want = of(wanted[name]).detach()
            errors[f"{what} {name}"] = relative(value(of(p)), want[mine] if p in own else want)

    for step in range(2):
        xs = batch(step)
        if unsynced is not None:
            with unsynced():
                (call(xs[rank][: S // 2]).square().mean() / 2).backward()
            (call(xs[rank][S // 2 :]).square().mean() / 2).backward()
        else:
            call(xs[rank]).square().mean().backward()
        finish()
        dense(torch.cat(xs)).square().mean().backward()
        assert sum(model.moe.plan.stats().host()["redundant_experts"]) > 0, "nothing was redundant"
        compare(f"gradient {step}", lambda p: p.grad)
        norm, want = clip_grad_norm_(model, 0.1), nn.utils.clip_grad_norm_(dense.parameters(), 0.1)
        errors[f"norm {step}"] = relative(norm, want)
        assert want > 0.1, "nothing was clipped"
        compare(f"clipped {step}", lambda p: p.grad)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    compare("parameter", lambda p: p)
    assert len(errors) == 2 * (2 * 8 + 1) + 8
    return errors


def copy_whole(model: Model) -> Model:
    """A stand-in that has plain tensors where a framework has put its own."""
    stand_in = nn.Module()
    for name in ("first", "last"):
        linear = nn.Linear(H, H)
        linear.load_state_dict({n: value(p) for n, p in getattr(model, name).named_parameters()})
        setattr(stand_in, name, linear)
    stand_in.moe = nn.Module()
    stand_in.moe.router = nn.Module()
    stand_in.moe.router.weight = nn.Parameter(value(model.moe.router.weight))
    return stand_in  # type: ignore[return-value]


def train_under_ddp(microbatches: int) -> dict[str, float]:
    mesh = mesh_of_two_by_two("dp", "ep")
    model = Model(mesh["ep"].get_group())
    moonep_nn.exclude_experts_from_ddp(model)
    wrapped = DistributedDataParallel(model)
    finish = lambda: moonep_nn.sum_expert_grads(model, mesh["dp"].get_group(), divide_by=4)  # noqa: E731
    return take_steps(model, wrapped, mesh, finish, False, wrapped.no_sync if microbatches == 2 else None)


def train_under_fsdp(layout: str) -> dict[str, float]:
    mesh = mesh_of_two_by_two("dp", "ep")
    model = Model(mesh["ep"].get_group())
    over = {"all": init_device_mesh("cpu", (4,)), "replicated over dp, sharded over ep": mesh}[layout]
    experts = set(expert_parameters(model))
    fully_shard(model.first, mesh=over)
    fully_shard(model, mesh=over, ignored_params=experts)
    assert all(isinstance(p, DTensor) != (p in experts) for p in model.parameters())
    finish = lambda: moonep_nn.sum_expert_grads(model, mesh["dp"].get_group(), divide_by=4)  # noqa: E731
    return take_steps(model, model, mesh, finish, separate=True)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_ddp_over_the_world_and_experts_over_dp_equal_dense_training(ranks, microbatches):
    for errors in ranks(4).run(train_under_ddp, microbatches):
        assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("layout", ["all", "replicated over dp, sharded over ep"])
def test_fsdp_of_all_but_the_experts_equals_dense_training(ranks, layout):
    for errors in ranks(4).run(train_under_fsdp, layout):
        assert max(errors.values()) < TOLERANCE, errors


LAYOUTS = ("dp x ep, FSDP2", "ep alone")


def make_trained(layout: str, seed: int) -> tuple[Model, torch.optim.Optimizer]:
    """A model after a step, and its optimizer. Experts are spread over two ranks, beside FSDP2, or over all four."""
    mesh, fsdp = mesh_of_two_by_two("dp", "ep"), layout == LAYOUTS[0]
    model = Model(mesh["ep"].get_group() if fsdp else None, seed=seed)
    own = expert_parameters(model)
    if fsdp:
        fully_shard(model, mesh=mesh, ignored_params=set(own))
    groups: list[Any] = [{"params": [p for p in model.parameters() if (p in own) == kind]} for kind in (False, True)]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    model(batch(seed)[dist.get_rank()]).square().sum().backward()
    if fsdp:
        moonep_nn.sum_expert_grads(model, mesh["dp"].get_group())
    else:
        for p in model.parameters():
            if p not in own:
                dist.all_reduce(p.grad)
    optimizer.step()
    return model, optimizer


def gather(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and optimizer state of all ranks together."""
    gathered, own = {}, expert_parameters(model)
    for name, p in model.named_parameters():
        for key, tensor in {"value": p, **optimizer.state[p]}.items():
            is_expert = p in own and tensor.shape == p.shape
            gathered[f"{name} {key}"] = whole(tensor, model.moe.pool.group) if is_expert else value(tensor)
    return gathered


def save_checkpoint(layout: str, path: Path) -> dict[str, Tensor]:
    model, optimizer = make_trained(layout, seed=1)
    dcp.save(sharded_state(model, optimizer), checkpoint_id=path)
    return gather(model, optimizer)


def load_checkpoint(layout: str, path: Path) -> dict[str, Tensor]:
    model, optimizer = make_trained(layout, seed=2)
    dcp.load(sharded_state(model, optimizer), checkpoint_id=path)
    return gather(model, optimizer)


@pytest.mark.parametrize(("saved", "loaded"), [LAYOUTS, LAYOUTS[::-1]])
def test_checkpoints_go_from_data_parallelism_to_experts_over_all_ranks_and_back(ranks, tmp_path, saved, loaded):
    want = ranks(4).run(save_checkpoint, saved, tmp_path)[0]
    assert want["moe.experts.gate exp_avg"].shape == (E, H, F) and want["first.weight exp_avg"].shape == (H, H)
    for got in ranks(4).run(load_checkpoint, loaded, tmp_path):
        assert got.keys() == want.keys()
        assert [name for name in want if not torch.equal(got[name], want[name])] == []


class ShardedExperts(nn.Module):
    """Experts whose parameters a framework owns, between a router and the tokens' output.

    Args:
        ep: the EP group.
        weights: {projection: [L, ...]} of this rank's own experts.
    """

    def __init__(self, ep: dist.ProcessGroup, weights: dict[str, Tensor], router: Tensor):
        super().__init__()
        self.router = nn.Parameter(router.clone())
        self.weights = nn.ParameterDict({name: nn.Parameter(w.clone()) for name, w in weights.items()})
        buffer = moonep.Buffer(S, H, K, E, dist.get_world_size(ep), token_padding=8, dtype=torch.float32, group=ep)
        self.pool = moonep.ExpertPool(SHAPES, E=E, dtype=torch.float32, group=ep, grads=True)
        self.routed = RoutedExperts(buffer, self.pool)

    def forward(self, x: Tensor) -> Tensor:
        weights = {
            name: w.full_tensor(grad_placements=[Partial()]) if isinstance(w, DTensor) else w
            for name, w in self.weights.items()
        }
        scores, ids = (x @ self.router.t()).softmax(-1).topk(K)
        return self.routed(x, scores, ids, anchor=functional.load(self.pool, weights)).output


def run_sharded_experts(owner: str) -> dict[str, float]:
    """Two steps in which each EP group's experts are sharded over dp. -> relative errors against dense training"""
    mesh, rank = mesh_of_two_by_two("dp", "ep"), dist.get_rank()
    ep, dp = mesh["ep"].get_local_rank(), mesh["dp"]
    generator = torch.Generator().manual_seed(0)
    experts = {name: torch.randn(E, *shape, generator=generator) / 4 for name, shape in SHAPES.items()}
    router = torch.randn(E, H, generator=generator)
    mine = slice(ep * E // 2, (ep + 1) * E // 2)
    layer = ShardedExperts(mesh["ep"].get_group(), {n: w[mine] for n, w in experts.items()}, router)
    if owner == "FSDP2":
        # The mean over dp, of this EP group's sums: half of what a mean over all ranks is not divided by yet.
        fully_shard(layer, mesh=dp, ignored_params={layer.router}, shard_placement_fn=lambda _: Shard(1))
    elif owner == "DTensor":
        for name, w in layer.weights.items():
            layer.weights[name] = nn.Parameter(distribute_tensor(w.detach(), dp, [Shard(1)]))
    dense = nn.ParameterDict({**{n: nn.Parameter(w) for n, w in experts.items()}, "router": nn.Parameter(router)})
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.01, foreach=False) for module in (layer, dense)]
    errors: dict[str, float] = {}
    divide_by = 2 if owner == "FSDP2" else 4
    for step in range(2):
        for half in range(2):  # two microbatches: gradients accumulate in the framework's parameters
            xs = batch(10 * step + half)
            (layer(xs[rank]).square().mean() / 2).backward()
            x = torch.cat(xs)
            scores, ids = (x @ dense["router"].t()).softmax(-1).topk(K)
            (dense_moe(x, ids, scores, *(dense[n] for n in PROJECTIONS)).square().mean() / 2).backward()
        dist.all_reduce(layer.router.grad)
        layer.router.grad /= 4
        for name, w in layer.weights.items():
            w.grad /= divide_by
            got, want = value(w.grad), dense[name].grad[mine]
            assert isinstance(w.grad, DTensor) and w.grad.to_local().numel() * 2 == got.numel(), "sharded over dp"
            assert not layer.pool.local_grad[name].any(), "handed over"
            errors[f"gradient {step} {name}"] = relative(got, want)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, w in layer.weights.items():
        errors[name] = relative(value(w), dense[name].detach()[mine])
        state = optimizers[0].state[w]
        assert state["exp_avg"].to_local().numel() == E // 2 * H * F // 2, "optimizer state is sharded"
    return errors


@pytest.mark.parametrize("owner", ["DTensor", "FSDP2"])
def test_experts_that_a_framework_shards_over_dp_equal_dense_training(ranks, owner):
    for errors in ranks(4).run(run_sharded_experts, owner):
        assert max(errors.values()) < TOLERANCE, errors


def load_what_does_not_fit() -> list[str]:
    weights = {name: torch.zeros(E, *shape) for name, shape in SHAPES.items()}
    messages = []
    for options, given in (
        ({"grads": True, "master": True}, weights),
        ({}, weights),
        ({"grads": True}, {"up": weights["up"]}),
    ):
        pool = moonep.ExpertPool(SHAPES, E=E, dtype=torch.float32, **options)
        with pytest.raises(ValueError) as error:
            functional.load(pool, given)
        messages.append(str(error.value))
    return messages


def test_a_pool_that_cannot_take_a_framework_s_weights_says_so(ranks):
    (messages,) = ranks(1).run(load_what_does_not_fit)
    assert messages == [
        "pool: given one with master=True, expected one with grads=True and master=False",
        "pool: given one with grads=False, expected one with grads=True and master=False",
        "weights: given ['up'], expected all of ['gate', 'up', 'down']",
    ]


def run_compiled_load() -> list[str]:
    """A framework's weights in a compiled layer. -> whose gradients differ from eager ones"""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(E // 2, *shape, generator=generator) for name, shape in SHAPES.items()}
    layer, grads = ShardedExperts(dist.group.WORLD, weights, torch.randn(E, H, generator=generator)), []
    for call in (layer, torch.compile(layer, backend="aot_eager")):
        layer.zero_grad()
        for seed in range(2):
            call(batch(seed)[dist.get_rank()]).sum().backward()
        grads.append({name: p.grad for name, p in layer.named_parameters()})
    assert all(g.any() for g in grads[0].values())
    return [name for name, g in grads[0].items() if not torch.equal(g, grads[1][name])]


def test_a_framework_s_weights_have_the_same_gradients_when_the_layer_is_compiled(ranks):
    assert ranks(2).run(run_compiled_load) == [[], []]


def run_frozen_weights() -> tuple[list[bool], bool]:
    """Weights are frozen for a step, then some are not. -> who has a gradient, and whether it is that of one step"""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(E // 2, *shape, generator=generator) for name, shape in SHAPES.items()}
    layer = ShardedExperts(dist.group.WORLD, weights, torch.randn(E, H, generator=generator))
    x, grads = batch(1)[dist.get_rank()], []
    for trained in ((), ("up", "down"), PROJECTIONS):
        for name, w in layer.weights.items():
            w.requires_grad_(name in trained)
            w.grad = None
        layer(x).sum().backward()
        grads.append({name: w.grad for name, w in layer.weights.items()})
    return [grads[1][n] is not None for n in PROJECTIONS], torch.equal(grads[1]["up"], grads[2]["up"])


def test_gradients_of_frozen_weights_are_dropped(ranks):
    assert ranks(2).run(run_frozen_weights) == [([False, True, True], True)] * 2


def wrap_in_ddp(kind: str) -> list[str]:
    """A model in DistributedDataParallel. -> what its first steps say"""
    model: nn.Module = Model(save="tokens")
    if kind == "the layer itself":
        model = model.moe
    elif kind == "experts left out":
        model._ddp_params_and_buffers_to_ignore = ["first.bias"]
        moonep_nn.exclude_experts_from_ddp(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    call: Any = DistributedDataParallel(model)
    if kind == "compiled":
        call = torch.compile(call, backend="eager")
    said = []
    for _ in range(2):
        try:
            call(batch(0)[dist.get_rank()]).sum().backward()
            said.append("fine")
        except ValueError as error:
            said.append(str(error))
    if said[-1] == "fine":
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    if kind == "experts left out":
        assert "first.bias" in call.parameters_to_ignore, "what was left out before stays left out"
        assert "moe.load" in call.parameters_to_ignore
    return said


@pytest.mark.parametrize("kind", ["model", "compiled"])
def test_ddp_over_experts_is_refused(ranks, kind):
    for said in ranks(2).run(wrap_in_ddp, kind):
        for message in said:
            assert message.startswith("model: given DistributedDataParallel over experts")
            assert "exclude_experts_from_ddp(model)" in message


@pytest.mark.parametrize("kind", ["the layer itself", "experts left out"])
def test_ddp_leaves_out_the_experts_of_a_layer_and_of_a_model_that_says_so(ranks, kind):
    assert ranks(2).run(wrap_in_ddp, kind) == [["fine", "fine"]] * 2


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copying_a_layer_says_what_to_do_instead(copied):
    model = Model(backend="cpu")
    for thing in (model, model.moe, model.moe.pool, model.moe.buffer, model.moe.routed):
        if thing is model and copied is copy.copy:
            continue  # shares everything with the original
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.*load_state_dict.*moonep\.nn\.sharded_state"):
            copied(thing)
    torch.optim.swa_utils.AveragedModel(model.first)  # all else can be copied as before


class Block(nn.Module):
    """Norms and a linear layer around a layer of experts."""

    def __init__(self, **options: Any):
        super().__init__()
        self.norm, self.model = nn.RMSNorm(H), Model(**options)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.model(self.norm(x)))


def save_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._grouped_mm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "not": {},
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": lambda: create_selective_checkpoint_contexts(save_products),
    },
}


def run_checkpointed_blocks(save: str, sizes: tuple[int, int]) -> dict[str, list[str]]:
    """Two blocks that share a Buffer, checkpointed in every way. -> what differs from not at all"""
    blocks = nn.ModuleList([Block(save=save), Block(save=save)])
    x, want, different = batch(0)[dist.get_rank()][: sizes[dist.get_rank()]], {}, {}
    for kind, options in CHECKPOINTS.items():
        blocks.zero_grad()
        h = x.clone().requires_grad_()
        start = h
        for block in blocks:
            h = checkpoint(block, h, **options) if options else block(h)
        h.square().sum().backward()
        got = {"input": start.grad, **{name: p.grad.clone() for name, p in blocks.named_parameters()}}
        want = want or got
        assert got.keys() == want.keys() and all(g.any() for name, g in got.items() if len(x) or "experts" in name)
        different[kind] = [name for name in want if not torch.equal(got[name], want[name])]
    return different


@pytest.mark.parametrize("sizes", [(S, S), (0, S)], ids=["equal", "one rank without tokens"])
@pytest.mark.parametrize("save", ["rows", "inputs", "tokens"])
def test_checkpointed_blocks_have_the_same_gradients_to_the_last_bit(ranks, save, sizes):
    for different in ranks(2).run(run_checkpointed_blocks, save, sizes):
        assert different == {kind: [] for kind in CHECKPOINTS}


def test_selective_checkpoints_save_the_products_of_experts():
    saved = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = save_products(context, op)
        if kept == CheckpointPolicy.MUST_SAVE and not context.is_recompute:
            saved.append(op)
        return kept

    block = Block(backend="cpu")
    contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    checkpoint(block, torch.ones(3, H), use_reentrant=False, context_fn=contexts).sum().backward()
    assert len(saved) >= 2 + 1 + 3, "linear layers, router, experts"


class Stage(nn.Module):
    """Two layers of experts; each microbatch in flight has its own slots."""

    def __init__(self, seed: int, group: dist.ProcessGroup | None, slot_sets: int):
        super().__init__()
        self.models = nn.ModuleList([Model(group, seed=seed + i, slot_sets=slot_sets) for i in range(2)])
        self.slot_sets = itertools.cycle(range(slot_sets))

    def forward(self, x: Tensor) -> Tensor:
        slot_set = next(self.slot_sets)
        for model in self.models:
            model.moe.slot_set = slot_set
            x = x + model(x)
        return x


MICROBATCHES = 4


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def run_pipeline(name: str, slot_sets: int, infer_shapes: bool) -> tuple[list[str], list[bool]]:
    """A pipeline over two ranks, and the same model in one piece, whole microbatch after whole microbatch.

    -> what differs to the last bit; which losses are equal.
    """
    schedule_class = getattr(schedules, name)
    mesh = mesh_of_two_by_two("pp", "ep")
    ep, pp, mine = mesh["ep"].get_group(), mesh["pp"].get_group(), mesh["pp"].get_local_rank()
    xs, targets = (batch(seed, MICROBATCHES * S)[dist.get_rank(ep)] for seed in (0, 1))
    several = issubclass(schedule_class, schedules.PipelineScheduleMulti)
    num_stages = 4 if several else 2
    stages = {i: Stage(10 * i, ep, slot_sets) for i in range(mine, num_stages, 2)}
    one = torch.empty(S, H, requires_grad=True)
    placed = []
    for i, stage in stages.items():
        example = {} if infer_shapes else {"input_args": (one if i else one.detach(),), "output_args": one}
        placed.append(PipelineStage(stage, i, num_stages, torch.device("cpu"), group=pp, **example))
    options = {"loss_fn": squares, "scale_grads": False}
    schedule = schedule_class(placed if several else placed[0], MICROBATCHES, **options)
    losses: list[Tensor] = []
    for _ in range(1 + infer_shapes):  # the first step infers shapes by a backward of its own, which experts count
        for stage in stages.values():
            stage.zero_grad()
        losses.clear()
        if mine == 0:
            schedule.step(xs)
        else:
            schedule.step(target=targets, losses=losses)

    model = nn.Sequential(*(Stage(10 * i, ep, 1) for i in range(num_stages)))
    want = []
    for x, target in zip(xs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
        want.append(squares(model(x), target))
        want[-1].backward()
    different = []
    for i, stage in stages.items():
        got = dict(stage.named_parameters())
        assert all(p.grad.any() for p in got.values())
        different += [f"{i} {n}" for n, p in model[i].named_parameters() if not torch.equal(p.grad, got[n].grad)]
    return different, [torch.equal(a, b) for a, b in zip(losses, want, strict=mine == 1)]


@pytest.mark.parametrize(
    ("name", "slot_sets", "infer_shapes"),
    [
        ("Schedule1F1B", 2, False),
        ("Schedule1F1B", 1, True),
        ("ScheduleInterleaved1F1B", 2, False),
        ("ScheduleInterleavedZeroBubble", 1, False),
    ],
)
def test_a_pipeline_has_the_gradients_of_the_model_in_one_piece(ranks, name, slot_sets, infer_shapes):
    for rank, (different, losses) in enumerate(ranks(4).run(run_pipeline, name, slot_sets, infer_shapes)):
        assert not different
        assert losses == ([True] * MICROBATCHES if rank >= 2 else [])


def run_accumulation() -> dict[str, float]:
    """Four microbatches, and all of their tokens at once. -> relative errors"""
    model, grads = Model(max_tokens=4 * S), []
    x = batch(3, 4 * S)[dist.get_rank()]
    for pieces in (1, 4):
        model.zero_grad(set_to_none=pieces == 1)
        for piece in x.chunk(pieces):
            model(piece).square().sum().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return {name: relative(grads[1][name], grads[0][name]) for name in grads[0]}


def test_microbatches_accumulate_to_the_gradients_of_one_batch(ranks):
    for errors in ranks(2).run(run_accumulation):
        assert max(errors.values()) < TOLERANCE, errors


class Engine:
    """What an inference engine has of a layer: weights that come from outside, and no gradients."""

    def __init__(self, group: dist.ProcessGroup, B: int, dtype: torch.dtype = torch.float32):
        sizes = {"num_ep_ranks": dist.get_world_size(group), "token_padding": 8, "B": B, "dtype": dtype}
        self.buffer = moonep.Buffer(S, H, K, E, group=group, **sizes)
        self.pool = moonep.ExpertPool(SHAPES, E=E, B=B, dtype=dtype, group=group)
        self.routed = RoutedExperts(self.buffer, self.pool)

    def own(self, experts: Tensor) -> Tensor:
        """[E, ...] -> [L, ...]"""
        return experts.chunk(self.pool.R)[self.pool.rank]

    @torch.no_grad()
    def again(self, x: Tensor, route: Tensor, plan: moonep.Plan) -> Tensor:
        """Another batch with the routing of an earlier one, planned before."""
        rows, weights, _, _ = self.buffer.dispatch(x, route, plan=plan)
        self.buffer.prefetch(plan, self.pool)
        return self.buffer.combine(plan, moonep_nn.experts(self.pool, plan, rows, weights))[0]


def sync_from_outside(B: int) -> dict[str, float]:
    """Generate, take new weights (of some projections, of some ranks), generate. -> relative errors"""
    rank, generator = dist.get_rank(), torch.Generator().manual_seed(0)
    engine = Engine(dist.group.WORLD, B)
    weights = {name: torch.zeros(E, *shape) for name, shape in SHAPES.items()}
    x, bias = batch(0)[rank], torch.linspace(4, 0, E)
    scores, ids = (torch.randn(S, E, generator=generator) + bias).softmax(-1).topk(K)
    errors, plan = {}, None
    for generation, (names, loading) in enumerate(
        [(PROJECTIONS, (0, 1)), (PROJECTIONS, (0, 1)), (("up",), (0, 1)), (("down", "gate"), (0,)), ((), ())]
    ):
        for name in names:
            new = torch.randn(E, *SHAPES[name], generator=generator) / 4
            for r in loading:
                half = slice(r * E // 2, (r + 1) * E // 2)
                weights[name][half] = new[half]
        if rank in loading:
            engine.pool.load_local({name: engine.own(weights[name]) for name in names})
        want = dense_moe(x, ids, scores, *(weights[n] for n in PROJECTIONS))
        if plan is not None:
            errors[f"old plan {generation}"] = relative(engine.again(x, scores, plan), want)
        with torch.inference_mode():
            errors[f"new plan {generation}"] = relative(engine.routed(x, scores, ids).output, want)
        plan = plan or engine.routed.plan
        engine.again(x, scores, plan)  # so that the slots hold this plan's weights when new ones arrive
        copies = max(engine.routed.plan.stats().host()["redundant_experts"])
        assert copies > B % (E // 2), "some, or more than there are slots"
    return errors


@pytest.mark.parametrize("B", [E // 2, 1])
def test_the_next_forward_has_the_weights_that_came_from_outside_on_all_ranks(ranks, B):
    for errors in ranks(2).run(sync_from_outside, B):
        assert len(errors) == 9 and max(errors.values()) < TOLERANCE, errors


def sync_from_trainer(dtype: torch.dtype) -> dict[str, float]:
    """A trainer on four ranks and engines on two each; weights travel after every step. -> relative errors"""
    rank = dist.get_rank()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    mesh = mesh_of_two_by_two("engine", "ep")
    engine, errors = Engine(mesh["ep"].get_group(), 1, dtype), {}
    for step in range(3):
        for name in PROJECTIONS:  # one at a time: no more than one projection of all experts is in memory
            experts = sharded_state(model)["model"][f"moe.experts.{name}"].full_tensor()
            assert experts.shape == (E, *SHAPES[name])
            engine.pool.load_local({name: engine.own(experts)})
            want = whole(model.moe.experts[name]).to(dtype)
            got = whole(engine.pool.local[name], mesh["ep"].get_group())
            errors[f"{name} {step}"] = relative(got.float(), want.float())
        x = batch(step)[rank]
        with torch.no_grad():
            ids, route, _ = model.moe.router(x)
            output = engine.routed(x.to(dtype), route, ids).output
            errors[f"output {step}"] = relative(output.float(), model.moe(x)) / (1 if dtype == torch.float32 else 1000)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trainer_s_experts_go_to_engines_with_another_number_of_ranks(ranks, dtype):
    for errors in ranks(4).run(sync_from_trainer, dtype):
        assert max(errors.values()) < TOLERANCE, errors


def train_with(optimizer_options: dict[str, Any], set_to_none: bool, scale: float) -> dict[str, Any]:
    """Three steps with a gradient scaler. -> parameters; elements of optimizer state by parameter"""
    model = Model(ffn=DENSE_F)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **optimizer_options)
    scaler: Any = ShardedGradScaler("cpu", init_scale=scale, process_group=dist.group.WORLD)
    if optimizer_options.get("fused"):  # which torch 2.13 does not take together with the sharded one on a CPU
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    own = expert_parameters(model)
    for step in range(3):
        loss = model(batch(step)[dist.get_rank()]).square().sum()
        scaler.scale(loss).backward()
        for p in model.parameters():
            if p not in own:
                dist.all_reduce(p.grad)
        scaler.unscale_(optimizer)
        clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=set_to_none)
    sizes = {name: optimizer.state[p]["exp_avg"].numel() for name, p in model.named_parameters()}
    return {"sizes": sizes, **{name: p.detach() for name, p in model.named_parameters()}}


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_optimizers_gradient_scaler_and_zeroing_agree_and_keep_state_of_own_experts(ranks, options, set_to_none):
    want = ranks(2).run(train_with, {"foreach": False}, True, 1.0)
    for expected, got in zip(want, ranks(2).run(train_with, options, set_to_none, 256.0), strict=True):
        sizes = got.pop("sizes")
        assert all(sizes[f"moe.experts.{name}"] == E // 2 * H * DENSE_F for name in PROJECTIONS)
        assert sum(sizes.values()) == sum(p.numel() for p in got.values())
        for name, p in got.items():
            assert relative(p, expected[name]) < TOLERANCE, name


def overflow_on_one_rank() -> tuple[bool, float]:
    """One rank's experts have an infinite gradient. -> whether this rank's parameters stay, and the scale"""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = ShardedGradScaler("cpu", init_scale=256.0, process_group=dist.group.WORLD)
    scaler.scale(model(batch(0)[dist.get_rank()]).square().sum()).backward()
    if dist.get_rank() == 1:
        model.moe.experts["up"].grad[0, 0, 0] = float("inf")
    before = [p.detach().clone() for p in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    return all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), scaler.get_scale()


def test_an_overflow_in_one_rank_s_experts_skips_the_step_of_all(ranks):
    assert ranks(2).run(overflow_on_one_rank) == [(True, 128.0)] * 2


def step_over_padding(dtype: torch.dtype, group_of_its_own: bool) -> tuple[bool, str, bool]:
    """A fused optimizer over experts with padding between them. -> whether there is, what it says, parameters stay"""
    model = Model(dtype=dtype)
    own = expert_parameters(model)
    rest = [p for p in model.parameters() if p not in own]
    fused = torch.optim.AdamW([{"params": list(own), "fused": not group_of_its_own}, {"params": rest, "fused": True}])
    model(batch(0)[dist.get_rank()]).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    said = ""
    try:
        fused.step()
    except ValueError as error:
        said = str(error)
    stay = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    return any(not p.grad.is_contiguous() for p in own), said, any(stay)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_optimizer_over_padded_experts_is_refused_before_it_steps(ranks, dtype):
    for padded, said, stay in ranks(2).run(step_over_padding, dtype, False):
        assert padded and stay
        assert said.startswith("optimizer: given fused=True, expected foreach=True or neither")
    for padded, said, stay in ranks(2).run(step_over_padding, dtype, True):
        assert padded and not said and not stay, "with fused=False for experts alone"


def replace_experts(how: str) -> str:
    """-> what the layer says when its experts are not its own any more"""
    model = Model(ffn=DENSE_F)  # FSDP2 itself refuses parameters with padding
    if how == "fully_shard":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    elif how == "assign":
        model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()}, assign=True)
    try:
        if how == "to":
            model.to(torch.bfloat16)
        elif how == "to_empty":
            model.to_empty(device="cpu")
        model(batch(0)[dist.get_rank()])
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("fully_shard", "experts.gate: given .* ignored_params=set"),
        ("assign", "experts.gate: given .* load_state_dict no assign=True"),
        ("to", "to: given bfloat16 on cpu, expected the float32 on cpu"),
        ("to_empty", "to: given float32 on cpu, expected the float32 on cpu that .* in memory of the layer"),
    ],
)
def test_a_layer_whose_parameters_were_replaced_says_so_instead_of_training_nothing(ranks, how, says):
    for said in ranks(2).run(replace_experts, how):
        assert re.match(says, said), said


def test_conversions_that_change_nothing_are_fine():
    model = Model(backend="cpu").to("cpu").float().to(torch.float32)
    model(torch.randn(3, H)).sum().backward()
    assert all(p.grad.any() for p in model.parameters())
