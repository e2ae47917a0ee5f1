"""Programs with RPC: how they end, what they say, and the two of scripts/."""

from __future__ import annotations

import os
import re
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch
from launcher import run_python

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

START = """
import os, sys, time
import torch, mpisgd
from mpisgd import rpc
mpisgd.init(timeout_s=float(os.environ.get("LIMIT", 120)))
rank, size = mpisgd.rank(), mpisgd.size()

def nap(seconds):
    time.sleep(seconds)
    return rank

def broken():
    raise ZeroDivisionError("in a call on rank %d" % rank)
"""


@pytest.fixture
def job(tmp_path):
    """Run a program's text on some ranks."""

    def run(
        text: str, num_ranks: int = 3, fresh: bool = False, **env: str
    ) -> subprocess.CompletedProcess[str]:
        program = tmp_path / "rpc_prog.py"
        program.write_text(START + textwrap.dedent(text))
        return run_python(str(program), num_ranks=num_ranks, env=env, fresh=fresh)

    return run


def of_mpisgd() -> set[int]:
    """The processes that run a program of ours."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if b"rpc_prog.py" in command:
            found.add(int(entry.name))
    return found


@pytest.mark.parametrize(
    "end", ["", pytest.param("rpc.shutdown(); mpisgd.shutdown()", marks=pytest.mark.long)]
)
def test_a_clean_end_is_silent_and_leaves_nothing(job, end):
    """Ranks come to their end at different moments, and answer until the last one has."""
    done = job(
        f"""
        rpc.init_rpc()
        time.sleep(0.3 * rank)
        print(sum(rpc.rpc_sync(other, nap, (0.01,)) for other in range(size)), flush=True)
        {end}
        """,
        fresh=True,
    )
    assert (done.returncode, done.stderr, done.stdout.split()) == (0, "", ["3"] * 3)
    assert not of_mpisgd()


@pytest.mark.long
def test_a_hundred_jobs_leave_nothing(job):
    """Neither processes, nor files (of the jobs of this machine alone: run it by itself)."""
    before = {folder: set(os.listdir(folder)) for folder in ("/dev/shm", "/tmp")}
    for _ in range(100):
        done = job("rpc.init_rpc(); rpc.rpc_sync((rank + 1) % size, nap, (0,))", 2)
        assert (done.returncode, done.stderr) == (0, "")
    assert not of_mpisgd()
    left = {folder: set(os.listdir(folder)) - names for folder, names in before.items()}
    print(f"new files: {left}")
    assert not {name for names in left.values() for name in names if "mpisgd" in name or "tensorpipe" in name}


@pytest.mark.long
def test_what_a_call_raises_ends_the_job_where_nobody_catches_it(job):
    done = job(
        """
        rpc.init_rpc()
        if rank == 0:
            rpc.rpc_sync(2, broken)
        """
    )
    assert done.returncode != 0
    assert done.stderr.count("mpisgd: rank 0 of 3") == 1
    assert "ZeroDivisionError: in a call on rank 2" in done.stderr
    assert not of_mpisgd()


def test_an_exception_ends_ranks_that_wait_for_calls_or_the_end(job):
    done = job(
        """
        rpc.init_rpc()
        if rank == 0:
            rpc.rpc_sync(1, nap, (100,))
        if rank == 2:
            time.sleep(0.5)
            raise KeyError("gone")
        """
    )
    assert done.returncode != 0
    assert "KeyError: 'gone'" in done.stderr
    assert "rank 2 of 3" in done.stderr
    assert not of_mpisgd()


def test_a_rank_that_does_not_come_to_the_end_is_named(job):
    done = job(
        """
        rpc.init_rpc()
        if rank == 1:
            time.sleep(100)
        rpc.shutdown()
        """,
        LIMIT="4",
    )
    assert done.returncode == 1
    assert re.search(r"CollectiveTimeout: rpc.shutdown: waited 4.0 s .*, for rank 1", done.stderr)
    assert re.search(r"has waited .* for rank 1 in rpc.shutdown", done.stderr)
    assert "time.sleep(100)" in done.stderr
    assert not of_mpisgd()


def test_ranks_that_wait_for_each_other_are_told_so(job):
    done = job(
        """
        rpc.init_rpc()
        rpc.shutdown() if rank else mpisgd.barrier()
        """
    )
    assert done.returncode == 1
    assert "Deadlock: ranks 0, 1, 2 can never go on" in done.stderr
    assert re.search(r"rank 1 waits for rank 0 in rpc.shutdown, .*rpc_prog.py:\d+", done.stderr)


def test_a_long_call_is_reported_and_no_deadlock_is_seen_in_it(job):
    """Rank 1 waits for rank 0 in a barrier, and serves its call meanwhile."""
    done = job(
        """
        rpc.init_rpc()
        if rank == 0:
            print(rpc.rpc_sync(1, nap, (5,)), flush=True)
        mpisgd.barrier()
        """,
        2,
        MPISGD_STALL_WARNING_S="1.5",
    )
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert re.search(r"rank 0 has waited .* s for rank 1 in rpc_sync of nap on 'worker1', at", done.stderr)
    assert "Deadlock" not in done.stderr


def losses_of_the_server(epochs: int) -> list[float]:
    """The parameter server's training, in one process: SGD on whole batches."""
    sklearn = pytest.importorskip("sklearn.datasets", reason="the digits come with scikit-learn")
    images, labels = map(torch.from_numpy, sklearn.load_digits(return_X_y=True))
    torch.manual_seed(0)
    hidden, out = torch.nn.Linear(64, 32).double(), torch.nn.Linear(32, 10).double()
    params, losses = [*hidden.parameters(), *out.parameters()], []
    for _ in range(epochs):
        total = 0.0
        for first in range(0, len(images), 64):
            x, y = images[first : first + 64] / 16, labels[first : first + 64]
            loss = torch.nn.functional.cross_entropy(out(torch.tanh(hidden(x))), y)
            total += loss.item() * len(x)
            for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
                param.data -= 0.5 * grad
        losses.append(total / len(images))
    return losses


@pytest.mark.parametrize("num_ranks", [3, pytest.param(2, marks=pytest.mark.long)])
def test_the_parameter_server_trains_as_one_process_does(num_ranks):
    expected = losses_of_the_server(3)
    done = run_python("-W", "error", str(SCRIPTS / "rpc" / "rpc_parameter_server.py"), num_ranks=num_ranks)
    assert (done.returncode, done.stderr) == (0, "")
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert losses == pytest.approx(expected, abs=1e-6)
    assert losses[-1] < losses[0] / 2


def test_the_split_rnn_learns():
    done = run_python(str(SCRIPTS / "rpc" / "rpc_rnn.py"), num_ranks=2)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert losses[0] > 4
    assert losses[-1] < 2.3


@pytest.mark.parametrize("name", ["rpc_parameter_server", pytest.param("rpc_rnn", marks=pytest.mark.long)])
def test_too_few_ranks_are_one_line(name):
    done = run_python(str(SCRIPTS / "rpc" / f"{name}.py"), num_ranks=None)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "start" in done.stderr
