"""moonep.nn equals a dense mixture of experts in one process: output and every gradient."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from outcomes import end_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import moonep
from moonep import nn as moonep_nn
from moonep.nn import MoE, Router, functional
from moonep.nn.experts import experts
from moonep.nn.grouped import add_weight_grad, grouped_mm
from moonep.testing import routing
from moonep.testing.dense import dense_moe

H, F_, L, K, S = 32, 16, 4, 2, 33
PROJECTIONS = ("gate", "up", "down")


def make_layer(seed: int, **options: Any) -> MoE:
    """A layer whose router is skewed enough for redundant experts."""
    E = L * dist.get_world_size()
    options = {"max_tokens": S, "dtype": torch.float32, "token_padding": 8, "seed": seed, **options}
    layer = MoE(H, F_, E, K, **options)
    with torch.no_grad():
        layer.router.weight.mul_(40)
    return layer


def make_batch(seed: int, ragged: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and output gradients of all ranks."""
    g = torch.Generator().manual_seed(seed)
    sizes = [max(S - 11 * r * ragged, 0) for r in range(dist.get_world_size())]
    return [torch.randn(s, H, generator=g) for s in sizes], [torch.randn(s, H, generator=g) for s in sizes]


def gather_experts(layer: MoE) -> dict[str, Tensor]:
    """All ranks' expert parameters, [E, ...]."""
    whole = {}
    for name, parameter in layer.experts.items():
        parts = [torch.empty_like(parameter.detach()).contiguous() for _ in range(dist.get_world_size())]
        dist.all_gather(parts, parameter.detach().contiguous())
        whole[name] = torch.cat(parts).requires_grad_()
    return whole


def dense_layer(layer: MoE, x: Tensor, router_weight: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """The layer on one rank's tokens, dense."""
    logits = x @ router_weight.t()
    scores = logits.softmax(-1) if layer.router.score == "softmax" else logits.sigmoid()
    ids = (scores + layer.router.bias).topk(K, -1).indices
    route = scores.gather(1, ids)
    y = dense_moe(x, ids, route / route.sum(-1, keepdim=True), *(weights[n] for n in PROJECTIONS))
    return y if layer.shared is None else y + layer.shared(x)


def relative(got: Tensor, want: Tensor) -> float:
    """Largest difference over largest value."""
    if not want.numel():
        return 0.0
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-9))


def run_against_dense(options: dict[str, Any], ragged: bool) -> dict[str, float]:
    """Two layers in a row, forward and backward, against the same two layers dense. -> relative errors"""
    R, rank = dist.get_world_size(), dist.get_rank()
    layers = [make_layer(seed, **options) for seed in (3, 4)]
    assert layers[0].buffer is layers[1].buffer, "layers of equal sizes share a Buffer"
    xs, grads = make_batch(5, ragged)
    x = xs[rank].clone().requires_grad_()
    y = layers[1](layers[0](x))
    y.backward(grads[rank])
    if R > 1:
        assert sum(sum(m.plan.stats().host()["redundant_experts"]) for m in layers) > 0, "nothing was redundant"

    routers = [m.router.weight.detach().clone().requires_grad_() for m in layers]
    weights = [gather_experts(m) for m in layers]
    dense_xs = [t.clone().requires_grad_() for t in xs]
    outputs = []
    for h in dense_xs:
        for m, router, w in zip(layers, routers, weights, strict=True):
            h = dense_layer(m, h, router, w)
        outputs.append(h)
    torch.autograd.backward(outputs, grads)

    errors = {"y": relative(y.detach(), outputs[rank].detach()), "dx": relative(x.grad, dense_xs[rank].grad)}
    for i, (m, router, w) in enumerate(zip(layers, routers, weights, strict=True)):
        dist.all_reduce(m.router.weight.grad)
        errors[f"router {i}"] = relative(m.router.weight.grad, router.grad)
        for name, parameter in m.experts.items():
            errors[f"{name} {i}"] = relative(parameter.grad, w[name].grad[rank * L : (rank + 1) * L])
    return errors


