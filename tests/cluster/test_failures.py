"""What goes wrong on one host is known on all."""

from __future__ import annotations

import time

import pytest
from clusters import run_code


def test_an_uncaught_exception_on_the_second_host_ends_the_job_with_one_traceback():
    code = """
        import torch
        import mpisgd
        mpisgd.init()
        mpisgd.barrier()
        if mpisgd.rank() == 3:
            raise ValueError("the wall is wet")
        mpisgd.all_reduce(torch.ones(10))
    """
    started = time.monotonic()
    done = run_code("2,2", code)
    assert done.returncode not in (0, 124)
    assert done.stderr.count("raised, the job ends:") == 1, done.stderr
    assert done.stderr.count("ValueError: the wall is wet") == 1
    assert "rank 3" in done.stderr
    assert time.monotonic() - started < 60


@pytest.mark.long
def test_a_job_error_on_the_second_host_is_said_once():
    code = """
        import mpisgd
        mpisgd.init()
        mpisgd.barrier()
        if mpisgd.node_rank() == 1:
            raise mpisgd.JobError("no such wall", exit_code=6)
        mpisgd.barrier()
    """
    done = run_code("2,2", code)
    assert (done.returncode, done.stderr.count("no such wall")) == (6, 1), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "hosts",
    [pytest.param("2,2", marks=pytest.mark.long), "2,1", pytest.param("1,1,1", marks=pytest.mark.long)],
)
def test_a_disagreement_between_hosts_is_raised_on_every_rank(hosts):
    """The ranks of a host agree with each other: only the exchange between hosts can find it."""
    code = """
        import torch
        import mpisgd
        mpisgd.init()
        try:
            mpisgd.all_reduce(torch.ones(1000 + 24 * mpisgd.node_rank()))
        except mpisgd.CollectiveMismatch as error:
            assert "shape=[1000]" in str(error) and "shape=[1024]" in str(error), error
            print("mismatch", flush=True)
        total = torch.tensor([float(mpisgd.rank() + 1)])
        mpisgd.all_reduce(total)
        assert total.item() == mpisgd.size() * (mpisgd.size() + 1) / 2
        print("after", flush=True)
    """
    done = run_code(hosts, code)
    assert done.returncode == 0, done.stderr
    size = sum(map(int, hosts.split(",")))
    assert sorted(done.stdout.split()) == ["after"] * size + ["mismatch"] * size


def test_ranks_of_another_host_that_do_not_come_are_named_with_what_they_do_instead():
    """One is stopped, and its host's other rank, in its own code, tells of both."""
    code = """
        import os, signal, time
        import mpisgd
        mpisgd.init(timeout_s=3)
        mpisgd.barrier()
        def reading_data():
            time.sleep(1000)
        if mpisgd.rank() == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        if mpisgd.rank() == 3:
            reading_data()
        mpisgd.barrier()
    """
    done = run_code("2,2", code)
    assert done.returncode not in (0, 124), done.stderr
    assert "CollectiveTimeout" in done.stderr
    assert done.stderr.count("what they do") == 1, done.stderr
    table = done.stderr.partition("what they do")[2]
    assert "0, 1   node1" in table
    assert "waits for ranks 2, 3: barrier(), operation 2 of group 'world'" in table
    assert "its process is stopped by a signal" in table
    assert "runs code outside mpisgd, has not come to operation 2 of group 'world'" in table
    assert "in reading_data" in table


def test_a_job_with_heartbeats_between_its_hosts_that_loses_nobody_ends_well():
    """Also where nobody calls MPI for longer than the hosts' patience, between two worlds of the job."""
    code = """
        import time
        import torch
        import mpisgd
        mpisgd.init()
        mpisgd.all_reduce(torch.ones(10))
        rank = mpisgd.rank()
        mpisgd.shutdown()
        time.sleep(4 + rank)
        mpisgd.init()
        total = torch.tensor([float(rank + 1)])
        mpisgd.all_reduce(total)
        print("done", total.item(), flush=True)
        mpisgd.shutdown()
    """
    started = time.monotonic()
    done = run_code("1,1", code, options="--with-ft ulfm --mca mpi_ft_detector_timeout 3")
    assert (done.returncode, done.stdout.splitlines()) == (0, ["done 3.0"] * 2), done.stderr
    assert time.monotonic() - started < 60
