"""The small faults that a file can be given: what a careless edit makes of a statement or an expression."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["Mutant", "executed_lines", "mutants_of"]

SWAPPED = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
SIGNS = {ast.Add: "-", ast.Sub: "+"}
FACTORS = {ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//"}
SMALL = 64  # larger numbers are sizes, limits and seeds
# What the program says of itself is no arithmetic, and tests do not read every word of it.
TEXTS = ("__repr__", "__str__")
# What methods are compared with, what `plan` alone reads, and with what methods are tried.
DERIVED = ("paper", "coding", "cost", "examples")


_Located = ast.stmt | ast.expr


class Mutant(NamedTuple):
    """One fault.

    Attributes:
        path: of the file, from the package's folder on.
        line: where it is, from 1 on.
        column: in bytes of UTF-8.
        kind: of the fault.
        before: the text that it changes.
        after: what takes its place.
        executed: the first and the last line of its statement; None where that is executed once for all, by
            an import or for a value that is kept.
    """

    path: str
    line: int
    column: int
    kind: str
    before: str
    after: str
    executed: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """What it is known by."""
        return f"{self.path}:{self.line}:{self.column} {self.kind}"

    def applied(self, source: str) -> str:
        """Return the file with the fault."""
        lines = source.encode().split(b"\n")
        start = sum(len(line) + 1 for line in lines[: self.line - 1]) + self.column
        text = source.encode()
        end = start + len(self.before.encode())
        if text[start:end] != self.before.encode():
            raise ValueError(f"{self.name}: the file has changed")
        return (text[:start] + self.after.encode() + text[end:]).decode()


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Return all faults that a file can be given."""
    found = []
    tree, lines, executed = ast.parse(source), source.encode().split(b"\n"), executed_lines(source)
    for node, kind, after in _faults(tree):
        before = _text(node, lines)
        if before != after:
            found.append(
                Mutant(path, node.lineno, node.col_offset, kind, before, after, executed[node.lineno])
            )
    return found


def _text(node: _Located, lines: Sequence[bytes]) -> str:
    """Return the text of a node, as ast.get_source_segment does, which divides the file for each."""
    assert node.end_lineno is not None
    part = list(lines[node.lineno - 1 : node.end_lineno])
    part[-1] = part[-1][: node.end_col_offset]
    part[0] = part[0][node.col_offset :]
    return b"\n".join(part).decode()


def executed_lines(source: str) -> dict[int, tuple[int, int] | None]:
    """Return by line the first and last one of its statement, None where it is executed once for all."""
    found: dict[int, tuple[int, int] | None] = {}
    for first, last, once in sorted(_statements(ast.parse(source), once=True)):
        found.update(dict.fromkeys(range(first, last + 1), None if once else (first, last)))
    return found


def _statements(tree: ast.AST, *, once: bool) -> Iterator[tuple[int, int, bool]]:
    """Yield the first and last line of each statement, without its body, and whether it is executed once."""
    for child in ast.iter_child_nodes(tree):
        inside = once
        if isinstance(child, ast.FunctionDef):
            inside = any("cache" in ast.unparse(each) for each in child.decorator_list)
        if isinstance(child, ast.stmt):
            assert child.end_lineno is not None
            body = getattr(child, "body", None)
            last = max(child.lineno, body[0].lineno - 1) if isinstance(body, list) else child.end_lineno
            yield child.lineno, last, once
        yield from _statements(child, once=inside)


def _faults(tree: ast.AST) -> Iterator[tuple[_Located, str, str]]:
    for node in _code(tree):
        match node:
            case ast.Expr(value=ast.Call()) | ast.AugAssign():
                yield node, "dropped statement", "pass"
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield node, "dropped statement", "pass"
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                yield test, "negated condition", f"(not ({ast.unparse(test)}))"
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in SWAPPED:
                text = f"({ast.unparse(left)} {SWAPPED[type(op)]} {ast.unparse(right)})"
                yield node, "swapped comparison", text
            case ast.BoolOp(op=op, values=values):
                word = " or " if isinstance(op, ast.And) else " and "
                yield node, "swapped and, or", f"({word.join(f'({ast.unparse(v)})' for v in values)})"
            case ast.BinOp(left=left, op=op, right=right) if type(op) in {**SIGNS, **FACTORS}:
                kind = "swapped sign" if type(op) in SIGNS else "swapped factor"
                other = {**SIGNS, **FACTORS}[type(op)]
                yield node, kind, f"(({ast.unparse(left)}) {other} ({ast.unparse(right)}))"
            case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
                yield node, "dropped sign", f"({ast.unparse(operand)})"
            case ast.Constant(value=int(value)) if not isinstance(value, bool) and 0 <= value <= SMALL:
                yield node, "off by one", str(value + 1)
            case ast.Call(func=ast.Name(id="reversed" | "sorted"), args=[only], keywords=[]):
                yield node, "other order", f"list({ast.unparse(only)})"


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that compute something: no annotations, texts, errors, assertions or declarations."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, (ast.JoinedStr, ast.Raise, ast.Assert, ast.arg, ast.keyword)):
            if isinstance(child, ast.keyword):
                yield from _code(child)
            continue
        if isinstance(child, ast.FunctionDef):
            if child.name not in (*TEXTS, *DERIVED):
                for statement in child.body:
                    yield statement
                    yield from _code(statement)
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.AnnAssign):
            if child.value is not None:
                yield from _code(ast.Expression(child.value))
            continue
        if isinstance(child, ast.Subscript) and isinstance(child.slice, (ast.Slice, ast.Constant)):
            yield child.value
            yield from _code(child.value)
            continue
        yield child
        yield from _code(child)
