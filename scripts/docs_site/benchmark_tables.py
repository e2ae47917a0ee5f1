"""The tables and plots of benchmarks/ as sections of a page, each with its command and machine."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["sections"]

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def sections() -> str:
    """Every table of the folder, with what it was measured by and on."""
    return "".join(_section(path) for path in sorted(FOLDER.glob("*.txt")))


def _section(table: Path) -> str:
    record = json.loads(table.with_suffix(".json").read_text())
    machine = record.get("machine", {})
    where = ", ".join(
        filter(None, [machine.get("processor"), f"{machine['cores']} cores" if machine else ""])
    )
    title = record.get("title") or record["kind"]
    lines = [f"### {table.stem}: {title}", "", f"```text\n{record['command']}\n```", ""]
    if where:
        ranks = f"{record['size']} ranks; " if "size" in record else ""
        lines += [f"{where}; {ranks}{record['when'][:10]}.", ""]
    picture = table.with_suffix(".png")
    if picture.exists():
        lines += [f"![{title}](../benchmarks/{picture.name})", ""]
    body = table.read_text().rstrip()
    return "\n".join(lines) + f"\n<details><summary>Table</summary>\n\n```text\n{body}\n```\n\n</details>\n\n"
