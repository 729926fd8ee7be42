"""`moonep demo` shows equal rows and equal losses, and says so when it does not."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("typer", reason="the command line needs the cli extra")

from typer.testing import CliRunner

from moonep.cli import demo, demo_training
from moonep.cli.app import app
from moonep.cli.demo_training import Record, Settings

KEYS = {
    "ranks",
    "steps",
    "rows_per_rank_min",
    "rows_per_rank_max",
    "rows_per_rank_expected",
    "baseline_rows_per_rank_max",
    "rank_imbalance_before_mean",
    "rank_imbalance_after_max",
    "redundant_experts_mean",
    "loss_first",
    "loss_last",
    "max_abs_loss_difference",
    "seconds",
    "figure",
}
STEPS = 4
Records = tuple[list[Record], list[Record]]


@dataclass
class Run:
    """One real run of the command with --json, and what its ranks recorded."""

    stdout: str
    stderr: str
    figure: Path
    losses: Path
    records: Records

    @property
    def report(self) -> dict[str, Any]:
        return json.loads(self.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    directory = tmp_path_factory.mktemp("demo")
    figure, losses = directory / "rows.png", directory / "losses.json"
    recorded: list[Records] = []

    def train_and_keep(*arguments: Any) -> Records:
        recorded.append(train_both(*arguments))
        return recorded[0]

    train_both = demo.train_both
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "train_both", train_and_keep)
        result = invoke("--ranks", 2, "--steps", STEPS, "--figure", figure, "--losses", losses, "--json")
    assert result.exit_code == 0, result.output
    yield Run(result.stdout, result.stderr, figure, losses, recorded[0])


@pytest.fixture
def trained(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Records:
    """Makes the command show these records, a copy of the real run's, instead of training again."""
    records = [replace(r) for r in run.records[0]], [replace(r) for r in run.records[1]]
    monkeypatch.setattr(demo, "train_both", lambda *_: records)
    monkeypatch.chdir(tmp_path)
    return records


def invoke(*options: Any) -> Any:
    return CliRunner().invoke(app, ["demo", *map(str, options)])


def words(text: str) -> str:
    """Text without the line breaks and the frame that a narrow terminal gives it."""
    return " ".join(text.replace("│", " ").split())


def test_json_is_the_last_line_and_people_read_stderr(run):
    assert set(run.report) >= KEYS
    assert len(run.stdout.splitlines()) == 1
    assert (run.report["ranks"], run.report["steps"]) == (2, STEPS)
    assert "ordinary EP" in run.stderr and "MoonEP" in run.stderr


def test_every_rank_computes_exactly_S_times_K_rows_in_every_step_and_layer(run):
    report, settings = run.report, Settings(2, STEPS)
    expected = settings.tokens * settings.top_k
    assert report["rows_per_rank_expected"] == expected
    assert report["rows_per_rank_min"] == report["rows_per_rank_max"] == expected
    assert all(record.rows == [[expected] * settings.layers] * STEPS for record in run.records[1])
    assert report["rank_imbalance_after_max"] == 1.0


def test_ordinary_expert_parallelism_computes_what_the_router_sends(run):
    first, second = (record.rows for record in run.records[0])
    total = 2 * Settings(2, STEPS).rows
    assert all(a + b == total for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))
    assert run.report["baseline_rows_per_rank_max"] > total / 2
    assert run.report["rank_imbalance_before_mean"] > 1
    peaks = [max(a, b) / (total / 2) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True)]
    assert run.report["rank_imbalance_before_mean"] == pytest.approx(sum(peaks) / len(peaks))


def test_both_trainings_have_the_same_losses_and_learn(run):
    report = run.report
    assert report["first_routing_equal"]
    assert report["max_abs_loss_difference"] < 1e-5
    assert report["loss_first"] == pytest.approx(math.log(256), abs=0.5)
    assert report["loss_last"] < report["loss_first"]


def test_the_figure_is_a_png(run):
    assert run.report["figure"] == str(run.figure)
    assert run.figure.read_bytes().startswith(b"\x89PNG")


def test_without_json_people_read_stdout(trained):
    result = invoke("--ranks", 2, "--steps", STEPS)
    assert result.exit_code == 0
    assert f"exactly {Settings(2, STEPS).rows} rows" in result.stdout
    assert Path("moonep-demo.png").exists()


def test_without_matplotlib_there_is_a_sentence_and_no_figure(trained, monkeypatch):
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    result = invoke("--ranks", 2, "--steps", STEPS, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout.splitlines()[-1])["figure"] is None
    assert 'No figure: it needs matplotlib: pip install "moonep[viz]"' in words(result.stderr)


def test_a_row_too_many_fails_the_demo(trained):
    first = trained[1][0]
    first.rows = [*first.rows[:-1], [1025, *first.rows[-1][1:]]]
    result = invoke("--ranks", 2, "--steps", STEPS, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout.splitlines()[-1])["problems"]
    assert "a rank computed 1024 to 1025 rows, expected exactly 1024" in words(result.stderr)


