"""The README's programs run as they stand, under torchrun; those of docs/frameworks.md on ranks that are there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from moonep.nn import MoE, expert_parameters

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def programs_in(text: str) -> list[str]:
    """The blocks of Python in a page."""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


PROGRAMS = programs_in(README)
FIRST, *PIECES = programs_in((ROOT / "docs" / "frameworks.md").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "rows"), [*zip(PROGRAMS, ("[1024, 1024]", "[512, 512]"), strict=True)], ids=["layer", "parts"]
)
def test_readme_program_runs_on_two_ranks_and_prints_equal_rows(program, rows, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(program)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MOONEP_BACKEND": "cpu"}
    result = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    assert rows in result.stdout


def test_readme_names_every_file_of_its_tree():
    tree = re.search(r"```\n(moonep/dims.py.*?)```", README, re.DOTALL)
    assert tree is not None
    for line in tree[1].splitlines():
        assert (ROOT / line.split()[0]).exists(), line


def run_piece(program: str) -> dict[str, Any]:
    """Run a program in this world. -> what it leaves: sums of its model's parameters, the layer's output"""
    left: dict[str, Any] = {}
    with mock.patch("torch.distributed.init_process_group"):  # this world is one already
        exec(compile(program, "frameworks.md", "exec"), left)
    seen: dict[str, Any] = {"ep": left["mesh"]["ep"].get_local_rank()}
    model = left.get("model")
    if isinstance(model, nn.Module):
        own = expert_parameters(model)
        whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
        seen["experts"] = {n: whole[n].detach().sum().item() for n, p in model.named_parameters() if p in own}
        seen["others"] = {n: whole[n].detach().sum().item() for n, p in model.named_parameters() if p not in own}
    if isinstance(trained := left.get("trained"), MoE):
        with torch.no_grad():
            torch.testing.assert_close(left["output"], trained(left["x"]))
    if (block := left.get("block")) is not None:
        assert all(p.grad.any() for p in block.parameters())
    if (grad := left.get("grad")) is not None:
        assert isinstance(grad, DTensor) and grad.to_local().any()
    return seen


@pytest.mark.parametrize("piece", PIECES, ids=["ddp", "fsdp", "sharded-experts", "checkpoint", "pipeline", "weights"])
def test_pieces_of_the_page_on_frameworks_run_and_keep_copies_equal(ranks, piece):
    results = ranks(4).run(run_piece, FIRST + piece)
    assert [r["ep"] for r in results] == [0, 1, 0, 1]
    if "experts" in results[0]:
        assert all(r["others"] == results[0]["others"] for r in results)
        assert results[0]["experts"] == results[2]["experts"] != results[1]["experts"] == results[3]["experts"]
