"""Everything here needs Slurm's daemons and namespaces, and is skipped where there are none."""

from __future__ import annotations

import pytest
from jobs import ENDED, Cluster, obstacle


@pytest.fixture(scope="session", autouse=True)
def slurm() -> None:
    if obstacle():
        pytest.skip(obstacle())


@pytest.fixture
def cluster(tmp_path, request) -> Cluster:
    """A folder in which sbatch is called; each `run` in it makes a cluster of its own."""
    return Cluster(tmp_path, request.node.name)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of all jobs that were run, with what Slurm says of their ends."""
    if not ENDED:
        return
    terminalreporter.section("jobs")
    for test, job in ENDED:
        terminalreporter.write_line(f"{job.number:>3}  {job.name:<12} {job.state:<11} {job.code:<6} {test}")
