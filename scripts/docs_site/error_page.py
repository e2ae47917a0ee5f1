"""The catalogue of errors, from the docstrings of mpisgd/errors.py: one section per public class."""

from __future__ import annotations

import inspect

from mpisgd import errors
from mpisgd.errors import anchor

__all__ = ["page"]

FIRST = """# Errors

This page lists every exception that mpisgd raises on purpose: what it means, what usually causes it, and what
to do. All of them derive from `mpisgd.MpisgdError`, and each also from the builtin exception beside its name,
so `except ValueError` works. [Order and
checks](../concepts/order-and-checks.md) shows which mistake leads to which error.

The message of an error ends with the short name of its entry here: `[mpisgd:collective-timeout]`. In a
terminal, `mpisgd explain collective-timeout` prints the same.

"""


def page() -> str:
    """The text of the page."""
    classes = [
        errors.MpisgdError,
        *(getattr(errors, name) for name in errors.__all__ if name != "MpisgdError"),
    ]
    table = "| error | means |\n| --- | --- |\n"
    table += "".join(f"| [{cls.__name__}](#{anchor(cls)}) | {_first_line(cls)} |\n" for cls in classes)
    return FIRST + table + "\n" + "\n".join(map(_section, classes))


def _first_line(cls: type) -> str:
    return inspect.getdoc(cls).partition("\n")[0].rstrip(".")


def _section(cls: type) -> str:
    bases = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
    paragraphs = inspect.getdoc(cls).split("\n\n")
    for index, paragraph in enumerate(paragraphs):
        label, colon, rest = paragraph.partition(": ")
        if colon and label in ("Causes", "What to do"):
            paragraphs[index] = f"**{label}.** {rest[0].upper()}{rest[1:]}"
    missing = [
        label for label in ("Causes", "What to do") if not any(p.startswith(f"**{label}") for p in paragraphs)
    ]
    if missing:
        raise RuntimeError(
            f"mpisgd/errors.py: the docstring of {cls.__name__} has no {' and no '.join(missing)}"
        )
    body = "\n\n".join(paragraphs)
    return f'<a id="{anchor(cls)}"></a>\n\n## {cls.__name__}\n\nDerives from {bases}.\n\n{body}\n'
