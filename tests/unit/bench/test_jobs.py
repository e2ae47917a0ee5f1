"""Jobs that a benchmark starts: they end with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from mpisgd.tools.bench.jobs import Job


def test_a_command_that_is_not_there_is_refused():
    with pytest.raises(FileNotFoundError, match="no-such-launcher"):
        Job(["no-such-launcher"], dict(os.environ))


def test_a_job_ends_with_the_process_that_started_it():
    program = (
        "import os; from mpisgd.tools.bench.jobs import Job; "
        "print(Job(['sleep', '60'], dict(os.environ)).pid, flush=True); input()"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert starter.stdin is not None
    assert starter.stdout is not None
    job = psutil.Process(int(starter.stdout.readline()))
    deadline = time.monotonic() + 20
    while job.name() != "sleep" and time.monotonic() < deadline:
        time.sleep(0.01)
    starter.kill()
    starter.communicate()
    psutil.wait_procs([job], timeout=20)
    assert not job.is_running() or job.status() == psutil.STATUS_ZOMBIE
