"""A plugin of pytest, `-p mutating.trace_plugin`: which file of tests executes which lines of the package."""

from __future__ import annotations

import os
import time

import pytest

from mutating.lines import Trace

_trace = Trace()
_began_s = 0.0


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note what follows as lines of this file."""
    global _began_s
    _trace.begin(_name(nodeid))
    _began_s = time.monotonic()


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Note how long it took."""
    _trace.took(_name(nodeid), time.monotonic() - _began_s)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what is red without a fault, such as what expects the time and memory of a run without a trace."""
    if report.failed:
        _trace.failed.add(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Write what was found."""
    _trace.save(os.environ["MUTATING_LINES"])


def _name(nodeid: str) -> str:
    return f"{os.environ['MUTATING_CHECK']} {nodeid.partition('::')[0]}"
