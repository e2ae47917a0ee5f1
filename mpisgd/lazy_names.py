"""Public names of a package that are looked up on first use, as its stub `__init__.pyi` lists them.

A line of the stub, `from mpisgd.methods.top_k.top_k import TopK as TopK`, is all that a name needs: type
checkers read the same.
"""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["look_up_in", "modules_of_names"]


def modules_of_names(init_file: str) -> dict[str, str]:
    """Return the module of each public name, without importing it.

    Args:
        init_file: `__file__` of the package, beside which the stub lies.
    """
    stub = ast.parse(Path(init_file).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def look_up_in(package: str, module_of: dict[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package, which imports a name and keeps it there."""

    def look_up(name: str) -> Any:
        """Look up a public name on first use."""
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = module_of[name]
        if module == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(module), name)
        setattr(importlib.import_module(package), name, value)
        return value

    return look_up
