"""The pages of the API reference as they lie in docs/reference/api: text alone, for readers on a code host.

The site has the same names on the same pages, shown by mkdocstrings (`api_pages.py`). All of it is read from
the sources, so that neither the version of Python nor what is installed changes it.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import api_pages
from api_pages import PAPERS
from generated_pages import noted

import mpisgd

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


ROOT = Path(mpisgd.__file__).resolve().parents[1]
DIRECTIVE = re.compile(r'^(?:::: (\S+)\n|<span id="(\S+)"></span>\n\n::: (\S+)\n)(?:    .*\n)*', re.MULTILINE)
Function = ast.FunctionDef | ast.AsyncFunctionDef
REFERS = re.compile(r"See `[\w.]+`\.")


def pages() -> dict[str, str]:
    """The text of each page by its path in docs/."""
    return {path: _page(text) for path, text in api_pages.pages().items()}


def _page(text: str) -> str:
    """A page of the site with the text of each name in place of its directive."""
    title, first, rest = text.split("\n\n", 2)
    body = _without_papers(rest)
    body = DIRECTIVE.sub(lambda found: _section(found[1] or found[2], found[3] or found[1]), body)
    return noted(f"{title}\n\n{first}\n\n" + re.sub(r"\n{3,}", "\n\n", body))


def _without_papers(text: str) -> str:
    """The papers themselves lie in the repository: they are linked."""
    return re.sub(r"\*\*The algorithm, all of it\*\*.*?^```\n", "", text, flags=re.DOTALL | re.MULTILINE)


def _section(name: str, path: str) -> str:
    node, aliased = _definition(path)
    return "\n".join(
        [f'<a id="{name}"></a>', "", f"## {name}", "", *_body(name, node, aliased), *_papers(name)]
    )


def _papers(name: str) -> Iterator[str]:
    for folder in PAPERS.get(name, ()):
        path = f"mpisgd/methods/{folder}/paper.py"
        yield f"The algorithm, with all ranks in one process: [{path}](../../../{path}).\n"


def _body(name: str, node: ast.AST | None, aliased: str) -> Iterator[str]:
    last = name.rpartition(".")[2]
    if isinstance(node, Function):
        yield f"```text\n{signature(last, node)}\n```\n"
        yield as_markdown(ast.get_docstring(node) or "") + "\n"
    elif isinstance(node, ast.ClassDef):
        yield f"```text\n{_constructor(last, node)}\n```\n"
        yield as_markdown(ast.get_docstring(node) or "") + "\n"
        yield from _members(last, [node, *_parts_of(node, aliased)])
    else:
        yield f"`{aliased}`\n"
        if isinstance(node, ast.Constant):  # the text below the assignment
            yield as_markdown(str(node.value)) + "\n"


def _constructor(name: str, node: ast.ClassDef) -> str:
    """What one calls; of an exception its bases."""
    bases = [ast.unparse(base) for base in node.bases]
    for each in node.body:
        if isinstance(each, Function) and each.name == "__init__":
            return signature(name, each, method=True)
    if any("dataclass" in ast.unparse(mark) for mark in node.decorator_list) or "NamedTuple" in bases:
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        shown = [
            f"{ast.unparse(each.target)}: {ast.unparse(each.annotation)}"
            + (f" = {ast.unparse(each.value)}" if each.value else "")
            for each in fields
            if "ClassVar" not in ast.unparse(each.annotation)
        ]
        line = f"{name}({', '.join(shown)})"
        return (
            line if len(line) <= 100 else f"{name}(\n" + "".join(f"    {field},\n" for field in shown) + ")"
        )
    line = f"class {name}({', '.join(bases)})" if bases else f"class {name}"
    values = [ast.unparse(each.targets[0]) for each in node.body if isinstance(each, ast.Assign)]
    values = [value for value in values if not value.startswith("_")]
    return f"{line}: {', '.join(values)}" if any("Enum" in base for base in bases) else line


def _parts_of(node: ast.ClassDef, aliased: str) -> Iterator[ast.ClassDef]:
    """The classes of `PARTS` that a class is made of; others that it derives from have their own section."""
    module = aliased.rpartition(".")[0]
    for base in map(ast.unparse, node.bases):
        source = _imported(_tree(module), module, base)
        if source is not None and source[1] in api_pages.PARTS:
            found, _ = _definition(".".join(source))
            assert isinstance(found, ast.ClassDef)
            yield found


def _members(name: str, nodes: Iterable[ast.ClassDef]) -> Iterator[str]:
    """The public methods and properties that say something of their own."""
    for each in [each for node in nodes for each in node.body]:
        text = ast.get_docstring(each) if isinstance(each, Function) else None
        if not isinstance(each, Function) or each.name.startswith("_") or not text or REFERS.fullmatch(text):
            continue
        marks = {ast.unparse(mark) for mark in each.decorator_list}
        if any(mark.endswith(".setter") for mark in marks):
            continue
        yield f"### {name}.{each.name}\n"
        if {"property", "cached_property"} & marks:
            kind = ast.unparse(each.returns) if each.returns else "a property"
            yield f"```text\n{each.name}: {kind}\n```\n"
        else:
            yield f"```text\n{signature(each.name, each, method=True)}\n```\n"
        yield as_markdown(text) + "\n"


def _definition(path: str) -> tuple[ast.AST | None, str]:
    """The node that defines a name, and its module; of a value the statement that sets it."""
    module, _, last = path.rpartition(".")
    for _ in range(10):
        tree = _tree(module)
        for node in reversed(tree.body):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == last:
                return node, f"{module}.{last}"
        source = _imported(tree, module, last)
        if source is None:
            text, statement = _statement(tree, last)
            return text, statement or f"{module}.{last}"
        module, last = source
    raise RuntimeError(f"{path}: where is it defined?")


def _imported(tree: ast.Module, module: str, name: str) -> tuple[str, str] | None:
    """The module, and the name there, that a module has a name from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("mpisgd"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return node.module, alias.name
    return None


def _statement(tree: ast.Module, name: str) -> tuple[ast.Constant | None, str]:
    """The text below the assignment of a name at the top of a module, and the assignment on one line."""
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if ast.unparse(target) == name:
                text = after.value if isinstance(after, ast.Expr) else None
                line = " ".join(ast.unparse(node).split())
                return (text if isinstance(text, ast.Constant) else None), line
    return None, ""


@cache
def _tree(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    files = [path / "__init__.pyi", path / "__init__.py", path.with_suffix(".py")]
    return ast.parse(next(file for file in files if file.exists()).read_text())