@pytest.mark.parametrize(("loss", "said"), [(7.0, "differ by"), (math.nan, "differ by nan")])
def test_losses_that_disagree_fail_the_demo(trained, loss, said):
    first = trained[1][0]
    first.loss = [*first.loss[:-1], loss]
    result = invoke("--ranks", 2, "--steps", STEPS, "--json")
    assert result.exit_code == 1
    assert said in words(result.stderr) and "expected at most 1e-04" in words(result.stderr)
    assert json.loads(result.stdout.splitlines()[-1])["loss_last"] == (None if math.isnan(loss) else loss)


def test_losses_are_written_and_another_run_is_compared_with_them(run, trained):
    written = json.loads(run.losses.read_text())
    assert written["ordinary"] == run.records[0][0].loss and written["moonep"] == run.records[1][0].loss
    trained[1][0].loss = [loss + 1e-5 for loss in trained[1][0].loss]
    result = invoke("--ranks", 2, "--steps", STEPS, "--against", run.losses, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["against"] == "float32 on cpu"
    assert report["against_max_abs_loss_difference"] == pytest.approx(1e-5, rel=0.1)
    assert "They agree with those of float32 on cpu within 1e-05 in the first steps" in words(result.stderr)


def test_losses_that_disagree_with_those_of_another_run_fail_the_demo(run, trained):
    for records in trained:
        records[0].loss = [loss + 1e-3 for loss in records[0].loss]
    result = invoke("--ranks", 2, "--steps", STEPS, "--against", run.losses, "--json")
    assert result.exit_code == 1
    assert "The losses and those of float32 on cpu differ by 1.0e-03" in words(result.stderr)


def test_losses_of_another_model_or_no_losses_are_refused(run, tmp_path):
    (tmp_path / "empty.json").write_text("{}")
    for options, sentence in (
        (["--ranks", 2, "--seed", 1, "--against", run.losses], "a run with seed 0, expected 1"),
        (["--against", run.losses], "a run with ranks 2, expected 4"),
        (["--against", tmp_path / "empty.json"], "expected what --losses writes"),
        (["--against", tmp_path / "none.json"], "expected what --losses writes"),
    ):
        result = invoke(*options)
        assert result.exit_code != 0 and sentence in words(result.stderr), result.stderr


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 2), (2, 2), (3, 2), (6, 4), (8, 8), (72, 16)])
def test_on_cuda_a_rank_takes_a_visible_gpu(monkeypatch, gpus, ranks):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert demo.usual_ranks("cuda") == ranks and demo.usual_ranks("cpu") == 4


@pytest.mark.slow
def test_in_bfloat16_both_trainings_agree_within_its_rounding(tmp_path):
    figure = tmp_path / "rows.png"
    result = invoke(
        "--ranks", 2, "--steps", demo_training.FIRST_STEPS, "--dtype", "bfloat16", "--figure", figure, "--json"
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert 1e-5 < report["max_abs_loss_difference"] <= demo_training.LOSS_BOUND["bfloat16"]


def fail_on_rank_1(settings: Settings) -> Record:
    if dist.get_rank() == 1:
        raise RuntimeError("out of luck")
    dist.barrier()
    return Record()


def test_a_rank_that_fails_ends_the_demo_with_its_error(monkeypatch):
    monkeypatch.setattr(demo_training, "train_moonep", fail_on_rank_1)
    monkeypatch.setattr(demo_training, "train_ordinary", fail_on_rank_1)
    result = invoke("--ranks", 2, "--steps", 1, "--json")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "The demo failed" in result.stderr and "rank 1: RuntimeError: out of luck" in words(result.stderr)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--ranks", 3], "--ranks: given 3, expected 2, 4, 8 or 16"),
        (["--ranks", 1], "--ranks: given 1, expected 2, 4, 8 or 16"),
        (["--ranks", 32], "--ranks: given 32, expected 2, 4, 8 or 16"),
        (["--steps", 0], "--steps: given 0, expected 1 or more"),
        (["--seed", -1], "--seed: given -1, expected 0 or more"),
        (["--device", "tpu"], "--device: given tpu, expected cpu or cuda"),
        (["--dtype", "float8"], "--dtype: given float8, expected float32 or bfloat16"),
        (["--losses", "no/such/losses.json"], "--losses: given no/such/losses.json, expected a file in a directory"),
        (["--figure", "rows.txt"], "--figure: given rows.txt, expected a name that ends in .png"),
        (["--figure", "no/such/rows.png"], "expected a file in a directory that exists"),
    ],
)
def test_a_bad_option_is_a_sentence(options, sentence):
    result = invoke(*options)
    assert result.exit_code != 0
    assert sentence in words(result.stderr)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_a_sentence():
    assert "--device: given cuda, expected a machine on which" in words(invoke("--device", "cuda").stderr)


def test_help_shows_an_example():
    result = invoke("--help")
    assert result.exit_code == 0
    assert "Example: moonep demo" in result.stdout


def test_the_most_rows_of_a_rank_are_all_tokens_for_its_experts():
    assert Settings(4, 1).most_rows == 4 * 512 * 2
    assert Settings(16, 1).most_rows == 16 * 512
