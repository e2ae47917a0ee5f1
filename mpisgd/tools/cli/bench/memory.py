"""`bench memory` and `bench offload`: the peak memory of trainings, and state that lies in files."""

from typing import Annotated

import typer

import mpisgd
from mpisgd.cores import available_cores
from mpisgd.tools.bench import cases
from mpisgd.tools.bench.jobs import mpirun
from mpisgd.tools.bench.memory.peak import OPTIMIZERS, MemoryPlan, run_memory
from mpisgd.tools.cli.bench.options import (
    MODELS,
    Json,
    Launcher,
    Models,
    Plot,
    Quick,
    Threads,
    TimeLimit,
    choice_of,
    refuse_under_mpirun,
)
from mpisgd.tools.cli.provenance import provenance
from mpisgd.tools.cli.record import Output, log_rows, measure_in_job, title

__all__ = ["memory", "offload"]


def memory(
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks, all on this host.")] = 2,
    models: Models = "all",
    threads: Annotated[int, typer.Option(min=0, help="torch threads of each rank; 0: cores / ranks.")] = 0,
    launcher: Launcher = "",
    steps: Annotated[int, typer.Option(min=2, help="Of each training.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Of each training.")] = 3,
    json_file: Json = None,
    plot_file: Plot = None,
    quick: Quick = False,
    limit_s: TimeLimit = 300.0,
) -> None:
    """Compare the peak memory of trainings with and without mpisgd. Run it without mpirun."""
    refuse_under_mpirun("memory")
    output = Output(json_file, plot_file)
    plan = MemoryPlan(
        choice_of("--models", models, MODELS),
        list(OPTIMIZERS)[:1] if quick else list(OPTIMIZERS),
        ranks=ranks,
        threads=threads or max(1, available_cores() // ranks),
        steps=2 if quick else steps,
        repeats=1 if quick else repeats,
        small=quick,
        limit_s=limit_s,
    )
    record = {"kind": "memory", **provenance(), "size": ranks, **run_memory(plan, mpirun(launcher), log_rows)}
    library = record["library"]
    record["versions"]["MPI"] = library.split(",")[0]
    record["title"] = title("memory", size=ranks, hosts=1, threads=plan.threads, library=library)
    output.put(record)


def offload(
    folder: Annotated[str, typer.Option(help="Folder for the state, on the disk to measure.")] = "",
    width: Annotated[int, typer.Option(min=8, help="Width of the model's four layers.")] = 4096,
    batch: Annotated[int, typer.Option(min=1, help="Examples of one rank.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Number of timed steps.")] = 10,
    prefetch: Annotated[int, typer.Option(min=1, help="Number of blocks that are read ahead.")] = 2,
    block: Annotated[str, typer.Option(help="Size of a block, which is read or written at once.")] = "8MiB",
    io: Annotated[str, typer.Option(help="direct, buffered, or all for both.")] = "all",
    checksum: Annotated[str, typer.Option(help="crc32, or a name of hashlib; default: none.")] = "",
    threads: Threads = 0,
    json_file: Json = None,
    quick: Quick = False,
    limit_s: TimeLimit = 3600.0,
) -> None:
    """Time steps with the optimizer's state in files, beside state in memory and the disk alone."""
    from mpisgd.tools.bench.offload import OffloadPlan, run_offload

    output = Output(json_file)
    if not folder:
        raise mpisgd.JobError("bench offload: --folder, on the disk that is to keep the state, is missing")
    plan = OffloadPlan(
        folder,
        256 if quick else width,
        batch,
        min(steps, 3) if quick else steps,
        prefetch,
        cases.sizes(block)[0],
        choice_of("--io", io, ("direct", "buffered")),
        checksum or None,
    )
    try:
        plan.offload("auto")
    except mpisgd.InvalidArgument as exc:
        raise mpisgd.JobError(f"bench offload: {exc}") from exc
    measure_in_job("offload", run_offload, plan, output, limit_s=limit_s, threads=threads)
