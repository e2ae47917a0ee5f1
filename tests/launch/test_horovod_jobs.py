"""How a program with `mpisgd.horovod` starts and ends: alone, on some of the ranks, without a farewell."""

from __future__ import annotations

import textwrap

import pytest
from launcher import run_python


@pytest.fixture
def start(tmp_path):
    """Run a program's text; warnings are errors there."""

    def run(text: str, num_ranks: int | None = None):
        program = tmp_path / "prog.py"
        program.write_text("import torch, mpisgd.horovod as hvd\n" + textwrap.dedent(text))
        return run_python("-W", "error", str(program), num_ranks=num_ranks)

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
        from mpisgd.comm.mpi import MPI, start
        warnings.simplefilter("ignore", RuntimeWarning)  # MPI runs before hvd.init() could set its defaults
        start()
        rank = MPI.COMM_WORLD.rank
        if rank != 1:
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
