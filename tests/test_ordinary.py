"""Ordinary expert parallelism equals the dense mixture of experts, and starts from the weights of `MoE`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moonep.nn import MoE, Router
from moonep.testing.dense import dense_moe
from moonep.testing.ordinary import OrdinaryMoE
from moonep.testing.ranks import PerRank, run_ranks

H, F, E, K, SEED = 16, 24, 8, 3, 5
EQUAL = {"rtol": 1e-5, "atol": 1e-5}


def inputs_of(tokens: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Each rank's tokens, with a common offset that skews the router, and the gradients of its output."""
    generator = torch.Generator().manual_seed(SEED)
    skew = 2 * torch.randn(H, generator=generator)
    xs = [skew + torch.randn(s, H, generator=generator) for s in tokens]
    return xs, [torch.randn(s, H, generator=generator) for s in tokens]


def forward_backward(moe: OrdinaryMoE | MoE, x: Tensor, grad: Tensor) -> dict[str, Any]:
    x = x.clone().requires_grad_()
    y = moe(x)
    y.backward(grad)
    grads = {name: parameter.grad for name, parameter in moe.experts.items()}
    return {"y": y, "x": x.grad, "router": moe.router.weight.grad, **grads}


def run_ordinary(x: Tensor, grad: Tensor) -> dict[str, Any]:
    moe = OrdinaryMoE(H, F, E, K, seed=SEED)
    result = forward_backward(moe, x, grad)
    return result | {"rows": moe.rows, "weights": dict(moe.experts), "router_weight": moe.router.weight}


def run_both(x: Tensor, grad: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Results of both layers, and the names of the parameters that are not bit-equal at the start."""
    ordinary, moe = OrdinaryMoE(H, F, E, K, seed=SEED), MoE(H, F, E, K, max_tokens=len(x), dtype=x.dtype, seed=SEED)
    theirs = dict(moe.named_parameters())
    different = [n for n, parameter in ordinary.named_parameters() if not torch.equal(parameter, theirs.pop(n))]
    return forward_backward(ordinary, x, grad), forward_backward(moe, x, grad), different + list(theirs)


def join(results: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The ranks' results as one process would have them."""
    whole = {name: torch.cat([r[name] for r in results]) for name in ("y", "x", "gate", "up", "down")}
    return whole | {"router": sum(r["router"] for r in results)}


def run_dense(results: list[dict[str, Any]], xs: list[Tensor], grads: list[Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """The dense layer with the ranks' weights, and the expert ids that its router chose."""
    weights = {n: torch.cat([r["weights"][n] for r in results]).detach() for n in ("gate", "up", "down")}
    router = Router(H, E, K)
    router.load_state_dict({"weight": results[0]["router_weight"].detach(), "bias": torch.zeros(E)})
    x = torch.cat(xs)
    for leaf in (x, *weights.values()):
        leaf.requires_grad_()
    ids, route_weights, _ = router(x)
    y = dense_moe(x, ids, route_weights, **weights)
    y.backward(torch.cat(grads))
    return {"y": y, "x": x.grad, "router": router.weight.grad, **{n: w.grad for n, w in weights.items()}}, ids


@pytest.mark.parametrize("tokens", [[13], [9, 13], [6, 0, 11, 7]], ids=["1 rank", "2 ranks", "4 ranks, one idle"])
def test_output_and_all_gradients_equal_the_dense_layer(tokens):
    xs, grads = inputs_of(tokens)
    results = run_ranks(run_ordinary, len(tokens), PerRank(xs), PerRank(grads))
    expected, ids = run_dense(results, xs, grads)
    for name, tensor in join(results).items():
        torch.testing.assert_close(tensor, expected[name], msg=lambda m, name=name: f"{name}: {m}", **EQUAL)
    homes = torch.bincount(ids.flatten() // (E // len(tokens)), minlength=len(tokens))
    assert [r["rows"] for r in results] == homes.tolist(), "every rank computes its home experts' rows"


def test_a_rank_whose_experts_get_no_tokens_takes_part_in_backward():
    results = run_ranks(run_one_sided, 2)
    assert results[0]["rows"] == 2 * 5 * K and results[1]["rows"] == 0
    assert all(bool((results[1][name] == 0).all()) for name in ("gate", "up", "down"))


def run_one_sided() -> dict[str, Any]:
    moe = OrdinaryMoE(H, F, E, K, seed=SEED)
    moe.router.bias[: E // 2] = 2  # more than any softmax score, so that rank 0's experts win
    xs, grads = inputs_of([5, 5])
    rank = dist.get_rank()
    return forward_backward(moe, xs[rank], grads[rank]) | {"rows": moe.rows}


@pytest.mark.parametrize("R", [1, 4])
def test_it_starts_from_the_weights_of_moe_and_agrees_with_it(R):
    xs, grads = inputs_of([12] * R)
    for ordinary, moe, different in run_ranks(run_both, R, PerRank(xs), PerRank(grads)):
        assert different == []
        for name, tensor in ordinary.items():
            torch.testing.assert_close(tensor, moe[name], msg=lambda m, name=name: f"{name}: {m}", **EQUAL)


def test_rows_keep_the_dtype_of_the_input():
    x = inputs_of([7])[0][0]
    moe = OrdinaryMoE(H, F, E, K, seed=SEED)
    y = moe(x.bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), moe(x.bfloat16().float()), rtol=3e-2, atol=3e-2)


def test_experts_that_ranks_cannot_share_equally_are_refused():
    with pytest.raises(Exception, match="num_experts: given 6, expected a multiple of the 4 ranks"):
        run_ranks(make_uneven, 4)


def make_uneven() -> None:
    OrdinaryMoE(H, F, 6, 2)
