"""`python -m mpisgd bench layout`: which number of ranks, and of threads, is the fastest for a program here.

python -m mpisgd bench layout -- python train.py --epochs 5
python -m mpisgd bench layout --batch 64 -- python train.py --batch-size {batch}
"""

from typing import Annotated

import typer

from mpisgd.cores import available_cores
from mpisgd.tools.bench.jobs import mpirun
from mpisgd.tools.cli.bench.options import (
    Json,
    Launcher,
    Plot,
    Quick,
    TimeLimit,
    counts_of,
    refuse_under_mpirun,
)
from mpisgd.tools.cli.provenance import provenance
from mpisgd.tools.cli.record import Output, on_machine
from mpisgd.tools.cli.run import is_open_mpi, program_words

__all__ = ["layout"]

Program = Annotated[
    list[str], typer.Argument(metavar="PROGRAM [ARGS]...", help="A .py file, or any command.")
]
Ranks = Annotated[
    str, typer.Option(help="Numbers of ranks to try; default: the divisors of the number of cores.")
]
Threads = Annotated[
    str,
    typer.Option(help="Threads of a rank to try; default: the cores divided by the ranks, and half of that."),
]
BATCH = (
    "What a step trains on: a batch of each rank (rank), one that the ranks divide (total), or so many "
    "examples, where {batch} in ARGS is replaced by a rank's share."
)
Batch = Annotated[str, typer.Option(help=BATCH)]
Warmup = Annotated[int, typer.Option(min=1, help="Steps before the measurement.")]
Steps = Annotated[int, typer.Option(min=2, help="Steps that are measured in each start of the program.")]
Rounds = Annotated[int, typer.Option(min=1, help="Number of starts of each layout.")]


def layout(
    command: Program,
    ranks: Ranks = "",
    threads: Threads = "",
    batch: Batch = "rank",
    warmup: Warmup = 5,
    steps: Steps = 30,
    rounds: Rounds = 3,
    launcher: Launcher = "",
    json_file: Json = None,
    plot_file: Plot = None,
    quick: Quick = False,
    limit_s: TimeLimit = 300.0,
) -> None:
    """Run PROGRAM for some steps in every layout of ranks and threads of this host, and compare.

    The program must call mpisgd.init() and use torch optimizers. It is ended after --warmup and --steps
    steps; files that it writes are written in every run. Run this command without mpirun.
    """
    refuse_under_mpirun("layout")
    from mpisgd.tools.bench.layout.comparison import Comparison
    from mpisgd.tools.bench.layout.plan import LayoutPlan, layouts_of, typed

    output, words = Output(json_file, plot_file), mpirun(launcher)
    joined_batch = int(batch) if batch.isdecimal() else None
    wanted_ranks = counts_of("--ranks", ranks) if ranks else ()
    wanted_threads = counts_of("--threads", threads) if threads else ()
    plan = LayoutPlan(
        program=program_words(command),
        layouts=layouts_of(available_cores(), wanted_ranks, wanted_threads, joined_batch),
        launcher=words,
        is_open_mpi=is_open_mpi(words[0]),
        batch=batch,
        warmup=warmup,
        steps=min(steps, 5) if quick else steps,
        rounds=1 if quick else rounds,
        limit_s=limit_s,
    )
    found = Comparison(plan, lambda line: typer.echo(line, err=True)).run()
    title = f"{typed(plan.program)}: {on_machine()}"
    output.put(
        {"kind": "layout", **provenance(), "title": title, "program": plan.program, "batch": batch, **found}
    )
