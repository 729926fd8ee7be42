"""What only a GPU can show: no host syncs, graphs, memory that goes back, a lost peer that leaves the context alive.

The contract itself runs on the cuda backend in `test_contract`. Ranks share GPUs when there are fewer of them.
"""

from __future__ import annotations

import functools
import logging
import os
import pkgutil
import random
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from moonep import Buffer, ExpertPool, PeerError, PeerTimeout, kernels
from moonep.cli.demo_training import FIRST_STEPS, LOSS_BOUND, Settings, train_moonep, train_ordinary
from moonep.kernels.launch import Launch
from moonep.nn import MoE
from moonep.testing import dense_moe
from moonep.testing.asserts import assert_equal
from moonep.testing.routing import hot_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the cuda backend is not run here"),
]

H, F, L, K, S = 256, 512, 4, 2, 192  # fp32 rows of 512 KiB fill granules: fused optimizers want dense gradients
PROJECTIONS = ("gate", "up", "down")


def use_gpu() -> torch.device:
    """This rank's GPU."""
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def make_layer(seed: int = 3, **options: Any) -> MoE:
    layer = MoE(
        H,
        F,
        L * dist.get_world_size(),
        K,
        max_tokens=S,
        token_padding=8,
        seed=seed,
        backend="cuda",
        timeout_s=20.0,
        **options,
    )
    with torch.no_grad():
        layer.router.weight.mul_(20)
    return layer


def batch(seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(S, H, generator=generator).to(device)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def gather(tensor: Tensor) -> list[Tensor]:
    """The tensor of every rank, on the CPU."""
    parts = [torch.empty(tensor.shape) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.detach().float().cpu().contiguous())
    return parts


def compare_with_dense(save: str) -> dict[str, float]:
    device, rank = use_gpu(), dist.get_rank()
    layer = make_layer(save=save)
    x, grad = batch(1, device).bfloat16().float().requires_grad_(), batch(2, device).bfloat16().float()
    y = layer(x)
    y.backward(grad)
    weights = {n: torch.cat(gather(layer.pool.local[n])).requires_grad_() for n in PROJECTIONS}
    router = layer.router.weight.detach().cpu()
    xs, grads = gather(x), gather(grad)
    outputs = []
    for t in xs:
        t.requires_grad_()
        scores = (t @ router.t()).softmax(-1)
        ids = layer_ids(layer, t)
        route = scores.gather(1, ids)
        outputs.append(dense_moe(t, ids, route / route.sum(-1, keepdim=True), *(weights[n] for n in PROJECTIONS)))
    torch.autograd.backward(outputs, grads)
    errors = {"y": relative(y.cpu(), outputs[rank]), "dx": relative(x.grad.cpu(), xs[rank].grad)}
    for n in PROJECTIONS:
        errors[n] = relative(layer.experts[n].grad.cpu(), weights[n].grad[rank * L : (rank + 1) * L])
    errors["redundant"] = sum(layer.plan.stats().host()["redundant_experts"])
    return errors


def layer_ids(layer: MoE, x: Tensor) -> Tensor:
    """The experts that the layer's router chooses, as computed on the GPU."""
    with torch.no_grad():
        return layer.router(x.detach().to(layer.router.weight.device)).topk_experts.cpu()


@pytest.mark.parametrize("R", [2, 4])
@pytest.mark.parametrize("save", ["rows", "inputs", "tokens"])
def test_moe_is_dense_within_bf16_rounding(ranks, R, save):
    for errors in ranks(R).run(compare_with_dense, save):
        assert errors.pop("redundant") > 0
        assert max(errors.values()) < 0.02, errors


def train_with_and_without_overlap(save: str) -> list[str]:
    """Two layers with shared experts, a few steps each way. -> what differs"""
    device = use_gpu()
    results: list[dict[str, Tensor]] = []
    for overlap in (False, True, ["prefetch"], ["reduce"], ["shared"]):
        layers = [make_layer(seed, save=save, overlap=overlap, shared_ffn=64) for seed in (3, 4)]
        found = {}
        for step in range(4):
            x, grad = batch(step, device).requires_grad_(), batch(step + 50, device)
            y = layers[1](layers[0](x))
            y.backward(grad)
            found |= {f"{step} y": y.detach(), f"{step} dx": x.grad}
        for i, layer in enumerate(layers):
            layer.buffer.check()
            found |= {f"{i} {name}": p.grad.clone() for name, p in layer.named_parameters()}
        results.append(found)
    want, *others = results
    return [name for got in others for name in want if not torch.equal(got[name], want[name])]


@pytest.mark.parametrize("save", ["rows", "inputs", "tokens"])
def test_overlap_changes_no_bit(ranks, save):
    assert ranks(2).run(train_with_and_without_overlap, save) == [[], []]


@pytest.mark.parametrize("dtype", LOSS_BOUND)
def test_the_demos_model_learns_on_gpus_as_on_the_cpu(ranks, dtype):
    curves = {
        (train.__name__, device): ranks(2).run(train, Settings(2, FIRST_STEPS, device=device, dtype=dtype))[0].loss
        for train in (train_moonep, train_ordinary)
        for device in ("cpu", "cuda")
    }
    want = curves["train_moonep", "cpu"]
    assert want[-1] < want[0] - 0.5
    for name, losses in curves.items():
        worst = max(abs(a - b) for a, b in zip(losses, want, strict=True))
        assert worst <= LOSS_BOUND[dtype], f"{name}: {worst}"


def train_without_syncs() -> bool:
    device = use_gpu()
    layer = make_layer()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=True)
    x, grad = batch(1, device), batch(2, device)

    def step() -> None:
        layer(x).backward(grad)
        optimizer.step()
        optimizer.zero_grad()

    step()  # compiles, and makes tables that stay
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    layer.buffer.check()
    return True


