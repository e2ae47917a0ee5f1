"""What a user sees of a job that does not go on: a warning, in the end a report, each from one rank."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

import pytest
from launcher import run_python

START = """
import ctypes, os, signal, sys, time
import torch
import mpisgd
from mpisgd.job.groups import open_group
from mpisgd.threads.wait_registry import WaitReason, waiting_for
from mpisgd.job.lifecycle import current_job, world

mpisgd.init()
rank = mpisgd.rank()
mpisgd.barrier()

def reading_data(seconds=100):
    time.sleep(seconds)

def counting():
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        pass

def in_c_code():
    while True:  # a signal ends one of them
        ctypes.PyDLL(None).usleep(20_000_000)
"""

STOP = "os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.fixture
def job(tmp_path):
    """Run a program's text on some ranks with a timeout and a time for warnings."""

    def run(
        text: str, num_ranks: int, *, limit_s: float, options: Sequence[str] = (), **env: str
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "prog.py").write_text(START + text)
        settings = {"MPISGD_TIMEOUT_S": str(limit_s), "MPISGD_STALL_WARNING_S": "0", **env}
        return run_python(str(tmp_path / "prog.py"), num_ranks=num_ranks, options=options, env=settings)

    return run


def rows(report: str) -> dict[str, str]:
    """The rows of a report's table: what is said of which ranks."""
    table = report.partition("what they do\n")[2].partition("is here")[0]
    lines = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines() if line.startswith("  ")]
    return {cells[0]: cells[-1] for cells in lines if len(cells) > 1}


def reports(done: subprocess.CompletedProcess[str]) -> list[str]:
    return done.stderr.split("mpisgd: ")[1:]


def test_a_late_rank_is_worth_one_warning_and_a_lost_one_a_report(job):
    """Rank 1 comes late, and all go on; then nobody comes any more, each for a reason of its own."""
    done = job(
        f"""
if rank == 1:
    reading_data(4)
mpisgd.all_reduce(torch.ones(3))
print("went on", flush=True)
if rank == 1: reading_data()
if rank == 2: {STOP}
if rank == 3: counting()
if rank == 4: in_c_code()
if rank == 5: mpisgd.recv(torch.zeros(2), 1)
mpisgd.all_reduce(torch.ones(4), async_op=True).wait()
        """,
        6,
        limit_s=8,
        MPISGD_STALL_WARNING_S="2.5",
    )
    assert done.returncode != 0
    assert done.stdout.count("went on") == 6
    late, again, end, *_ = reports(done)
    assert late.startswith("warning: ")
    assert "for rank 1 in all_reduce" in late
    assert "shape=[3]" in late
    assert again.startswith("warning: ")
    assert "That is the limit" in end
    for report in (late, again, end):
        assert "in reading_data" in report
        assert report.count("what they do") == 1
    assert done.stderr.count("what they do") == 3
    seen = rows(end)
    assert "runs code outside mpisgd" in seen["1, 3"]
    assert "runs code outside mpisgd" not in seen["4"]
    assert "stopped by a signal" in seen["2"]
    assert "for rank 1: recv" in seen["5"]
    assert any("shape=[4]" in text and "operation 3 of group 'world', at " in text for text in seen.values())
    assert "has not let Python's threads run" in seen["4"]
    assert "in counting" in end
    assert "in in_c_code" in end
    assert done.stderr.count("errors.CollectiveTimeout: ") == 1


def test_a_rank_blocked_inside_mpi_ends_the_job_with_the_report(job):
    done = job(
        """
if rank == 1:
    reading_data()
with waiting_for(WaitReason("tea", members=(0, 1, 2))):
    world().queue.communicator.barrier()
        """,
        3,
        limit_s=2,
    )
    assert done.returncode != 0
    (report,) = reports(done)
    assert "for rank 1 in tea, inside MPI's Barrier" in report
    assert "the job ends" in report
    assert "in reading_data" in report
    assert rows(report)["1"] == "runs code outside mpisgd"


@pytest.mark.parametrize(
    "elsewhere", ["reading_data()", pytest.param(STOP, marks=pytest.mark.long, id="stopped")]
)
def test_with_fault_tolerance_ranks_blocked_inside_mpi_are_freed_with_an_error(job, tmp_path, elsewhere):
    """Also one that would wait on; nobody is lost, so nobody goes on without anybody, and the job ends."""
    done = job(
        f"""
@mpisgd.elastic.run
def train(state):
    if rank == 1:
        {elsewhere}
    try:
        if rank == 2:
            mpisgd.irecv(torch.zeros(2), 1).wait(50)
        with waiting_for(WaitReason("tea", members=(0, 1, 3))):
            world().queue.communicator.barrier()
    except mpisgd.CollectiveTimeout as exc:
        with open(f"{tmp_path}/got-{{rank}}", "w") as file:
            file.write(str(exc))
        while not all(os.path.exists(f"{tmp_path}/got-{{other}}") for other in (0, 2, 3)):
            time.sleep(0.1)
        time.sleep(0.5)
        raise

train(mpisgd.elastic.State())
        """,
        4,
        limit_s=3,
        options=("--with-ft", "ulfm"),
    )
    assert done.returncode != 0
    report, *traceback = reports(done)
    assert "for rank 1 in tea, inside MPI's Barrier" in report
    assert "all communicators of the job are revoked" in report
    assert ("in reading_data" if "reading" in elsewhere else "stopped by a signal") in report
    assert "errors.CollectiveTimeout: " in "".join(traceback)
    got = {rank: (tmp_path / f"got-{rank}").read_text() for rank in (0, 2, 3)}
    assert all(re.match("MPI Barrier: .* blocked", got[rank]) for rank in (0, 3))
    assert "a call of another rank was blocked inside MPI" in got[2]
    assert "go on from the last commit" not in done.stderr


