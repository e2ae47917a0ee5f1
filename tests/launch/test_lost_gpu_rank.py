"""A rank is lost while the others wait for their GPUs, which wait for it: they are woken and go on."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from launcher import run_python

sys.path.insert(0, str(Path(__file__).parents[1]))
from simulated_gpu.guard import has_compiler

PROGRAM = Path(__file__).parent / "programs" / "lost_gpu_rank.py"


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler to simulate GPUs")
def test_the_survivors_of_a_killed_rank_are_woken_and_go_on_by_nccl(tmp_path):
    path = tmp_path / "lines"
    done = run_python(str(PROGRAM), str(path), num_ranks=3, options=("--with-ft", "ulfm"))
    assert path.exists(), done.stderr
    first, last = path.read_text().splitlines()
    found = re.fullmatch(r"3 ranks, sum 12; woken after ([\d.]+) s: PeerLost: (.*)", first)
    assert found, first
    assert float(found[1]) < 5.0
    assert "lost" in found[2]
    assert last == "2 ranks, sum 8"
    assert done.returncode == 0, done.stderr