def test_a_training_step_never_waits_for_the_device(ranks):
    assert all(ranks(2).run(train_without_syncs))


def watch_memory(save: str) -> tuple[set[int], dict[str, int]]:
    """Training steps with other tokens each time, also with all tokens the same, which go to K experts.

    Returns: peaks of allocated memory, and what torch has asked of the driver meanwhile.
    """
    device = use_gpu()
    layer = make_layer(save=save)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=True)
    grad = batch(2, device)
    batches = [batch(seed, device) for seed in range(4)]
    batches += [tokens[:1].expand(S, H).contiguous() for tokens in batches[:2]]

    def step(x: Tensor) -> None:
        layer(x).backward(grad)
        optimizer.step()
        optimizer.zero_grad()

    for x in batches[:3]:
        step(x)
    torch.cuda.synchronize(device)
    before, peaks = torch.cuda.memory_stats(device), set()
    for x in 3 * batches:
        torch.cuda.reset_peak_memory_stats(device)
        step(x)
        peaks.add(torch.cuda.max_memory_allocated(device))
    after = torch.cuda.memory_stats(device)
    asked = ("num_device_alloc", "num_device_free", "reserved_bytes.all.current", "allocated_bytes.all.current")
    return peaks, {name: after[name] - before[name] for name in asked}


@pytest.mark.parametrize("save", ["rows", "inputs", "tokens"])
def test_steps_after_the_first_three_take_no_memory_whatever_the_router_does(ranks, save):
    for peaks, asked in ranks(2).run(watch_memory, save):
        assert len(peaks) == 1, f"allocated at most: {sorted(peaks)}"
        assert not any(asked.values()), asked


