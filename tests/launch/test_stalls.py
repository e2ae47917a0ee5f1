"""A rank that does not come is named, with what it does instead, and the job can end for it."""

from __future__ import annotations

import pytest
from launcher import run_python

PROGRAM = """
import os, signal, sys, time
import torch
import mpisgd.horovod as hvd
hvd.init()
rank = hvd.rank()

def reading_data():
    time.sleep(1.5)

def validating():
    time.sleep(100)

if rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP) if "stop" in sys.argv else reading_data()
hvd.allreduce(torch.ones(3), name="grad.0")
print("went on", flush=True)
if rank == 1:
    validating()
hvd.allreduce(torch.ones(3), name="grad.1")
"""

LIMITS = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.5", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2.5"}


@pytest.fixture
def program(tmp_path):
    (tmp_path / "prog.py").write_text(PROGRAM)
    return str(tmp_path / "prog.py")


def test_who_is_elsewhere_is_named_with_its_stack_and_in_the_end_the_job_ends(program):
    """First it is rank 0: its engine speaks all the same, and the job goes on when it comes."""
    done = run_python(program, num_ranks=3, env={**LIMITS, "MPISGD_STALL_STACKS": "1"})
    assert done.returncode != 0
    assert done.stdout.count("went on") == 3
    first, *_, last = done.stderr.split("mpisgd.horovod: ")[1:]
    assert "allreduce 'grad.0': rank 0\n" in first
    assert "rank 0 is here meanwhile" in first
    assert "in reading_data" in first
    assert "the job ends" not in first
    assert "allreduce 'grad.1': rank 1\n" in last
    assert "in validating" in last
    assert "the job ends" in last


def test_a_process_that_is_stopped_is_named_by_the_others_and_the_job_ends(program):
    """They wait for it in the middle of their exchange."""
    done = run_python(program, "stop", num_ranks=3, env=LIMITS)
    assert done.returncode != 0
    assert "went on" not in done.stdout
    first, *_, last = done.stderr.split("mpisgd: ")[1:]
    assert first.startswith("warning: ")
    assert "for rank 0 in the negotiation of operations" in first
    assert "stopped by a signal" in first
    assert "allreduce 'grad.0'" in first
    assert "longer than 2.5 s, after which the job ends" in last
