"""All public names of the package with their signatures, as one text.

    python scripts/checking/public_api.py            # print it
    python scripts/checking/public_api.py --write    # renew tests/unit/public_api.txt

Where the version is that of a release, `--write` also writes tests/unit/public_api-VERSION.txt, which later
versions are compared with. A test compares the text with the file, so that a change of the public API is
seen in the diff of the commit that makes it. Signatures are as the source has them: the same under every
version of Python and torch.
"""

import argparse
import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

PUBLIC_MODULES = (
    "mpisgd",
    "mpisgd.checkpoint",
    "mpisgd.compress",
    "mpisgd.data",
    "mpisgd.elastic",
    "mpisgd.gossip",
    "mpisgd.horovod",
    "mpisgd.horovod.elastic",
    "mpisgd.integrations.accelerate",
    "mpisgd.metrics",
    "mpisgd.nn",
    "mpisgd.pipeline",
    "mpisgd.rpc",
)
SNAPSHOT = Path(__file__).resolve().parents[2] / "tests" / "unit" / "public_api.txt"

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def definitions(module: str) -> dict[str, Definition]:
    """The classes and functions at the top of a module, the last one of each name."""
    source = inspect.getsource(importlib.import_module(module))
    return {node.name: node for node in ast.parse(source).body if isinstance(node, Definition)}


def signature(node: Function) -> str:
    """For example `all_reduce(tensor: Tensor, op: ReduceOp=ReduceOp.SUM) -> Work | None`."""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({ast.unparse(node.args)}){returns}"


def is_public(name: str) -> bool:
    """Whether a member is for users: `__init__` and operators are."""
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))


def member(node: ast.stmt) -> str | None:
    """One line for a statement in the body of a class; None for what is not public."""
    if isinstance(node, Function) and is_public(node.name):
        marks = [text for text in map(ast.unparse, node.decorator_list) if text != "override"]
        return " ".join([*(f"@{mark}" for mark in marks), signature(node)])
    if isinstance(node, ast.Assign | ast.AnnAssign) and is_public(name_in(node)):
        return ast.unparse(node)
    return None


def describe_class(value: type, node: ast.ClassDef) -> Iterator[str]:
    """The class, then its members and those of the package's classes that it derives from."""
    bases = ", ".join(map(ast.unparse, [*node.bases, *node.keywords]))
    decorators = "".join(f"@{ast.unparse(each)} " for each in node.decorator_list)
    yield f"{decorators}class {value.__name__}({bases})"
    fields: dict[str, str] = {}  # in their order, which is that of positional arguments
    methods: dict[str, str] = {}
    for statement in statements(value):
        line = member(statement)
        if line and isinstance(statement, Function):
            methods[statement.name] = line
        elif line:
            fields[name_in(statement)] = line
    yield from (f"    {line}" for line in fields.values())
    yield from (f"    {methods[name]}" for name in sorted(methods))


def statements(value: type) -> Iterator[ast.stmt]:
    """The body of a class, after those of the package's classes that it derives from."""
    for base in reversed(value.__mro__):
        source = definitions(base.__module__).get(base.__name__) if of_package(base) else None
        yield from source.body if isinstance(source, ast.ClassDef) else []


def name_in(node: ast.stmt) -> str:
    """The name that an assignment in the body of a class is for."""
    assert isinstance(node, ast.Assign | ast.AnnAssign)
    return ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])


def of_package(value: Any) -> bool:
    """Whether a class or function is the package's own."""
    return str(getattr(value, "__module__", "")).partition(".")[0] == "mpisgd"


def describe_value(name: str, value: Any) -> list[str]:
    """The lines for one public name."""
    if isinstance(value, ModuleType):
        return [f"module {name}"]
    node = definitions(value.__module__).get(getattr(value, "__name__", "")) if of_package(value) else None
    if isinstance(node, ast.ClassDef) and isinstance(value, type):
        lines = list(describe_class(value, node))
    elif isinstance(node, Function):
        lines = [f"def {signature(node)}"]
    else:
        home = getattr(value, "__module__", "") if callable(value) else type(value).__name__
        return [f"{name}: from {home}" if callable(value) else f"{name}: {home}"]
    return lines if node and node.name == name else [f"{name} = {lines[0]}", *lines[1:]]


def is_release(version: str) -> bool:
    """Whether a version is one of those that users get."""
    return "dev" not in version


def released(version: str) -> Path:
    """The snapshot of a release."""
    return SNAPSHOT.with_name(f"{SNAPSHOT.stem}-{version}.txt")


def describe() -> str:
    """The whole text: for each public module its names, sorted."""
    lines = []
    for module in PUBLIC_MODULES:
        lines += [f"# {module}", ""]
        loaded = importlib.import_module(module)
        for name in sorted(loaded.__all__):
            lines += describe_value(name, getattr(loaded, name))
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Print the text, or write it to the file that the test reads."""
    parser = argparse.ArgumentParser(description="Print all public names with their signatures.")
    parser.add_argument("--write", action="store_true", help=f"write {SNAPSHOT.name} instead")
    if parser.parse_args().write:
        text, version = describe(), importlib.import_module("mpisgd").__version__
        for file in [SNAPSHOT, *([released(version)] if is_release(version) else [])]:
            file.write_text(text)
    else:
        sys.stdout.write(describe())


if __name__ == "__main__":
    main()
