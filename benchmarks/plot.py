"""Figures from results: nothing here measures.

    python benchmarks/plot.py                       # the newest set below benchmarks/results -> docs/figures/*.png

growth      time against imbalance and maxvio, stacked: planning, dispatch, prefetch, combine, and backward's parts
bandwidth   physical bandwidth against SMs, with the copy engines' as lines
tokens      time against tokens, graph and eager
peers       dispatch and combine beside peers, against imbalance and maxvio
layers      one layer, forward and backward, beside the same on peers, against imbalance and maxvio

A figure whose lines are not there is not drawn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moonep.bench import results
from moonep.bench.layer_peers import LAYER
from moonep.bench.settings import LOCAL_ALL

Line = dict[str, Any]

ROOT = Path(__file__).parent
SWEEPS = (("hot_rank", "rank imbalance, 8 hot experts"), ("lognormal", "maxvio"))
FORWARD = ("planning", "dispatch", "prefetch", "combine")
BACKWARD = ("dispatch with plan", "prefetch", "combine", "reduce_grad")
COLOURS = {
    "planning": "tab:purple",
    "dispatch": "tab:blue",
    "dispatch with plan": "tab:blue",
    "prefetch": "tab:orange",
    "combine": "tab:green",
    "reduce_grad": "tab:red",
}
PEER_COLOURS = {"moonep": "tab:blue", "all_to_all": "tab:orange", "deepep_v2": "tab:green"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="a .jsonl file, or a directory of them")
    parser.add_argument("--output", type=Path, default=ROOT.parent / "docs" / "figures", help="directory")
    parser.add_argument("--format", choices=("png", "svg"), default="png")
    parser.add_argument("--set", default=None, help="which set, such as '1a2b3c4 2026-01-31'; the newest")
    args = parser.parse_args()
    if not args.results.exists():
        parser.error(f"--results: given {args.results}, expected a file or a directory")
    lines = list(results.read(args.results))
    sets = sorted({line["set"] for line in lines})
    if args.set is not None and args.set not in sets:
        parser.error(f"--set: given {args.set!r}, expected one of {', '.join(sets) or 'none: there are no results'}")
    lines = [line for line in lines if line["set"] == args.set] if args.set else results.newest_set(lines)
    paths = draw_all(lines, args.output, args.format)
    for path in paths:
        print(path)
    if not paths:
        print("nothing is drawn: no figure has its lines in this set", file=sys.stderr)


def draw_all(lines: Iterable[Line], directory: Path, suffix: str) -> list[Path]:
    """Draw every figure that the lines of a set allow. -> the files"""
    lines = [line for line in lines if "median_us" in line]
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    figures: dict[str, Callable[[list[Line]], Figure | None]] = {
        "growth": draw_growth,
        "bandwidth": draw_bandwidth,
        "tokens": draw_tokens,
        "peers": draw_peers,
        "layers": draw_layers,
    }
    for name, draw in figures.items():
        figure = draw(lines)
        if figure is not None:
            path = directory / f"{name}.{suffix}"
            figure.savefig(path, dpi=150)
            paths.append(path)
    return paths


def draw_growth(lines: list[Line]) -> Figure | None:
    """A row of stacks for each direction: what the parts take alone, and the time of all in one call as a mark."""
    rows = _own([line for line in lines if line["F"] is not None])
    sweeps = [(kind, text) for kind, text in SWEEPS if len(_values(_of(rows, "forward"), kind)) > 1]
    if not sweeps:
        return None
    planning = min((line["median_us"] for line in _of(_own(lines), "plan")), default=0.0)
    figure = Figure(figsize=(5 * len(sweeps), 7), layout="constrained")
    grid = figure.subplots(2, len(sweeps), squeeze=False, sharey="row")
    for column, (kind, text) in enumerate(sweeps):
        for axes, direction, parts in zip(grid[:, column], ("forward", "backward"), (FORWARD, BACKWARD), strict=True):
            values = _values(_of(rows, direction), kind)
            bottom = [0.0] * len(values)
            for part in parts:
                heights = [_part_us(rows, part, kind, value, planning) for value in values]
                axes.bar(range(len(values)), heights, 0.6, bottom, color=COLOURS[part], label=part)
                bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
            whole = [_us(_of(rows, direction), kind, value) for value in values]
            axes.plot(range(len(values)), whole, "k_", markersize=22, markeredgewidth=2, label="in one call")
            axes.set_xticks(range(len(values)), [f"{value:g}" for value in values])
            axes.set_xlabel(text)
            axes.set_ylabel(f"{direction}, us")
    for row in grid:
        row[-1].legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(f"Communication of a layer by skew of the router: {_machine(rows)}")
    return figure


def _part_us(rows: list[Line], part: str, kind: str, value: float, planning: float) -> float:
    """A part's share of a stack. Planning is taken out of dispatch, in which it was timed."""
    if part == "planning":
        return planning
    operation = {"dispatch with plan": "dispatch_with_plan"}.get(part, part)
    us = _us(_of(rows, operation), kind, value) or 0.0
    return max(us - planning, 0.0) if part == "dispatch" else us


