"""Dispatch and combine alone, for splits of multiprocessors between what crosses ranks and what does not.

    python benchmarks/movers.py --ranks 2 --split 32,100 --split 16,116 --output benchmarks/results/h200/movers.jsonl

A quick look while working on movers (`moonep bench` measures everything). Outputs are compared first, bit for bit, with
what the specification says of them. Graphs; each sample starts from a barrier on the devices; the slowest rank; the
median of 21 and the least.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import moonep
from moonep.bench.results import describe_run
from moonep.plan import ARRIVAL_ROW
from moonep.testing import run_ranks
from moonep.testing.routing import lognormal

SAMPLES, DELAY_CYCLES, TIMEOUT_S = 21, 2_000_000, 5.0
Sizes = dict[str, int]


def tokens_of(rank: int, sizes: Sizes, device: torch.device) -> Tensor:
    """[S, H], the same wherever it is made."""
    generator = torch.Generator(device).manual_seed(100 + rank)
    return torch.randn(sizes["S"], sizes["H"], device=device, generator=generator).bfloat16()


def check(buffer: moonep.Buffer, x: Tensor, weights: Tensor, topk: Tensor, sizes: Sizes) -> moonep.Plan:
    """Raise unless a dispatch, a combine of its rows and a dispatch with its plan are right."""
    hidden, row_weights, _, plan = buffer.dispatch(x, weights, topk, zero_copy=True, router_weights_zero_copy=True)
    source, token, _ = (plan.arrivals >= 0).nonzero(as_tuple=True)
    rows = (plan.arrivals[plan.arrivals >= 0] & ARRIVAL_ROW).long()
    sent = torch.stack([tokens_of(r, sizes, x.device) for r in range(buffer.dims.R)])
    assert torch.equal(hidden[rows], sent[source, token]), "rows differ"
    for first, count in plan.zero_fill_ranges.tolist():
        assert not hidden[first : first + count].any() and not row_weights[first : first + count].any(), "padding"
    ranks, _, _ = plan.destinations()
    want = torch.zeros(x.shape, device=x.device)
    for r in range(buffer.dims.R):
        partial = torch.zeros(x.shape, device=x.device)
        for k in range(buffer.dims.K):
            partial += torch.where((ranks[:, k] == r)[:, None], x.float(), 0.0)
        want += partial.bfloat16().float()
    output, back, _ = buffer.combine(plan, hidden, row_weights)
    assert torch.equal(output, want.bfloat16()), "sums differ"
    assert torch.equal(back, weights), "route weights differ"
    again = buffer.dispatch(x, plan=plan, zero_copy=True)[0]
    assert torch.equal(again[rows], hidden[rows]), "rows of the reused plan differ"
    buffer.check()
    return plan


def time_graph(call: Callable[[], Any], barrier: Callable[[], None]) -> dict[str, float]:
    """Median and least time of the slowest rank, in microseconds."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(2):
        graph.replay()
    samples = []
    for _ in range(SAMPLES):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(DELAY_CYCLES)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        barrier()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3)
    slowest = torch.tensor(samples)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return {"median": round(slowest.median().item(), 1), "least": round(slowest.min().item(), 1)}


def measure(sizes: Sizes, splits: list[tuple[int, int]], routing: str) -> list[dict[str, Any]]:
    """One rank's part."""
    R, rank = dist.get_world_size(), dist.get_rank()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    S, H, K, E = (sizes[n] for n in "SHKE")
    x, topk = tokens_of(rank, sizes, device), torch.load(routing)[rank].to(device)
    weights = torch.rand(S, K, device=device)
    lines = []
    for senders, local in splits:
        buffer = moonep.Buffer(S, H, K, E, R, num_sms=senders, num_local_sms=local, timeout_s=TIMEOUT_S)
        plan = check(buffer, x, weights, topk, sizes)
        views = {"zero_copy": True, "router_weights_zero_copy": True}
        calls: dict[str, Callable[[], Any]] = {
            "dispatch": lambda b=buffer, v=views: b.dispatch(x, weights, topk, **v),
            "dispatch_with_plan": lambda b=buffer, p=plan: b.dispatch(x, plan=p, zero_copy=True),
            "combine": lambda b=buffer, p=plan: b.combine(p, b.hidden_nvsh_buffer_view, zero_copy=True),
            "barrier": buffer.barrier,
        }
        times = {f"{name}_us": time_graph(call, buffer.barrier) for name, call in calls.items()}
        buffer.check()
        buffer.destroy()
        lines.append({"num_sms": senders, "num_local_sms": local, **times})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    for name, default in (("S", 8192), ("H", 7168), ("K", 8), ("E", 384)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--maxvio", type=float, default=1.0)
    parser.add_argument("--split", action="append", help="SMs across ranks, SMs within: 32,100", default=None)
    parser.add_argument("--output", type=Path, default=None, help="append the lines to this file")
    args = parser.parse_args()
    os.environ.update(TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NCCL_NVLS_ENABLE="0")
    sizes = {name: getattr(args, name) for name in "SHKE"}
    splits = [tuple(map(int, split.split(","))) for split in args.split or ["32,100"]]
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        torch.save(lognormal(args.S, args.E, args.K, args.ranks, args.maxvio, seed=1), file.name)
        lines = run_ranks(measure, args.ranks, sizes, splits, file.name, timeout_s=150.0)[0]
    run = describe_run(" ".join(["python", *sys.argv]))
    for line in lines:
        routing = {"R": args.ranks, **sizes, "maxvio": args.maxvio}
        text = json.dumps({"benchmark": "movers", "mode": "graph", **routing, **line, **run})
        print(text, flush=True)
        if args.output is not None:
            with args.output.open("a") as output:
                output.write(text + "\n")


if __name__ == "__main__":
    main()
