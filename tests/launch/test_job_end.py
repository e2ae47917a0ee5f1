"""How a job ends: within seconds, on every rank, with one report and the exit code that was meant."""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from launcher import ENVIRONMENT, mpirun, run_python

# A rank that waits for the timeout of START takes twice as long, the start on a slow machine a third of it.
PROMPT_S = 60

START = """
import os, sys, time
import torch
import mpisgd
mpisgd.init(timeout_s=float(os.environ.get("LIMIT", 120)))
rank, size = mpisgd.rank(), mpisgd.size()
"""


@pytest.fixture
def job(tmp_path):
    """Run a program's text on some ranks; the result, and what it took in seconds."""

    def run(
        text: str, num_ranks: int | None, fresh: bool = False, **env: str
    ) -> subprocess.CompletedProcess[str]:
        program = tmp_path / "prog.py"
        program.write_text(START + textwrap.dedent(text))
        start = time.monotonic()
        done = run_python(str(program), num_ranks=num_ranks, env=env, fresh=fresh)
        done.seconds = time.monotonic() - start  # type: ignore[attr-defined]
        return done

    return run


def ours(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What we said: the launcher has its own to say about a job that failed."""
    return [line for line in done.stderr.splitlines() if "mpisgd" in line or "prog.py" in line]


EVERYONE_WAITS = "x = torch.ones(3); mpisgd.all_reduce(x); mpisgd.barrier()"


@pytest.mark.parametrize("culprit", [0, 2])
def test_an_exception_on_one_rank_ends_the_job_with_its_traceback_once(job, culprit):
    done = job(
        f"""
        def broken():
            raise ZeroDivisionError("by rank %d" % rank)
        if rank == {culprit}:
            broken()
        {EVERYONE_WAITS}
        """,
        3,
    )
    assert done.returncode != 0
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count(f"ZeroDivisionError: by rank {culprit}") == 1
    assert f"rank {culprit} of 3" in done.stderr
    assert "in broken" in done.stderr
    assert done.seconds < PROMPT_S


def test_an_exception_ends_ranks_that_compute_or_wait_for_a_message(job):
    done = job(
        """
        if rank == 0:
            raise KeyError("gone")
        if rank == 1:
            mpisgd.recv(torch.zeros(3), 0)
        work = mpisgd.all_reduce(torch.zeros(3), async_op=True)
        time.sleep(100)
        """,
        3,
    )
    assert done.returncode != 0
    assert done.stderr.count("Traceback") == 1
    assert "KeyError: 'gone'" in done.stderr
    assert done.seconds < PROMPT_S


def test_the_same_exception_on_all_ranks_is_one_traceback(job):
    done = job("raise ZeroDivisionError('everywhere')", 3)
    assert done.returncode != 0
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("ZeroDivisionError: everywhere") == 1


@pytest.mark.parametrize("who", ["True", "rank == 1"])
def test_a_job_error_is_one_line(job, who):
    done = job(
        f"""
        if {who}:
            raise mpisgd.JobError("no such file: data.npz")
        {EVERYONE_WAITS}
        """,
        3,
    )
    assert done.returncode == 2
    assert ours(done) == ["prog.py: error: no such file: data.npz"]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("num_ranks", [None, 1])
def test_a_job_error_in_a_world_of_one(job, num_ranks):
    done = job("raise mpisgd.JobError('no such file', exit_code=7)", num_ranks)
    assert done.returncode == 7
    assert ours(done) == ["prog.py: error: no such file"]
    assert "Traceback" not in done.stderr


def test_an_exception_in_a_world_of_one_looks_as_always(job):
    done = job("raise ZeroDivisionError('alone')", None)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.count("ZeroDivisionError: alone") == 1
    assert "mpisgd" not in done.stderr.replace("import mpisgd", "")


def test_a_mismatch_is_reported_once_by_the_lowest_rank(job):
    done = job("mpisgd.all_reduce(torch.ones(3 + (rank == 2)))", 3)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "rank 0 of 3" in done.stderr
    assert "[3]" in done.stderr
    assert "[4]" in done.stderr
    assert "prog.py" in done.stderr


@pytest.mark.parametrize(
    ("leaver", "group"), [(0, "None"), pytest.param(1, "mpisgd.new_group()", marks=pytest.mark.long)]
)
def test_a_rank_that_exits_early_ends_the_others_with_an_error_that_says_so(job, leaver, group):
    done = job(
        f"""
        group = {group}
        if rank == {leaver}:
            sys.exit(3)
        mpisgd.all_reduce(torch.ones(3), group=group)
        """,
        3,
    )
    assert done.returncode == 3, "it was 1"
    assert f"rank {leaver} left the program by sys.exit(3)" in done.stderr
    assert "shutdown" in done.stderr
    assert "the end of the program" in done.stderr
    assert "all_reduce" in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert done.seconds < PROMPT_S


def test_an_error_in_a_forked_child_is_not_the_end_of_the_job_and_a_fault_names_its_rank(job):
    """The child said that the job ends, and blocked in MPI_Abort. Of a fault only a number was known."""
    done = job(
        """
        import ctypes
        child = os.fork()
        if child == 0:
            raise ValueError("in a child")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        mpisgd.barrier()
        print("went on", flush=True)

        def broken():
            ctypes.string_at(0)

        if rank == 1:
            broken()
        mpisgd.barrier()
        """,
        2,
    )
    assert done.returncode != 0
    assert done.stdout.count("went on") == 2
    assert done.stderr.count("ValueError: in a child") == 2
    assert "the job ends" not in done.stderr
    assert "Segmentation fault" in done.stderr
    assert "this is rank 1 of 2" in done.stderr
    assert "in broken" in done.stderr


def test_torchrun_alone_makes_no_job(job):
    """Each of its processes was rank 0 of 1, in silence."""
    done = job("print(size)", None, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    assert done.returncode != 0
    assert "mpirun -n 2" in done.stderr
    alone = job("print(size)", None, RANK="0", WORLD_SIZE="1")
    assert alone.stdout.split() == ["1"]


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.long), 2])
def test_one_rank_destroys_its_group_and_the_others_end_the_program(job, first):
    """It once told the others of its messages inside MPI, while they waited for it at the world's end."""
    done = job(
        f"""
        import torch.distributed as dist
        dist.init_process_group("mpisgd")
        dist.all_reduce(torch.ones(3))
        if rank == {first}:
            dist.destroy_process_group()
        """,
        3,
        LIMIT="15",
    )
    assert done.returncode == 0, done.stderr


def test_a_rank_that_shuts_down_early_is_told_with_the_others(job):
    done = job(
        f"""
        if rank == 1:
            mpisgd.shutdown()
        else:
            {EVERYONE_WAITS}
        """,
        3,
    )
    assert done.returncode != 0
    assert done.stderr.count("Traceback") == 1
    assert "shutdown" in done.stderr
    assert "all_reduce" in done.stderr


def test_a_rank_that_does_not_come_is_named_within_the_time_limit(job):
    done = job(
        """
        if rank == 1:
            time.sleep(100)
        mpisgd.all_reduce(torch.ones(3))
        """,
        2,
        LIMIT="1.5",
    )
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "CollectiveTimeout" in done.stderr
    assert "rank 1" in done.stderr
    assert "MPISGD_TIMEOUT_S" in done.stderr
    assert done.seconds < PROMPT_S


def test_a_group_whose_rank_did_not_come_refuses_from_then_on(job):
    done = job(
        """
        group = mpisgd.new_group()
        group.queue.consistency.timeout_s = 0.5
        if rank == 0:
            for call in (lambda: mpisgd.barrier(group), lambda: mpisgd.broadcast(torch.ones(1), 0, group)):
                try:
                    call()
                except mpisgd.CollectiveTimeout as exc:
                    print("refused:", "rank 1" in str(exc))
        mpisgd.barrier()
        if rank == 1:
            try:
                mpisgd.all_reduce(torch.ones(3), group=group)
            except mpisgd.CollectiveTimeout as exc:
                print("came in vain:", "timed out before" in str(exc))
        print("the world goes on")
        """,
        2,
    )
    assert done.stdout.count("refused: True") == 2
    assert done.stdout.count("came in vain: True") == 1
    assert done.stdout.count("the world goes on") == 2
    assert done.returncode == 1  # what was started in the group never ended: no clean exit
    assert done.seconds < PROMPT_S


def test_shutdown_after_a_rank_did_not_come_does_not_hang(job):
    done = job(
        """
        group = mpisgd.new_group()
        group.queue.consistency.timeout_s = 0.5
        if rank == 0:
            try:
                mpisgd.barrier(group)
            except mpisgd.CollectiveTimeout:
                pass
        mpisgd.barrier()
        mpisgd.shutdown()
        """,
        2,
        LIMIT="3",
    )
    assert done.returncode != 0
    assert "CollectiveTimeout" in done.stderr
    assert done.seconds < PROMPT_S


@pytest.mark.parametrize(
    ("num_ranks", "last"),
    [(None, ""), (1, "mpisgd.shutdown()"), (2, ""), (3, "mpisgd.shutdown(); sys.exit(0)")],
)
def test_a_clean_end_is_silent(job, num_ranks, last):
    done = job(
        f"""
        x = torch.ones(3)
        work = mpisgd.all_reduce(x, async_op=True)
        mpisgd.barrier(async_op=True)
        group = mpisgd.new_group([size - 1])
        before, after = (rank - 1) % size, (rank + 1) % size
        out = torch.zeros(3)
        mpisgd.isend(out, after)
        mpisgd.irecv(out, before).get_future()
        mpisgd.irecv(out, before, tag=5)
        {last}
        """,
        num_ranks,
        fresh=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_messages_sent_and_forgotten_arrive_although_the_sender_ends(job):
    done = job(
        """
        if rank == 0:
            mpisgd.isend(torch.full((3_000_000,), 7.0), 1)
        else:
            time.sleep(0.5)
            out = torch.zeros(3_000_000)
            mpisgd.recv(out, 0)
            print(out.min().item(), out.max().item())
        """,
        2,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "7.0 7.0\n", "")


def test_the_exit_code_of_the_program_is_kept(job):
    done = job("sys.exit(5)", 2)
    assert done.returncode == 5
    assert "Traceback" not in done.stderr


def test_an_interrupt_ends_the_job(job):
    done = job("if rank == 1:\n    raise KeyboardInterrupt\nmpisgd.barrier()", 2)
    assert done.returncode != 0
    assert done.stderr.count("Traceback") == 1
    assert done.seconds < PROMPT_S


def start_two(tmp_path: Path, rest: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a job; return the launcher and the process ids of both ranks."""
    program = tmp_path / "prog.py"
    program.write_text(f"{START}print(os.getpid(), flush=True)\nmpisgd.barrier()\n{rest}\n")
    process = subprocess.Popen(
        [mpirun(), "-n", "2", sys.executable, str(program)],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    ranks = [int(process.stdout.readline()) for _ in range(2)]
    time.sleep(0.5)
    return process, ranks


def test_nothing_is_left_behind_by_a_job_that_is_killed(tmp_path):
    """kill -9 of the launcher and of every rank."""
    before = set(glob.glob(f"{tempfile.gettempdir()}/mpisgd-*"))
    process, ranks = start_two(tmp_path, "time.sleep(60)")
    for pid in (*ranks, process.pid):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert set(glob.glob(f"{tempfile.gettempdir()}/mpisgd-*")) <= before


def test_ranks_end_with_a_launcher_that_is_killed_whatever_they_do(tmp_path):
    """MPI tells those alone that call it: who computes would do so for ever."""
    process, ranks = start_two(tmp_path, "while True:\n    torch.ones(9).sum()")
    running = [*map(psutil.Process, ranks)]
    process.kill()
    try:
        psutil.wait_procs(running, timeout=PROMPT_S)
        assert [pid for pid in ranks if psutil.pid_exists(pid)] == []
    finally:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=60)


def test_asynchronous_gossip_ends_with_the_program_whoever_is_first(job):
    done = job(
        """
        import time
        model = torch.nn.Linear(300, 300)
        mpisgd.broadcast_parameters(model)
        optimizer = mpisgd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            strategy=mpisgd.Gossip("complete", style="asynchronous"),
        )
        for _ in range(50 if rank == 1 else 5):
            optimizer.zero_grad()
            model(torch.ones(4, 300)).mean().backward()
            optimizer.step()
            time.sleep(0.01 * rank)
        if rank == 2:
            del optimizer, model
        """,
        3,
    )
    assert done.returncode == 0, done.stderr
    assert done.seconds < PROMPT_S
    assert [line for line in ours(done) if "spectral gap" not in line] == []
