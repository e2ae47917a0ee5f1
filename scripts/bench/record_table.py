"""A record that a command has written with --json, as a file of benchmarks/.

    mpirun -n 2 python -m mpisgd bench step --json runs/step.json --plot benchmarks/step-2.png
    python scripts/bench/record_table.py runs/step.json benchmarks/step-2.md --before "mpirun -n 2"

Records stay out of the repository, and who wants all numbers measures again.
"""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table as RichTable
from timed_record import COMPARISONS

from mpisgd.tools.bench.report.tables import tables_of, timed_table
from mpisgd.tools.cli.program import run_program
from mpisgd.tools.verification.cell import Cell
from mpisgd.tools.verification.report import summary_of
from mpisgd.tools.verification.report import table_of as matrix_table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs_site"))
from measurements import Measurement, Table

app = typer.Typer(add_completion=False)

OUTPUTS = re.compile(r" --(?:html|json|plot|table)[ =]\S+")


def plain(table: RichTable) -> Table:
    """A table for a terminal as one of a file, in which every row names its section."""
    columns = [" ".join(str(column.header).split()) for column in table.columns]
    rows: list[list[str]] = []
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        row = [str(cell).strip() for cell in cells]
        rows.append([row[0] or rows[-1][0], *row[1:]])
    return Table(str(table.title), columns, rows)


def facts(record: dict[str, Any], before: str) -> Iterable[tuple[str, str]]:
    """What is known of a record, by name."""
    command = OUTPUTS.sub("", record["command"])
    yield "command", f"`{f'{before} {command}'.strip()}`"
    yield "machine", f"{record['machine']['processor']}, {record['machine']['cores']} cores"
    known, peers = record["versions"], record.get("peers", {})
    versions = [f"mpisgd {known['mpisgd']}", f"torch {known['torch']}"]
    versions += [known["MPI"]] if "MPI" in known else []
    versions += [version for version in peers.values() if known["torch"] not in version]
    yield "versions", ", ".join(versions)
    yield "date", record["when"][:10]
    if "size" in record:
        hosts = record.get("hosts", 1)
        yield "ranks", f"{record['size']} rank{'s' * (record['size'] > 1)} on {hosts} host{'s' * (hosts > 1)}"
    cells = matrix_cells(record)
    for note in (*record.get("notes", ()), *(summary_of(cells) if cells else ())):
        yield "note", note
    entries = record.get("left_out", ())
    absent = {
        f"{entry['variant']} ({entry.get('dtype') or entry['model']})": entry["reason"] for entry in entries
    }
    for name, reason in {**record.get("peers_left_out", {}), **absent}.items():
        yield "missing", f"{name}: {reason}"


def tables(record: dict[str, Any]) -> list[Table]:
    """The tables of a record, as a terminal has them."""
    kind = record["kind"]
    if kind in ("faults", "growth", "learners"):
        return [Table(kind, record["columns"], record["cells"])]
    if kind == "mutations":
        return [Table(each["title"], each["columns"], each["rows"]) for each in record["tables"]]
    if kind == "verify":
        return [plain(matrix_table(matrix_cells(record)))]
    if kind == "overview":
        return overview(record)
    if kind in COMPARISONS:
        section, field, heading = COMPARISONS[kind]
        return [plain(timed_table(kind, section, record["rows"], field, heading))]
    return [plain(table) for table in tables_of(kind, record["rows"])]


def overview(record: dict[str, Any]) -> list[Table]:
    """Medians with a column for each library, and their spread; one process has no network."""
    rows = record["rows"]
    what = {
        "examples_per_s": "examples per second",
        "seconds_to_target": f"seconds to {record['target']:.0%}",
    }
    names = list(dict.fromkeys(row["variant"] for row in rows))
    alone = [row for row in rows if row["variant"].startswith("one process")]
    cells, spread = [], []
    for network in dict.fromkeys(row["network"] for row in rows):
        there = [row for row in rows if row["network"] == network]
        found = {row["variant"]: row for row in (*alone, *there)}
        for field, quantity in what.items():
            cells.append([network, quantity, *(_number(found[name][field]["median"]) for name in names)])
            for row in there:
                spread.append([network, row["variant"], quantity, *map(_number, row[field].values())])
    return [
        Table(record["title"], ["network", "what", *names], cells),
        Table("spread", ["network", "variant", "what", "median", "min", "max"], spread),
    ]


def _number(value: float | None) -> str:
    if value is None:
        return "not reached"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def matrix_cells(record: dict[str, Any]) -> list[Cell]:
    """The cells of `verify`; of other records none."""
    return [Cell(**cell) for cell in record["cells"]] if record["kind"] == "verify" else []


def measurement(record: dict[str, Any], title: str, before: str = "") -> Measurement:
    """A record as a file of benchmarks/."""
    return Measurement(title or record["kind"], list(facts(record, before)), tables(record))


@app.command()
def main(
    record: Annotated[Path, typer.Argument(help="what a command has written with --json")],
    out: Annotated[Path, typer.Argument(help="the file of benchmarks/")],
    before: Annotated[str, typer.Option(help="what stood before `python`, such as 'mpirun -n 2'")] = "",
    title: Annotated[str, typer.Option(help="of the file; without: the kind of the record")] = "",
    note: Annotated[str, typer.Option(help="besides those of the record")] = "",
) -> None:
    """Make a table of a record."""
    found = json.loads(record.read_text())
    if note:
        found["notes"] = [*found.get("notes", ()), note]
    out.write_text(measurement(found, title, before).text)


if __name__ == "__main__":
    run_program(app)
