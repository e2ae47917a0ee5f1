"""`evaluated`: what a text such as "mpisgd.LocalSGD(2)" says; no other code is run for it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from mpisgd.errors import InvalidArgument

__all__ = ["evaluated"]


def evaluated(text: str, names: Mapping[str, Any] | None = None) -> Any:
    """Return the value of a text of literals, names, attributes and calls of these.

    Args:
        text: what `repr()` or `catalogue.text_of` have written.
        names: what names mean; by default each is a module, which is imported.

    Raises:
        InvalidArgument: it has anything else.
    """
    try:
        return _value(_parsed(text), names)
    except SyntaxError as exc:
        raise InvalidArgument(f"{text[:80]!r} is no expression: {exc}") from exc


@lru_cache(maxsize=1024)  # programs ask for the options of a method again and again
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _value(node: ast.expr, names: Mapping[str, Any] | None) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Tuple():
            return tuple(_value(each, names) for each in node.elts)
        case ast.List():
            return [_value(each, names) for each in node.elts]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_value(key, names): _value(value, names) for key, value in pairs if key is not None}
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, names)
        case ast.Name(id=name) if names is None:
            return importlib.import_module(name)
        case ast.Name(id=name) if names is not None and name in names:
            return names[name]
        case ast.Attribute():
            return getattr(_value(node.value, names), node.attr)
        case ast.Call():
            options = {word.arg: _value(word.value, names) for word in node.keywords if word.arg}
            return _value(node.func, names)(*(_value(each, names) for each in node.args), **options)
    raise InvalidArgument(f"{ast.unparse(node)[:80]} is no literal, name or call")
