"""What lies in `scripts/` has no import circle; imports for annotations count, too."""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def modules() -> dict[str, Path]:
    """Each file by the names under which others import it: from `scripts/`, or from its own folder."""
    found = {}
    for path in sorted(SCRIPTS.rglob("*.py")):
        name = ".".join(path.relative_to(SCRIPTS).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
        if not (path.parent / "__init__.py").exists():
            found[path.stem] = path
    return found


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def circle(files: dict[str, Path]) -> list[str]:
    """A circle of files, each of which imports the one before; [] where there is none."""
    graph = {
        path: {files[name] for name in imported(path) if name in files} - {path} for path in files.values()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [str(path.relative_to(SCRIPTS)) for path in error.args[1]]
    return []


def test_no_script_imports_one_that_imports_it() -> None:
    files = modules()
    assert {"train", "training.train_state", "fuzzing.draw", "run_tests"} <= files.keys()
    assert circle(files) == []


@pytest.mark.parametrize("text", ["import a", "if TYPE_CHECKING:\n    from a import X"])
def test_a_circle_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SCRIPTS", tmp_path)
    (tmp_path / "a.py").write_text("import b")
    (tmp_path / "b.py").write_text(text)
    assert set(circle(modules())) == {"a.py", "b.py"}
