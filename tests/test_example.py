"""examples/train_moe.py learns, resumes as if it had not been interrupted, and resumes on other numbers of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moonep.testing.ranks import Ranks

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_moe.py"
sys.path.insert(0, str(EXAMPLE.parent))  # the ranks import this file, too

import train_moe  # noqa: E402

STEPS, SAVED = 12, 6
SIZES = "--batch 8 --context 16 --layers 2 --hidden 16 --heads 2 --ffn 16 --experts 8 --token-padding 4 --log-every 1"


def train(folder: Path, *more: str) -> None:
    """On each rank: what the script does after it has joined the others."""
    sizes = [*SIZES.split(), "--steps", str(STEPS), "--warmup", "3", "--device", "cpu", "--learning-rate", "0.01"]
    args = train_moe.parse([*sizes, "--log-dir", str(folder), *more])
    train_moe.train(args, train_moe.torch.device("cpu"))


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "scalars.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read(folder)]


@pytest.fixture(scope="module")
def uninterrupted(ranks: Callable[[int], Ranks], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training on two ranks, which saved its state half way."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    ranks(2).run(train, folder, "--checkpoint-every", str(SAVED))
    return folder


def test_loss_goes_down_and_files_appear(uninterrupted):
    lines = read(uninterrupted)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    for step in (SAVED, STEPS):
        assert (uninterrupted / "checkpoints" / f"step-{step:07}" / ".metadata").exists()


def test_scalars_tell_balance_and_seconds(uninterrupted):
    for line in read(uninterrupted):
        assert {"gradient_norm", "learning_rate", "layer1/maxvio", "layer1/redundant_experts"} <= line.keys()
        assert all(line[f"seconds/{phase}"] > 0 for phase in ("forward", "backward", "step"))
        assert line["layer0/rows_after_max"] == line["layer0/rows_after_mean"] == 8 * 16 * 2 / 2
        assert line["layer0/imbalance_after"] == 1.0
        assert line["layer0/imbalance_before"] == line["layer0/rows_before_max"] / line["layer0/rows_before_mean"]
    assert max(line["layer0/imbalance_before"] for line in read(uninterrupted)) > 1.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_training_has_bit_identical_losses(ranks, uninterrupted, tmp_path, dtype):
    whole = uninterrupted
    if dtype != "float32":
        whole = tmp_path / "whole"
        ranks(2).run(train, whole, "--checkpoint-every", str(SAVED), "--dtype", dtype)
    checkpoint = whole / "checkpoints" / f"step-{SAVED:07}"
    ranks(2).run(train, tmp_path / "resumed", "--resume", str(checkpoint), "--dtype", dtype)
    assert losses(tmp_path / "resumed") == losses(whole)[SAVED:]


@pytest.mark.parametrize("R", [1, 4])
def test_a_checkpoint_of_two_ranks_goes_on_alike_on_other_numbers_of_ranks(ranks, uninterrupted, tmp_path, R):
    ranks(R).run(train, tmp_path, "--resume", str(uninterrupted / "checkpoints" / f"step-{SAVED:07}"))
    got, want = read(tmp_path), read(uninterrupted)[SAVED:]
    for name in ("loss", "gradient_norm"):
        assert [line[name] for line in got] == pytest.approx([line[name] for line in want], rel=1e-4)


def test_resume_takes_the_last_complete_checkpoint_of_a_folder(ranks, uninterrupted, tmp_path):
    (uninterrupted / "checkpoints" / "step-0000099").mkdir()  # a save that was cut short has no .metadata
    ranks(2).run(train, tmp_path, "--resume", str(uninterrupted / "checkpoints"), "--steps", str(STEPS + 1))
    assert [line["step"] for line in read(tmp_path)] == [STEPS + 1]
    with pytest.raises(SystemExit, match="expected a checkpoint or a folder of checkpoints"):
        train_moe.load(tmp_path, None, None)


def test_scalars_go_to_tensorboard_when_it_is_there(monkeypatch, tmp_path):
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str):
            assert folder == str(tmp_path)

        def add_scalar(self, *scalar: Any) -> None:
            written.append(scalar)

        def flush(self) -> None:
            pass

    module = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(train_moe.importlib.util, "find_spec", lambda name: name)
    train_moe.Log(tmp_path).write(3, {"loss": 0.5})
    assert written == [("loss", 0.5, 3)]
    assert not (tmp_path / "scalars.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_the_script_runs_by_itself(launcher, tmp_path):
    command = [sys.executable]
    if launcher == "torchrun":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = [*SIZES.split(), "--steps", "2", "--device", "cpu", "--log-dir", str(tmp_path), "--checkpoint-every", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join([str(EXAMPLE.parent.parent), environment.get("PYTHONPATH", "")])
    result = subprocess.run(
        [*command, str(EXAMPLE), *options], capture_output=True, text=True, timeout=120, env=environment
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "step 2: loss" in result.stdout
    assert len(read(tmp_path)) == 2
    assert (tmp_path / "checkpoints" / "step-0000002" / ".metadata").exists()
