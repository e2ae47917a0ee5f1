"""Every test here runs on all ranks at once: one job, groups to run it on, one verdict per test."""

from __future__ import annotations

import gc
import importlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from on_threads import mark_on_threads
from ranks_as_threads import PerRank, as_size, call_on_threads, run_all_on_threads
from verdicts import shared_report

if TYPE_CHECKING:
    from mpisgd import Group

TIMEOUT_S = 30.0
GROUPS = ("world", "duplicate", "half", "reversed")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a test on every rank, where these are threads."""
    return call_on_threads(pyfuncitem)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    size = config.getoption("--threads")
    mark_on_threads(items)
    for item in items:
        if item.get_closest_marker("big") and "big" not in config.getoption("-m"):
            item.add_marker(pytest.mark.skip(reason="needs gigabytes; run by scripts/test --big"))
        if "tests/mpi" in item.path.as_posix() and not item.get_closest_marker("mpi"):
            item.add_marker("mpi")
    yield
    if size:
        run_all_on_threads(items, size)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Give all ranks the same outcome of each phase, so that none goes on alone."""
    report: pytest.TestReport = yield  # type: ignore[assignment]
    return shared_report(item, report) if item.config.getoption("--with-mpi") else report


@pytest.fixture(autouse=True)
def first_optimizer() -> None:
    """Let the optimizers of a test be the first ones of their groups, whatever other tests have left."""
    from mpisgd.gradients import windows

    windows._of_groups.clear()


@pytest.fixture(scope="session", autouse=True)
def job(request: pytest.FixtureRequest) -> Iterator[None]:
    """The job's world, with a timeout that makes a hang a failure."""
    if size := request.config.getoption("--threads"):
        torch.set_num_threads(1)  # as many as a rank has where cores are scarce; others add in another order
        with as_size(size):
            yield
        return
    if not request.config.getoption("--with-mpi"):
        yield
        return
    import mpisgd

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # MPI runs already, our defaults are set above
        mpisgd.init(timeout_s=TIMEOUT_S)
    yield


@pytest.fixture(scope="session", autouse=True)
def compiler() -> None:
    """Load torch's compiler, as the first test that compiles does, before `frozen` can miss its objects."""
    importlib.import_module("torch._dynamo")


@pytest.fixture(scope="module", autouse=True)
def ended(job: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """End what a module of tests has left to the end of the job.

    A window between hosts has a thread that calls MPI all the time, as have ranks that average at any time.
    """
    if request.config.getoption("--threads") or not request.config.getoption("--with-mpi"):
        yield
        return
    from mpisgd.job.lifecycle import world

    at_end = world().job.at_end
    kept = len(at_end)
    yield
    for end in at_end[kept:]:
        end()
    del at_end[kept:]


@pytest.fixture(scope="module", autouse=True)
def frozen(job: None, compiler: None) -> None:
    """Keep what there was before a module of tests out of the collections that each new optimizer asks for.

    With thousands of tests and the modules of torch's compiler one took a fifth of a second.
    """
    gc.collect()
    gc.freeze()


def make_groups() -> dict[str, Group]:
    """Make the groups that a test body can run on; of the halves, the one this rank is in. Collective."""
    import mpisgd
    from mpisgd.job.lifecycle import world

    size = mpisgd.size()
    halves = [mpisgd.new_group(range(start, size, 2)) for start in range(min(2, size))]
    return {
        "world": world(),
        "duplicate": mpisgd.new_group(),
        "half": next(half for half in halves if half.rank >= 0),
        "reversed": mpisgd.new_group(range(size)[::-1]),
    }


@pytest.fixture(scope="session")
def groups(job: None, request: pytest.FixtureRequest) -> dict[str, Group] | PerRank:
    """The groups of `make_groups`."""
    return PerRank(make_groups) if request.config.getoption("--threads") else make_groups()


@pytest.fixture(params=GROUPS)
def group(request: pytest.FixtureRequest, groups: dict[str, Group] | PerRank) -> Group | PerRank:
    """A group that this rank is in; every rank is in one of the kind."""
    if isinstance(groups, PerRank):
        return PerRank(lambda: make_groups()[request.param])
    return groups[request.param]
