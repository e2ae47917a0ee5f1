"""Every test here runs on all ranks at once: one job, groups to run it on, one verdict per test."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from verdicts import shared_report

from mpisgd import config as mpisgd_config
from mpisgd.job.mpi_settings import set_mpi_defaults

if TYPE_CHECKING:
    from mpisgd import Group

TIMEOUT_S = 30.0
GROUPS = ("world", "duplicate", "half", "reversed")


def pytest_configure(config: pytest.Config) -> None:
    """pytest-mpi starts MPI long before `mpisgd.init()` could set its defaults.

    And what is tested must not depend on what someone has measured on this machine.
    """
    if config.getoption("--with-mpi"):
        set_mpi_defaults()
        os.environ["MPISGD_PROFILE"] = mpisgd_config.BUILT_IN_PROFILE


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("big") and "big" not in config.getoption("-m"):
            item.add_marker(pytest.mark.skip(reason="needs gigabytes; run by scripts/test --big"))
        if "tests/mpi" in item.path.as_posix() and not item.get_closest_marker("mpi"):
            item.add_marker("mpi")


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
    if not request.config.getoption("--with-mpi"):
        yield
        return
    import mpisgd

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # MPI runs already, our defaults are set above
        mpisgd.init(timeout_s=TIMEOUT_S)
    gc.freeze()  # thousands of collected tests need not be looked through when optimizers are made
    yield


@pytest.fixture(scope="session")
def groups(job: None) -> dict[str, Group]:
    """The groups that a test body can run on; of the halves, the one this rank is in."""
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


@pytest.fixture(params=GROUPS)
def group(request: pytest.FixtureRequest, groups: dict[str, Group]) -> Group:
    """A group that this rank is in; every rank is in one of the kind."""
    return groups[request.param]
