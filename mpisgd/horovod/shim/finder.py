"""Modules of ours under Horovod's names, the same objects under both."""

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

__all__ = ["ALIASES", "install"]

PATH = str(Path(__file__).with_name("path"))

ALIASES = {
    "horovod.common.elastic": "mpisgd.horovod.elastic.common",
    "horovod.common.exceptions": "mpisgd.horovod.exceptions",
    "horovod.common.process_sets": "mpisgd.horovod.process_sets",
    "horovod.torch": "mpisgd.horovod",
    "horovod.torch.compression": "mpisgd.horovod.compression",
    "horovod.torch.elastic": "mpisgd.horovod.elastic",
    "horovod.torch.elastic.sampler": "mpisgd.horovod.elastic.sampler",
    "horovod.torch.elastic.state": "mpisgd.horovod.elastic.state",
    "horovod.torch.functions": "mpisgd.horovod.functions",
    "horovod.torch.mpi_ops": "mpisgd.horovod.mpi_ops",
    "horovod.torch.optimizer": "mpisgd.horovod.optimizer",
    "horovod.torch.sync_batch_norm": "mpisgd.horovod.sync_batch_norm",
}


def install() -> None:
    """Let `import horovod...` find our modules from now on, whatever else is installed.

    Also in processes that this one starts: multiprocessing's get its `sys.path`, others its environment.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    if PATH not in sys.path:
        sys.path.insert(1, PATH)  # behind the script's own folder
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if PATH not in inherited:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [PATH, *inherited]))


class _Finder(MetaPathFinder):
    """Finds what `ALIASES` and `path/` have, and nothing else of that name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load a module of Horovod's; None for all others.

        Raises:
            ModuleNotFoundError: it is Horovod's, and not there.
        """
        if fullname.partition(".")[0] != "horovod":
            return None
        if fullname in ALIASES:
            return ModuleSpec(fullname, _Alias(ALIASES[fullname]))
        spec = PathFinder.find_spec(fullname, [PATH] if path is None else path)
        if spec is None:
            raise ModuleNotFoundError(
                f"{fullname} is not there: mpisgd provides horovod.torch and the parts of horovod.common "
                "that scripts use, and no other framework; start programs with mpirun",
                name=fullname,
            )
        return spec


class _Alias(Loader):
    """Loads a module that has another name already."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module itself."""
        module = importlib.import_module(self._name)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give back what the import system has overwritten; the module has run before."""
        module.__spec__ = self._own_spec
