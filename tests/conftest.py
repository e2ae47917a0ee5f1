"""What holds for every test: its options, and the `mpi` mark takes only what pytest-mpi understands.

The garbage collector rests until all tests are collected: it took half of the time in which torch and the
tests are imported. What exists then lives as long as the process, and no later collection goes through it.
"""

from __future__ import annotations

import gc
import os

import pytest

gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mpisgd")
    group.addoption("--threads", type=int, default=0, help="ranks that are threads of this process")
    group.addoption("--threads-seed", type=int, default=0, help="of the schedules")


def pytest_configure(config: pytest.Config) -> None:
    """pytest-mpi starts MPI long before `mpisgd.init()` could set its defaults.

    And what is tested must not depend on what someone has measured on this machine.
    """
    if config.getoption("--with-mpi"):
        from mpisgd.config import BUILT_IN_PROFILE
        from mpisgd.job.mpi_settings import set_mpi_defaults

        set_mpi_defaults()
        os.environ["MPISGD_PROFILE"] = BUILT_IN_PROFILE


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def check_mpi_mark(item: pytest.Item, mark: pytest.Mark) -> None:
    """pytest-mpi reads `min_size` and ignores the rest in silence: a misspelt one would never skip."""
    unknown = sorted(set(mark.kwargs) - {"min_size"})
    if mark.args or unknown:
        given = ", ".join([*map(repr, mark.args), *unknown])
        raise pytest.UsageError(f"{item.nodeid}: pytest.mark.mpi takes min_size=, not {given}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("mpi"):
            check_mpi_mark(item, mark)
