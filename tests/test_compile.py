"""Compiled models with MoE layers equal eager ones, bit for bit where the same kernels run, without a graph break.

Backend "aot_eager" traces forward and backward into graphs and runs them with eager kernels: nothing may differ, router
included. "inductor" fuses the router, so its results are compared within rounding.
"""

from __future__ import annotations

import gc
import itertools
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import Tensor, library, nn
from torch._dynamo.backends.common import aot_autograd
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import moonep
import moonep.plan
from moonep.nn import MoE, RoutedExperts, experts, functional, operators

H, F, L, K, S = 32, 16, 4, 2, 33
PLAIN = {"dtype": torch.float32}
ALL_PARTS = {"dtype": torch.bfloat16, "save": "tokens", "shared_ffn": 8, "router": "sigmoid"}
INDUCTOR_TOLERANCE = 1e-5  # of the largest value: fp32, sums of about a hundred terms in another order


def make_layer(seed: int, backend: str = "cpu", **options: Any) -> MoE:
    """A layer whose router is skewed enough for redundant experts."""
    E = L * (dist.get_world_size() if dist.is_initialized() else 1)
    options = {"max_tokens": S, "dtype": torch.float32, "token_padding": 8, **options}
    layer = MoE(H, F, E, K, seed=seed, backend=backend, **options)
    with torch.no_grad():
        layer.router.weight.mul_(40)
    return layer


def make_tokens(seed: int, s: int = S) -> Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(s, H, generator=torch.Generator().manual_seed(100 * seed + rank))


def compiled(model: Any, backend: Any = "aot_eager") -> Any:
    return torch.compile(model, fullgraph=True, backend=backend)


