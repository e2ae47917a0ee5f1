"""Count what a rank sends and computes on hosts of different numbers, and by which law it grows.

    python scripts/growth/main.py --json runs/growth.json
    python scripts/bench/record_table.py runs/growth.json benchmarks/growth.md --title "Growth with the ranks"

Nothing of it depends on the machine, but for how long it takes.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Annotated

import typer

from mpisgd.tools.cli.program import run_program
from mpisgd.tools.cli.provenance import provenance

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from growth.laws import laws_of
from growth.programs import everything
from growth.runs import Count, Shape, count_acts, count_recovery, memory_of_a_group

app = typer.Typer(add_completion=False)

LAW_SHAPES = (Shape(16, 2), Shape(32, 2), Shape(16, 4))
FEW_SHAPES = (Shape(2, 2), Shape(8, 2))
MANY_SHAPES = (Shape(128, 8),)
MOST_RANKS = 256  # of which everything is counted
TRACED = (0,)  # the ranks whose instructions are counted
METHODS = ("Synchronous()", "Sharded(stage=2)")
FIELDS = {
    "messages": "messages",
    "bytes": "message_bytes",
    "calls of MPI": "calls",
    "bytes of these": "call_bytes",
    "instructions": "instructions",
}


def counts_of(shape: Shape, short: bool) -> dict[str, Count]:
    """Everything on some hosts, and the loss of a rank; of many ranks operations and groups."""
    if shape.size > MOST_RANKS:
        return count_acts(shape, lambda: everything((), is_pairwise=False), traced=TRACED)
    if short:
        return count_acts(shape, lambda: everything(METHODS), traced=TRACED)
    with tempfile.TemporaryDirectory() as folder:
        found = count_acts(shape, lambda: everything(METHODS, Path(folder)), traced=TRACED)
    return {**found, "loss of a rank, to the next step": count_recovery(shape)}


@app.command()
def main(
    to: Annotated[Path, typer.Option("--json", help="where the record goes")],
    many: Annotated[bool, typer.Option(help="count 1,024 ranks, too")] = True,
    short: Annotated[bool, typer.Option(help="leave out checkpoints, losses and memory")] = False,
) -> None:
    """Count, and write a record."""
    warnings.simplefilter("ignore")
    shapes = [*LAW_SHAPES, *FEW_SHAPES, *(MANY_SHAPES if many else ())]
    counts = {}
    for shape in shapes:
        counts[shape] = counts_of(shape, short)
        print(f"{shape}: counted", file=sys.stderr)
    laws = laws_of({shape: counts[shape] for shape in LAW_SHAPES})
    columns = ["what", *(f"{name}: law" for name in FIELDS)]
    for shape in shapes:
        columns += [f"{shape}: {name}" for name in FIELDS]
    cells = []
    for act, law in laws.items():
        row = [act, *(law[field] or "none" for field in FIELDS.values())]
        for shape in shapes:
            count = counts[shape].get(act)
            row += ["" if count is None else f"{getattr(count, field):,}" for field in FIELDS.values()]
        cells.append(row)
    memory = [[str(shape), *memory_of_a_group(shape)] for shape in LAW_SHAPES if not short]
    record = {
        "kind": "growth",
        **provenance(),
        "notes": [
            "the most of any rank, on ranks that are threads; shapes are hosts x ranks of each",
            f"laws are those of {', '.join(map(str, LAW_SHAPES))}: the slowest that nothing exceeds",
            "instructions of Python's bytecode on the first rank, without those of the network; "
            "bytes of MPI's calls are what they take and give",
            *(
                f"a group on {shape}, for each rank: {taken:,} bytes of Python, {opened:.1f} descriptors"
                for shape, taken, opened in memory
            ),
        ],
        "columns": columns,
        "cells": cells,
    }
    to.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    run_program(app)
