"""torch's `reconfigure` where a rank is killed: the others go on in the same groups, with fewer members."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launcher import run_python

from mpisgd.torch_backend import compat

PROGRAM = Path(__file__).parent / "programs" / "torch_reconfigure.py"


@pytest.mark.skipif(
    not compat.HAS_RECONFIGURE, reason=f"torch {torch.__version__} has no reconfigure; 2.14 has"
)
@pytest.mark.parametrize(("num_ranks", "killed"), [(2, 1), (3, 0), (4, 2)])
def test_the_others_reconfigure_after_a_loss(num_ranks, killed):
    done = run_python(str(PROGRAM), str(killed), num_ranks=num_ranks, options=("--with-ft", "ulfm"))
    assert done.returncode == 0, done.stderr
    seen = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    seen.sort(key=lambda each: each["mpi_rank"])
    left = [rank for rank in range(num_ranks) if rank != killed]
    assert [each["mpi_rank"] for each in seen] == left, done.stderr
    fewer, both = num_ranks - 1, num_ranks * (num_ranks + 1) / 2
    total = fewer * (fewer + 1) / 2
    for place, each in enumerate(seen):
        assert each["before"] == [-1, -1]
        assert each["refused"]
        assert each["all"] == [each["mpi_rank"], num_ranks, both, both]
        assert each["left"] == [place, fewer, total, total / fewer]
        assert each["side"] == [fewer - 1 - place, fewer, total]
        assert each["lost"]
