"""What of a job can be seen and touched from outside, while it runs and after it was killed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from watched import ANY_ADDRESS, Job, descendants, listens_on, mapped, modes_of_open_files, running

SHARED_MEMORY = Path("/dev/shm")
NUM_RANKS = 2

# Everything that opens files or sockets: shared memory, MPI, a thread, named operations, a torch group.
PROGRAM = """
import os, sys, time
import torch
import torch.distributed as dist
import mpisgd
import mpisgd.horovod as hvd
mpisgd.init(timeout_s=60)
x = torch.ones(300_000)
for algorithm in ("node", "mpi", "ring"):
    mpisgd.all_reduce(x, algorithm=algorithm)
mpisgd.all_reduce(x, async_op=True).wait()
hvd.init()
hvd.allreduce(x, name="x")
dist.init_process_group("mpisgd")
dist.all_reduce(x)
mpisgd.barrier()
print("pid", os.getpid(), flush=True)
if "crash" in sys.argv and mpisgd.rank() == 1:
    raise ValueError("on purpose")
while True:
    mpisgd.barrier()
    time.sleep(0.1)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "prog.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def folder(tmp_path):
    """A temporary folder of the jobs' own, by a short name: sockets have long ones."""
    path = tmp_path / "t"
    path.mkdir()
    return path


def start(program: Path, folder: Path, *arguments: str):
    return running([sys.executable, str(program), *arguments], NUM_RANKS, env={"TMPDIR": str(folder)})


def segments_of(job: Job) -> set[str]:
    """The names that the job's files in /dev/shm have or had; none where MPI uses no such files."""
    return set().union(*(mapped(rank, str(SHARED_MEMORY)) for rank in job.ranks))


def left_in_shared_memory(names: set[str]) -> set[str]:
    return {name for name in names if (SHARED_MEMORY / name).exists()}


def private(path: Path) -> bool:
    return path.stat().st_mode & 0o077 == 0


def test_nobody_comes_into_a_job_and_nothing_is_left_of_it_however_it_ends(program, folder):
    with start(program, folder) as job:
        assert {pid: listens_on(pid) for pid in job.ranks} == {key: [] for key in job.ranks}
        names = segments_of(job)
        assert left_in_shared_memory(names) == set(), "files that all have mapped need no names"
        for rank in job.ranks:
            modes = modes_of_open_files(rank, [str(SHARED_MEMORY), str(folder)])
            assert all(mode & 0o077 == 0 for mode in modes.values()), modes
        assert all(private(entry) for entry in folder.iterdir()), [*folder.iterdir()]
        # What the launcher has for itself: one way to other hosts, in both kinds of addresses.
        launchers = [pid for pid in descendants(job.launcher) if pid not in job.ranks]
        assert sum(address in ANY_ADDRESS for pid in launchers for address in listens_on(pid)) <= 2

        job.kill(job.launcher)  # the ranks find that out and end
        job.wait(limit_s=60)
        assert left_in_shared_memory(names) == set()
        assert [entry.name for entry in folder.iterdir()] in ([], [f"ompi.{job.launcher}"])
    with start(program, folder) as job:
        assert [entry.name for entry in folder.iterdir()] in ([], [f"ompi.{job.launcher}"])
        names = segments_of(job)
        job.kill(*job.ranks, job.launcher)
        job.wait()
        assert left_in_shared_memory(names) == set()
    with start(program, folder, "crash") as job:
        job.wait()
        assert job.output.count("ValueError: on purpose") == 1
        assert list(folder.iterdir()) == []
