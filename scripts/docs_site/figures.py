"""The figures of README.md and of docs/: written from benchmarks/, and checked.

    python scripts/docs_site/figures.py            # exit code 1 where a figure has no source, or another one
    python scripts/docs_site/figures.py --write    # renew the tables of all pages

A page takes a table from a file of benchmarks/, or some of its columns and rows:

    <!-- generated: benchmarks/step-2.md
    columns: model, variant, median, min, max
    rows: mpisgd | one process -->
    <!-- end of generated -->

`rows` keeps those of which a cell is one of these, `table` is the title where a file has several tables.
Whatever else looks measured (`quantities.py`) fails, unless `not_measured.toml` says what it is instead.
"""

import argparse
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from generated_pages import is_generated
from measurements import Measurement, all_measurements, as_markdown
from quantities import BLOCK, quantities

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = Path(__file__).with_name("not_measured.toml")


def pages(root: Path = ROOT) -> list[Path]:
    """The pages that people read; CHANGELOG.md is a record of what was."""
    names = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")
    written = [page for page in sorted((root / "docs").rglob("*.md")) if not is_generated(page)]
    return [*(root / name for name in names), *written]


def generated(measured: Measurement, options: Mapping[str, list[str]], link: str) -> str:
    """The table that a page takes from a file, and the line below it.

    Raises:
        ValueError: there is no such table, column or row.
    """
    if unknown := options.keys() - {"columns", "rows", "table"}:
        raise ValueError(f"unknown: {', '.join(unknown)}")
    table = measured.table(options.get("table", [None])[0])
    names = [name.strip() for name in options["columns"][0].split(",")] if "columns" in options else []
    places = [_place(table.columns, name) for name in names or table.columns]
    rows = table.rows
    for line in options.get("rows", ()):
        wanted = {cell.strip() for cell in line.split("|")}
        rows = [row for row in rows if wanted & set(row)]
        if missing := wanted - {cell for row in rows for cell in row}:
            raise ValueError(f"no row has {', '.join(missing)}")
    text = as_markdown([table.columns[at] for at in places], [[row[at] for at in places] for row in rows])
    return f"\n{text}\n{measured.provenance}. [The whole table]({link}).\n\n"


def _place(columns: Any, name: str) -> int:
    if name not in columns:
        raise ValueError(f"no column {name}")
    return list(columns).index(name)


def with_figures(text: str, page: Path, measured: Mapping[Path, Measurement], root: Path = ROOT) -> str:
    """A page with the tables that the files have now.

    Raises:
        ValueError: it takes from a file what that does not have.
    """

    def block(found: re.Match[str]) -> str:
        file = root / "benchmarks" / f"{found['name']}.md"
        options: dict[str, list[str]] = {}
        for line in filter(str.strip, found["options"].splitlines()):
            name, _, value = line.partition(":")
            options.setdefault(name.strip(), []).append(value.strip())
        try:
            if file not in measured:
                raise ValueError("there is no such file")
            body = generated(measured[file], options, os.path.relpath(file, page.parent))
        except ValueError as exc:
            raise ValueError(f"{page.relative_to(root)}: benchmarks/{file.name}: {exc}") from exc
        return f"{found['begin']}{body}{found['end']}"

    return re.sub(BLOCK, block, text, flags=re.DOTALL)


def problems(root: Path = ROOT, allowed_file: Path = ALLOWED) -> list[str]:
    """A line for each figure without a source, and for whatever else is wrong."""
    try:
        measured = all_measurements(root / "benchmarks")
        texts = {page: page.read_text() for page in pages(root)}
        renewed = {page: with_figures(text, page, measured, root) for page, text in texts.items()}
    except ValueError as exc:
        return [str(exc)]
    wrong = []
    allowed = _allowed(allowed_file)
    unused = set(allowed)
    for page, text in texts.items():
        name = str(page.relative_to(root))
        if renewed[page] != text:
            wrong.append(f"{name}: its tables are not those of benchmarks/; figures.py --write renews them")
        for line, what in quantities(text):
            if (name, what) in allowed:
                unused.discard((name, what))
            else:
                wrong.append(f"{name}:{line}: {what!r} has no source")
    wrong += [f"{allowed_file.name}: {name} has no {what!r} any more" for name, what in sorted(unused)]
    raw = sorted(path.name for path in (root / "benchmarks").glob("*.json"))
    return wrong + [
        f"benchmarks/{name}: a raw record; scripts/bench/record_table.py makes a table of it" for name in raw
    ]


def _allowed(file: Path) -> set[tuple[str, str]]:
    """Pages and what may stand there; every kind says why."""
    found: set[tuple[str, str]] = set()
    for kind, table in tomllib.loads(file.read_text()).items():
        if not table.pop("reason", "").strip():
            raise ValueError(f"{file.name}: [{kind}] has no reason")
        found |= {(page, what) for page, texts in table.items() for what in texts}
    return found


def main() -> int:
    """Check the pages, or renew them; the exit code."""
    parser = argparse.ArgumentParser(description="See that every figure comes from a file of benchmarks/.")
    parser.add_argument("--write", action="store_true", help="renew the tables of the pages")
    if parser.parse_args().write:
        measured = all_measurements()
        for page in pages():
            text = page.read_text()
            if (renewed := with_figures(text, page, measured)) != text:
                page.write_text(renewed)
    wrong = problems()
    print(*wrong, sep="\n", end="\n" * bool(wrong))
    print(f"{len(pages())} pages, {len(wrong)} problems with their figures")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
