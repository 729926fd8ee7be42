"""Times of the operations of a Buffer, on the GPUs of this machine: one JSON line a routing.

    python benchmarks/operations.py --ranks 2 --output benchmarks/results/h200/operations.jsonl

Each sample starts from a barrier of the hosts, with launches hidden behind a delay on the device, and is the slowest
rank's time between device events; the median of 21 is reported. Outputs are compared with the specification first, on
the inputs that are timed: on a mismatch no time is printed. Eager calls: no graph. What is counted: everything that the
call does, planning included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import moonep
from moonep.backends.cpu import sum_chains, sum_partials
from moonep.plan import check_plan
from moonep.planner import policy, rows
from moonep.testing import run_ranks
from moonep.testing.routing import lognormal, rank_imbalance

SAMPLES, WARMUP, DELAY_CYCLES = 21, 3, 500_000
TIMEOUT_S = 20.0


def measure(S: int, H: int, K: int, E: int, maxvio: float, num_sms: int | None, seed: int) -> dict[str, Any]:
    """One rank's part."""
    R, rank = dist.get_world_size(), dist.get_rank()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    topks = lognormal(S, E, K, R, maxvio, seed)
    generator = torch.Generator(device).manual_seed(seed + rank)
    x = torch.randn(S, H, device=device, generator=generator).bfloat16()
    weights = torch.rand(S, K, device=device, generator=generator)
    topk = topks[rank].to(device)
    buffer = moonep.Buffer(S, H, K, E, R, num_sms=num_sms, timeout_s=TIMEOUT_S)
    views = {"zero_copy": True, "router_weights_zero_copy": True}
    hidden, row_weights, _, plan = buffer.dispatch(x, weights, topk, **views)
    gate(buffer, plan, topks, x, weights, hidden, row_weights)
    output = buffer.hidden_nvsh_buffer_view
    calls: dict[str, Callable[[], Any]] = {
        "dispatch": lambda: buffer.dispatch(x, weights, topk, **views),
        "dispatch_with_plan": lambda: buffer.dispatch(x, plan=plan, zero_copy=True),
        "combine": lambda: buffer.combine(plan, output, zero_copy=True),
        "barrier": buffer.barrier,
    }
    times = {f"{name}_us": time_call(call) for name, call in calls.items()}
    buffer.check()
    buffer.destroy()
    return {**times, "rank_imbalance": round(rank_imbalance(topks, E), 3), "copies": int(plan.stats().copies_in.sum())}


def gate(
    buffer: moonep.Buffer, plan: moonep.Plan, topks: list, x: Any, weights: Any, hidden: Any, row_weights: Any
) -> None:
    """Planned integers, arrived rows and the combined output equal the vectorised twin of the specification."""
    d, rank = buffer.dims, buffer.rank
    load = torch.stack([rows.count_load(topk, d) for topk in topks])
    alloc = torch.tensor(policy.allocate(load.sum(0).tolist(), d).counts_ER, dtype=torch.int32)
    groups = rows.lay_groups(alloc, d)
    first, row = rows.split_sources(load, alloc, groups.base_ER, rank, d)
    want = {
        "load": load,
        "alloc": alloc,
        "cu_seqlens": groups.ends_RG[rank],
        "experts_to_copy": groups.experts_to_copy_RB,
    }
    want["dst"] = rows.assign_rows(topks[rank], first, row, d)
    for name, value in want.items():
        assert torch.equal(getattr(plan, name).cpu(), value), f"{name} differs from the specification"
    assert check_plan(plan) == []
    output, back, _ = buffer.combine(plan, hidden, row_weights)
    assert torch.equal(back, weights), "route weights did not come back"
    reply, partial = sum_chains(plan.links, hidden)
    source = reply // (d.S * d.W)
    mine = torch.zeros(d.S * d.W, d.H, dtype=x.dtype, device=x.device)
    mine[reply[source == rank] % (d.S * d.W)] = partial[source == rank]
    ranks_of_token = rows.ranks_used(plan.destinations()[0].cpu(), d)
    local_only = (ranks_of_token.sum(1) == ranks_of_token[:, rank]).nonzero().flatten().to(x.device)
    want_local = sum_partials(mine.view(d.S, d.W, d.H)[local_only], torch.ones(len(local_only), device=x.device))
    assert torch.equal(output[local_only], want_local), "combine differs from the specification"
    rounding = (output.float() - d.K * x.float()).abs() / (d.K * x.float()).abs().clamp(min=1e-2)
    assert float(rounding.max()) < 0.02, "combined copies of a token are not K times the token"


def time_call(call: Callable[[], Any]) -> dict[str, float]:
    """Median, p10 and p90 of the slowest rank's device time, and the median host time, in microseconds."""
    for _ in range(WARMUP):
        call()
    device_us, host_us = [], []
    for _ in range(SAMPLES):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(DELAY_CYCLES)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        start = time.perf_counter()
        call()
        host_us.append((time.perf_counter() - start) * 1e6)
        end.record()
        torch.cuda.synchronize()
        device_us.append(begin.elapsed_time(end) * 1e3)
    slowest = torch.tensor(device_us)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    p10, median, p90 = slowest.quantile(torch.tensor([0.1, 0.5, 0.9])).tolist()
    host = float(torch.tensor(host_us).median())
    return {"median": round(median, 1), "p10": round(p10, 1), "p90": round(p90, 1), "host_median": round(host, 1)}


def machine() -> dict[str, Any]:
    """Hardware, versions and commit."""
    import triton

    # A copy of the tree without its repository gets the commit by the environment.
    commit = (
        os.environ.get("MOONEP_COMMIT")
        or subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    )
    gpus = [torch.cuda.get_device_properties(i).name for i in range(torch.cuda.device_count())]
    return {"gpus": gpus, "torch": torch.__version__, "triton": triton.__version__, "commit": commit or None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192, help="S")
    parser.add_argument("--hidden", type=int, default=7168, help="H")
    parser.add_argument("--top-k", type=int, default=8, help="K")
    parser.add_argument("--experts", type=int, default=384, help="E")
    parser.add_argument("--maxvio", type=float, nargs="+", default=[0.2, 1.0, 10.0, 20.0])
    parser.add_argument("--num-sms", type=int, default=None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=None, help="append the lines to this file")
    args = parser.parse_args()
    sizes = {"S": args.tokens, "H": args.hidden, "K": args.top_k, "E": args.experts}
    for maxvio in args.maxvio:
        result = run_ranks(measure, args.ranks, *sizes.values(), maxvio, args.num_sms, args.seed, timeout_s=120.0)[0]
        line = {"benchmark": "operations", "mode": "eager", "ranks": args.ranks, **sizes, "maxvio": maxvio}
        line = json.dumps({**line, "num_sms": args.num_sms, **result, **machine()})
        print(line, flush=True)
        if args.output is not None:
            with args.output.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
