"""A signature and a docstring of the sources as Markdown that every code host shows."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator

__all__ = ["as_markdown", "signature"]

WIDTH = 100  # of a signature on one line
LISTS = ("Args", "Attributes", "Raises", "Yields")
SECTION = re.compile(rf"({'|'.join((*LISTS, 'Returns', 'Example'))}):")
ENTRY = re.compile(r"([\w`*.]+(?:, [\w`*.]+)*): (.*)", re.DOTALL)
LABEL = re.compile(r"(Cost|Source|Causes|What to do): ")


def signature(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef, *, method: bool = False) -> str:
    """For example `barrier(group: Group | None = None) -> None`; a parameter to a line where it is long."""
    params = list(_parameters(node.args))[1 if method and not _is_static(node) else 0 :]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    line = f"{name}({', '.join(params)}){returns}"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {param},\n" for param in params) + f"){returns}"


def _is_static(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(mark) == "staticmethod" for mark in node.decorator_list)


def _parameters(args: ast.arguments) -> Iterator[str]:
    positional = [*args.posonlyargs, *args.args]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults))
    for place, (arg, default) in enumerate(zip(positional, [*missing, *args.defaults], strict=True)):
        yield _parameter(arg, default)
        if args.posonlyargs and place + 1 == len(args.posonlyargs):
            yield "/"
    if args.vararg:
        yield "*" + _parameter(args.vararg, None)
    elif args.kwonlyargs:
        yield "*"
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield _parameter(arg, default)
    if args.kwarg:
        yield "**" + _parameter(args.kwarg, None)


def _parameter(arg: ast.arg, default: ast.expr | None) -> str:
    text = f"{arg.arg}: {ast.unparse(arg.annotation)}" if arg.annotation else arg.arg
    equals = " = " if arg.annotation else "="
    return text if default is None else f"{text}{equals}{ast.unparse(default)}"


def as_markdown(docstring: str) -> str:
    """The docstring, its sections as lists; indented blocks stay code."""
    return "\n\n".join(_block(block) for block in inspect.cleandoc(docstring).split("\n\n") if block.strip())


def _block(block: str) -> str:
    """One paragraph or section."""
    first, _, rest = block.partition("\n")
    section = SECTION.fullmatch(first)
    if section:
        body = textwrap.dedent(rest)
        if section[1] in LISTS:
            return f"**{section[1]}:**\n\n" + "\n".join(f"- {_entry(each)}" for each in _entries(body))
        if section[1] == "Example":
            return "**Example:**\n\n" + "\n".join(f"    {line}" for line in body.splitlines())
        return f"**{section[1]}:** {_joined(body)}"
    if all(line.startswith("    ") for line in block.splitlines()):
        return block
    return LABEL.sub(r"**\1:** ", _joined(block))


def _entries(body: str) -> Iterator[str]:
    """The entries of a section: a line, and those below it that are indented."""
    lines: list[str] = []
    for line in body.splitlines():
        if lines and not line.startswith(" "):
            yield _joined("\n".join(lines))
            lines = []
        lines.append(line)
    yield _joined("\n".join(lines))


def _entry(text: str) -> str:
    found = ENTRY.fullmatch(text)
    if not found:
        return text
    names = ", ".join(f"`{name.strip('`')}`" for name in found[1].split(", "))
    return f"{names}: {found[2]}"


def _joined(text: str) -> str:
    """The text on one line, but for lines of code in it, which are indented further than the first."""
    return " ".join(text.split())
