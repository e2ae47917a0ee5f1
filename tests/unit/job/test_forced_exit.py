"""The end of a process is the same whether the program has called `shutdown()` or not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mpisgd.job import lifecycle as jobs
from mpisgd.job.job_of_thread import PROCESS


@pytest.mark.parametrize("in_order", [True, False], ids=["shutdown was called", "shutdown was not called"])
@pytest.mark.parametrize(
    ("lost_ranks", "lost_host", "end"),
    [(True, False, "lost_ranks"), (True, True, "lost_host 3"), (False, False, "limit 60")],
)
def test_a_job_that_has_lost_ranks_does_not_wait_for_them(monkeypatch, lost_ranks, lost_host, end, in_order):
    topology = SimpleNamespace(local_rank=3)
    world = SimpleNamespace(pid=os.getpid(), size=4, known_topology=topology)
    hooks = SimpleNamespace(exit_code=lambda: 0)
    job = SimpleNamespace(hooks=hooks, world=world, lost_ranks=lost_ranks, lost_host=lost_host, timeout_s=60)
    said: list[str] = []
    monkeypatch.setattr(PROCESS, "job", None if in_order else job)
    monkeypatch.setattr(PROCESS, "ended", job if in_order else None)
    monkeypatch.setattr(jobs, "shutdown", lambda: None)
    monkeypatch.setattr(jobs, "exit_after_loss", lambda: said.append("lost_ranks"))
    monkeypatch.setattr(jobs, "exit_without_host", lambda local_rank: said.append(f"lost_host {local_rank}"))
    monkeypatch.setattr(jobs, "set_alarm", lambda limit_s: said.append(f"limit {limit_s}"))
    jobs._at_exit()
    assert said[0] == end  # the real `exit_without_host` does not return


def test_handlers_registered_before_init_have_their_time():
    """The alarm for MPI's finalize ended them: it was set before they ran."""
    program = """
import atexit, ctypes, signal, sys, time

@atexit.register
def last():
    time.sleep(0.5)
    print("saved", flush=True)
    hangs = ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p)  # as MPI's finalize may
    ctypes.pythonapi.Py_AtExit(hangs)

from mpisgd.job import forced_exit
forced_exit.FINALIZE_S = 0.2
atexit.register(forced_exit.exit_after_loss)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "saved\n", done.stderr
    assert done.returncode == -signal.SIGALRM
