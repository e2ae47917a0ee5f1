"""The files of benchmarks/: tables of what was measured, below the command, machine, versions and date.

    # Training steps

    - command: `mpirun -n 2 python -m mpisgd bench step`
    - machine: Intel(R) Xeon(R) Processor, 2 cores
    - versions: torch 2.13.0, Open MPI v5.0.11
    - date: 2026-11-23

    ## training step

    | model | variant | median | min | max |
    | --- | --- | --- | --- | --- |
    | mlp | mpisgd | 106 ms | 91.4 ms | 242 ms |

`scripts/bench/record_table.py` makes them of the records that commands write with `--json`.
"""

import datetime
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
# Others are `ranks`, `note` (pages have it, too) and `missing`: what could not be measured.
REQUIRED = ("command", "machine", "versions", "date")
FACT = re.compile(r"- (\w+): (.+)")
CELLS = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True)
class Table:
    """One table of a file.

    Attributes:
        title: above it.
        columns: their headings.
        rows: a cell for each column.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Measurement:
    """A file of benchmarks/.

    Attributes:
        title: what was measured.
        facts: what is known of it, by name; a name may stand several times.
        tables: what came out.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    tables: Sequence[Table]

    def all_of(self, name: str) -> list[str]:
        """Return the values of a fact."""
        return [value for key, value in self.facts if key == name]

    @property
    def provenance(self) -> str:
        """Where the numbers come from, in one line, and what else one must know to read them."""
        rest = [value for key, value in self.facts if key not in ("command", "note", "missing")]
        notes = [note[:1].upper() + note[1:] for note in self.all_of("note")]
        return ". ".join(["; ".join([", ".join(self.all_of("command")), *rest]), *notes])

    def table(self, title: str | None) -> Table:
        """Return the table of this title, or the only one."""
        found = [each for each in self.tables if title in (None, each.title)]
        if len(found) != 1:
            titles = "; ".join(each.title for each in self.tables)
            raise ValueError(f"table {title!r}: expected one of: {titles}")
        return found[0]

    @property
    def text(self) -> str:
        """The file."""
        facts = "".join(f"- {name}: {value}\n" for name, value in self.facts)
        tables = "".join(f"\n## {t.title}\n\n{as_markdown(t.columns, t.rows)}" for t in self.tables)
        return f"# {self.title}\n\n{facts}{tables}"


def as_markdown(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of Markdown, with a line end."""
    columns = list(columns)
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in line)}|\n" for line in lines)


def parse(text: str) -> Measurement:
    """Read a file.

    Raises:
        ValueError: it does not say where its numbers come from, or is no such file.
    """
    head, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    title, _, rest = head.partition("\n")
    facts = [(found[1], found[2].strip()) for found in map(FACT.fullmatch, rest.splitlines()) if found]
    known = Measurement(title.removeprefix("# ").strip(), facts, [_table(part) for part in parts])
    if missing := [name for name in REQUIRED if not known.all_of(name)]:
        raise ValueError(f"no line '- {missing[0]}: ...' above the tables")
    for date in known.all_of("date"):
        datetime.date.fromisoformat(date)
    if not known.tables:
        raise ValueError("no table below a heading")
    return known


def _table(part: str) -> Table:
    title, *lines = part.splitlines()
    cells = [[cell.strip() for cell in CELLS.split(line.strip())[1:-1]] for line in lines if line[:1] == "|"]
    if len(cells) < 3 or len({len(row) for row in cells}) != 1:
        raise ValueError(f"{title}: expected a table, whose rows have as many cells as its head")
    if len(set(cells[0])) < len(cells[0]):
        raise ValueError(f"{title}: two columns have one heading")
    return Table(title.strip(), cells[0], cells[2:])


def all_measurements(folder: Path = FOLDER) -> dict[Path, Measurement]:
    """Read all files of the folder.

    Raises:
        ValueError: one of them, which is named, is no such file.
    """
    found = {}
    for path in sorted(folder.glob("*.md")):
        if path.name == "README.md":
            continue
        try:
            found[path] = parse(path.read_text())
        except ValueError as exc:
            raise ValueError(f"benchmarks/{path.name}: {exc}") from exc
    return found