@pytest.mark.parametrize("R", [1, 2, 4])
@pytest.mark.parametrize("save", ["rows", "inputs", "tokens"])
@pytest.mark.parametrize("options", [{}, {"router": "sigmoid", "shared_ffn": 8}], ids=["softmax", "sigmoid-shared"])
def test_moe_equals_dense_in_output_and_all_gradients(ranks, R, save, options):
    for errors in ranks(R).run(run_against_dense, {"save": save, **options}, False):
        assert max(errors.values()) < 1e-5, errors


def test_moe_equals_dense_with_ragged_and_empty_ranks(ranks):
    for errors in ranks(4).run(run_against_dense, {}, True):
        assert max(errors.values()) < 1e-5, errors


def test_moe_in_bf16_is_dense_within_bf16_rounding(ranks):
    for errors in ranks(2).run(run_one_bf16_layer):
        assert max(errors.values()) < 0.04, errors
        assert min(errors.values()) > 0, "bf16 without any rounding error would not be bf16"


def run_one_bf16_layer() -> dict[str, float]:
    rank = dist.get_rank()
    layer = make_layer(3, dtype=torch.bfloat16)
    xs, grads = ([t.bfloat16().float() for t in ts] for ts in make_batch(5))
    x = xs[rank].clone().requires_grad_()
    y = layer(x)
    y.backward(grads[rank])
    weights = {n: w.detach().bfloat16().float().requires_grad_() for n, w in gather_experts(layer).items()}
    outputs = [dense_layer(layer, t, layer.router.weight.detach(), weights) for t in xs]
    torch.autograd.backward(outputs, grads)
    errors = {"y": relative(y.detach(), outputs[rank].detach())}
    for name, parameter in layer.experts.items():
        errors[name] = relative(parameter.grad, weights[name].grad[rank * L : (rank + 1) * L])
    return errors


def expert_grads(layer: MoE) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in layer.experts.items()}


def run_frozen_inputs() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Expert gradients with trained inputs and router, and with both frozen."""
    rank = dist.get_rank()
    layer = make_layer(3)
    xs, grads = make_batch(5)
    layer(xs[rank].clone().requires_grad_()).backward(grads[rank])
    want = expert_grads(layer)
    layer.zero_grad()
    layer.router.requires_grad_(False)
    layer(xs[rank]).backward(grads[rank])
    return want, expert_grads(layer)


def test_slot_gradients_come_home_when_inputs_and_router_are_frozen(ranks):
    for want, got in ranks(4).run(run_frozen_inputs):
        for name in PROJECTIONS:
            assert want[name].abs().sum() > 0
            assert torch.equal(want[name], got[name])


def run_frozen_experts(frozen: tuple[str, ...], backend: str = "cpu") -> tuple[list[str], list[str], int, bool]:
    """Optimizer steps with weight decay.

    -> experts that changed, those with gradients, projections that are reduced, whether the tokens' gradient is right
    """
    rank = dist.get_rank()
    layer = make_layer(3, backend=backend)
    xs, grads = make_batch(5)
    x = xs[rank].clone().requires_grad_()
    layer(x).backward(grads[rank])
    want, x.grad = x.grad, None
    layer.zero_grad()
    for name in frozen:
        layer.experts[name].requires_grad_(False)
    before = {name: p.detach().clone() for name, p in layer.experts.items()}
    optimizer = torch.optim.AdamW(layer.experts.parameters(), lr=0.1, weight_decay=0.5)
    layer(x).backward(grads[rank])
    optimizer.step()
    changed = sorted(name for name, p in layer.experts.items() if not torch.equal(p, before[name]))
    with_grad = sorted(name for name, p in layer.experts.items() if p.grad is not None)
    return changed, with_grad, sum(r.wanted for r in layer.pool.slot_reductions(0)), torch.equal(x.grad, want)


@pytest.mark.parametrize("frozen", [PROJECTIONS, ("up",)])
def test_frozen_experts_have_no_gradients_and_do_not_decay(ranks, frozen):
    trained = sorted(set(PROJECTIONS) - set(frozen))
    assert ranks(2).run(run_frozen_experts, frozen) == [(trained, trained, len(trained), True)] * 2


@pytest.mark.slow
def test_reducing_nothing_is_no_failure_of_kernels(interpreters):
    assert interpreters(2).run(run_frozen_experts, PROJECTIONS, "interpreter") == [([], [], 0, True)] * 2


def run_without_anchor() -> str:
    """Two backward passes whose slot gradients are never reduced."""
    rank = dist.get_rank()
    layer = make_layer(3)
    xs, grads = make_batch(5)
    plans = []
    for _ in range(2):
        ids, weights, _ = layer.router(xs[rank])
        sent = functional.dispatch(layer.buffer, xs[rank], weights.detach(), ids)
        plans.append(sent.plan)
        rows = experts(layer.pool, sent.plan, sent.hidden.requires_grad_(), sent.route_weights)
        try:
            functional.combine(layer.buffer, sent.plan, rows).backward(grads[rank])
        except moonep.StaleSlotsError as error:
            layer.buffer.reduce(plans[0], layer.pool)  # other tests' layers may share these slots
            return str(error)
    return ""


def test_slot_gradients_that_were_not_reduced_are_not_mixed_with_others(ranks):
    for message in ranks(2).run(run_without_anchor):
        assert "not reduced" in message


def run_interleaved(slot_sets: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of two microbatches one after the other, and interleaved."""
    rank = dist.get_rank()
    layer = make_layer(3, slot_sets=slot_sets)
    batches = [make_batch(5), make_batch(6)]
    for xs, grads in batches:
        layer(xs[rank]).backward(grads[rank])
    want = expert_grads(layer)
    layer.zero_grad()
    outputs = []
    for i, (xs, _) in enumerate(batches):
        layer.slot_set = i % slot_sets
        outputs.append(layer(xs[rank]))
    for y, (_, grads) in zip(outputs, batches, strict=True):
        y.backward(grads[rank])
    return want, expert_grads(layer)


