"""What the programs of this folder make of the times of variants: a table, and a record."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import mpisgd
from mpisgd.tools.bench.report.rows import timed_rows
from mpisgd.tools.bench.report.tables import show, timed_table
from mpisgd.tools.cli.provenance import provenance

# By the kind of record: the section of its table, and what it compares with.
COMPARISONS = {
    "data_parallel": ("model", "ratio_to_ddp", "x DDP"),
    "checkpoint": ("model", "ratio_to_step", "x step"),
    "fusion": ("gradients", "ratio_to_fused", "x fused"),
    "muon": ("model", "ratio_to_fsdp2", "x FSDP2"),
}
JsonFile = Annotated[Path | None, typer.Option("--json", readable=False, help="file for the result")]


def tell(
    kind: str,
    what: str,
    seconds: Mapping[str, Sequence[float]],
    base: str,
    json_file: Path | None,
    **further: object,
) -> None:
    """Print a table on rank 0, and write the record.

    Args:
        kind: one of COMPARISONS.
        what: was measured; the section of all rows.
        seconds: of each round, by variant.
        base: the variant that medians are compared with.
        json_file: for the record; None: there is none.
        further: what else belongs to the record.
    """
    if mpisgd.rank() != 0:
        return
    section, field, heading = COMPARISONS[kind]
    bases = {field.removeprefix("ratio_to_"): statistics.median(seconds[base])}
    rows = timed_rows({section: what}, seconds, bases)
    title = f"{mpisgd.size()} ranks on {mpisgd.num_nodes()} host(s), torch {torch.__version__}"
    show([timed_table(title, section, rows, field, heading)], [])
    if json_file is not None:
        record: dict[str, Any] = {"kind": kind, **provenance(), "title": title, "size": mpisgd.size()}
        json_file.write_text(json.dumps({**record, "rows": rows, **further}, indent=2) + "\n")
