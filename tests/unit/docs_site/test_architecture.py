"""The drawing of the packages says what `./scripts/check` enforces."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def drawn(part: str) -> list[set[str]]:
    """The layers of a part of the drawing, from the top: names beside each other are one layer."""
    drawing = PAGE.split("```text\n")[1].split("```")[0]
    lines = part_of(drawing, part).splitlines()
    names = [re.split(r" {3,}", line.strip())[0] for line in lines if indent(line) == indent(lines[0])]
    return [layer for text in names for layer in layers_of(text)]


def part_of(drawing: str, part: str) -> str:
    for text in drawing.split("\n\n"):
        if text.lstrip().startswith(f"{part}:"):
            return text.replace(f"{part}:", " " * len(f"{part}:"), 1).rstrip()
    assert not part
    return drawing.split("\n\n")[0]


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def layers_of(text: str) -> list[set[str]]:
    """Of "a | b" one layer, of "a, b" two."""
    return [set(layer.split(" | ")) for layer in text.split(", ")]


def enforced(container: str) -> list[set[str]]:
    """The layers of a contract that has a container."""
    (contract,) = [each for each in CONTRACTS if each.get("containers") == [container]]
    return [set(layer.split(" | ")) for layer in contract["layers"]]


@pytest.mark.parametrize(
    ("part", "container"),
    [("", "mpisgd"), ("tools", "mpisgd.tools"), ("transport", "mpisgd.transport")],
)
def test_the_drawing_has_the_layers_that_are_enforced(part, container):
    assert drawn(part) == enforced(container)
