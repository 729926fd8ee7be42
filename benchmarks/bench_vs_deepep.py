"""MoonEP beside DeepEP, all_to_all by hand, and torch's symmetric memory: one process group, samples in turn.

    python benchmarks/bench_vs_deepep.py --output benchmarks/results/h200/peers.jsonl
    python benchmarks/bench_vs_deepep.py --imbalance 1.0 1.25 1.5 1.9 --peers moonep deepep_v2 all_to_all

Every peer gets the same routings and SMs, and is checked before it is timed. A peer that is not there, or fails, is
named with its error. Without a GPU it runs on CPU processes with small sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from moonep import environment
from moonep.bench import results
from moonep.bench.peers import PEERS
from moonep.bench.routings import Routing
from moonep.bench.side_by_side import Comparison, run_comparisons, run_launched

SIZES = {"cuda": (8192, 7168, 8, 384), "cpu": (64, 32, 2, 8)}
MAXVIOS = {"cuda": [0.2, 1.0, 10.0, 20.0], "cpu": [1.0]}
IMBALANCES = {"cuda": [1.0, 1.25, 1.5, 1.9], "cpu": [1.5]}


def parse() -> argparse.Namespace:
    device = "cuda" if torch.cuda.is_available() and environment.backend() in (None, "cuda") else "cpu"
    S, H, K, E = SIZES[device]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=S, help="S")
    parser.add_argument("--hidden", type=int, default=H, help="H")
    parser.add_argument("--top-k", type=int, default=K, help="K")
    parser.add_argument("--experts", type=int, default=E, help="E")
    parser.add_argument("--sms", type=int, default=32)
    parser.add_argument("--maxvio", type=float, nargs="*", default=MAXVIOS[device])
    parser.add_argument("--imbalance", type=float, nargs="*", default=IMBALANCES[device])
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--samples", type=int, default=21)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=None, help="append the lines to this .jsonl file")
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--json", action="store_true", help="the last line of stdout is one JSON document")
    parser.set_defaults(device=device)
    args = parser.parse_args()
    ranks = int(os.environ["WORLD_SIZE"]) if environment.launched() else args.ranks
    if ranks < 1 or args.experts % ranks or args.experts < args.top_k:
        parser.error(
            f"--experts: given {args.experts}, expected a multiple of {ranks} ranks, at least K = {args.top_k}"
        )
    return args


def main() -> None:
    args = parse()
    routings = [Routing("hot_rank", value, args.seed) for value in args.imbalance]
    routings += [Routing("lognormal", value, args.seed) for value in args.maxvio]
    comparison = Comparison(
        args.tokens,
        args.hidden,
        args.top_k,
        args.experts,
        tuple(routings),
        tuple(args.peers),
        args.sms if args.device == "cuda" else None,
        args.device,
        args.samples,
    )
    first = not environment.launched() or os.environ["RANK"] == "0"
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    about = results.describe_run(" ".join(["bench_vs_deepep.py", *words])) if first else {}
    people = sys.stderr if args.json else sys.stdout
    if first and args.device == "cpu":
        print("No GPU: the wall clock of processes on this machine's cores, with small sizes.", file=people)
    lines: list[dict[str, Any]] = []

    def take(line: dict[str, Any]) -> None:
        lines.append({"benchmark": "peers", **line, **about})
        if args.output is not None:
            results.append(args.output, lines[-1:])
        print(describe(line), file=people, flush=True)

    if environment.launched():
        run_launched([comparison], take)
    else:
        run_comparisons([comparison], args.ranks, args.timeout_s, take)
    if first and args.json:
        print(json.dumps({"set": about["set"], "backend": args.device, "rows": lines}))
    if any("gate" in line or "error" in line for line in lines):
        raise SystemExit(1)


def describe(line: dict[str, Any]) -> str:
    """A line in words."""
    routing = line["routing"]
    what = f"{line['peer']} ({line['budget']}), {line['operation']}, {routing['kind']} {routing['value']:g}"
    if "median_us" not in line:
        kind = next(key for key in ("gate", "error", "unavailable") if key in line)
        return f"{what}: {kind}: {line[kind]}"
    return f"{what}: {line['median_us']:g} us ({line['p10_us']:g} to {line['p90_us']:g}), {line['rows']} rows"


if __name__ == "__main__":
    main()
