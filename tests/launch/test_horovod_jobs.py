"""How a program with `mpisgd.horovod` starts and ends: alone, on some of the ranks, without `shutdown()`."""

from __future__ import annotations

import textwrap

import pytest
from launcher import run_python


@pytest.fixture
def start(tmp_path):
    """Run a program's text; warnings are errors there."""

    def run(text: str, num_ranks: int | None = None, **env: str):
        program = tmp_path / "prog.py"
        program.write_text("import torch, mpisgd.horovod as hvd\n" + textwrap.dedent(text))
        return run_python("-W", "error", str(program), num_ranks=num_ranks, env=env)

    return run


def said(done) -> list[str]:
    """The lines of all ranks, in no order, of a run without complaints."""
    assert (done.returncode, done.stderr) == (0, "")
    return sorted(done.stdout.splitlines())


def test_without_mpirun_one_process_trains_alone(start):
    done = start(
        """
        hvd.init()
        net = torch.nn.Linear(2, 1)
        opt = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        net(torch.ones(1, 2)).sum().backward()
        opt.step()
        print(hvd.rank(), hvd.size(), hvd.allreduce(torch.ones(1)).item(), hvd.join())
        """
    )
    assert said(done) == ["0 1 1.0 0"]


def test_the_world_may_be_some_of_the_ranks(start):
    """By their numbers, by communicators; operations that nobody waits for are no obstacle to the end."""
    done = start(
        """
        import warnings
        from mpisgd.transport.mpi import MPI, start
        warnings.simplefilter("ignore", RuntimeWarning)  # MPI runs before hvd.init() could set its defaults
        start()
        rank = MPI.COMM_WORLD.rank
        if rank != 1:
            hvd.init([0, 2])
            hvd.shutdown()
            hvd.init([0, 2])
            print(f"{rank} is {hvd.rank()} of {hvd.size()}:", hvd.allgather(torch.tensor([rank])).tolist())
            hvd.shutdown()
        import mpisgd
        mpisgd.shutdown()
        hvd.init(comm=MPI.COMM_WORLD.Split(rank == 1, -rank))
        print(f"{rank} is {hvd.rank()} of {hvd.size()}:", hvd.allgather(torch.tensor([rank])).tolist())
        hvd.allreduce_async(torch.ones(1), name="unfinished")
        """,
        3,
    )
    assert said(done) == [
        "0 is 0 of 2: [0, 2]",
        "0 is 1 of 2: [2, 0]",
        "1 is 0 of 1: [1]",
        "2 is 0 of 2: [2, 0]",
        "2 is 1 of 2: [0, 2]",
    ]


def test_an_exception_on_one_rank_ends_the_job_that_waits_for_it(start):
    done = start(
        """
        hvd.init()
        if hvd.rank() == 1:
            raise RuntimeError("no data on this rank")
        hvd.allreduce(torch.ones(1), name="for ever")
        """,
        2,
    )
    assert done.returncode != 0
    assert done.stderr.count("RuntimeError: no data on this rank") == 1


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_who_waits_for_a_rank_at_its_end_is_told(start, size):
    done = start(
        """
        import time
        hvd.init()
        hvd.barrier()
        if hvd.rank() == hvd.size() - 1:
            raise SystemExit
        began_s = time.monotonic()
        try:
            hvd.allreduce(torch.ones(1), name="for ever")
        except hvd.HorovodInternalError as exc:
            print(time.monotonic() - began_s < 10, exc)
        """,
        size,
    )
    told = f"True tensor 'for ever': rank {size - 1} has shut down without submitting it"
    assert said(done) == [told] * (size - 1)


# What the last rank does while the other is at its end, the limit, and what is said of it.
WAYS = {
    "sleeps": (
        "time.sleep(100)",
        "3",
        ("hvd.shutdown: not over after 3 s", "rank 1 has neither", "horovod/engine/engine.py"),
    ),
    "receives": (
        "mpisgd.recv(torch.ones(1), 0)",
        "60",
        ("can never go on", "in hvd.shutdown", "in recv from rank 0"),
    ),
}


@pytest.mark.parametrize("way", ["sleeps", pytest.param("receives", marks=pytest.mark.long)])
def test_the_end_of_the_program_waits_for_others_up_to_a_limit(start, way):
    """Or to the moment when it is known that they wait for this rank."""
    does, limit_s, words = WAYS[way]
    done = start(
        f"""
        import time, mpisgd
        hvd.init()
        hvd.barrier()
        if hvd.rank() == hvd.size() - 1:
            {does}
        """,
        2,
        MPISGD_TIMEOUT_S=limit_s,
    )
    assert done.returncode != 0
    assert not [word for word in words if word not in done.stderr], done.stderr
