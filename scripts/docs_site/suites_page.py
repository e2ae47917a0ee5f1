"""What does not pass of the suites of others, and why, from scripts/suites/suites.toml."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["sections"]

FILE = Path(__file__).resolve().parents[1] / "suites" / "suites.toml"
KINDS = {"fails": "fails", "left_out": "not started"}


def sections() -> str:
    """A section for each suite, with a row for each test that does not pass."""
    suites = tomllib.loads(FILE.read_text())
    return "\n".join(section(name, table) for name, table in suites.items())


def section(name: str, table: Mapping[str, Any]) -> str:
    """The section of a suite."""
    rows = [
        f"| `{test}` | {KINDS[kind]} | {at(reason)} | {why(reason)} |"
        for kind in KINDS
        for test, reason in table[kind].items()
    ]
    if not rows:
        return f"\n## What does not pass: {name}\n\nNothing.\n"
    head = "| test | | ranks | reason |\n| --- | --- | --- | --- |"
    return f"\n## What does not pass: {name}\n\n{head}\n" + "\n".join(rows) + "\n"


def at(reason: str | Mapping[str, Any]) -> str:
    """The numbers of ranks at which a reason holds."""
    return "all" if isinstance(reason, str) else ", ".join(map(str, reason["ranks"]))


def why(reason: str | Mapping[str, Any]) -> str:
    """The reason as one line."""
    return reason if isinstance(reason, str) else reason["reason"]
