"""Horovod's operations of this run, over all its ranks."""

from collections.abc import Iterator

import pytest

import mpisgd.horovod as hvd
from mpisgd.horovod.engine import cycles


@pytest.fixture(scope="session", autouse=True)
def horovod(request: pytest.FixtureRequest, job: None) -> Iterator[None]:
    """Every test here finds Horovod initialized; the last one leaves it shut down."""
    if not request.config.getoption("--with-mpi"):
        yield
        return
    hvd.init()
    yield
    hvd.shutdown()


@pytest.fixture(autouse=True)
def no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wake-up that got lost is made up for by the next alarm: without it, it is a hang."""
    monkeypatch.setattr(cycles, "CHECK_INTERVAL_S", 1000.0)