def clear_grads(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def take_step(call: Callable[[Tensor], Tensor], model: nn.Sequential, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Forward and backward of a stack of layers. -> all that comes of it"""
    clear_grads(model)
    x = x.clone().requires_grad_()
    for layer in model:
        layer.load.zero_()
    y = call(x)
    torch.autograd.backward([y, *(layer.aux_loss for layer in model)], [grad, *(torch.ones(()) for _ in model)])
    seen = {"y": y.detach(), "dx": x.grad, **grads_of(model)}
    for i, layer in enumerate(model):
        seen |= {f"dst {i}": layer.plan.dst.clone(), f"load {i}": layer.load.clone()}
    return seen


def differences(want: dict[str, Tensor], got: dict[str, Tensor]) -> list[str]:
    """Names of what is not the same to the last bit."""
    assert want.keys() == got.keys()
    return [name for name in want if not torch.equal(want[name], got[name])]


def run_two_layers(options: dict[str, Any]) -> tuple[list[str], int]:
    """Two layers that share a Buffer, compiled and eager. -> what differs, redundant experts"""
    model = nn.Sequential(*(make_layer(seed, **options) for seed in (3, 4)))
    assert model[0].buffer is model[1].buffer
    x, grad = make_tokens(5), make_tokens(6)
    want = take_step(model, model, x, grad)
    redundant = sum(sum(layer.plan.stats().host()["redundant_experts"]) for layer in model)
    return differences(want, take_step(compiled(model), model, x, grad)), redundant


@pytest.mark.parametrize("options", [PLAIN, ALL_PARTS], ids=["rows-fp32", "tokens-bf16-shared"])
@pytest.mark.parametrize("R", [1, 2])
def test_compiled_layers_equal_eager_ones_in_output_and_all_gradients(ranks, R, options):
    for different, redundant in ranks(R).run(run_two_layers, options):
        assert not different
        assert redundant > 0 or R == 1, "nothing was redundant"


def run_interleaved(slot_sets: int) -> list[str]:
    """Two microbatches whose forwards both precede the backwards."""
    layer = make_layer(3, slot_sets=slot_sets)

    def run(call: Any) -> dict[str, Tensor]:
        clear_grads(layer)
        outputs = []
        for i in range(2):
            layer.slot_set = i % slot_sets
            outputs.append(call(make_tokens(i)))
        for i, y in enumerate(outputs):
            y.backward(make_tokens(7 + i))
        return grads_of(layer)

    return differences(run(layer), run(compiled(layer)))


@pytest.mark.parametrize("slot_sets", [1, 2])
def test_microbatches_in_flight_give_the_gradients_of_eager_ones(ranks, slot_sets):
    assert ranks(2).run(run_interleaved, slot_sets) == [[], []]


def run_training(dtype: torch.dtype) -> list[str]:
    """Three optimizer steps, eager and compiled, from the same weights. -> what differs at the end"""

    def train(wrap: Any) -> dict[str, Tensor]:
        layer = make_layer(3, dtype=dtype)
        call, optimizer = wrap(layer), torch.optim.AdamW(layer.parameters(), lr=1e-2)
        for i in range(3):
            call(make_tokens(i)).square().mean().backward()
            dist.all_reduce(layer.router.weight.grad)
            optimizer.step()
            optimizer.zero_grad()
            layer.update_bias()
        last = call(make_tokens(3)).detach()
        return {"y": last, "bias": layer.router.bias, **{n: p.detach() for n, p in layer.named_parameters()}}

    return differences(train(lambda layer: layer), train(compiled))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_training_steps_end_at_the_same_weights(ranks, dtype):
    assert ranks(2).run(run_training, dtype) == [[], []]


def run_frozen_inputs() -> tuple[list[str], bool]:
    layer = make_layer(3)
    layer.router.requires_grad_(False)
    grad = make_tokens(6)
    layer(make_tokens(5)).backward(grad)
    want = grads_of(layer)
    clear_grads(layer)
    compiled(layer)(make_tokens(5)).backward(grad)
    return differences(want, grads_of(layer)), all(bool(g.abs().sum() > 0) for g in want.values())


def test_backward_runs_when_only_the_experts_are_trained(ranks):
    assert ranks(2).run(run_frozen_inputs) == [([], True), ([], True)]


def run_ragged() -> list[str]:
    """Another number of tokens on each rank, in each call, also none."""
    model = nn.Sequential(make_layer(3))
    call, rank = compiled(model), dist.get_rank()
    different = []
    for i, s in enumerate([(33, 20), (0, 33), (7, 7), (1, 0)]):
        x, grad = make_tokens(i, s[rank]), make_tokens(9 + i, s[rank])
        different += differences(take_step(model, model, x, grad), take_step(call, model, x, grad))
    return different


def test_ranks_may_bring_different_numbers_of_tokens_and_change_them(ranks):
    assert ranks(2).run(run_ragged) == [[], []]


def run_checkpoint() -> dict[str, list[str]]:
    """Recompute a layer's forward in backward: around a compiled layer, and in a compiled model."""
    first, second = make_layer(3), make_layer(4)
    model = nn.Sequential(first, second)

    def run(call: Any) -> dict[str, Tensor]:
        clear_grads(model)
        x = make_tokens(5).requires_grad_()
        call(x).backward(make_tokens(6))
        return {"dx": x.grad, **grads_of(model)}

    want, call = run(model), compiled(first)
    found = {
        f"around, reentrant {reentrant}": differences(
            want, run(lambda x, reentrant=reentrant: second(checkpoint(call, x, use_reentrant=reentrant)))
        )
        for reentrant in (False, True)
    }
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        inside = compiled(lambda x: second(checkpoint(first, x, use_reentrant=False)))
        found["inside"] = differences(want, run(inside))
        blocks = [compiled(lambda x, layer=layer: checkpoint(layer, x, use_reentrant=False)) for layer in model]
        found["inside, a graph a layer"] = differences(want, run(lambda x: blocks[1](blocks[0](x))))
    return found


def test_activation_checkpointing_gives_the_same_gradients(ranks):
    for found in ranks(2).run(run_checkpoint):
        assert not any(found.values()), found


def give_bad_input(kind: str) -> tuple[str, str]:
    """Rank 1 gives a compiled layer what it cannot take. -> error and message of this rank"""
    layer = make_layer(3, timeout_s=30.0)
    x = torch.randn(4, H)
    if dist.get_rank() == 1:
        x = {"width": torch.randn(4, H + 1), "tokens": torch.randn(S + 1, H)}[kind]
    try:
        compiled(layer)(x)
        return "", ""
    except (ValueError, moonep.PeerError) as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(
    ("kind", "expected"), [("width", "x: given [4, 33]"), ("tokens", "hidden_sh: given s = 34 tokens")]
)
def test_bad_input_of_one_rank_is_refused_on_all(ranks, kind, expected):
    (peer, text), (own, message) = ranks(2).run(give_bad_input, kind)
    assert own == "ValueError" and message.startswith(expected)
    assert peer == "PeerError" and expected in text


def test_a_model_is_one_graph():
    model = nn.Sequential(make_layer(3), make_layer(4, shared_ffn=8, save="tokens"))
    explained = torch._dynamo.explain(model)(make_tokens(5))
    assert (explained.graph_count, explained.graph_break_count) == (1, 0), explained.break_reasons


def test_layers_compiled_one_by_one_share_a_graph():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layers = [make_layer(seed) for seed in range(4)]
    h = make_tokens(5).requires_grad_()
    for layer in layers:
        h = compiled(layer, counter)(h)
    h.sum().backward()
    assert counter.frame_count == 1
    assert all(float(layer.experts["down"].grad.abs().sum()) > 0 for layer in layers)


def chained(graph: torch.fx.Graph, operator: Any) -> list[bool]:
    """For each call of an operator but the first: whether its first argument is a result of the call before it."""
    calls = graph.find_nodes(op="call_function", target=operator._opoverload)
    return [after.args[0].args[0] is before for before, after in itertools.pairwise(calls)]


def test_operators_depend_on_the_one_before_them_in_graphs_of_independent_layers():
    graphs: list[torch.fx.Graph] = []

    def keep(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    layers = nn.ModuleList(make_layer(seed) for seed in (3, 4, 5))
    model = compiled(lambda x: sum(layer(x) for layer in layers), aot_autograd(fw_compiler=keep))
    model(make_tokens(5)).sum().backward()
    forward, backward = graphs
    assert chained(forward, operators.routed_experts) == [True, True]
    assert chained(backward, operators.routed_experts_backward) == [True, True]


class Plans:
    """Watches the memory of all plans and rows that a Buffer makes."""

    def __init__(self, buffer: moonep.Buffer, monkeypatch: pytest.MonkeyPatch):
        self.storages: list[StorageWeakRef] = []
        dispatch = buffer.dispatch

        def watched(*args: Any, **kwargs: Any) -> Any:
            results = dispatch(*args, **kwargs)
            self.storages.append(StorageWeakRef(results[3].arrivals.untyped_storage()))
            return results

        monkeypatch.setattr(buffer, "dispatch", watched)

    def alive(self) -> int:
        gc.collect()
        return sum(not storage.expired() for storage in self.storages)


def test_plans_live_no_longer_than_what_needs_them(monkeypatch):
    layer = make_layer(3)
    plans, call = Plans(layer.buffer, monkeypatch), compiled(layer)
    last = 1  # layer.plan
    with torch.no_grad():
        for i in range(3):
            call(make_tokens(i))
    assert (len(plans.storages), plans.alive()) == (3, last), "no_grad"
    outputs = [call(make_tokens(i)) for i in range(3)]
    assert plans.alive() == 3, "three forwards wait for their backwards, the last one's plan is the layer's"
    outputs[0].sum().backward()
    outputs[0] = None
    assert plans.alive() == 2
    outputs.clear()
    assert plans.alive() == last, "forwards without backward"
    layer.eval()
    with torch.inference_mode():
        call(make_tokens(4))
    with pytest.raises(ValueError, match="hidden_sh"):
        call(make_tokens(5, S + 1))
    assert plans.alive() == last


def test_evaluation_between_training_steps_changes_nothing():
    model = nn.Sequential(make_layer(3))
    x, grad = make_tokens(5), make_tokens(6)
    want = take_step(model, model, x, grad)
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        for call in (compiled(model), compiled(lambda x: checkpoint(model, x, use_reentrant=False))):
            with torch.inference_mode():
                assert torch.equal(call(x), want["y"])
            assert not differences(want, take_step(call, model, x, grad))


def test_autocast_changes_compiled_layers_as_it_does_eager_ones():
    model = nn.Sequential(make_layer(3, shared_ffn=8))

    def under_autocast(call: Any) -> dict[str, Tensor]:
        clear_grads(model)
        x = make_tokens(5).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = call(x)
        y.backward(make_tokens(6))
        return {"y": y.detach(), "dx": x.grad, **grads_of(model)}

    with torch._functorch.config.patch(backward_pass_autocast="off"):
        assert not differences(under_autocast(model), under_autocast(compiled(model)))


class OwnRouter(nn.Module):
    """A user's model around `RoutedExperts`."""

    def __init__(self, routed: RoutedExperts):
        super().__init__()
        self.routed, self.score = routed, nn.Linear(H, L)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.score(x).softmax(-1).topk(K)
        output, load = self.routed(x, weights, ids)
        return x + output, load


def make_routed() -> RoutedExperts:
    pool = moonep.ExpertPool(
        {"gate": (H, F), "up": (H, F), "down": (F, H)}, E=L, dtype=torch.float32, grads=True, master=True, backend="cpu"
    )
    for parameter in pool.master.values():
        nn.init.normal_(parameter, std=0.2)
    return RoutedExperts(moonep.Buffer(S, H, K, L, 1, token_padding=8, dtype=torch.float32, backend="cpu"), pool)


def test_a_model_with_a_router_of_its_own_compiles():
    model = OwnRouter(make_routed())
    results = []
    for call in (model, compiled(model)):
        for parameter in (*model.parameters(), *model.routed.pool.master.values()):
            parameter.grad = None
        x = make_tokens(5).requires_grad_()
        y, load = call(x)
        y.backward(make_tokens(6))
        experts_grads = {n: p.grad.clone() for n, p in model.routed.pool.master.items()}
        results.append({"y": y.detach(), "load": load, "dx": x.grad, **grads_of(model), **experts_grads})
    assert int(results[0]["load"].sum()) == S * K
    assert not differences(*results)


# The compiler looks at .grad of tensors that it meets between graphs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_pieces_run_outside_of_graphs_with_equal_results():
    routed = make_routed()
    buffer, pool = routed.buffer, routed.pool

    def model(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        sent = functional.dispatch(buffer, x.sin(), weights, ids, pool)
        rows = experts(pool, sent.plan, sent.hidden, sent.route_weights)
        return functional.combine(buffer, sent.plan, rows, pool).cos()

    weights, ids = make_tokens(6).softmax(-1).topk(K)
    ids = ids % L
    results = []
    for call in (model, torch.compile(model, backend="aot_eager")):
        for parameter in pool.master.values():
            parameter.grad = None
        x = make_tokens(5).requires_grad_()
        y = call(x, weights, ids)
        y.backward(make_tokens(6))
        results.append({"y": y.detach(), "dx": x.grad, **{n: p.grad.clone() for n, p in pool.master.items()}})
    assert not differences(*results)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(model)(make_tokens(5), weights, ids)


@pytest.mark.parametrize("save", ["rows", "inputs", "tokens", "nothing"])
def test_operators_pass_opcheck(monkeypatch, save):
    """Without padding all rows are in use; with one key for all plans, equal calls return equal keys."""
    monkeypatch.setattr(moonep.plan, "_plan_ids", itertools.repeat(1))
    layer = make_layer(3, token_padding=1)
    routed, trained = layer.routed, save != "nothing"
    x, weights = make_tokens(5).requires_grad_(trained), torch.rand(S, K, requires_grad=trained)
    ids = torch.randint(L, (S, K), generator=torch.Generator().manual_seed(1))
    anchor = functional.make_anchor(torch.device("cpu")) if trained else None
    args = (operators.ORDER.last, routed._number, x, weights, ids, anchor, 0, save, routed._sizes)
    assert set(library.opcheck(operators.routed_experts, args).values()) == {"SUCCESS"}
    if not trained:
        return
    with torch.no_grad():
        _, *saved, key = operators.routed_experts(*args)
    saved, (_, plan) = saved[: operators.NUM_SAVED], saved[operators.NUM_SAVED :]
    saved = {"inputs": saved[:2], "tokens": [x.detach(), weights.detach()]}.get(save, saved)
    args = (key, routed._number, make_tokens(6), saved, plan, key, 0, save, K)
    assert set(library.opcheck(operators.routed_experts_backward, args).values()) == {"SUCCESS"}


def test_operators_keep_no_layer_alive_and_say_when_one_is_gone():
    routed = make_routed()
    number = routed._number
    with pytest.raises(ValueError, match=r"x: given \[33, 32\] float32 on cpu, expected nothing"):
        operators.refuse(number, "x", make_tokens(5), "nothing")
    del routed
    gc.collect()
    with pytest.raises(ValueError, match="layer: given one that is gone"):
        operators.refuse(number, "x", make_tokens(5), "nothing")


def test_routed_experts_refuse_what_does_not_go_together():
    buffer = moonep.Buffer(S, H, K, L, 1, token_padding=8, dtype=torch.float32, backend="cpu")

    def pool(**shapes: tuple[int, int]) -> moonep.ExpertPool:
        return moonep.ExpertPool(shapes, E=L, dtype=torch.float32, backend="cpu")

    with pytest.raises(ValueError, match=r"pool: given projections \['up'\]"):
        RoutedExperts(buffer, pool(up=(H, F)))
    with pytest.raises(ValueError, match=r"pool: given gate \[16, 8\], expected \[32, F\]"):
        RoutedExperts(buffer, pool(gate=(16, 8), up=(16, 8), down=(8, 16)))
    with pytest.raises(ValueError, match=r"pool: given gate \[32, 8\] and down \[16, 32\], expected gate \[H, F\]"):
        RoutedExperts(buffer, pool(gate=(H, 8), up=(H, 8), down=(16, H)))
    with pytest.raises(ValueError, match="pool: given E, B, ranks = 4, 2, 1, expected those of the Buffer: 4, 4, 1"):
        shapes = {"gate": (H, F), "up": (H, F), "down": (F, H)}
        RoutedExperts(buffer, moonep.ExpertPool(shapes, E=L, B=2, dtype=torch.float32, backend="cpu"))
    with pytest.raises(ValueError, match="save: given 'all', expected one of 'rows', 'inputs', 'tokens'"):
        make_routed()(make_tokens(5), torch.rand(S, K), torch.zeros(S, K, dtype=torch.int64), save="all")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(operation, pool) of every dispatch's prefetch and every reduction that is called from now on."""
    seen: list[tuple[str, int]] = []
    for name in ("prefetch", "reduce"):
        original = getattr(moonep.Buffer, name)

        def noted(
            self: Any, plan: Any, pool: Any, *args: Any, _do: Any = original, _name: str = name, **kw: Any
        ) -> Any:
            seen.append((_name, pool._id))
            return _do(self, plan, pool, *args, **kw)

        monkeypatch.setattr(moonep.Buffer, name, noted)
    return seen


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # inductor's own import
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler, which inductor needs on a CPU")
def test_inductor_is_eager_within_rounding_and_keeps_the_order_of_independent_layers(calls):
    layers = nn.ModuleList(make_layer(seed) for seed in (3, 4, 5))
    layers[1].router.requires_grad_(False)

    def model(x: Tensor) -> Tensor:
        return layers[0](x).sin() + 2 * layers[1](x.detach()) + layers[2](layers[0](x))

    results, orders = [], []
    for call in (model, compiled(model, "inductor")):
        clear_grads(layers)
        calls.clear()
        x = make_tokens(5).requires_grad_()
        y = call(x)
        y.backward(make_tokens(6))
        results.append({"y": y.detach(), "dx": x.grad, **grads_of(layers)})
        orders.append(list(calls))
    assert orders[0] == orders[1]
    assert results[0].keys() == results[1].keys()
    for name, want in results[0].items():
        error = float((results[1][name] - want).abs().max() / want.abs().max())
        assert error < INDUCTOR_TOLERANCE, name


def run_on_gpus(options: dict[str, Any], only_experts: bool) -> tuple[list[str], float]:
    """aot_eager against eager to the last bit, and inductor's relative error.

    only_experts: of the first layer nothing else is trained.
    """
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    model = nn.Sequential(*(make_layer(seed, "cuda", timeout_s=20.0, **options) for seed in (3, 4)))
    model[0].router.requires_grad_(not only_experts)
    x, grad = make_tokens(5).cuda(), make_tokens(6).cuda()

    def step(call: Any) -> dict[str, Tensor]:
        clear_grads(model)
        given = x.clone().requires_grad_(not only_experts)
        y = call(given)
        y.backward(grad)
        found = {"y": y.detach(), **grads_of(model)}
        return found if only_experts else {**found, "dx": given.grad}

    want = step(model)
    got = step(compiled(model))
    fused = step(compiled(model, "inductor"))
    model[0].buffer.check()
    norms = [float((fused[n] - t).float().norm() / t.float().norm().clamp(min=1e-9)) for n, t in want.items()]
    return differences(want, got), max(norms)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the cuda backend is not run here")
@pytest.mark.parametrize(
    ("save", "shared_ffn", "only_experts"), [("rows", 32, False), ("tokens", 32, False), ("rows", 0, True)]
)
def test_compiled_layers_equal_eager_ones_on_gpus(ranks, save, shared_ffn, only_experts):
    options = {"dtype": torch.bfloat16, "save": save, "shared_ffn": shared_ffn}
    for different, error in ranks(2).run(run_on_gpus, options, only_experts):
        assert not different
        assert error < 0.02, error
