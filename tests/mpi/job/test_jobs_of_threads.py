"""A thread of each process as a rank of a second job, beside the job of the process."""

from __future__ import annotations

import threading

import pytest
import torch
from verdicts import everyone

import mpisgd
from mpisgd.job.group_factory import make_group
from mpisgd.job.job_of_thread import job_of_this_thread
from mpisgd.job.lifecycle import current_job, shutdown, world
from mpisgd.job.world import Job


def test_a_group_knows_its_job(group):
    everyone(group.job is current_job())


def test_callbacks_on_the_thread_of_a_queue_are_of_the_job():
    seen: list[object] = []
    work = mpisgd.all_reduce(torch.ones(1), async_op=True)
    work.get_future().then(lambda _: seen.append(current_job())).wait()
    everyone(seen == [current_job()])


def second_job() -> Job:
    """A job of all ranks without hooks and monitor, as where ranks are threads. Collective."""
    mine = current_job()
    communicator = mine.communicator.duplicate()
    made = make_group(
        "second", range(mpisgd.size()), communicator, timeout_s=30, threads_allowed=mine.threads_allowed
    )
    return Job(communicator, made, timeout_s=30, threads_allowed=mine.threads_allowed, gpu="mpi")


def in_job_of_its_own(job: Job, program) -> BaseException | None:
    """Run a program as a rank of `job`, on a thread; return what it raises."""
    errors: list[BaseException] = []

    def target() -> None:
        try:
            with job_of_this_thread(job):
                program()
        except BaseException as exc:
            errors.append(exc)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    return errors[0] if errors else None


def test_two_jobs_in_a_process(job):
    if not current_job().threads_allowed:
        pytest.skip("the second job's operations run on another thread")
    first, second = current_job(), second_job()
    seen: list[object] = []

    def program() -> None:
        x = torch.tensor([float(mpisgd.rank() + 1)])
        mpisgd.all_reduce(x)
        half = mpisgd.new_group(range((mpisgd.size() + 1) // 2))
        y = torch.ones(1)
        mpisgd.all_reduce(y, async_op=True).get_future().then(lambda _: seen.append(world())).wait()
        seen.extend([x.item(), y.item(), half.job, world()])
        shutdown()
        seen.append(len(second.groups))

    error = in_job_of_its_own(second, program)
    size = mpisgd.size()
    expected = [second.world, size * (size + 1) / 2, size, second, second.world, 0]
    everyone(error is None and seen == expected, f"{error!r}, {seen}")
    everyone(current_job() is first)
    x = torch.ones(1)
    mpisgd.all_reduce(x)
    everyone(x.item() == size)
