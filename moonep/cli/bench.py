"""`moonep bench`: time the operations on this machine, checked first, and keep the results."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from moonep import environment
from moonep.backends import choose
from moonep.bench import results, side_by_side, suites
from moonep.bench.comparison import Comparison
from moonep.bench.hosts import ERROR, GATE, SKIPPED
from moonep.bench.layer_memory import FIRST_STEPS
from moonep.bench.layer_suite import compare_layers
from moonep.bench.operations import OPERATIONS
from moonep.bench.routings import PLAIN_KINDS
from moonep.bench.run import run_launched, run_settings
from moonep.bench.settings import EAGER, GRAPH, Options, Setting
from moonep.bench.suites import Sweep
from moonep.cli.bench_report import describe, find_goals, render
from moonep.cli.lists import ListCommand, split
from moonep.cli.output import JsonFlag, emit, open_console

COMMAND = ListCommand

SUITES = ("sweep", "goals", "figures", "layers")
ON_CPU = "No GPU: times are the wall clock of processes that share this machine's cores. They say nothing about GPUs."
_SIZES = {
    "cuda": {"tokens": 8192, "hidden": 7168, "top_k": 8, "experts": 384, "ffn": 2048, "weight_experts": 96},
    "cpu": {"tokens": 128, "hidden": 128, "top_k": 2, "experts": 16, "ffn": 64, "weight_experts": 16},
}
_PADDING = {"cuda": 128, "cpu": 8}
_ROUTINGS: dict[str, dict[str, tuple[float, ...]]] = {
    "cuda": {"maxvio": suites.MAXVIOS, "imbalance": suites.IMBALANCES, "adverse": (1.5,)},
    "cpu": {"maxvio": (1.0,), "imbalance": (1.0, 1.5), "adverse": ()},
}
_STEPS = {"cuda": 200, "cpu": 20}


def bench(
    suite: Annotated[str, typer.Option(help="goals: all figures of the table of goals but layers'; layers: one layer, "
                                       "forward and backward, beside peers; figures: what the plots show; sweep: what "
                                       "the other options say.")] = "sweep",
    ranks: Annotated[int, typer.Option(help="Processes; on GPUs rank r uses GPU r. torchrun's if it started us.")] = 2,
    operations: Annotated[str | None, typer.Option(metavar="NAME...", help=", ".join(OPERATIONS))] = None,
    maxvio: Annotated[str | None, typer.Option(metavar="X...", help="Lognormal popularity of experts.")] = None,
    imbalance: Annotated[str | None, typer.Option(metavar="X...", help="8 hot experts of rank 0.")] = None,
    adverse: Annotated[str | None, typer.Option(metavar="X...", help="All experts of rank 0 are hot.")] = None,
    routing: Annotated[str | None, typer.Option(metavar="NAME...", help=", ".join(PLAIN_KINDS))] = None,
    trace: Annotated[str | None, typer.Option(metavar="FILE...", help="Router outputs: .npz with topk_ids.")] = None,
    trace_layers: Annotated[str | None, typer.Option(metavar="N...", help="First, middle and last.")] = None,
    sms: Annotated[str | None, typer.Option(metavar="N...", help="SMs of a kernel that crosses NVLink.")] = None,
    tokens: Annotated[str | None, typer.Option(metavar="S...", help="Tokens of a rank.")] = None,
    mode: Annotated[str | None, typer.Option(metavar="NAME...", help="graph, eager.")] = None,
    hidden: Annotated[int | None, typer.Option(help="H.")] = None,
    top_k: Annotated[int | None, typer.Option(help="K.")] = None,
    experts: Annotated[int | None, typer.Option(help="E.")] = None,
    ffn: Annotated[int | None, typer.Option(help="F, of three projections.")] = None,
    weight_experts: Annotated[int | None, typer.Option(help="E of operations that need expert weights.")] = None,
    balance: Annotated[str, typer.Option(help="exact, auto, or a tolerance.")] = "exact",
    samples: Annotated[int, typer.Option(help="Of each row.")] = 21,
    steps: Annotated[int | None, typer.Option(help="Of rows about memory, in the suite of layers.")] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Flush the L2 cache before each sample.")] = False,
    seed: Annotated[int, typer.Option(help="Of the routings.")] = 1,
    output: Annotated[Path | None, typer.Option(help="Append result lines to this .jsonl file.")] = None,
    timeout_s: Annotated[float, typer.Option(help="Time limit of everything, in seconds.")] = 600.0,
    json: JsonFlag = False,
) -> None:  # fmt: skip
    """Time planning, dispatch, combine, prefetch and reduce_grad, or layers. A wrong output has no time, and fails.

    Without a GPU it runs on CPU processes with small sizes, so that one can see what it does.

    Example: moonep bench --suite goals --output benchmarks/results/h200/goals.jsonl
    Example: moonep bench --suite layers --imbalance 1.0 1.9 --trace router.npz
    Example: moonep bench --operations dispatch combine --imbalance 1.0 1.9 --sms 16 32 --mode graph --json
    """
    try:
        backend, _ = choose(None)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if backend not in _SIZES:
        raise typer.BadParameter(f"MOONEP_BACKEND: given {backend!r}, expected cuda or cpu")
    world = int(os.environ["WORLD_SIZE"]) if environment.launched() else ranks
    sizes = dict(_SIZES[backend])
    given = {"hidden": hidden, "top_k": top_k, "experts": experts, "ffn": ffn, "weight_experts": weight_experts}
    sizes |= {name: value for name, value in given.items() if value is not None}
    swept = {"maxvio": maxvio, "imbalance": imbalance, "adverse": adverse}
    layers = suite == "layers"
    chosen_any = any(text is not None for text in (*swept.values(), routing, None if layers else trace))
    defaults = {**_ROUTINGS[backend], **({"adverse": ()} if layers else {})}
    values = {
        name: split(f"--{name}", text, float, () if chosen_any else defaults[name]) for name, text in swept.items()
    }
    modes = (GRAPH, EAGER) if backend == "cuda" else (EAGER,)
    sweep = Sweep(
        H=sizes["hidden"], K=sizes["top_k"], E=sizes["experts"], F=sizes["ffn"],
        weight_experts=weight_experts or min(sizes["experts"], sizes["weight_experts"]),
        tokens=split("--tokens", tokens, int, (sizes["tokens"],)),
        sms=split("--sms", sms, int, (suites.MANY_SMS,)) if backend == "cuda" else (None,),
        modes=_names("--mode", mode, (GRAPH, EAGER), modes),
        maxvio=values["maxvio"], imbalance=values["imbalance"], adverse=values["adverse"],
        routings=_names("--routing", routing, PLAIN_KINDS, ()),
        traces=split("--trace", trace, str),
        trace_layers=split("--trace-layers", trace_layers, int),
        operations=_names("--operations", operations, OPERATIONS, OPERATIONS),
        balance=balance, token_padding=_PADDING[backend], cold=cold, seed=seed,
    )  # fmt: skip
    steps = _STEPS[backend] if steps is None else steps
    check_options(suite, backend, world, sweep, samples, steps, timeout_s, output)
    console = open_console(json)
    if layers:
        work = of_comparisons(compare_layers(sweep, world, backend, samples, steps), world, timeout_s)
    else:
        settings = {"goals": lambda: suites.goals(seed), "figures": lambda: suites.figures(seed)}.get(
            suite, lambda: suites.sweep(sweep, world)
        )()
        work = of_settings(settings, Options(backend, samples), world, timeout_s)
    report = measure(suite, work, backend, world, output, console)
    if report is not None:
        render(report, console)
        emit(console, json, report)
        if any(report["failed"][kind] for kind in (GATE, ERROR)):
            raise typer.Exit(1)


def _names(option: str, text: str | None, known: Sequence[str], default: Sequence[str]) -> tuple[str, ...]:
    names = split(option, text, str, tuple(default))
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{option}: given {name!r}, expected some of {', '.join(known)}")
    return names


def check_options(
    suite: str,
    backend: str,
    world: int,
    sweep: Sweep,
    samples: int,
    steps: int,
    timeout_s: float,
    output: Path | None,
) -> None:
    """Raise a BadParameter that says in a sentence what is wrong."""
    if suite not in SUITES:
        raise typer.BadParameter(f"--suite: given {suite!r}, expected one of {', '.join(SUITES)}")
    if suite in ("goals", "figures") and backend != "cuda":
        raise typer.BadParameter(
            f"--suite: given {suite!r} without a GPU, expected sweep or layers: its sizes are for GPUs"
        )
    if world < 1:
        raise typer.BadParameter(f"--ranks: given {world}, expected 1 or more")
    for name, E in (("--experts", sweep.E), ("--weight-experts", sweep.weight_experts)):
        if E % world or E < sweep.K:
            raise typer.BadParameter(f"{name}: given {E}, expected a multiple of {world} ranks, at least K = {sweep.K}")
    if GRAPH in sweep.modes and backend != "cuda":
        raise typer.BadParameter("--mode: given graph without a GPU, expected eager: only CUDA has graphs")
    if samples < 2 or not 0 < timeout_s < float("inf"):
        raise typer.BadParameter(f"--samples, --timeout-s: given {samples}, {timeout_s:g}, expected 2 and more, over 0")
    if steps <= FIRST_STEPS:
        raise typer.BadParameter(f"--steps: given {steps}, expected more than the first {FIRST_STEPS}")
    if output is not None and output.suffix != ".jsonl":
        raise typer.BadParameter(f"--output: given {output}, expected a name that ends in .jsonl")
    for path in sweep.traces:
        if not zipfile.is_zipfile(path):
            raise typer.BadParameter(f"--trace: given {path}, expected an .npz file that exists")
    if output is not None:
        there = next(path for path in (output, *output.absolute().parents) if path.exists())
        if not os.access(there, os.W_OK) or (there.is_file() and there != output):
            raise typer.BadParameter(f"--output: given {output}, expected a place that can be written")
    if not sweep.operations:
        raise typer.BadParameter("--operations: given none, expected at least one")
    for name, values in (("--sms", sweep.sms), ("--tokens", sweep.tokens)):
        for value in values:
            if value is not None and value < 1:
                raise typer.BadParameter(f"{name}: given {value}, expected 1 and more")


@dataclass(frozen=True)
class Work:
    """What is to be measured: how many lines come, from what, and how it is run; `run` calls with each line."""

    lines: int
    title: str
    run: Callable[[Callable[[dict[str, Any]], None]], None]


def of_settings(settings: list[Setting], options: Options, world: int, timeout_s: float) -> Work:
    """Operations of MoonEP alone."""

    def run(take: Callable[[dict[str, Any]], None]) -> None:
        if environment.launched():
            run_launched(settings, options, take)
        else:
            run_settings(settings, options, world, timeout_s, take)

    rows = sum(1 for setting in settings for _ in setting.rows())
    return Work(rows, f"{rows} rows in {len(settings)} settings, {world} ranks.", run)


def of_comparisons(comparisons: list[Comparison], world: int, timeout_s: float) -> Work:
    """MoonEP beside its peers."""

    def run(take: Callable[[dict[str, Any]], None]) -> None:
        if environment.launched():
            side_by_side.run_launched(comparisons, take)
        else:
            side_by_side.run_comparisons(comparisons, world, timeout_s, take)

    rows = sum(len(list(c.lines(world, name, r))) for c in comparisons for name in c.peers for r in c.routings)
    return Work(rows, f"{rows} rows in {len(comparisons)} comparisons, {world} ranks.", run)


def measure(
    suite: str, work: Work, backend: str, world: int, output: Path | None, console: Console
) -> dict[str, Any] | None:
    """Do the work; write and show each line as it comes. None on ranks that torchrun started, but the first."""
    first = not environment.launched() or os.environ["RANK"] == "0"
    about = results.describe_run(_command(suite)) if first else {}
    if first and backend == "cpu":
        console.print(ON_CPU, style="yellow", markup=False, soft_wrap=True)
    if first:
        console.print(work.title, markup=False)
    lines: list[dict[str, Any]] = []

    def take(line: dict[str, Any]) -> None:
        benchmark = "layers" if suite == "layers" else "operations"
        lines.append({"suite": suite, "benchmark": benchmark, **line, **about})
        if output is not None:
            results.append(output, lines[-1:])
        console.print(f"[{len(lines)}/{work.lines}] {describe(line)}", markup=False, soft_wrap=True)

    work.run(take)
    if not first:
        return None
    kinds = {GATE: ("gate",), ERROR: ("error",), SKIPPED: ("skipped", "unavailable")}
    return {
        "suite": suite,
        "backend": backend,
        "clock": "device events" if backend == "cuda" else "wall clock",
        "ranks": world,
        "set": about["set"],
        "rows": lines,
        "failed": {kind: sum(any(key in line for key in keys) for line in lines) for kind, keys in kinds.items()},
        "goals": find_goals(suite, lines),
        "output": None if output is None else str(output),
    }


def _command(suite: str) -> str:
    """What was typed. File names only: paths say something about a machine, nothing about a measurement."""
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    return " ".join(["moonep", *words]) if words[:1] == ["bench"] else f"moonep bench --suite {suite}"