def test_with_fault_tolerance_a_recovery_without_the_others_ends_the_job(job):
    """Nobody moves MPI's messages but the failure detectors, and every communicator is revoked."""
    done = job(
        """
from mpisgd.job import startup_timeout

startup_timeout.LEAST_S = 2.0

@mpisgd.elastic.run
def train(state):
    if rank == 2:
        current_job().failure_detector._end_waits(mpisgd.PeerLost("for a test"))
        raise mpisgd.PeerLost("for a test")
    reading_data()

train(mpisgd.elastic.State())
        """,
        3,
        limit_s=1,
        options=("--with-ft", "ulfm"),
    )
    assert done.returncode == 75
    assert "rank 2 has been in the agreement of the remaining ranks for 2 s" in done.stderr


def test_with_fault_tolerance_an_error_ends_the_job_whatever_the_others_do(job):
    """MPI_Abort does not: its caller would be one more lost rank."""
    done = job(
        f"""
if rank == 1:
    {STOP}
if rank == 2:
    in_c_code()
if rank == 3:
    time.sleep(1)
    raise SystemExit(mpisgd.no_such_thing)
time.sleep(40)
        """,
        4,
        limit_s=100,
        options=("--with-ft", "ulfm"),
    )
    assert done.returncode != 0
    assert done.stderr.count("Traceback") == 1
    assert "rank 3 of 4" in done.stderr
    assert "no_such_thing" in done.stderr


def test_a_thread_that_an_error_has_ended_is_named_with_the_error(job):
    """The program of its rank goes on, as in plain Python, and the others wait for what it did not do."""
    done = job(
        """
import threading

def exchange():
    mpisgd.barrier()
    if rank == 1:
        raise ValueError("a bad batch")
    mpisgd.all_reduce(torch.ones(3))

thread = threading.Thread(target=exchange, name="loader")
thread.start()
thread.join()
if rank == 1:
    reading_data(6)
os._exit(7)
        """,
        3,
        limit_s=2,
    )
    assert done.returncode == 7
    report = next(text for text in reports(done) if "what they do" in text)
    assert "for rank 1 in all_reduce" in report
    assert re.search(r"rank 1: thread 'loader' ended \d+\.\d s ago with ValueError: a bad batch, at ", report)
    assert "in exchange" in report
    assert done.stderr.count("ValueError: a bad batch") >= 2  # Python's own traceback, and the report


def test_the_making_of_a_group_has_the_limit_too(job):
    done = job(
        """
if rank == 1:
    reading_data()
open_group(current_job(), range(3), name="mine")
        """,
        3,
        limit_s=2,
    )
    assert done.returncode != 0
    report, *_ = reports(done)
    assert "for rank 1 in new_group of [0, 1, 2]" in report
    assert "in reading_data" in report
    assert rows(report)["1"] == "runs code outside mpisgd"
    assert "CollectiveTimeout: new_group(ranks=[0, 1, 2]), group 'mine'" in done.stderr


@pytest.mark.long
def test_ranks_that_share_no_memory_ask_by_messages_and_each_other_at_once(job):
    """Every rank asks, in two threads, while one is stopped and another keeps the interpreter's lock."""
    done = job(
        f"""
import threading
if rank == 1:
    {STOP}
if rank == 2:
    in_c_code()
found = []
def ask():
    found.append(current_job().monitor.collect())
threads = [threading.Thread(target=ask) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
for views in found:
    assert [view.rank for view in views] == [0, 1, 2, 3], views
    assert [view.state for view in views] == ["runs", "unresponsive", "unresponsive", "runs"], views
    assert all("ask" in "".join(views[peer].stacks.values()) for peer in (0, 3)), views
if rank == 0:
    time.sleep(1)  # rank 3's answer may be on its way
os.write(1, b"asked\\n")
time.sleep(1)
os._exit(7)
        """,
        4,
        limit_s=30,
        MPISGD_SHARED_MEMORY="0",
    )
    assert done.stdout.split() == ["asked"] * 2, done.stderr


GUARDED = """
import atexit, os, signal, sys, time
from mpi4py import MPI
import mpisgd.job.startup_timeout
mpisgd.job.startup_timeout.LEAST_S = 2.0
late = MPI.COMM_WORLD.Get_rank() == 1
if late and "start" in sys.argv:
    time.sleep(100)
if late:
    atexit.register(os.kill, os.getpid(), signal.SIGSTOP)  # runs after all that is registered later
mpisgd.init(timeout_s=2.0)
mpisgd.barrier()
"""


@pytest.mark.long
@pytest.mark.parametrize("when", ["start", "end"])
def test_the_start_of_the_job_and_the_end_of_mpi_have_the_limit_too(tmp_path, when):
    (tmp_path / "prog.py").write_text(GUARDED)
    done = run_python(str(tmp_path / "prog.py"), when, num_ranks=2)
    assert done.returncode != 0
    if when == "start":
        assert "rank 0 has been in mpisgd.init() for 2 s" in done.stderr
        assert "prog.py" in done.stderr
    else:
        assert "Alarm clock" in done.stderr
