"""`evaluated`: what the text of an option says, with the names of the modules in it."""

from __future__ import annotations

import ast
import importlib
from typing import Any

__all__ = ["evaluated"]


def evaluated(text: str) -> Any:
    """Return the value of a text such as "mpisgd.LocalSGD(2)"; whatever it names is a module."""
    named = [node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)]
    return eval(text, {"__builtins__": {}, **{name: importlib.import_module(name) for name in named}})
