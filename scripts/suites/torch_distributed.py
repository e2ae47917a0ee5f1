"""torch's own tests of a backend on `mpisgd`: `distributed_test` of its wheel.

    mpirun -n 2 python scripts/suites/torch_distributed.py FOLDER LIMIT_S NAME ...      see in_job.py

The module decides by the backend's name which tests there are, for the backends that torch knows. So it is
loaded twice, as for gloo and as for MPI, and a test is taken from the one that does not leave it out: mpisgd
claims what either of them can. The process group of each test is made with the name "mpisgd".
"""

import functools
import importlib.util
import os
import sys
import time
import unittest
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import in_job

BACKEND = "mpisgd"
MODULE = "torch.testing._internal.distributed.distributed_test"
TIMEOUT_S = 60  # of torch's own runner; some tests have another one
# What these do with the backend's name is meant for the group's; other tests ask what the backend can.
ABOUT_THE_NAME = ("test_Backend_enum_class", "test_barrier_timeout_global", "test_get_backend")

folder = Path(sys.argv[1])
loaded: list[ModuleType] = []


def load(backend: str) -> ModuleType:
    """The module, as its author meant it for a backend."""
    os.environ["BACKEND"] = backend
    found = importlib.util.find_spec(MODULE)
    assert found is not None
    assert found.origin is not None
    name = f"{MODULE}_as_{backend}"
    spec = importlib.util.spec_from_file_location(name, found.origin)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where pickle looks for the classes of what tests send
    spec.loader.exec_module(module)
    loaded.append(module)
    return module


def skipping(test: Callable[[unittest.TestCase], None], codes: dict[int, str]) -> Callable[..., None]:
    """The test, with SkipTest where it ends its process with one of torch's codes for "left out"."""

    @functools.wraps(test)
    def call(case: unittest.TestCase) -> None:
        try:
            test(case)
        except SystemExit as exc:
            if exc.code not in codes:
                raise
            raise unittest.SkipTest(codes[exc.code]) from None

    return call


def wait_for_all(meeting: Path, size: int) -> None:
    """Wait until that many ranks have come; RuntimeError after ten seconds, as torch's."""
    with meeting.open("ab") as arrived:
        arrived.write(b".")
    until = time.monotonic() + 10
    while meeting.stat().st_size < size:
        if time.monotonic() > until:
            raise RuntimeError("barrier timeout")
        time.sleep(0.005)


def case_class(module: ModuleType, rank: int, size: int) -> type[unittest.TestCase]:
    """The tests of the module as test cases of one job, with a process group each."""
    import torch.distributed as dist
    from torch.testing._internal.common_utils import TestCase

    backend = module.BACKEND

    class Case(module.DistributedTest._DistTestBase, TestCase):  # type: ignore[misc]
        init_method = "env://"
        world_size = str(size)

        def setUp(self) -> None:
            super().setUp()
            self.rank = rank
            place = folder / self._testMethodName
            for name in ("barrier", "test_dir", "init_dir"):
                (place / name).mkdir(parents=True, exist_ok=True)
            os.environ["TEMP_DIR"] = str(place)
            module.BACKEND = BACKEND if self._testMethodName in ABOUT_THE_NAME else backend
            self.num_meetings = 0
            os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)  # an earlier test of this process may have set it
            dist.set_debug_level(dist.DebugLevel.OFF)
            seconds = module.CUSTOM_PG_TIMEOUT.get(self._testMethodName, TIMEOUT_S)
            dist.init_process_group(BACKEND, timeout=timedelta(seconds=seconds))

        def _barrier(self, *_: object, **__: object) -> None:
            """As torch's, by files, which looks ten times a second: that would take most of the time."""
            self.num_meetings += 1
            wait_for_all(Path(os.environ["TEMP_DIR"]) / f"meeting-{self.num_meetings}", size)

        def tearDown(self) -> None:
            self._barrier()  # torch's own runner does so, too
            dist.destroy_process_group()
            super().tearDown()

    return Case


def tests() -> in_job.Tests:
    """All tests of the module by their names."""
    import torch.distributed as dist

    import mpisgd

    mpisgd.init()  # under mpirun this sets RANK and WORLD_SIZE

    assert dist.is_available()
    warnings.simplefilter("ignore")
    os.environ.setdefault("PYTORCH_PRINT_REPRO_ON_FAILURE", "0")
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.setdefault("WORLD_SIZE", "1"))
    modules = [load("gloo"), load("mpi")]
    from torch.testing._internal.common_distributed import TEST_SKIPS

    codes = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    # Tests of a group of ranks 1 and 2 run where there are these; torch asks for eight, but not for MPI.
    os.environ["BACKEND"] = "mpi" if size > 2 else "gloo"
    first, second = (case_class(module, rank, size) for module in modules)
    for module in modules:
        module.PROFILING_SUPPORTED_BACKENDS.append(BACKEND)
        module.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(BACKEND)
    found: dict[str, Callable[[], object]] = {}
    for name in unittest.TestLoader().getTestCaseNames(first):
        left_out = [getattr(getattr(kind, name), "__unittest_skip__", False) for kind in (first, second)]
        kind = second if left_out == [True, False] else first
        setattr(kind, name, skipping(getattr(kind, name), codes))
        found[name] = functools.partial(in_job.of_case, kind(name))
    return found


if __name__ == "__main__":
    in_job.main(tests, sys.argv[1:])
