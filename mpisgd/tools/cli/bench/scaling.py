"""`bench scaling`: steps over numbers of ranks."""

from typing import Annotated

import typer

from mpisgd.tools.bench.jobs import mpirun
from mpisgd.tools.bench.report.rows import as_number
from mpisgd.tools.bench.scaling import launch, scaling_rows
from mpisgd.tools.cli.bench.options import (
    MODELS,
    Batch,
    BestThreads,
    Budget,
    Json,
    Launcher,
    Models,
    Plot,
    Quick,
    Rounds,
    TimeLimit,
    choice_of,
    counts_of,
    refuse_under_mpirun,
)
from mpisgd.tools.cli.provenance import provenance
from mpisgd.tools.cli.record import Output

__all__ = ["scaling"]


def scaling(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks; 1 is always added.")] = "1,2,4",
    models: Models = "all",
    batch: Batch = 0,
    threads: BestThreads = 0,
    launcher: Launcher = "",
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of all numbers of ranks.")] = 2,
    rounds: Rounds = 20,
    budget_s: Budget = 20.0,
    json_file: Json = None,
    plot_file: Plot = None,
    quick: Quick = False,
    limit_s: TimeLimit = 1200.0,
) -> None:
    """Time training steps over numbers of ranks. Run it without mpirun: it starts the jobs itself."""
    refuse_under_mpirun("scaling")
    output = Output(json_file, plot_file)
    counts = sorted({1, *counts_of("--ranks", ranks)})
    options = {
        "--models": ",".join(choice_of("--models", models, MODELS)),
        "--batch": batch,
        "--peers": "none",
        "--rounds": rounds,
        "--threads": threads,
        "--budget": budget_s,
        "--time-limit": limit_s,
    }
    words = [str(word) for option in options.items() for word in option] + ["--quick"] * quick
    records = []
    for _ in range(1 if quick else repeats):
        for count in counts:
            records.append(launch(mpirun(launcher), count, ["step", *words], limit_s))
            typer.echo(f"{as_number(count, 'rank')} measured", err=True)
    record = {
        **records[-1],
        **provenance(),
        "kind": "scaling",
        "rows": scaling_rows(records),
        "jobs": records,
    }
    record["title"] = record["title"].replace("step: ", "scaling: ", 1)
    output.put(record)
