"""`moonep bench` runs without a GPU, tells people and programs the same, and fails when an output is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moonep.bench.settings import EAGER
from moonep.cli import bench
from moonep.cli.app import app

TINY = ("--tokens", 16, "--hidden", 16, "--experts", 8, "--top-k", 2, "--ffn", 8, "--samples", 2, "--json")


def invoke(*options: Any) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, options)])


def words(text: str) -> str:
    """Text without the line breaks and the frame that a narrow terminal gives it."""
    return " ".join(text.replace("│", " ").split())


def test_it_runs_on_cpu_and_the_last_line_is_one_json_document(tmp_path):
    output = tmp_path / "results" / "cpu.jsonl"
    operations = ("--operations", "dispatch", "combine", "prefetch", "--routing", "uniform", "--imbalance", "1.5")
    result = invoke(*TINY, *operations, "--output", output)
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 1
    report = json.loads(result.stdout)
    assert (report["backend"], report["clock"], report["ranks"]) == ("cpu", "wall clock", 2)
    rows = [(r["operation"], r["mode"], (r["routing"] or {"kind": None})["kind"]) for r in report["rows"]]
    movers = [(operation, EAGER, kind) for kind in ("hot_rank", "uniform") for operation in ("dispatch", "combine")]
    ceilings = [(operation, EAGER, None) for operation in ("copy_push", "copy_pull", "hbm_copy")]
    assert rows == [*movers, *ceilings, ("prefetch", EAGER, "hot_rank"), ("prefetch", EAGER, "uniform")]
    assert all(row["median_us"] > 0 and row["set"] == report["set"] for row in report["rows"])
    assert report["failed"] == {"gate": 0, "error": 0, "skipped": 0}
    assert [json.loads(line) for line in output.read_text().splitlines()] == report["rows"]
    assert bench.ON_CPU in words(result.stderr) and "dispatch, eager" in result.stderr


@pytest.mark.parametrize(("key", "code"), [("gate", 1), ("error", 1), ("skipped", 0)])
def test_a_wrong_output_fails_the_command_without_a_time(monkeypatch, key, code):
    def run(settings: list[Any], options: Any, R: int, timeout_s: float, on_line: Any) -> None:
        row = next(settings[0].rows())
        on_line({**settings[0].record(), **row.record(), key: "rank 1: rows differ"})

    monkeypatch.setattr(bench, "run_settings", run)
    result = invoke(*TINY)
    assert result.exit_code == code
    report = json.loads(result.stdout)
    assert report["failed"][key] == 1
    assert "median_us" not in report["rows"][0]
    assert "rows differ" in words(result.stderr) and " us" not in result.stderr


def test_what_the_time_limit_cuts_off_is_an_error():
    result = invoke(*TINY, "--operations", "barrier", "--timeout-s", 0.5)
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["rows"] and all("time limit of 0.5 s" in row["error"] for row in report["rows"])


def test_lists_are_words_or_commas(monkeypatch):
    seen = []
    monkeypatch.setattr(bench.suites, "sweep", lambda sweep, R: seen.append(sweep) or [])
    monkeypatch.setattr(bench, "run_settings", lambda *_: None)
    for imbalances in (("1.0", "1.5"), ("1.0,1.5",), ("1.0 1.5",)):
        assert invoke("--imbalance", *imbalances, "--tokens", 8, 16, "--json").exit_code == 0
        assert (seen[-1].imbalance, seen[-1].tokens, seen[-1].maxvio) == ((1.0, 1.5), (8, 16), ())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--suite", "all"], "--suite: given 'all', expected one of sweep, goals, figures"),
        (["--suite", "goals"], "--suite: given 'goals' without a GPU"),
        (["--ranks", 0], "--ranks: given 0, expected 1 or more"),
        (["--experts", 9], "--experts: given 9, expected a multiple of 2 ranks"),
        (["--maxvio", "much"], "--maxvio: given 'much', expected numbers"),
        (["--operations", "dispatch", "fly"], "--operations: given 'fly', expected some of plan, barrier"),
        (["--mode", "graph"], "--mode: given graph without a GPU"),
        (["--samples", 1], "given 1, 600, expected 2 and more"),
        (["--output", "results.txt"], "expected a name that ends in .jsonl"),
        (["--trace", "nowhere.npz"], "expected an .npz file that exists"),
    ],
)
def test_a_bad_option_is_a_sentence(options, sentence):
    result = invoke(*options)
    assert result.exit_code != 0
    assert sentence in words(result.stderr)


def test_help_shows_an_example():
    result = invoke("--help")
    assert result.exit_code == 0
    assert "Example: moonep bench --suite goals" in words(result.stdout)


def test_commands_are_kept_without_directories(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/usr/bin/moonep", "bench", "--output", str(Path("/somewhere/else/goals.jsonl"))])
    assert bench._command("goals") == "moonep bench --output goals.jsonl"


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--output", f"{__file__}/a-file-is-no-folder.jsonl", "expected a place that can be written"),
        ("--trace", __file__, "expected an .npz file that exists"),
        ("--tokens", "-5", "expected 1 and more"),
        ("--timeout-s", "nan", "expected 2 and more, over 0"),
    ],
)
def test_nonsense_is_refused_before_ranks_start(option, value, says):
    result = invoke(*TINY, option, value)
    assert result.exit_code == 2
    assert says in words(result.output)