def read_after_backward_on_another_stream() -> list[str]:
    """Only experts are trained, and backward is called on another stream. -> gradients that were read too early"""
    device = use_gpu()
    layer = make_layer(save="tokens")
    layer.router.weight.requires_grad_(False)
    x, grad = batch(1, device), batch(2, device)
    layer(x).backward(grad)
    want = {n: layer.experts[n].grad.clone() for n in PROJECTIONS}
    layer.zero_grad()
    for n in PROJECTIONS:
        layer.pool.local_grad[n].fill_(float("nan"))  # what is read too early
    other = torch.cuda.Stream(device)
    y = layer(x)
    other.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(other):
        torch.cuda._sleep(100_000_000)  # so that hosts are far ahead
        y.backward(grad)
        got = {n: layer.experts[n].grad.clone() for n in PROJECTIONS}
    torch.cuda.synchronize(device)
    return [n for n in PROJECTIONS if not torch.equal(got[n], want[n])]


def test_backward_on_another_stream_is_waited_for(ranks):
    assert ranks(2).run(read_after_backward_on_another_stream) == [[], []]


def replay_graph() -> int:
    """Capture forward and backward once; replay with other routings; compare with eager, bit for bit."""
    device = use_gpu()
    layer = make_layer()
    x, grad = batch(0, device).requires_grad_(), batch(50, device)

    def run() -> Tensor:
        y = layer(x)
        y.backward(grad)
        return y

    def clear() -> None:
        x.grad = layer.router.weight.grad = None
        for gradient in layer.pool.local_grad.values():
            gradient.zero_()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    clear()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    captured = {"y": y, "dx": x.grad, "router": layer.router.weight.grad, **layer.pool.local_grad}
    routings = set()
    for seed in range(1, 4):
        with torch.no_grad():
            x.copy_(batch(seed, device))
        for gradient in layer.pool.local_grad.values():
            gradient.zero_()
        graph.replay()
        torch.cuda.synchronize()
        got = {name: tensor.clone() for name, tensor in captured.items()}
        clear()
        y_eager = run()
        want = {"y": y_eager, "dx": x.grad, "router": layer.router.weight.grad, **layer.pool.local_grad}
        for name, tensor in got.items():
            assert_equal(f"replay {seed}: {name}", tensor.cpu(), want[name].detach().cpu())
        routings.add(tuple(layer.plan.experts_to_copy.flatten().tolist()))
        torch.cuda.synchronize()
        dist.barrier()
    layer.buffer.check()
    return len(routings)


def test_forward_and_backward_replay_in_a_graph_with_other_routings(ranks):
    for different in ranks(2).run(replay_graph):
        assert different > 1, "all routings had the same redundant experts"


