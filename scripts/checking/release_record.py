"""benchmarks/releases.md from the cases that ./scripts/release_check --record has tried.

    python3 scripts/checking/release_record.py LINES

A line of LINES has the parts of a row, between tabs: the case, Python, torch, the MPI, what passed; or
`missing`, the case, and why it was not tried or that it fails. The row of a case takes the place of its
earlier one; the rows of an earlier version of mpisgd go into a table of their own.
"""

import datetime
import os
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs_site"))
from measurements import FOLDER, Measurement, Table, parse

TITLE = "MPI tests"
COLUMNS = ("case", "Python", "torch", "MPI", "MPI tests in short form, at 2 and at 3 ranks", "date")


def recorded(before: Measurement, lines: Iterable[Sequence[str]], version: str, date: str) -> Measurement:
    """What was known, with what was tried now.

    Args:
        before: the file as it is.
        lines: the parts of each line.
        version: of mpisgd, which was tried.
        date: of today.
    """
    known = before.table(TITLE)
    others = [table for table in before.tables if table is not known]
    rows = {(row[0], row[3].split()[0]): tuple(row) for row in known.rows}
    missing, notes = before.all_of("missing"), before.all_of("note")
    if before.all_of("versions") != [f"mpisgd {version}"]:
        title = f"earlier, with {before.all_of('versions')[0]}, on {before.all_of('date')[0]}"
        others, rows = [Table(title, known.columns, known.rows), *others], {}
        missing, notes = [], []
    for case, *parts in lines:
        name = parts[0] if case == "missing" else case
        missing = [text for text in missing if not text.startswith(f"`{name}`, ")]
        if case == "missing":
            rows = {key: row for key, row in rows.items() if key[0] != name}
            missing.append(f"`{name}`, {parts[1]}")
        else:
            rows[case, parts[2].split()[0]] = (case, *parts, date)
    facts = [
        ("command", "`./scripts/release_check --record CASE ...`"),
        ("machine", f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {os.cpu_count()} cores"),
        ("versions", f"mpisgd {version}"),
        ("date", date),
        *(("missing", text) for text in missing),
        *(("note", text) for text in notes),
    ]
    table = Table(TITLE, COLUMNS, sorted(rows.values(), key=_order))
    return Measurement(before.title, facts, [table, *others])


def _order(row: Sequence[str]) -> tuple[list[int], Sequence[str]]:
    return [int(number) for number in re.findall(r"\d+", row[1])], row


def main() -> None:
    """Write the file."""
    lines = [line.split("\t") for line in Path(sys.argv[1]).read_text().splitlines()]
    version = re.search(r'__version__ = "(.+)"', (FOLDER.parent / "mpisgd" / "__init__.py").read_text())
    assert version
    file = FOLDER / "releases.md"
    date = datetime.date.today().isoformat()
    file.write_text(recorded(parse(file.read_text()), lines, version[1], date).text)


if __name__ == "__main__":
    main()
