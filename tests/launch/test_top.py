"""`python -m mpisgd top`, from another process than the job's, while a rank hangs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

from launcher import ENVIRONMENT, mpirun, run_python

PROGRAM = """
import os, sys, time
import torch
import mpisgd
mpisgd.init()
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
for _ in range(1200):
    optimizer.step()
pids = [None] * mpisgd.size()
mpisgd.all_gather_object(pids, os.getpid())
if mpisgd.rank() == 1:
    with open(sys.argv[1] + ".part", "w") as file:
        file.write(" ".join(map(str, pids)))
    os.rename(sys.argv[1] + ".part", sys.argv[1])
    while not os.path.exists(sys.argv[1] + ".over"):
        time.sleep(0.05)
mpisgd.barrier()
"""
LIMIT_S = 120.0


def test_it_shows_for_whom_the_others_wait(tmp_path):
    (tmp_path / "prog.py").write_text(PROGRAM)
    ready, env = tmp_path / "pids", {**os.environ, **ENVIRONMENT}
    command = [mpirun(), "-n", "3", sys.executable, str(tmp_path / "prog.py"), str(ready)]
    job = subprocess.Popen(command, env=env)
    try:
        limit_s = time.monotonic() + LIMIT_S
        while not ready.exists():
            assert job.poll() is None
            assert time.monotonic() < limit_s
            time.sleep(0.1)
        pids = ready.read_text().split()
        rows: list[str] = []
        while "waits" not in "".join(rows):  # it tells so after a tenth of a second
            assert time.monotonic() < limit_s
            done = run_python("-m", "mpisgd", "top", "--once", "--pid", pids[0])
            assert (done.returncode, done.stderr) == (0, "")
            heading, _, *rows = done.stdout.splitlines()
        assert "3 ranks" in heading
        assert "prog.py" in heading
        assert [row.split()[:3] for row in rows] == [[str(rank), pids[rank], "1,200"] for rank in range(3)]
        assert [bool(re.search("waits for rank 1: barrier", row)) for row in rows] == [True, False, True]
        assert rows[1].endswith("runs")
    finally:
        (tmp_path / "pids.over").touch()
        assert job.wait(LIMIT_S) == 0
    over = run_python("-m", "mpisgd", "top", "--pid", pids[0])
    assert over.returncode == 2
    assert over.stderr.endswith(f"error: there is no process {pids[0]} here\n")


def test_it_is_no_program_of_the_job(tmp_path):
    done = run_python("-m", "mpisgd", "top", num_ranks=2)
    assert done.returncode != 0
    assert done.stderr.count("run it in another terminal, without mpirun") == 1
