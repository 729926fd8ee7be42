"""The goals, and what the newest committed results say: a table, or one JSON document with a value for each key.

    python benchmarks/summary.py --json

Reads benchmarks/results/**/*.jsonl, which `moonep bench --output ...` with the suites goals and layers, and
`bench_vs_deepep.py --output ...` write. Which lines measure which goal: `moonep/bench/goals.py`. null: not measured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from moonep.bench import goals, results

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document: a value or null for each key")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a .jsonl file, or a directory of them")
    args = parser.parse_args()
    if not args.results.exists():
        parser.error(f"--results: given {args.results}, expected a file or a directory")
    lines = results.newest_set(results.read(args.results))
    values = goals.measured(lines)
    if args.json:
        print(json.dumps(values))
        return
    if lines:
        gpus = [gpu["name"] for gpu in lines[-1]["hardware"].get("gpus", [])]
        print(f"set {lines[-1]['set']}: {len(lines)} lines, {', '.join(gpus) or 'no GPU'}\n")
    else:
        print("no results of `moonep bench --suite goals` yet\n")
    print(f"{'figure':<62} {'must':>8} {'aim':>8} {'measured':>9}  met")
    for goal in goals.GOALS:
        print(format_goal(goal, values[goal.key]))
    beside = goals.measured_with_weights(lines)
    for goal in goals.WITH_WEIGHTS:
        print(format_goal(goal, beside[goal.key]))


def format_goal(goal: goals.Goal, value: float | None) -> str:
    """One line of the table."""
    sign = ">=" if goal.higher else "<="
    must, aim = ("-" if limit is None else f"{sign} {limit:g}" for limit in (goal.must, goal.aim))
    met = {True: "yes", False: "NO", None: "-"}[goal.met(value)]
    return f"{goal.what:<62} {must:>8} {aim:>8} {'-' if value is None else format(value, 'g'):>9}  {met}"


if __name__ == "__main__":
    main()
