"""`--threads N`: a test of tests/mpi or tests/gpu on N ranks that are threads of this process.

The body of each test runs on every rank, under a schedule that its name and `--threads-seed` draw. Fixtures
are made once, so they must not ask for this rank; one that does returns a `PerRank`.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from mpisgd.core.group import Group
from mpisgd.job.job_of_thread import job_of_this_thread
from mpisgd.job.lifecycle import current_job
from mpisgd.job.threads_as_ranks import RankFailed, run_ranks
from mpisgd.job.world import Job
from mpisgd.tuning import CostModel

__all__ = [
    "PerRank",
    "ThreadReferee",
    "as_size",
    "call_on_threads",
    "run_all_on_threads",
    "run_on_threads",
    "thread_referee",
]

NO_MPI = "need --with-mpi option to run"  # as pytest-mpi says

_referees: dict[int, ThreadReferee] = {}  # by thread


class PerRank(NamedTuple):
    """What a fixture stands for, to be made by each rank in the test."""

    make: Callable[[], Any]


class ThreadReferee:
    """What the tests' own communicator is, among threads."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self.allgather: Callable[[Any], list[Any]] = communicator.all_gather_object
        self.barrier = self.Barrier = communicator.barrier
        self.rank, self.size = communicator.rank, communicator.size

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return root's object."""
        return self._communicator.broadcast_object(obj, root)


def thread_referee() -> ThreadReferee | None:
    """The referee of this thread, None where ranks are processes."""
    return _referees.get(threading.get_ident())


def as_size(size: int) -> Any:
    """Let `mpisgd.size()` be `size` meanwhile on this thread, for fixtures that ask."""
    nobody = Group("world", range(size), None, costs=CostModel("none", ()))
    return job_of_this_thread(Job(None, nobody, 60.0, True, "mpi"))


def run_on_threads(
    size: int,
    seed: int,
    name: str,
    body: Callable[..., None],
    given: Mapping[str, Any],
    begin: Callable[[], object],
) -> None:
    """Run a test's body on every rank, with what fixtures have given; raise what the first one has raised."""

    def program() -> None:
        begin()
        _referees[threading.get_ident()] = ThreadReferee(current_job().communicator.duplicate())
        try:
            body(**{name: x.make() if isinstance(x, PerRank) else x for name, x in given.items()})
        finally:
            del _referees[threading.get_ident()]

    try:
        run_ranks(size, program, seed=seed + zlib.crc32(name.encode()), timeout_s=30.0)
    except RankFailed as exc:
        raise exc.errors[exc.rank] from None


def call_on_threads(item: pytest.Function, begin: Callable[[], object] = lambda: None) -> bool | None:
    """Run the body of a test on every rank, where these are threads; for a hook `pytest_pyfunc_call`.

    Args:
        item: the test.
        begin: called first by each rank.
    """
    if not (size := item.config.getoption("--threads")):
        return None
    given = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    run_on_threads(size, item.config.getoption("--threads-seed"), item.nodeid, item.obj, given, begin)
    return True


def run_all_on_threads(items: Sequence[pytest.Item], size: int) -> None:
    """Let pytest-mpi's tests run without MPI, but those that need processes or more ranks."""
    for item in items:
        item.own_markers = [mark for mark in item.own_markers if mark.kwargs.get("reason") != NO_MPI]
        if item.get_closest_marker("processes"):
            item.add_marker(pytest.mark.skip(reason="needs ranks that are processes"))
        if any(mark.kwargs.get("min_size", 0) > size for mark in item.iter_markers("mpi")):
            item.add_marker(pytest.mark.skip(reason=f"for more ranks than {size}"))
