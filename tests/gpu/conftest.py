"""On a machine with a GPU: one rank by NCCL, two ranks that share it through host memory.

    mpirun -n 1 python -m pytest --with-mpi tests/gpu
    mpirun -n 2 python -m pytest --with-mpi tests/gpu

Where every rank has a GPU of its own, any number of ranks goes by NCCL.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "mpi"))

TIMEOUT_S = 60.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker("mpi")
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="torch sees no GPU on this machine"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Give all ranks the same outcome of each phase, as in tests/mpi."""
    from verdicts import shared_report

    report: pytest.TestReport = yield  # type: ignore[assignment]
    return shared_report(item, report) if item.config.getoption("--with-mpi") else report


@pytest.fixture(scope="session", autouse=True)
def job(request: pytest.FixtureRequest) -> Iterator[None]:
    """The job's world; several ranks on one GPU are what is tested here, and no warning."""
    if not request.config.getoption("--with-mpi") or not torch.cuda.is_available():
        yield
        return
    import mpisgd

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        mpisgd.init(timeout_s=TIMEOUT_S)
        mpisgd.all_reduce(torch.zeros(1, device="cuda"))
    yield


@pytest.fixture
def expected_way() -> str:
    """How the tensors of the world must travel here."""
    import mpisgd

    return "nccl" if mpisgd.local_size() <= torch.cuda.device_count() else "pinned host memory"
