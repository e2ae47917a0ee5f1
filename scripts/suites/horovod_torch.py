"""Horovod's own tests and examples for torch on `mpisgd.horovod`, which takes the place of Horovod.

    HOROVOD_SOURCE=FOLDER mpirun -n 2 python -m mpisgd.horovod scripts/suites/horovod_torch.py ...

The arguments are those of in_job.py. The folder is a checkout, or a source distribution that has the
tests. Examples are in a checkout only.
"""

import contextlib
import functools
import importlib
import inspect
import os
import sys
import tempfile
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import in_job

from mpisgd.config import launcher_rank, launcher_size

MODULES = ("test_torch", "test_adasum_pytorch")
# Options with which an example takes seconds, by the name of its file.
EXAMPLES = {
    "pytorch_synthetic_benchmark.py": ["--num-iters=2", "--num-batches-per-iter=1", "--num-warmup-batches=1"],
    "pytorch_mnist.py": ["--epochs=1", "--no-cuda"],
}
SOURCE = Path(os.environ["HOROVOD_SOURCE"])


@contextlib.contextmanager
def temporary_path() -> Iterator[str]:
    """The path of a file that does not exist, in a folder that is removed."""
    with tempfile.TemporaryDirectory() as folder:
        yield os.path.join(folder, "file")


def provide_common() -> None:
    """The helper module of Horovod's tests, if the source has none: source distributions leave it out."""
    found = sorted(SOURCE.rglob("test/utils/common.py")) or sorted(SOURCE.rglob("test/common.py"))
    if found:
        sys.path.insert(0, str(found[0].parent))
        return
    common = types.ModuleType("common")
    common.mpi_env_rank_and_size = lambda: (launcher_rank() or 0, launcher_size() or 1)
    common.temppath = temporary_path
    sys.modules["common"] = common


def bridge_the_years() -> None:
    """Undo what has changed in Python and torch since the tests were written."""
    import torch

    if not hasattr(inspect, "getargspec"):
        inspect.getargspec = inspect.getfullargspec
    # The tests give every optimizer of torch a layer with a bias.
    optimizers = [kind for kind in torch.optim.Optimizer.__subclasses__() if kind.__name__ != "Muon"]
    torch.optim.Optimizer.__subclasses__ = lambda: optimizers


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """The cases of the test modules as `module.test`."""
    provide_common()
    bridge_the_years()
    for name in MODULES:
        for path in sorted(SOURCE.rglob(f"{name}.py"))[:1]:
            sys.path.insert(0, str(path.parent))
            module = importlib.import_module(name)
            for kind in vars(module).values():
                if isinstance(kind, type) and issubclass(kind, unittest.TestCase):
                    for test in unittest.TestLoader().getTestCaseNames(kind):
                        yield f"{name}.{test}", functools.partial(run_case, kind, test)


def run_case(kind: type[unittest.TestCase], test: str) -> None:
    """Run a case, with the warnings that its author had."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        in_job.of_case(kind(test))


def examples() -> Iterator[tuple[str, Callable[[], object]]]:
    """The examples that are small enough, as `examples/FILE`."""
    for name, options in EXAMPLES.items():
        for path in sorted(SOURCE.rglob(f"examples/**/{name}"))[:1]:
            yield f"examples/{name}", functools.partial(in_job.run_program, path, options)


def tests() -> in_job.Tests:
    """All of them by their names."""
    return dict([*cases(), *examples()])


if __name__ == "__main__":
    in_job.main(tests, sys.argv[1:])
