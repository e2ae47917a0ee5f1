"""Each rank that is a thread has its own job, which the threads that it starts share."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

import mpisgd
from mpisgd.core.group import Group
from mpisgd.core.owner import OPTIMIZER, current_owner, new_owner, owned_by
from mpisgd.errors import JobError, NotInitialized
from mpisgd.horovod.process_sets import serial_of_new
from mpisgd.job.job_of_thread import PROCESS, job_of_this_thread, job_place
from mpisgd.job.lifecycle import abandon, current_job, is_initialized, shutdown, world
from mpisgd.job.world import Job
from mpisgd.threads.service_thread import InheritingThread, ServiceThread


@pytest.fixture(autouse=True)
def _process_without_job(monkeypatch):
    """Other tests of this process may have started its own."""
    monkeypatch.setattr(PROCESS, "job", None)


def job_of(name: str) -> Job:
    """A job without MPI, of which this process is no member."""
    outside = Group(name, [0, 1], None, costs=None)
    return Job(communicator=None, world=outside, timeout_s=1.0, threads_allowed=True, gpu="mpi")


def seen_by(kind: type[threading.Thread], ask) -> object:
    """What a thread that is started here sees."""
    seen: list[object] = []

    def target() -> bool:
        seen.append(ask())
        return False

    thread = ServiceThread("mpisgd test", target) if kind is ServiceThread else kind(target=target)
    thread.start()
    thread.join()
    return seen[0]


def test_ranks_that_are_threads_have_a_job_each():
    jobs = [job_of("first"), job_of("second")]
    met, seen = threading.Barrier(2), [None, None]

    def rank(number: int) -> None:
        with job_of_this_thread(jobs[number]):
            met.wait(10)
            seen[number] = (current_job(), world(), is_initialized())
            met.wait(10)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [(job, job.world, True) for job in jobs]
    assert PROCESS.job is None
    assert not is_initialized()


@pytest.mark.parametrize("kind", [InheritingThread, ServiceThread])
def test_a_thread_belongs_to_the_job_of_its_starter(kind):
    job = job_of("mine")
    with job_of_this_thread(job):
        assert seen_by(kind, current_job) is job
        assert not seen_by(threading.Thread, is_initialized)  # Python's own does not, before 3.14
    assert not seen_by(kind, is_initialized)


def test_a_service_thread_sees_that_its_rank_is_in_another_job():
    changed, seen = threading.Event(), []

    def serve() -> bool:
        changed.wait(10)
        seen.append(current_job())
        return False

    old, new = job_of("old"), job_of("new")
    with job_of_this_thread(old) as place:
        thread = ServiceThread("mpisgd test", serve)
        thread.start()
        place.job = new
        changed.set()
        thread.join_from_others()
    assert seen == [new]


@pytest.mark.parametrize("kind", [InheritingThread, ServiceThread])
def test_a_thread_inherits_no_owner(kind):
    """Ranks start their threads at different times: what one began in a callback would not be the other's."""
    with owned_by(new_owner({OPTIMIZER: 0}, OPTIMIZER, "SGD", ["weight"])):
        assert seen_by(kind, current_owner) is None


def test_shutdown_ends_the_job_of_this_thread_alone():
    ended: list[str] = []
    outer, inner = job_of("outer"), job_of("inner")
    inner.at_end.append(lambda: ended.append("inner"))
    outer.at_end.append(lambda: ended.append("outer"))
    with job_of_this_thread(outer):
        with job_of_this_thread(inner) as place:
            mpisgd.init()  # does nothing
            shutdown()
            shutdown()
            assert not is_initialized()
            assert place.ended is inner
            with pytest.raises(NotInitialized, match="the job of this thread has ended"):
                current_job()
        assert current_job() is outer
    assert ended == ["inner"]


def test_abandoning_leaves_the_job_of_this_thread_alone(monkeypatch):
    from mpisgd.threads import waiting
    from mpisgd.threads.scheduling import Cancellation

    monkeypatch.setattr(waiting, "_of_process", Cancellation())
    outer, inner = job_of("outer"), job_of("inner")
    with job_of_this_thread(outer):
        with job_of_this_thread(inner):
            assert abandon("rank 1 went away") is inner
            assert not is_initialized()
        assert current_job() is outer


def test_groups_know_their_job_and_are_counted_in_it():
    job = job_of("mine")
    groups = [Group("a", [0, 1], None, costs=None) for _ in range(2)] + [Group("b", [0], None, costs=None)]
    for group in groups:
        group.rank = 0
        job.add(group)
    others = Group("others", [1], None, costs=None)  # this rank is no member
    job.add(others)
    assert job.groups == groups
    assert [group.ordinal for group in groups] == [0, 1, 0]
    assert all(group.job is job for group in [*groups, others])


def test_what_is_kept_for_a_rank_is_not_seen_by_others():
    class Kept(list[int]):
        pass

    with job_of_this_thread(job_of("first")) as first:
        first.own(Kept).append(1)
        with job_of_this_thread(job_of("second")) as second:
            assert second.own(Kept) == []
        assert job_place().own(Kept) == [1]
    assert Kept not in PROCESS.kept


def test_horovod_counts_optimizers_by_rank():
    """Ranks that are threads would have numbered theirs together, each rank another way."""
    whole = SimpleNamespace(members=lambda: [0, 1])
    serials = []
    for name in ("first", "second"):
        with job_of_this_thread(job_of(name)):
            serials += [serial_of_new(whole), serial_of_new(whole)]
    assert serials == [0, 1, 0, 1]


def test_ranks_that_are_threads_are_not_ended():
    with pytest.raises(JobError):
        job_of("mine").end(3)
