"""A timeline that is asked for in the environment, and what is left of one after a crash."""

from __future__ import annotations

import json
import os
import signal

import pytest
from launcher import run_python

from mpisgd.timeline.files import read_events

KILLED = """
import os, signal, sys, time
import torch
import mpisgd
mpisgd.init()
rank = mpisgd.rank()
for i in range(3):
    mpisgd.all_reduce(torch.ones(10 + i))
if rank == 1:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
mpisgd.barrier()
"""

NEGOTIATED = """
import torch
import mpisgd
import mpisgd.horovod as hvd
hvd.init()
hvd.allreduce(torch.ones(3), name="x")
mpisgd.broadcast(torch.ones(3), 0)
"""


@pytest.fixture
def program(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "prog.py").write_text(text)
        return str(tmp_path / "prog.py")

    return write


def ranks_with(events, name: str) -> dict[int, int]:
    found: dict[int, int] = {}
    for event in events:
        if event["name"] == name and event["ph"] in "Xb":
            found[event["pid"]] = found.get(event["pid"], 0) + 1
    return found


def test_a_killed_rank_leaves_what_it_did(program, tmp_path):
    done = run_python(program(KILLED), num_ranks=2, env={"MPISGD_TIMELINE": str(tmp_path / "{rank}.json")})
    assert done.returncode not in (0, -signal.SIGKILL)
    for rank in range(2):
        assert ranks_with(read_events(tmp_path / f"{rank}.json"), "all_reduce") == {rank: 3}


def test_horovods_variable_records_a_program_to_its_end(program, tmp_path):
    path = tmp_path / "hvd.json"
    done = run_python(program(NEGOTIATED), num_ranks=2, env={"HOROVOD_TIMELINE": str(path)})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    events = json.loads(path.read_text())
    assert ranks_with(events, "NEGOTIATE_ALLREDUCE") == {0: 1, 1: 1}
    assert ranks_with(events, "broadcast") == {0: 1, 1: 1}
    assert sorted(os.listdir(tmp_path)) == ["hvd.json", "prog.py"]
