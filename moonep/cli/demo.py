"""`moonep demo`: train one small model twice, with ordinary expert parallelism and with MoonEP, and compare."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from json import dumps, loads
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from moonep.cli import demo_training
from moonep.cli.demo_training import FIRST_STEPS, LOSS_BOUND, Record, Settings, StepDone
from moonep.cli.output import JsonFlag, emit, open_console
from moonep.testing.ranks import RankFailure, Ranks

EXPERTS = Settings.experts
RANKS = (16, 8, 4, 2)
DEVICES = {"cpu": "float32", "cuda": "bfloat16"}  # and the dtype that is usual there
FIGURE_FORMATS = (".png", ".pdf", ".svg")
# An optimizer's first step imports it, which takes seconds in every rank.
PRELOAD = ("torch._dynamo",)


def demo(
    ranks: Annotated[
        int | None,
        typer.Option(help="Processes on this machine: 2, 4, 8 or 16.", show_default="4; on cuda one a visible GPU"),
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps of each of the two trainings.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the initial weights and the batches.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda; on cuda ranks share GPUs when there are fewer.")] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(help="Of rows and expert weights: float32 or bfloat16.", show_default="float32; on cuda bfloat16"),
    ] = None,
    figure: Annotated[Path, typer.Option(help="Where to draw rows per rank over steps.")] = Path("moonep-demo.png"),
    losses: Annotated[Path | None, typer.Option(help="Where to write both loss curves as JSON.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="Loss curves of another run, say on another device, to compare with.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Train a small MoE language model, with ordinary expert parallelism and with MoonEP, and compare them.

    Both start from the same weights and see the same English text. It takes about a minute on two cores.

    Example: moonep demo --ranks 4 --steps 100 --figure rows.png

    On GPUs, compared with the CPU: moonep demo --ranks 4 --dtype bfloat16 --losses cpu.json, then
    moonep demo --ranks 4 --device cuda --against cpu.json
    """
    if device not in DEVICES:
        raise typer.BadParameter(f"--device: given {device}, expected {' or '.join(DEVICES)}")
    settings = Settings(ranks or usual_ranks(device), steps, seed, device=device, dtype=dtype or DEVICES[device])
    check_options(settings, figure, losses)
    other = None if against is None else read_losses(settings, against)
    console = open_console(json)
    try:
        ordinary, moonep = train_both(settings, console)
    except RankFailure as failure:
        errors = Console(stderr=True, highlight=False)
        errors.print(f"The demo failed: {failure}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    report = compare(settings, ordinary, moonep, other)
    if losses is not None:
        losses.write_text(dumps({"settings": asdict(settings), **curves(ordinary, moonep)}) + "\n")
    report["figure"] = draw(settings, ordinary, moonep, figure, console)
    render(report, console)
    emit(console, json, report)
    if report["problems"]:
        raise typer.Exit(1)


def usual_ranks(device: str) -> int:
    """Four, or as many as there are GPUs; two that share the only one."""
    return 4 if device == "cpu" else next((r for r in RANKS if r <= torch.cuda.device_count()), 2)


def check_options(settings: Settings, figure: Path, losses: Path | None) -> None:
    """Raise a BadParameter that says in a sentence what is wrong."""
    s = settings
    if s.ranks not in RANKS:
        raise typer.BadParameter(f"--ranks: given {s.ranks}, expected 2, 4, 8 or 16: they share {EXPERTS} experts")
    if s.steps < 1:
        raise typer.BadParameter(f"--steps: given {s.steps}, expected 1 or more")
    if s.seed < 0:
        raise typer.BadParameter(f"--seed: given {s.seed}, expected 0 or more")
    if s.device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device: given cuda, expected a machine on which torch.cuda.is_available()")
    if s.dtype not in LOSS_BOUND:
        raise typer.BadParameter(f"--dtype: given {s.dtype}, expected {' or '.join(LOSS_BOUND)}")
    if figure.suffix not in FIGURE_FORMATS:
        raise typer.BadParameter(f"--figure: given {figure}, expected a name that ends in {', '.join(FIGURE_FORMATS)}")
    for option, path in (("--figure", figure), ("--losses", losses)):
        if path is not None and not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"{option}: given {path}, expected a file in a directory that exists")


def curves(ordinary: list[Record], moonep: list[Record]) -> dict[str, list[float]]:
    """The loss of each step of both trainings."""
    return {"ordinary": ordinary[0].loss, "moonep": moonep[0].loss}


