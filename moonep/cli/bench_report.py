"""What `moonep bench` tells people: a line in words, the goals as a table, and what failed."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from moonep.bench import goals
from moonep.bench.hosts import ERROR, GATE, SKIPPED


def find_goals(suite: str, lines: list[dict[str, Any]]) -> dict[str, float | None] | None:
    """The values of the goals that a suite is about."""
    about = {"goals": goals.OPERATION_GOALS, "layers": goals.LAYER_GOALS}.get(suite)
    values = goals.measured(lines)
    return None if about is None else {goal.key: values[goal.key] for goal in about}


def describe(line: dict[str, Any]) -> str:
    """A line in words."""
    what = f"{line['operation']}, {line['mode']}, S={line['S']} E={line['E']}"
    if line.get("peer"):
        what = " ".join(filter(None, [line["peer"], line.get("variant")])) + f": {what}"
    if line["tokens"] != line["S"]:
        what += f" s={line['tokens']}"
    if line["sms"] is not None:
        what += f", {line['sms']} SMs {line['budget']}"
    if line["routing"]:
        what += f", {line['routing']['kind']} {line['routing']['value']:g}"
    if "growth" in line:
        return f"{what}: " + ("no GPU" if line["growth"] is None else f"{line['growth']:g} of the first steps' memory")
    if "median_us" not in line:
        kind = next(key for key in ("gate", "error", "skipped", "unavailable") if key in line)
        return f"{what}: {'WRONG OUTPUT' if kind == 'gate' else kind}: {line[kind]}"
    speed = f", {line['physical_gbps']:g} GB/s" if "physical_gbps" in line else ""
    return f"{what}: {line['median_us']:g} us ({line['p10_us']:g} to {line['p90_us']:g}){speed}"


def render(report: dict[str, Any], console: Console) -> None:
    """The end of the output for people: the goals, if they were measured, and what failed."""
    if report["goals"]:
        console.print(goals_table(report["goals"]))
    failed = report["failed"]
    if any(failed.values()):
        text = f"{failed[GATE]} wrong outputs, {failed[ERROR]} errors, {failed[SKIPPED]} skipped."
        console.print(text, style="red" if failed[GATE] + failed[ERROR] else "yellow", markup=False)
    if report["output"]:
        console.print(f"Results: {report['output']}", markup=False, soft_wrap=True)


def goals_table(values: dict[str, float | None]) -> Table:
    """Must, aim, measured, met."""
    table = Table("figure", "must", "aim", "measured", "met", title="Goals", title_justify="left")
    for goal in (goal for goal in goals.GOALS if goal.key in values):
        value, met = values[goal.key], goal.met(values[goal.key])
        sign = ">= " if goal.higher else "<= "
        wanted = ["-" if limit is None else f"{sign}{limit:g}" for limit in (goal.must, goal.aim)]
        measured = "-" if value is None else f"{value:g}"
        table.add_row(f"{goal.what} ({goal.key})", *wanted, measured, {True: "yes", False: "NO", None: "-"}[met])
    return table
