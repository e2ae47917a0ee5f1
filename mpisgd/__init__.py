"""mpisgd: distributed SGD with torch over MPI.

    import mpisgd

    mpisgd.init()
    model = ...
    mpisgd.broadcast_parameters(model)
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                            named_parameters=model.named_parameters())

Importing the package starts no MPI and loads neither torch nor mpi4py: every public name is looked up on
first use.
"""

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0.dev0"


def _modules_of_names() -> dict[str, str]:
    """Return the module of each public name, as the stub `__init__.pyi` lists them."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


_MODULE_OF = _modules_of_names()

__all__ = sorted(name for name, module in _MODULE_OF.items() if module != __name__)  # no subpackages


def __getattr__(name: str) -> Any:
    """Look up a public name on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mpisgd' has no attribute {name!r}")
    module = _MODULE_OF[name]
    if module == __name__:
        return importlib.import_module(f"mpisgd.{name}")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return [*sorted(_MODULE_OF), "__version__"]