def read_losses(settings: Settings, path: Path) -> dict[str, Any]:
    """What a run with `--losses` wrote; of the same model, batches and number of ranks."""
    try:
        written = loads(path.read_text())
        theirs = Settings(**written["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise typer.BadParameter(f"--against: given {path}, expected what --losses writes: {error}") from None
    may_differ = ("steps", "device", "dtype")
    for key, value in asdict(settings).items():
        if key not in may_differ and getattr(theirs, key) != value:
            raise typer.BadParameter(
                f"--against: given losses of a run with {key} {getattr(theirs, key)}, expected {value} as in this one"
            )
    return written


def train_both(settings: Settings, console: Console) -> tuple[list[Record], list[Record]]:
    """Train twice and return what every rank recorded.

    Raises:
        RankFailure: a rank failed; all are ended.
    """
    s = settings
    console.print(
        f"Training a language model of {s.layers} MoE layers, {s.experts} experts, top-{s.top_k}, twice from the same "
        f"weights. {s.ranks} ranks bring {s.tokens} tokens each: {s.rows} rows a rank and layer, if all were equal.",
        markup=False,
    )
    limit_s = 120 + 10 * s.steps
    with Ranks(s.ranks, timeout_s=limit_s, preload=PRELOAD) as ranks, _progress(console) as progress:
        trainings = (("ordinary EP", demo_training.train_ordinary), ("MoonEP", demo_training.train_moonep))
        ordinary, moonep = (
            ranks.run(train, settings, on_message=_follow(progress, name, s.steps)) for name, train in trainings
        )
    return ordinary, moonep


def _progress(console: Console) -> Progress:
    name, status = TextColumn("{task.description}"), TextColumn("{task.fields[status]}")
    return Progress(name, BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), status, console=console)


def _follow(progress: Progress, name: str, steps: int) -> Callable[[int, StepDone], None]:
    """A function that shows what the ranks send after each step."""
    task = progress.add_task(name, total=steps, status="")
    hottest = 0

    def show(rank: int, done: StepDone) -> None:
        nonlocal hottest
        hottest = max(hottest, done.rows)
        if rank == 0:
            status = f"loss {done.loss:.3f}, most rows of a rank: {hottest}"
            progress.update(task, completed=done.step + 1, status=status)

    return show


def compare(
    settings: Settings, ordinary: list[Record], moonep: list[Record], other: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What the two trainings show, as plain values that JSON can carry. Numbers that are not finite are None.

    Args:
        other: loss curves of another run, see `read_losses`.
    """
    theirs, ours = [r.rows for r in ordinary], [r.rows for r in moonep]
    differences = _differences(ordinary[0].loss, moonep[0].loss)
    pairs = zip(ordinary, moonep, strict=True)
    seconds = max(r.seconds for r in ordinary), max(r.seconds for r in moonep)
    report: dict[str, Any] = {
        "device": settings.device,
        "dtype": settings.dtype,
        "ranks": settings.ranks,
        "steps": settings.steps,
        "layers": settings.layers,
        "rows_per_rank_min": min(_numbers(ours)),
        "rows_per_rank_max": max(_numbers(ours)),
        "rows_per_rank_expected": settings.rows,
        "padding_rows_per_rank_max": max(_numbers(r.padding for r in moonep)),
        "baseline_rows_per_rank_min": min(_numbers(theirs)),
        "baseline_rows_per_rank_max": max(_numbers(theirs)),
        "baseline_rows_per_rank_possible": settings.most_rows,
        "rank_imbalance_before_mean": fmean(_numbers([moonep[0].imbalance_before])),
        "rank_imbalance_after_max": max(_numbers([moonep[0].imbalance_after])),
        "redundant_experts_mean": fmean(map(sum, moonep[0].redundant_experts)),
        "loss_first": moonep[0].loss[0],
        "loss_last": moonep[0].loss[-1],
        "baseline_loss_last": ordinary[0].loss[-1],
        "max_abs_loss_difference": _worst(differences),
        "max_abs_loss_difference_first_steps": _worst(differences[:FIRST_STEPS]),
        "first_routing_equal": all(torch.equal(a.first_routing, b.first_routing) for a, b in pairs),
        "seconds": sum(seconds),
        "seconds_ordinary": seconds[0],
        "seconds_moonep": seconds[1],
        "memory": moonep[0].memory,
    }
    if other is not None:
        mine = curves(ordinary, moonep)
        against = [_differences(mine[name], other[name]) for name in mine]
        theirs = other["settings"]["dtype"]
        report |= {
            "against": f"{theirs} on {other['settings']['device']}",
            "against_loss_bound": max(LOSS_BOUND[settings.dtype], LOSS_BOUND[theirs]),
            "against_max_abs_loss_difference": _worst([d for ds in against for d in ds]),
            "against_max_abs_loss_difference_first_steps": _worst([d for ds in against for d in ds[:FIRST_STEPS]]),
        }
    report["problems"] = find_problems(report)
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in report.items()
    }


def find_problems(report: dict[str, Any]) -> list[str]:
    """One sentence for each claim that the trainings did not bear out."""
    problems = []
    rows = report["rows_per_rank_min"], report["rows_per_rank_max"]
    if set(rows) != {report["rows_per_rank_expected"]}:
        expected = report["rows_per_rank_expected"]
        problems.append(f"With MoonEP a rank computed {rows[0]} to {rows[1]} rows, expected exactly {expected}.")
    bound = LOSS_BOUND[report["dtype"]]
    claims = [("of the two trainings", report["max_abs_loss_difference_first_steps"], bound)]
    if "against" in report:
        difference = report["against_max_abs_loss_difference_first_steps"]
        claims.append((f"and those of {report['against']}", difference, report["against_loss_bound"]))
    for whose, difference, bound in claims:
        if not difference <= bound:
            problems.append(
                f"The losses {whose} differ by {difference:.1e} within the first {FIRST_STEPS} steps, "
                f"expected at most {bound:.0e}."
            )
    return problems


def _numbers(nested: Iterable[list[list[Any]]]) -> list[Any]:
    """The numbers of all ranks, steps and layers."""
    steps = itertools.chain.from_iterable(nested)
    return list(itertools.chain.from_iterable(steps))


def _differences(a: list[float], b: list[float]) -> list[float]:
    """Of the steps that both have."""
    return [abs(x - y) for x, y in zip(a, b, strict=False)]


def _worst(differences: list[float]) -> float:
    """The largest; NaN if any is, which max() would lose."""
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def render(report: dict[str, Any], console: Console) -> None:
    """Write `report` for people."""
    r = report
    title = f"{r['ranks']} ranks, {r['steps']} steps, {r['layers']} MoE layers, {r['dtype']} on {r['device']}"
    table = Table(title=title, title_justify="left")
    table.add_column()
    table.add_column("ordinary EP", justify="right")
    table.add_column("MoonEP", justify="right")
    fewest, most = f"{r['rows_per_rank_min']}", f"{r['rows_per_rank_max']}"
    table.add_row("rows of a rank in a layer, fewest", f"{r['baseline_rows_per_rank_min']}", fewest)
    table.add_row("rows of a rank in a layer, most", f"{r['baseline_rows_per_rank_max']}", most)
    imbalance = f"{r['rank_imbalance_before_mean']:.2f}", f"{r['rank_imbalance_after_max']:.2f}"
    table.add_row("rank imbalance (max / mean), mean of steps", *imbalance)
    received = f"{r['baseline_rows_per_rank_max']} (can be {r['baseline_rows_per_rank_possible']})"
    table.add_row("largest receive buffer, rows", received, f"{r['memory']['receive_buffer_rows']}")
    table.add_row("redundant experts a step, all layers and ranks", "0", f"{r['redundant_experts_mean']:.1f}")
    table.add_row("loss of the last step", _loss(r["baseline_loss_last"]), _loss(r["loss_last"]))
    table.add_row("seconds of the steps", f"{r['seconds_ordinary']:.1f}", f"{r['seconds_moonep']:.1f}")
    console.print(table)
    _render_claims(report, console)


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _render_claims(report: dict[str, Any], console: Console) -> None:
    r = report
    if r["problems"]:
        for problem in r["problems"]:
            console.print(problem, style="red", markup=False, soft_wrap=True)
        return
    memory = r["memory"]
    extra = (memory["buffer_bytes"] + memory["redundant_experts_bytes"]) / 2**20
    own = memory["expert_weights_and_gradients_bytes"] / 2**20
    calls = r["steps"] * r["layers"]
    sentences = [
        f"Every rank computed exactly {r['rows_per_rank_max']} rows in each of {calls} layer calls "
        f"(and at most {r['padding_rows_per_rank_max']} rows of padding).",
        f"The losses agree within {r['max_abs_loss_difference_first_steps']:.0e} in the first "
        f"{min(FIRST_STEPS, r['steps'])} steps, and within {r['max_abs_loss_difference']:.0e} in all {r['steps']}.",
        f"The first step's routing in the first layer is {'' if r['first_routing_equal'] else 'NOT '}bit-equal.",
        f"A rank holds {extra:.1f} MiB for rows and redundant experts, which all layers share, and {own:.1f} MiB of "
        "expert weights and gradients of its own.",
        "Ranks share cores here, so an idle rank lends its time to a hot one: on GPUs of their own all wait for it."
        if r["device"] == "cpu"
        else "The rows of ordinary EP travel through the host here: the seconds do not compare the two.",
    ]
    if "against" in r:
        sentences.append(
            f"They agree with those of {r['against']} within {r['against_max_abs_loss_difference_first_steps']:.0e} in "
            f"the first steps, and within {r['against_max_abs_loss_difference']:.0e} in all."
        )
    for sentence in sentences:
        console.print(sentence, markup=False, soft_wrap=True)
    if r["figure"]:
        console.print(f"Figure: {r['figure']}", markup=False, soft_wrap=True)


def draw(settings: Settings, ordinary: list[Record], moonep: list[Record], path: Path, console: Console) -> str | None:
    """Draw rows per rank over steps. Returns the path, or None after saying why there is no figure."""
    try:
        draw_rows(settings, [r.rows for r in ordinary], [r.rows for r in moonep], path)
    except ModuleNotFoundError as error:
        reason = f'it needs {(error.name or "").partition(".")[0]}: pip install "moonep[viz]"'
    except OSError as error:
        reason = str(error)
    else:
        return str(path)
    console.print(f"No figure: {reason}", style="yellow", markup=False, soft_wrap=True)
    return None


def draw_rows(settings: Settings, theirs: list[list[list[int]]], ours: list[list[list[int]]], path: Path) -> None:
    """Write the figure. theirs, ours: rows by rank, step and layer."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    s, figure = settings, Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    steps = list(range(1, s.steps + 1))
    (cold, hot), (low, high) = _extremes(theirs), _extremes(ours)
    marker = "o" if s.steps == 1 else None
    axes.fill_between(steps, cold, hot, color="tab:red", alpha=0.15, linewidth=0, label="ordinary EP, all ranks")
    axes.plot(steps, hot, color="tab:red", linewidth=1.8, marker=marker, label="ordinary EP, hottest rank")
    axes.fill_between(steps, low, high, color="tab:blue", linewidth=0)
    axes.plot(steps, high, color="tab:blue", linewidth=3, marker=marker, label="MoonEP, every rank")
    axes.set_ylim(0, 1.06 * max(*hot, *high))
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("training step", fontsize=12)
    axes.set_ylabel("rows a rank computes in a layer", fontsize=12)
    shares = axes.twinx()
    shares.set_ylim(0, axes.get_ylim()[1] / s.rows)
    shares.yaxis.set_major_formatter("{x:g}×")
    shares.set_ylabel("multiple of the equal share", fontsize=12)
    for spine in (axes.spines["top"], shares.spines["top"]):
        spine.set_visible(False)
    exactly = f"exactly {low[0]}" if set(low + high) == {low[0]} else f"{min(low)} to {max(high)}"
    figure.suptitle(f"With MoonEP every rank computes {exactly} rows in every step", fontsize=14, fontweight="bold")
    model = f"{s.ranks} ranks, {s.layers} MoE layers, {s.experts} experts, top-{s.top_k}"
    axes.set_title(f"the same training with ordinary EP: {min(cold)} to {max(hot)} rows ({model})", fontsize=11)
    figure.legend(loc="outside lower center", ncols=3, fontsize=11, frameon=False)
    figure.savefig(path, dpi=150)


def _extremes(rows: list[list[list[int]]]) -> tuple[list[int], list[int]]:
    """Fewest and most rows of any rank in any layer, by step."""
    by_step = [list(itertools.chain.from_iterable(ranks)) for ranks in zip(*rows, strict=True)]
    return [min(step) for step in by_step], [max(step) for step in by_step]