@pytest.mark.parametrize("slot_sets", [1, 2])
def test_interleaved_microbatches_on_one_pool_give_the_gradients_of_sequential_ones(ranks, slot_sets):
    for want, got in ranks(4).run(run_interleaved, slot_sets):
        for name in PROJECTIONS:
            assert torch.equal(want[name], got[name])


def run_accumulation() -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    rank = dist.get_rank()
    layer = make_layer(3)
    xs, grads = make_batch(5)
    layer(xs[rank]).backward(grads[rank])
    once = expert_grads(layer)
    layer(xs[rank]).backward(grads[rank])
    twice = expert_grads(layer)
    torch.optim.SGD(layer.parameters(), lr=0.0).zero_grad()
    layer(xs[rank]).backward(grads[rank])
    again = expert_grads(layer)
    return once, twice, all(torch.equal(once[n], again[n]) for n in PROJECTIONS)


def test_gradients_accumulate_until_they_are_zeroed(ranks):
    for once, twice, starts_anew in ranks(2).run(run_accumulation):
        assert starts_anew
        for name in PROJECTIONS:
            assert relative(twice[name], 2 * once[name]) < 1e-6


def run_checkpoint(use_reentrant: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    rank = dist.get_rank()
    layer, second = make_layer(3), make_layer(4)
    xs, grads = make_batch(5)
    results = []
    for recompute in (False, True):
        x = xs[rank].clone().requires_grad_()
        layer.zero_grad()
        second.zero_grad()
        h = checkpoint(layer, x, use_reentrant=use_reentrant) if recompute else layer(x)
        second(h).backward(grads[rank])
        results.append({**expert_grads(layer), "dx": x.grad})
    return results[0], results[1]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(ranks, use_reentrant):
    for want, got in ranks(2).run(run_checkpoint, use_reentrant):
        for name, value in want.items():
            assert torch.equal(value, got[name]), name


def run_stale_rows() -> str:
    """Experts save a zero-copy view; another layer's dispatch overwrites it before backward."""
    rank = dist.get_rank()
    layer = make_layer(3)
    xs, grads = make_batch(5)
    x = xs[rank].clone().requires_grad_()
    ids, weights, _ = layer.router(x)
    rows, row_weights, plan = functional.dispatch(layer.buffer, x, weights, ids, layer.pool, zero_copy=True)
    y = functional.combine(layer.buffer, plan, experts(layer.pool, plan, rows, row_weights), layer.pool)
    layer.buffer.dispatch(xs[rank], None, ids)
    try:
        y.backward(grads[rank])
    except RuntimeError as error:
        return str(error)
    return ""


def test_stale_rows_used_in_backward_raise(ranks):
    for message in ranks(2).run(run_stale_rows):
        assert "modified by an inplace operation" in message


def run_training(dtype: torch.dtype, fused: bool) -> tuple[list[float], bool]:
    """A few optimizer steps; nothing but `step()` is called between forwards. -> losses, compute weights follow"""
    rank = dist.get_rank()
    layer = make_layer(3, dtype=dtype)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=fused)
    xs, targets = make_batch(5)
    losses = []
    for _ in range(8):
        loss = F.mse_loss(layer(xs[rank]), targets[rank])
        loss.backward()
        dist.all_reduce(layer.router.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
    layer(xs[rank])
    local = layer.pool.local
    return losses, all(torch.equal(local[n], p.detach().to(dtype)) for n, p in layer.experts.items())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layer_follows_its_optimizer(ranks, dtype, fused):
    for losses, follows in ranks(2).run(run_training, dtype, fused):
        assert follows
        assert losses[-1] < 0.97 * losses[0]


def run_state_dict() -> bool:
    rank = dist.get_rank()
    layer, other = make_layer(3), make_layer(4)
    xs, _ = make_batch(5)
    before = other(xs[rank])
    other.load_state_dict(layer.state_dict())
    want, got = layer(xs[rank]), other(xs[rank])
    return torch.equal(want, got) and not torch.equal(before, got)


def test_a_loaded_state_dict_takes_effect_on_all_ranks(ranks):
    assert all(ranks(2).run(run_state_dict))


def run_with_inputs_of(dtype: torch.dtype) -> tuple[torch.dtype, list[int], bool, float]:
    """A layer with a shared expert on 3-D input of a dtype. -> what comes out, and its distance from fp32 input"""
    layer = make_layer(3, dtype=torch.bfloat16, shared_ffn=8)
    x = make_batch(5)[0][dist.get_rank()].bfloat16().view(3, 11, H)
    given = x.to(dtype).requires_grad_()
    y = layer(given)
    y.float().sum().backward()
    with torch.no_grad():
        want = layer(x.float())
    return y.dtype, list(y.shape), bool(given.grad.isfinite().all()), relative(y.detach().float(), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_inputs_of_any_floating_dtype_go_through_experts_and_shared_expert(ranks, dtype):
    for out_dtype, shape, finite, error in ranks(2).run(run_with_inputs_of, dtype):
        assert out_dtype == dtype and shape == [3, 11, H] and finite
        assert error < 0.02


def run_under_autocast(router: str, save: str) -> list[str]:
    """What autocast changes in a layer that says itself what it computes in."""
    layer = make_layer(3, router=router, save=save)
    xs, grads = make_batch(5)
    results = []
    for enabled in (False, True):
        layer.zero_grad()
        x = xs[dist.get_rank()].clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = layer(x)
        y.backward(grads[dist.get_rank()])
        router_grad = layer.router.weight.grad.clone()
        results.append({"y": y.detach(), "dx": x.grad, "router": router_grad, **expert_grads(layer)})
    return [name for name, want in results[0].items() if not torch.equal(results[1][name], want)]


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("save", ["rows", "tokens"])
def test_router_and_experts_are_the_same_under_autocast(ranks, router, save):
    assert ranks(2).run(run_under_autocast, router, save) == [[], []]


def differentiate_twice(pieces: bool) -> str:
    """-> what is said about a second derivative"""
    layer = make_layer(3)
    x = make_batch(5)[0][0].requires_grad_()
    y = layer(x)
    if pieces:
        ids, weights, _ = layer.router(x.detach())
        sent = functional.dispatch(layer.buffer, x, weights, ids, layer.pool)
        rows = experts(layer.pool, sent.plan, sent.hidden, sent.route_weights)
        y = functional.combine(layer.buffer, sent.plan, rows, layer.pool)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    try:
        (grad.sum() + x.square().sum()).backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("pieces", [False, True])
def test_a_second_derivative_is_refused(ranks, pieces):
    (message,) = ranks(1).run(differentiate_twice, pieces)
    assert "differentiate twice" in message


def give_experts(hidden: dict[str, Any], route_weights: dict[str, Any]) -> str:
    layer = make_layer(3)
    ids, weights, _ = layer.router(torch.zeros(4, H))
    plan = functional.dispatch(layer.buffer, torch.zeros(4, H), weights, ids).plan
    C = plan.dims.C
    try:
        experts(layer.pool, plan, torch.zeros(C, H).to(**hidden), torch.zeros(C).to(**route_weights))
    except ValueError as error:
        return str(error)
    return ""


def test_experts_refuse_what_is_not_rows_of_the_pool(ranks):
    (message,) = ranks(1).run(give_experts, {"dtype": torch.bfloat16}, {})
    assert message.startswith("hidden: given [") and message.endswith("32] float32 on cpu")
    (message,) = ranks(1).run(give_experts, {}, {"dtype": torch.float64})
    assert message.startswith("route_weights: given [") and message.endswith("] float32 on cpu")


def give_bad_input(kind: str) -> tuple[str, str, float]:
    """Rank 1 gives a layer what it cannot take. -> error and message of this rank, and its time"""
    layer = make_layer(3, timeout_s=30.0)
    x = torch.randn(4, H)
    if dist.get_rank() == 1:
        x = {"width": torch.randn(4, H + 1), "integers": torch.ones(4, H, dtype=torch.int64)}[kind]
    return end_of(lambda: layer(x))


@pytest.mark.parametrize("kind", ["width", "integers"])
def test_bad_input_of_one_rank_is_refused_on_all(ranks, kind):
    (peer, text, seconds), (own, message, _) = ranks(2).run(give_bad_input, kind)
    assert own == "ValueError" and message.startswith("x: given [4, ")
    assert peer == "PeerError" and "x: given [4, " in text and seconds < 10


def initial_weights() -> dict[str, Tensor]:
    layer = MoE(H, F_, 8, K, max_tokens=4, dtype=torch.float32, seed=7)
    return {**{n: w.detach() for n, w in gather_experts(layer).items()}, "router": layer.router.weight.detach()}


def test_initial_weights_do_not_depend_on_the_number_of_ranks(ranks):
    one, four = ranks(1).run(initial_weights)[0], ranks(4).run(initial_weights)[3]
    for name, weight in one.items():
        assert torch.equal(weight, four[name]), name


def run_inference_with_spill() -> tuple[float, int]:
    """B = 1 slot a rank: some redundant experts are read from their homes."""
    R, rank = dist.get_world_size(), dist.get_rank()
    E = L * R
    pool = moonep.ExpertPool({"gate": (H, F_), "up": (H, F_), "down": (F_, H)}, E=E, B=1, dtype=torch.float32)
    buffer = moonep.Buffer(S, H, K, E, R, token_padding=8, B=1, dtype=torch.float32)
    g = torch.Generator().manual_seed(1)
    weights = {n: torch.randn(E, *pool.local[n].shape[1:], generator=g) / 5 for n in PROJECTIONS}
    pool.load_local({n: w[rank * L : (rank + 1) * L] for n, w in weights.items()})
    ids = routing.hot_rank(S, E, K, R, imbalance=1.9, hot_experts=3, seed=2)[rank]
    xs, _ = make_batch(5)
    route = torch.rand(S, K, generator=g)
    with torch.no_grad():
        rows, row_weights, plan = functional.dispatch(buffer, xs[rank], route, ids, pool)
        y = functional.combine(buffer, plan, experts(pool, plan, rows, row_weights), pool)
    redundant = max(plan.stats().host()["redundant_experts"])
    return relative(y, dense_moe(xs[rank], ids, route, *(weights[n] for n in PROJECTIONS))), redundant


def run_fresh_gradients() -> dict[str, float]:
    """Many tokens, then gradients from zero with one token: most experts have no rows, and gradients of 0."""
    rank = dist.get_rank()
    used, new = make_layer(3), make_layer(3)
    xs, grads = make_batch(5)
    used(xs[rank]).backward(grads[rank])
    used.zero_grad(set_to_none=True)
    for layer in (used, new):
        layer(xs[rank][:1]).backward(grads[rank][:1])
    assert any(not g.any() for g in new.experts["up"].grad), "all experts have rows"
    return {name: relative(p.grad, new.experts[name].grad) for name, p in used.experts.items()}


def test_gradients_that_start_from_zero_are_those_of_a_new_layer(ranks):
    for errors in ranks(2).run(run_fresh_gradients):
        assert max(errors.values()) == 0, errors


def test_inference_with_fewer_slots_than_redundant_experts_equals_dense(ranks):
    results = ranks(2).run(run_inference_with_spill)
    assert all(error < 1e-5 for error, _ in results)
    assert max(redundant for _, redundant in results) > 1, "nothing spilled"


def test_grouped_mm_falls_back_to_one_product_a_group(monkeypatch):
    offsets = torch.tensor([3, 3, 10], dtype=torch.int32)
    x, weight = torch.randn(10, 16), torch.randn(3, 16, 8)
    want = torch.cat([x[:3] @ weight[0], x[3:] @ weight[2]])
    torch.testing.assert_close(grouped_mm(x, weight, offsets), want)
    monkeypatch.delattr(F, "grouped_mm", raising=False)
    torch.testing.assert_close(grouped_mm(x, weight, offsets), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grouped_mm_takes_what_torch_does_not(dtype):
    offsets = torch.tensor([3, 7], dtype=torch.int32)
    x, weight = torch.randn(7, 5, dtype=dtype), torch.randn(2, 5, 3, dtype=dtype)
    torch.testing.assert_close(grouped_mm(x, weight, offsets), torch.cat([x[:3] @ weight[0], x[3:] @ weight[1]]))
    assert grouped_mm(x[:0], weight, torch.zeros(2, dtype=torch.int32)).shape == (0, 3)


def test_weight_gradients_leave_groups_without_rows_untouched():
    grad = torch.full((3, 4, 2), 7.0)
    x, y = torch.randn(5, 4).bfloat16(), torch.randn(5, 2).bfloat16()
    add_weight_grad(grad, x, y, torch.tensor([2, 2, 5], dtype=torch.int32))
    assert (grad[1] == 7).all()
    torch.testing.assert_close(grad[2], 7 + x[2:].float().t() @ y[2:].float())


def test_bias_updates_bring_loads_together_without_changing_weights():
    torch.manual_seed(0)
    router = Router(16, 8, 2)
    torch.nn.init.normal_(router.weight, std=0.2)
    x = torch.randn(512, 16) + 1
    with torch.no_grad():
        router.weight[0] += 0.1

    def imbalance() -> float:
        load = torch.bincount(router(x).topk_experts.flatten(), minlength=8).float()
        return float(load.max() / load.mean())

    before = imbalance()
    assert before > 2
    for _ in range(300):
        router.update_bias(torch.bincount(router(x).topk_experts.flatten(), minlength=8), rate=0.001)
    assert imbalance() < 0.5 * (before - 1) + 1
    weights = router(x).route_weights
    torch.testing.assert_close(weights.sum(-1), torch.ones(512))


def test_auxiliary_loss_is_one_when_equal_and_more_when_not():
    router = Router(8, 4, 1)
    torch.nn.init.zeros_(router.weight)
    assert router(torch.randn(64, 8)).aux_loss.item() == pytest.approx(1.0)
    with torch.no_grad():
        router.weight[0] = 1.0
    assert router(torch.rand(64, 8)).aux_loss.item() > 1.5


def test_options_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="save: given 'all', expected one of 'rows', 'inputs', 'tokens'"):
        MoE(H, F_, 4, K, max_tokens=4, save="all")
    with pytest.raises(ValueError, match="router: given 'argmax'"):
        MoE(H, F_, 4, K, max_tokens=4, router="argmax")
    with pytest.raises(ValueError, match="top_k: given 9, expected 1 to num_experts = 4"):
        MoE(H, F_, 4, 9, max_tokens=4)


def test_exported_names_are_these():
    assert sorted(moonep_nn.__all__) == [
        "MoE",
        "RoutedExperts",
        "Router",
        "Routing",
        "clip_grad_norm_",
        "exclude_experts_from_ddp",
        "expert_parameters",
        "experts",
        "functional",
        "sharded_state",
        "sum_expert_grads",
    ]
    assert sorted(moonep.__all__) == [
        "Buffer",
        "ExpertPool",
        "MoonEPCommPlan",
        "PeerError",
        "PeerTimeout",
        "Plan",
        "StaleSlotsError",
        "__version__",
    ]


def test_a_shared_expert_computes_in_fp32_or_in_autocasts_dtype():
    layer = MoE(8, 16, 4, 2, max_tokens=4, shared_ffn=8, token_padding=8, backend="cpu")
    seen: list[torch.dtype] = []
    assert layer.shared is not None
    layer.shared.down.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    layer(torch.ones(4, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.ones(4, 8)).dtype == torch.float32
    assert seen == [torch.float32, torch.bfloat16]


def end_group() -> tuple[bool, list[str]]:
    """Whether a group is gone when it has been destroyed and a layer is still there; what asking for it says."""
    group = dist.new_group(list(range(dist.get_world_size())))
    gone = weakref.ref(group)
    layer = make_layer(3, group=group)
    layer(torch.ones(S, H)).sum().backward()
    assert layer.pool.group is layer.buffer.group is group
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return gone() is None, [end_of(lambda owner=owner: owner.group)[1] for owner in (layer.pool, layer.buffer)]


def test_a_layer_does_not_keep_its_process_group(ranks):
    for gone, said in ranks(2).run(end_group):
        assert gone
        assert all("which destroy_process_group has ended, expected a live one" in text for text in said), said


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_layer_does_not_depend_on_the_default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        layer = MoE(8, 16, 4, 2, max_tokens=4, shared_ffn=8, dtype=torch.float32, token_padding=8, backend="cpu")
        assert {p.dtype for p in layer.parameters()} == {torch.float32}
        assert layer(torch.ones(4, 8, dtype=torch.float32)).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def count_calls(overlap: Any) -> list[tuple[int, bool]]:
    """A step. -> prefetch in forward, in backward, reduce, shared: how often it is called, whether beside other work"""
    layer = make_layer(3, overlap=overlap, shared_ffn=8)
    counts: dict[str, list[bool]] = {"prefetch": [], "reduce": [], "shared": []}
    for name in ("prefetch", "reduce"):
        calls = counts[name]
        method = getattr(layer.buffer, name)

        def count(plan: Any, pool: Any, async_finish: bool = False, calls=calls, method=method, **options: Any) -> Any:
            calls.append(async_finish)
            return method(plan, pool, async_finish, **options)

        setattr(layer.buffer, name, count)

    def start(function: Any, x: Tensor, *, beside: bool) -> Any:
        counts["shared"].append(beside)
        return lambda: function(x)

    with patch("moonep.nn.moe.start", start):
        y = layer(torch.ones(S, H, requires_grad=True))
    forward = counts["prefetch"].copy()
    for slots in layer.pool._slots[0].values():
        slots.holder = None  # another layer has used them
    y.sum().backward()
    backward = counts["prefetch"][len(forward) :]
    return [(len(calls), all(calls)) for calls in (forward, backward, counts["reduce"], counts["shared"])]


@pytest.mark.parametrize(
    ("overlap", "prefetch", "reduce", "shared"),
    [
        (True, (3, True), (1, True), (1, True)),
        (False, (1, False), (1, False), (1, False)),
        (["prefetch"], (3, True), (1, False), (1, False)),
        ({"reduce", "shared"}, (1, False), (1, True), (1, True)),
        ((), (1, False), (1, False), (1, False)),
    ],
)
def test_what_runs_beside_other_work_can_be_chosen(ranks, overlap, prefetch, reduce, shared):
    assert ranks(2).run(count_calls, overlap) == [[prefetch, prefetch, reduce, shared]] * 2
