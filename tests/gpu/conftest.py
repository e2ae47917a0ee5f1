"""On a GPU where torch sees one, on simulated ones elsewhere: see gpu_under_test.py.

    mpirun -n 1 python -m pytest --with-mpi tests/gpu
    mpirun -n 2 python -m pytest --with-mpi tests/gpu
    MPISGD_GPU=mpi mpirun -n 2 python -m pytest --with-mpi tests/gpu       # all through host memory
    python -m pytest --threads 3 -m on_threads tests/gpu                  # ranks as threads, simulated GPUs

Where every rank has a GPU of its own, as it has a simulated one, any number of ranks goes by NCCL. One GPU
has NCCL at one rank only; two ranks share it through host memory.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

for folder in (".", "mpi", "mpi/collectives", "mpi/horovod", "mpi/optim", "mpi/pipeline"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

from gpu_under_test import DEVICE, IS_SIMULATED, gpu  # noqa: E402
from ranks_as_threads import PerRank, as_size, call_on_threads, run_all_on_threads  # noqa: E402
from simulated_gpu.nccl import end_those_of_threads  # noqa: E402

from mpisgd import config as mpisgd_config  # noqa: E402

if TYPE_CHECKING:
    from simulated_gpu.runtime import SimulatedGpu

    import mpisgd

TIMEOUT_S = 60.0
# What `scripts/test` runs on ranks that are threads, too, and among processes on two ranks only.
ON_THREADS = ("test_futures.py", "test_mismatch.py", "test_optimizers_on_gpus.py")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    items = [item for item in items if "tests/gpu" in item.path.as_posix()]
    for item in items:
        item.add_marker("mpi")
        if item.path.name in ON_THREADS and not item.get_closest_marker("processes"):
            item.add_marker("on_threads")
        if "simulated" in getattr(item, "fixturenames", ()) and not IS_SIMULATED:
            item.add_marker(pytest.mark.skip(reason="looks into the simulated device"))
    yield
    if size := config.getoption("--threads"):
        run_all_on_threads(items, size)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a test on every rank, where these are threads, each on a simulated GPU of its own."""

    def begin() -> None:
        import mpisgd
        from mpisgd.job.lifecycle import current_job

        gpu.set_device(mpisgd.local_rank())
        current_job().gpu = mpisgd_config.gpu()

    try:
        return call_on_threads(pyfuncitem, begin)
    finally:
        end_those_of_threads()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Give all ranks the same outcome of each phase, as in tests/mpi."""
    from verdicts import shared_report

    report: pytest.TestReport = yield  # type: ignore[assignment]
    return shared_report(item, report) if item.config.getoption("--with-mpi") else report


@pytest.fixture(scope="session", autouse=True)
def job(request: pytest.FixtureRequest) -> Iterator[None]:
    """The job's world; several ranks on one GPU are what is tested here, and no warning."""
    if size := request.config.getoption("--threads"):
        from simulated_gpu.runtime import SimulatedGpu

        from mpisgd.accelerator.runtime import set_runtime

        set_runtime(SimulatedGpu())
        with as_size(size):
            yield
        return
    if not request.config.getoption("--with-mpi"):
        yield
        return
    import mpisgd
    from mpisgd.accelerator.runtime import set_runtime

    if IS_SIMULATED:
        from simulated_gpu.runtime import SimulatedGpu

        set_runtime(SimulatedGpu())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        mpisgd.init(timeout_s=TIMEOUT_S)
        mpisgd.all_reduce(torch.zeros(1, device=DEVICE))
    yield


def closing(group: mpisgd.Group) -> None:
    """Close what a group has for tensors on a device; the next operation on one begins anew."""
    transport, group.device = group.device, None
    group.queue.on_mismatch = lambda: None
    if transport is not None:
        transport.close()
    if group.point_to_point.elsewhere is not None:
        group.point_to_point.elsewhere.close()


@pytest.fixture(params=["nccl", "staging"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What drives the devices; the world's tensors travel so during one test."""
    import harness

    from mpisgd.accelerator.runtime import runtime
    from mpisgd.job.lifecycle import current_job, world

    monkeypatch.setattr(harness, "DEVICE", DEVICE)
    wanted = "nccl" if request.param == "nccl" else "mpi"

    def of_job() -> Any:
        current_job().gpu = wanted
        return runtime()

    if request.config.getoption("--threads"):
        yield PerRank(of_job)
        return
    monkeypatch.setattr(current_job(), "gpu", wanted)
    closing(world())
    yield runtime()
    closing(world())


@pytest.fixture
def staged() -> Iterator[None]:
    """The world's tensors travel through host memory during one test, whatever MPISGD_GPU is."""
    import mpisgd
    from mpisgd.job.lifecycle import current_job, world

    before, current_job().gpu = current_job().gpu, "mpi"
    closing(world())
    yield
    current_job().gpu = before
    closing(world())
    mpisgd.all_reduce(torch.zeros(1, device=DEVICE))


@pytest.fixture
def idle_world(request: pytest.FixtureRequest) -> None:
    """The world has nothing open for tensors on a device, which a test of lost ranks would break."""
    from mpisgd.job.lifecycle import world

    if not request.config.getoption("--threads"):  # where each test has a world of its own
        closing(world())


@pytest.fixture
def expected_way(request: pytest.FixtureRequest) -> Any:
    """How the tensors of the world must travel here."""
    import mpisgd
    from mpisgd.job.lifecycle import current_job

    def of_job() -> str:
        has_nccl = current_job().gpu != "mpi" and mpisgd.local_size() <= gpu.device_count()
        return "nccl" if has_nccl else "pinned host memory"

    return PerRank(of_job) if request.config.getoption("--threads") else of_job()


@pytest.fixture
def simulated() -> Iterator[SimulatedGpu]:
    """The simulated device, which begins nothing by itself during the test but after three seconds."""
    from mpisgd.accelerator.runtime import runtime

    device = runtime()
    before, device.device.streams.latency_s = device.device.streams.latency_s, 3.0
    yield device
    device.device.streams.latency_s = before
    gpu.synchronize()