def draw_bandwidth(lines: list[Line]) -> Figure | None:
    """Physical bandwidth against SMs."""
    rows = [line for line in _own(lines, any_sms=True) if "physical_gbps" in line and line["sms"] is not None]
    movers = ("dispatch", "dispatch_with_plan", "combine", "prefetch", "reduce_grad")
    curves = {name: _curve(_of(rows, name), "sms", "physical_gbps", biggest="physical_bytes") for name in movers}
    curves = {name: curve for name, curve in curves.items() if len(curve) > 1}
    if not curves:
        return None
    figure, axes = _one()
    for name, curve in curves.items():
        axes.plot(list(curve), list(curve.values()), marker="o", label=name.replace("_", " "))
    for name, style in (("copy_push", "--"), ("copy_pull", ":")):
        ceiling = [line["physical_gbps"] for line in lines if line["operation"] == name]
        if ceiling:
            axes.axhline(ceiling[-1], color="gray", linestyle=style, label=name.replace("copy_", "copy engine, "))
    axes.set_ylim(bottom=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("SMs of a kernel that crosses NVLink")
    axes.set_ylabel("GB/s over the links")
    return _finish(figure, axes, "Bandwidth of one direction while all ranks send", rows)


def draw_tokens(lines: list[Line]) -> Figure | None:
    """Time against tokens of a rank, uniform routing."""
    uniform = [line for line in _own(lines) if (line["routing"] or {}).get("kind") == "uniform"]
    figure, axes = _one()
    drawn = []
    for operation, colour in (("dispatch", "tab:blue"), ("combine", "tab:green")):
        for mode, style in (("graph", "-"), ("eager", "--")):
            rows = [line for line in _of(uniform, operation, mode) if line["tokens"] == line["S"]]
            curve = _curve(rows, "tokens", "median_us")
            if len(curve) > 1:
                drawn += rows
                axes.plot(
                    list(curve), list(curve.values()), style, marker="o", color=colour, label=f"{operation}, {mode}"
                )
    if not drawn:
        return None
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("tokens of a rank")
    axes.set_ylabel("us")
    return _finish(figure, axes, "Time of a call by tokens", drawn)


def draw_peers(lines: list[Line]) -> Figure | None:
    """dispatch + combine of MoonEP and its peers, side by side."""
    rows = [line for line in lines if line.get("peer") and line["operation"] in ("dispatch", "combine")]
    sweeps = [(kind, text) for kind, text in SWEEPS if len(_values(_of(rows, "dispatch", None), kind)) > 1]
    if not sweeps:
        return None
    figure = Figure(figsize=(5 * len(sweeps), 4), layout="constrained")
    grid = figure.subplots(1, len(sweeps), squeeze=False, sharey=True)[0]
    for axes, (kind, text) in zip(grid, sweeps, strict=True):
        for peer, budget in dict.fromkeys((line["peer"], line["budget"]) for line in rows):
            here = [line for line in rows if (line["peer"], line["budget"]) == (peer, budget)]
            both = {}
            for value in _values(_of(here, "dispatch", None), kind):
                parts = [_us(_of(here, operation, None), kind, value) for operation in ("dispatch", "combine")]
                if None not in parts:
                    both[value] = sum(us for us in parts if us is not None)
            axes.plot([f"{value:g}" for value in both], list(both.values()), marker="o", label=f"{peer}, {budget}")
        axes.set_xlabel(text)
    grid[0].set_ylim(bottom=0)  # of all, which share it
    grid[0].set_ylabel("dispatch + combine, us, eager")
    grid[-1].legend(frameon=False)
    figure.suptitle(f"Beside peers, in one process group, in turn: {_machine(rows)}")
    return figure


def _is_swept(line: Line, rows: list[Line]) -> bool:
    """Whether the variant has been measured with several routings."""
    routings = [row["routing"] for row in rows if (row["peer"], row["variant"]) == (line["peer"], line["variant"])]
    return any(routing != line["routing"] for routing in routings)


def draw_layers(lines: list[Line]) -> Figure | None:
    """Forward and backward of a layer, by peer and variant; the balanced time of MoonEP's as a line."""
    rows = [line for line in lines if line.get("peer") and line["operation"] == LAYER]
    rows = [line for line in rows if line["S"] == max(row["S"] for row in rows)]
    sweeps = [(kind, text) for kind, text in SWEEPS if len(_values(rows, kind)) > 1]
    if not sweeps:
        return None
    figure = Figure(figsize=(5 * len(sweeps), 4.5), layout="constrained")
    grid = figure.subplots(1, len(sweeps), squeeze=False, sharey=True)[0]
    names = list(dict.fromkeys((line["peer"], line["variant"]) for line in rows if _is_swept(line, rows)))
    ideal = _us([line for line in rows if (line["peer"], line["variant"]) == ("moonep", "rows")], "hot_rank", 1.0)
    for axes, (kind, text) in zip(grid, sweeps, strict=True):
        for peer, variant in names:
            here = [line for line in rows if (line["peer"], line["variant"]) == (peer, variant)]
            times = {value: _us(here, kind, value) for value in _values(here, kind)}
            milliseconds = [us / 1000 for us in times.values() if us is not None]
            style = "-" if variant in ("rows", "unpadded") or peer not in ("moonep", "all_to_all") else "--"
            axes.plot(
                [f"{value:g}" for value in times], milliseconds, style, marker="o", color=PEER_COLOURS.get(peer),
                label=f"{peer}, {variant}",
            )  # fmt: skip
        if ideal is not None:
            axes.axhline(ideal / 1000, color="gray", linestyle=":", label="moonep, balanced")
        axes.set_xlabel(text)
    grid[0].set_ylim(bottom=0)  # of all, which share it
    grid[0].set_ylabel("forward + backward, ms, eager")
    grid[-1].legend(frameon=False)
    figure.suptitle(f"One layer by skew of the router, in one process group, in turn: {_machine(rows)}")
    return figure


def _own(lines: list[Line], any_sms: bool = False) -> list[Line]:
    """Full-size rows without peers; of the headline's budget where there is one; of the most usual number of SMs."""
    rows = [line for line in lines if not line.get("peer") and line["balance"] == "exact" and not line["cold"]]
    if any(line["budget"] == LOCAL_ALL for line in rows):
        rows = [line for line in rows if line["budget"] == LOCAL_ALL]
    counts = [line["sms"] for line in rows]
    return rows if any_sms or not counts else [line for line in rows if line["sms"] == max(counts, key=counts.count)]


def _of(rows: list[Line], operation: str, mode: str | None = "graph") -> list[Line]:
    """Rows of an operation: as graphs where there are any, unless `mode` is None (any) or another one."""
    rows = [line for line in rows if line["operation"] == operation]
    if mode == "graph" and not any(line["mode"] == "graph" for line in rows):
        return rows
    return [line for line in rows if mode is None or line["mode"] == mode]


def _values(rows: list[Line], kind: str) -> list[float]:
    routings = [line["routing"] for line in rows if line["routing"]]
    return sorted({routing["value"] for routing in routings if routing["kind"] == kind})


def _us(rows: list[Line], kind: str, value: float) -> float | None:
    found = [
        line["median_us"]
        for line in rows
        if line["routing"] and (line["routing"]["kind"], line["routing"]["value"]) == (kind, value)
    ]
    return found[-1] if found else None


def _curve(rows: list[Line], x: str, y: str, biggest: str | None = None) -> dict[float, float]:
    """y by x, ascending; the row with most of `biggest` where there are several, else the newest."""
    chosen: dict[float, Line] = {}
    for line in rows:
        before = chosen.get(line[x])
        if before is None or biggest is None or line.get(biggest, 0) >= before.get(biggest, 0):
            chosen[line[x]] = line
    return {key: chosen[key][y] for key in sorted(chosen)}


def _one() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    return figure, figure.add_subplot()


def _finish(figure: Figure, axes: Axes, title: str, rows: list[Line]) -> Figure:
    axes.set_title(f"{title}\n{_machine(rows)}")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    return figure


def _machine(rows: list[Line]) -> str:
    """What the rows were measured on, in a line."""
    line = rows[-1]
    gpus = [gpu["name"] for gpu in line["hardware"].get("gpus", [])]
    machine = f"{line['R']} ranks, {gpus[0] if gpus else 'CPU processes'}"
    return f"{machine}, H={line['H']}, K={line['K']}, E={line['E']} ({line['commit']})"


if __name__ == "__main__":
    main()