def mix_graph_and_eager() -> list[str]:
    """A captured training step between an eager forward and its backward, and after an optimizer's step."""
    device = use_gpu()
    layer = make_layer(shared_ffn=64)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    x, grad = batch(0, device).requires_grad_(), batch(50, device)
    other, other_grad = batch(1, device).requires_grad_(), batch(51, device)

    def run(tokens: Tensor, gradient: Tensor, between: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
        tokens.grad = None
        y = layer(tokens)
        between()
        for p in layer.parameters():
            if p.grad is not None:
                p.grad.zero_()
        y.backward(gradient)
        return {"y": y.detach(), "dx": tokens.grad, **layer.pool.local_grad}

    def copies(results: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in results.items()}

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run(x, grad)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(x, grad)
    alone = copies(run(other, other_grad))
    mixed = copies(run(other, other_grad, between=graph.replay))
    wrong = [f"eager: {name}" for name, want in alone.items() if not torch.equal(mixed[name], want)]
    optimizer.step()
    graph.replay()
    replayed = copies(captured)
    kept = x.grad
    eager = copies(run(x, grad))
    x.grad = kept
    wrong += [f"replayed: {name}" for name, want in eager.items() if not torch.equal(replayed[name], want)]
    layer.buffer.check()
    return wrong


def test_graphs_and_eager_calls_share_slots_and_weights(ranks):
    assert ranks(2).run(mix_graph_and_eager) == [[], []]


def create_and_destroy(times: int) -> list[int]:
    """Free device memory after each cycle."""
    use_gpu()
    R = dist.get_world_size()
    free = []
    for _ in range(times):
        buffer = Buffer(1024, 1024, 4, 16, R, backend="cuda", timeout_s=20.0)
        pool = ExpertPool({"up": (1024, 1024)}, E=16, grads=True, backend="cuda", timeout_s=20.0)
        assert pool.full_grad["up"].shape[0] == 16 + pool.B
        pool.destroy()
        buffer.destroy()
        del pool, buffer
        torch.cuda.synchronize()
        dist.barrier()
        free.append(torch.cuda.mem_get_info()[0])
        dist.barrier()
    return free


@pytest.mark.alone
def test_memory_goes_back_to_the_driver(ranks):
    for free in ranks(2).run(create_and_destroy, 50):
        assert free[-1] >= free[2] - (4 << 20), free


def lose_a_peer() -> dict[str, Any]:
    device = use_gpu()
    R, rank = dist.get_world_size(), dist.get_rank()
    buffer = Buffer(64, 256, 2, 4 * R, R, token_padding=8, backend="cuda", timeout_s=2.0)
    x = torch.ones(64, 256, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(64, 2, dtype=torch.int32, device=device)
    buffer.dispatch(x, None, ids)
    buffer.check()
    if rank == 1:
        os.kill(os.getpid(), 9)
    start = time.monotonic()
    try:
        buffer.dispatch(x, None, ids)
        buffer.check()
        return {"error": None}
    except PeerTimeout as error:
        result = {"error": "PeerTimeout", "rank": error.rank, "operation": error.operation}
    result["seconds"] = time.monotonic() - start
    try:
        buffer.barrier()
    except PeerError:
        result["later"] = "PeerError"
    result["alive"] = float(torch.ones(8, device=device).sum())
    start = time.monotonic()
    buffer.destroy()
    return {**result, "destroy_seconds": time.monotonic() - start}


def test_a_lost_peer_is_a_timeout_and_the_context_lives(ranks):
    for outcome in ranks(3).run(lose_a_peer, raise_errors=False)[::2]:
        assert outcome.ok, outcome.report
        result = outcome.value
        assert (result["error"], result["rank"], result["operation"]) == ("PeerTimeout", 1, "dispatch")
        assert 1.9 < result["seconds"] < 10 and result["destroy_seconds"] < 5
        assert result["later"] == "PeerError" and result["alive"] == 8


def replay_alone() -> dict[str, Any]:
    """Rank 1 stops to replay: rank 0, which only replays a graph, sees it in its log and at the end of the block."""
    device, R, rank = use_gpu(), dist.get_world_size(), dist.get_rank()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("moonep").addHandler(handler)
    buffer = Buffer(64, 256, 2, 4 * R, R, token_padding=8, backend="cuda", timeout_s=2.0)
    x = torch.ones(64, 256, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(64, 2, dtype=torch.int32, device=device)

    def run() -> dict[str, Tensor]:
        _, _, _, plan = buffer.dispatch(x, None, ids)
        return {"plan": plan.dst}

    run()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    dist.barrier()
    seen: dict[str, Any] = {"error": None}
    try:
        with buffer.watch():
            for _ in range(3 - rank):
                graph.replay()
            torch.cuda.synchronize()
            time.sleep(0.5)
    except PeerTimeout as error:
        seen = {"error": str(error), "rank": error.rank}
    dist.barrier()
    if rank == 0:  # it waits for nobody, after a failure
        buffer.destroy()
    return {**seen, "lines": lines}


def test_a_watched_buffer_tells_of_a_lost_peer_while_a_graph_is_replayed(ranks):
    waiting, gone = ranks(2).run(replay_alone)
    assert waiting["rank"] == 1 and "dispatch: rank 1: did not arrive within 2 s" in waiting["error"]
    assert waiting["lines"] == [f"rank 0: PeerTimeout: {waiting['error']}"]
    assert gone["error"] is None and gone["lines"] == []


def give_bad_ids() -> list[str]:
    """Ids out of range count as masked; the next call says so; then all goes on."""
    device, R = use_gpu(), dist.get_world_size()
    buffer = Buffer(16, 256, 1, 8, R, token_padding=1, backend="cuda", timeout_s=20.0)
    x = torch.ones(16, 256, dtype=torch.bfloat16, device=device)
    ids = torch.arange(16, device=device, dtype=torch.int32)[:, None]
    plan = buffer.dispatch(x, None, ids)[3]
    torch.cuda.synchronize()
    messages = [str(plan.load.sum().item())]
    for counts in (None, torch.full((8,), 3, dtype=torch.int32, device=device)):
        try:
            buffer.check()
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
        buffer.dispatch(x, None, ids % 8, counts)
    try:
        buffer.check()
    except ValueError as error:
        messages.append(str(error))
    buffer.dispatch(x, None, ids % 8)
    buffer.check()
    return messages


def test_wrong_data_is_reported_by_the_next_call_and_nothing_breaks(ranks):
    for total, ids, fine, counts in ranks(2).run(give_bad_ids):
        assert total == str(2 * 8)
        assert ids.startswith("topk_experts_sk: given ids out of range")
        assert fine == ""
        assert counts.startswith("tokens_per_expert: given counts that differ")


def use_large_rows() -> dict[str, Any]:
    """A receive buffer of more than 2^31 elements: rows beyond arrive and are summed like all others."""
    device, R, rank = use_gpu(), dist.get_world_size(), dist.get_rank()
    S, width, top_k = 40_000, 8192, 8
    buffer = Buffer(S, width, top_k, 16, R, backend="cuda", timeout_s=20.0)
    x = torch.randn(S, width, device=device, dtype=torch.bfloat16)
    ids = torch.rand(S, 16, device=device).topk(top_k).indices
    hidden, _, cu_seqlens, plan = buffer.dispatch(x, None, ids, zero_copy=True)
    to, row, _ = plan.destinations()
    token, k = ((to == rank) & (row > 2**31 // width)).nonzero(as_tuple=True)
    arrived = torch.equal(hidden[row[token, k]], x[token])
    output, _, _ = buffer.combine(plan, hidden, zero_copy=True)
    error = (output.float() - top_k * x.float()).abs() / (top_k * x.float()).abs().clamp(min=1e-2)
    buffer.check()
    seen = {
        "elements": int(cu_seqlens[-1]) * width,
        "rows": len(token),
        "arrived": arrived,
        "error": float(error.max()),
    }
    buffer.destroy()
    return seen


def test_offsets_beyond_31_bits_are_right(ranks):
    if torch.cuda.get_device_properties(0).total_memory < 60 << 30:
        pytest.skip("needs 60 GiB of GPU memory")
    for seen in ranks(2).run(use_large_rows):
        assert seen["elements"] > 2**31 and seen["rows"] > 0
        assert seen["arrived"] and seen["error"] < 0.02, seen


@triton.jit(do_not_specialize=["i"])
def _spin_kernel(nanoseconds, i):
    """Spin as long as the i-th number says: read on the device, so that each replay of a graph is delayed otherwise."""
    limit = tl.load(nanoseconds + i)
    start = tl.extra.cuda.globaltimer().to(tl.int64)
    now = start
    while now - start < limit:
        now = tl.extra.cuda.globaltimer().to(tl.int64)


class Delays:
    """Delays on the device before and after each launch of a kernel, different on each rank.

    They are random when launched; while a graph is captured they are recorded, and `draw` makes the next replay's.
    """

    MOST_NS, SHARE = 200_000, 0.15
    CAPACITY = 4096  # launches in a graph

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.nanoseconds = torch.zeros(self.CAPACITY, dtype=torch.int64, device="cuda")
        self.recorded = 0
        _spin_kernel[(1,)](self.nanoseconds, 0)  # compiles
        modules = [import_module(f"{kernels.__name__}.{m.name}") for m in pkgutil.iter_modules(kernels.__path__)]
        self.launchers = [
            (module, name, function)
            for module in modules
            for name, function in vars(module).items()
            if isinstance(function, FunctionType) and function.__annotations__.get("return") == "None"
        ]
        self.launchers += [(Launch, name, getattr(Launch, name)) for name in ("run", "repeat")]

    def __enter__(self) -> None:
        for module, name, function in self.launchers:
            setattr(module, name, self.delayed(function))

    def __exit__(self, *_: object) -> None:
        for module, name, function in self.launchers:
            setattr(module, name, function)

    def delayed(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(launch)
        def launch_late(*args: Any, **kwargs: Any) -> Any:
            self.nap()
            result = launch(*args, **kwargs)
            self.nap()
            return result

        return launch_late

    def nap(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            assert self.recorded < self.CAPACITY
            _spin_kernel[(1,)](self.nanoseconds, self.recorded)
            self.recorded += 1
        elif self.random.random() < self.SHARE:
            torch.cuda._sleep(self.random.randrange(2 * self.MOST_NS))

    def draw(self) -> None:
        """Other delays for the next replay, in stream order."""
        chosen = torch.rand(self.CAPACITY, generator=self.generator) < self.SHARE
        drawn = torch.randint(self.MOST_NS, (self.CAPACITY,), generator=self.generator) * chosen
        self.nanoseconds.copy_(drawn.pin_memory(), non_blocking=True)


class Hurried:
    """Every operation follows itself at once, with other data."""

    def __init__(self) -> None:
        self.device, R, self.rank = use_gpu(), dist.get_world_size(), dist.get_rank()
        E = 4 * R
        self.buffer = Buffer(256, 512, 4, E, R, token_padding=8, backend="cuda", timeout_s=20.0)
        self.pool = ExpertPool({"up": (64, 64)}, E=E, dtype=torch.bfloat16, grads=True, backend="cuda", timeout_s=20.0)
        generator = torch.Generator().manual_seed(self.rank)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.device)

        self.topks = [hot_rank(256, E, 4, R, 1.25, 2, seed)[self.rank].to(self.device) for seed in (1, 2)]
        self.xs = [draw(256, 512).bfloat16() for _ in range(2)]
        self.weights_sk = draw(256, 4)
        self.pool.local["up"].copy_(draw(4, 64, 64))
        self.buffer.barrier()
        self.plans = [self.buffer.dispatch(x, None, topk)[3] for x, topk in zip(self.xs, self.topks, strict=True)]
        self.used = [int(plan.cu_seqlens[-1]) for plan in self.plans]
        self.slots = [(plan.experts_to_copy[self.rank] >= 0).nonzero().flatten() for plan in self.plans]
        self.ys = [draw(self.buffer.dims.C, 512).bfloat16() for _ in range(2)]
        self.row_weights = draw(self.buffer.dims.C)

    def results(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.operations()}

    def operations(self) -> Iterator[tuple[str, Tensor]]:
        buffer, xs, ys, plans, used = self.buffer, self.xs, self.ys, self.plans, self.used
        for i in range(2):
            hidden, got, _, _ = buffer.dispatch(xs[i], self.weights_sk, self.topks[i])
            yield f"fresh {i}", hidden[: used[i]]
            yield f"fresh weights {i}", got[: used[i]]
        for i in range(2):
            hidden = buffer.dispatch(xs[1 - i], plan=plans[0])[0]
            yield f"reuse {i}", hidden[: used[0]]
        for i in range(2):
            output, back, _ = buffer.combine(plans[0], ys[i], self.row_weights)
            yield f"combine {i}", output
            yield f"gathered {i}", back
        hidden, _, _, plan, event = buffer.dispatch(xs[0], None, self.topks[0], async_finish=True, zero_copy=True)
        event.wait()
        output, _, event = buffer.combine(plan, hidden, async_finish=True, zero_copy=True)
        event.wait()
        yield "async", output
        yield from self.weights_and_gradients(False)
        yield from self.async_backward()
        yield from self.weights_and_gradients(True)

    def async_backward(self) -> Iterator[tuple[str, Tensor]]:
        """Asynchronous and ordinary operations in turn, each begun before the one before it is waited for."""
        buffer, xs, ys, plans = self.buffer, self.xs, self.ys, self.plans
        for i in range(2):
            hidden, _, _, _, arrived = buffer.dispatch(xs[i], plan=plans[1], async_finish=True)
            fresh = buffer.dispatch(xs[1 - i], None, self.topks[i])[0]
            output, back, summed = buffer.combine(plans[1], ys[i], self.row_weights, async_finish=True)
            again = buffer.combine(plans[0], ys[1 - i])[0]
            arrived.wait()
            yield f"async reuse {i}", hidden[: self.used[1]]
            yield f"fresh beside it {i}", fresh[: self.used[i]]
            summed.wait()
            yield f"async combine {i}", output
            yield f"async gathered {i}", back
            yield f"combine beside it {i}", again

    def weights_and_gradients(self, async_finish: bool) -> Iterator[tuple[str, Tensor]]:
        buffer, pool, kind = self.buffer, self.pool, "async " * async_finish
        for i in range(2):
            filled = buffer.prefetch(self.plans[i], pool, async_finish=async_finish)
            pool.local_grad["up"].fill_(i)
            pool.compact_grad["up"][4:] = self.rank + i
            reduced = buffer.reduce(self.plans[i], pool, async_finish=async_finish)
            if async_finish:
                filled.wait()
                reduced.wait()
            yield f"{kind}slots {i}", pool.compact["up"][4:].index_select(0, self.slots[i])
            yield f"{kind}reduced {i}", pool.local_grad["up"]


def hurried_operations(iterations: int) -> dict[str, int]:
    """Ranks are delayed at random. -> results that differ from those without delays, by name"""
    hurried = Hurried()
    want = hurried.results()
    torch.cuda.synchronize()
    different = dict.fromkeys(want, 0)
    for iteration in range(iterations):
        with Delays(1000 * iteration + hurried.rank):
            got = hurried.results()
        for name, tensor in got.items():
            different[name] += int(not torch.equal(tensor, want[name]))
    hurried.buffer.check()
    return different


def capture(run: Callable[[], dict[str, Tensor]], delays: Delays) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor]]:
    """A graph of `run` with a delay before and after each kernel, and the tensors that hold its results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with delays, torch.cuda.graph(graph):
        results = run()
    assert delays.recorded > 20
    return graph, results


def hurried_replays(iterations: int) -> dict[str, int]:
    """As `hurried_operations`, with all of them in one graph; replays follow each other at once, data change."""
    hurried, delays = Hurried(), Delays(dist.get_rank())
    data = [(hurried.xs, hurried.ys), ([x.neg() for x in hurried.xs], [y.neg() for y in hurried.ys])]
    data = [tuple([t.clone() for t in tensors] for tensors in pair) for pair in data]

    def give(i: int) -> None:
        for tensors, given in zip((hurried.xs, hurried.ys), data[i % 2], strict=True):
            for tensor, values in zip(tensors, given, strict=True):
                tensor.copy_(values)

    wants = []
    for i in range(2):
        give(i)
        wants.append(hurried.results())
    graph, results = capture(hurried.results, delays)
    seen = []
    for i in range(iterations):
        give(i)
        delays.draw()
        graph.replay()
        seen.append({name: tensor.clone() for name, tensor in results.items()})
    hurried.buffer.check()
    different = dict.fromkeys(results, 0)
    for i, got in enumerate(seen):
        for name, tensor in got.items():
            different[name] += int(not torch.equal(tensor, wants[i % 2][name]))
    return different


@pytest.mark.parametrize("hurry", [hurried_operations, hurried_replays])
def test_random_delays_on_random_ranks_change_nothing(ranks, hurry):
    for different in ranks(2).run(hurry, 100):
        assert len(different) > 20 and not any(different.values()), different


def hurried_training(iterations: int, slot_sets: int, save: str) -> int:
    """Two layers that share a Buffer, two interleaved microbatches, ranks delayed at random. -> mismatches"""
    device = use_gpu()
    layers = [make_layer(seed, slot_sets=slot_sets, save=save) for seed in (3, 4)]
    inputs = [batch(i, device).requires_grad_() for i in (1, 2)]
    grads = [batch(i, device) for i in (3, 4)]

    def results() -> list[Tensor]:
        for layer in layers:
            layer.router.weight.grad = None
            for gradient in layer.pool.local_grad.values():
                gradient.zero_()
        outputs = []
        for i, x in enumerate(inputs):
            x.grad = None
            for layer in layers:
                layer.slot_set = i % slot_sets
            outputs.append(layers[1](layers[0](x)))
        for y, grad in zip(outputs, grads, strict=True):
            y.backward(grad)
        found = [*outputs, *(x.grad for x in inputs), *(layer.router.weight.grad for layer in layers)]
        found += [gradient for layer in layers for gradient in layer.pool.local_grad.values()]
        return [tensor.detach().clone() for tensor in found]

    want = results()
    different = 0
    for iteration in range(iterations):
        with Delays(1000 * iteration + dist.get_rank()):
            got = results()
        different += not all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    layers[0].buffer.check()
    return different


def hurried_training_replays(iterations: int, save: str) -> int:
    """Forward and backward in one graph with delays inside; replays follow each other at once. -> mismatches"""
    device = use_gpu()
    layer, delays = make_layer(save=save), Delays(dist.get_rank())
    x, grad = batch(0, device).requires_grad_(), batch(50, device)
    batches = [batch(seed, device) for seed in (1, 2, 3)]

    def run() -> dict[str, Tensor]:
        x.grad = layer.router.weight.grad = None
        for gradient in layer.pool.local_grad.values():
            gradient.zero_()
        y = layer(x)
        y.backward(grad)
        return {"y": y, "dx": x.grad, "router": layer.router.weight.grad, **layer.pool.local_grad}

    def give(i: int) -> None:
        with torch.no_grad():
            x.copy_(batches[i % len(batches)])

    def copies(results: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in results.items()}

    wants = []
    side = torch.cuda.Stream()  # a graph cannot wait for the default stream, where leaves accumulate that began there
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(len(batches)):
            give(i)
            wants.append(copies(run()))
    torch.cuda.current_stream().wait_stream(side)
    graph, results = capture(run, delays)
    seen = []
    for i in range(iterations):
        give(i)
        delays.draw()
        graph.replay()
        seen.append(copies(results))
    layer.buffer.check()
    return sum(
        any(not torch.equal(got[name], want) for name, want in wants[i % len(batches)].items())
        for i, got in enumerate(seen)
    )


@pytest.mark.parametrize("save", ["rows", "inputs", "tokens"])
def test_random_delays_inside_a_graph_do_not_change_training(ranks, save):
    assert ranks(2).run(hurried_training_replays, 100, save) == [0, 0]


@pytest.mark.parametrize(("slot_sets", "save"), [(1, "rows"), (2, "tokens")])
def test_random_delays_do_not_change_training_with_interleaved_microbatches(ranks, slot_sets, save):
    assert ranks(2).run(hurried_training, 100, slot_sets, save) == [0, 0]
