"""The README's programs run as they stand, under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


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
    root = Path(__file__).parent.parent
    tree = re.search(r"```\n(moonep/dims.py.*?)```", README, re.DOTALL)
    assert tree is not None
    for line in tree[1].splitlines():
        assert (root / line.split()[0]).exists(), line
