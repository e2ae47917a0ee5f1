"""`python -m mpisgd bench`: how fast collectives and training steps are, beside what else there is.

mpirun -np 2 python -m mpisgd bench collectives --json all.json --plot all.png
mpirun -np 2 python -m mpisgd bench step
mpirun -np 2 python -m mpisgd bench checks
mpirun -np 4 -hostfile hosts python -m mpisgd bench strategies --plot strategies.png
mpirun -np 4 -hostfile hosts python -m mpisgd bench strategies --task text --table text.txt
mpirun -np 4 -hostfile hosts python -m mpisgd bench compression
mpirun -np 2 -hostfile hosts python -m mpisgd bench overlap
mpirun -np 2 python -m mpisgd bench offload --folder /scratch
python -m mpisgd bench scaling --ranks 1,2,4          # these start mpirun themselves
python -m mpisgd bench memory --ranks 2
python -m mpisgd bench layout -- python train.py --epochs 5
"""

from typing import Annotated

import typer

import mpisgd
from mpisgd.cores import available_cores
from mpisgd.tools.bench import cases
from mpisgd.tools.bench.jobs import mpirun
from mpisgd.tools.bench.memory.peak import OPTIMIZERS, MemoryPlan, run_memory
from mpisgd.tools.bench.report.rows import as_number
from mpisgd.tools.bench.scaling import launch, scaling_rows
from mpisgd.tools.cli.bench.layout import layout
from mpisgd.tools.cli.bench.options import (
    ALL_PEERS,
    MODELS,
    Batch,
    BestThreads,
    Budget,
    DdpBuckets,
    Device,
    Frameworks,
    Json,
    Launcher,
    Models,
    Plot,
    Quick,
    Rounds,
    Threads,
    TimeLimit,
    choice_of,
    counts_of,
    device_of,
    pace_of_steps,
    peers_of,
    refuse_under_mpirun,
)
from mpisgd.tools.cli.bench.strategies import compression, strategies
from mpisgd.tools.cli.program import OF_PROGRAM
from mpisgd.tools.cli.provenance import provenance
from mpisgd.tools.cli.record import Output, log_rows, measure_in_job, title

__all__ = ["bench", "checks", "collectives", "memory", "offload", "overlap", "scaling", "step"]


def collectives(
    only: Annotated[str, typer.Option(help="Collectives, separated by commas.")] = "all",
    sizes: Annotated[str, typer.Option(help="A range (times 4), or a list: 4,64KiB,1MiB.")] = "4-256MiB",
    dtypes: Annotated[str, typer.Option(help="dtypes, separated by commas.")] = "float32",
    algorithms: Annotated[
        str, typer.Option(help="Algorithms of mpisgd.all_reduce: auto,mpi,ring,...")
    ] = "auto",
    device: Device = "cpu",
    peers: Frameworks = ALL_PEERS,
    rounds: Rounds = 20,
    budget_s: Budget = 4.0,
    json_file: Json = None,
    plot_file: Plot = None,
    quick: Quick = False,
    limit_s: TimeLimit = 3600.0,
) -> None:
    """Time each collective beside those of MPI, gloo and Horovod, and the limit of memory or link."""
    from mpisgd.collectives.all_reduce import CHOICES
    from mpisgd.tools.bench.collectives import CollectivesPlan, run_collectives
    from mpisgd.tools.bench.measure import Pace

    output, where = Output(json_file, plot_file), device_of(device)
    if quick:
        only, sizes, rounds = "all_reduce,broadcast" if only == "all" else only, "4,64KiB", min(rounds, 3)
    plan = CollectivesPlan(
        choice_of("--only", only, cases.COLLECTIVES),
        cases.sizes(sizes),
        choice_of("--dtypes", dtypes, tuple(cases.ITEM_BYTES)),
        choice_of("--algorithms", algorithms, CHOICES),
        Pace(rounds, min(rounds, 3), budget_s, turn_s=0.004, max_calls=100),
        where,
    )
    measure_in_job("collectives", run_collectives, plan, output, peers_of(peers, where), limit_s=limit_s)


def step(
    models: Models = "all",
    batch: Batch = 0,
    optimizer: Annotated[str, typer.Option(help="sgd, momentum or adamw.")] = "sgd",
    threads: BestThreads = 0,
    buckets: DdpBuckets = "25MiB,100MiB",
    device: Device = "cpu",
    peers: Frameworks = ALL_PEERS,
    rounds: Rounds = 20,
    budget_s: Budget = 60.0,
    json_file: Json = None,
    plot_file: Plot = None,
    quick: Quick = False,
    limit_s: TimeLimit = 3600.0,
) -> None:
    """Time training steps beside steps without communication, one process, DDP and Horovod."""
    from mpisgd.tools.bench.peers.framework import REFERENCES
    from mpisgd.tools.bench.step import StepPlan, run_steps
    from mpisgd.tools.bench.training import OPTIMIZERS

    output, where = Output(json_file, plot_file), device_of(device)
    pace = pace_of_steps(rounds, budget_s, quick)
    chosen = choice_of("--models", models, MODELS)
    (kind,) = choice_of("--optimizer", optimizer, tuple(OPTIMIZERS))
    sizes = cases.sizes(buckets)
    plan = StepPlan(chosen, batch or None, sizes, quick, pace, threads or None, kind, where)
    wanted = [*peers_of(peers, where), *REFERENCES]
    measure_in_job("step", run_steps, plan, output, wanted, limit_s=limit_s, threads=threads)


def overlap(
    model: Annotated[str, typer.Option(help="mlp, deep or transformer.")] = "mlp",
    batch: Annotated[int, typer.Option(min=0, help="Examples of one rank; 0: chosen by --share.")] = 0,
    share: Annotated[
        float, typer.Option(min=0.0, help="Time of the computation as a share of the link's time.")
    ] = 0.25,
    factor: Annotated[
        int, typer.Option(min=2, help="Size of the second batch as a multiple of the first.")
    ] = 4,
    threads: Threads = 0,
    buckets: DdpBuckets = "25MiB",
    peers: Frameworks = "gloo",
    rounds: Rounds = 20,
    budget_s: Budget = 60.0,
    json_file: Json = None,
    plot_file: Plot = None,
    quick: Quick = False,
    limit_s: TimeLimit = 3600.0,
) -> None:
    """Compare a step between hosts with its parts: computation, link, all-reduce. Needs several hosts."""
    from mpisgd.tools.bench.measure import Pace
    from mpisgd.tools.bench.overlap import OverlapPlan, run_overlap

    output = Output(json_file, plot_file)
    (name,) = choice_of("--model", model, MODELS)
    pace = Pace(min(rounds, 2) if quick else rounds, min(rounds, 2), budget_s, turn_s=0.0, max_calls=1)
    plan = OverlapPlan(name, batch or None, share, factor, cases.sizes(buckets), quick, pace)
    measure_in_job(
        "overlap", run_overlap, plan, output, peers_of(peers), limit_s=limit_s, threads=threads, min_hosts=2
    )


def checks(
    models: Models = "all",
    batch: Batch = 0,
    threads: Threads = 0,
    rounds: Rounds = 20,
    budget_s: Budget = 60.0,
    json_file: Json = None,
    quick: Quick = False,
    limit_s: TimeLimit = 3600.0,
) -> None:
    """Measure what the consistency checks cost: steps with and without comparing the ranks' calls."""
    from mpisgd.tools.bench.checks import run_checks
    from mpisgd.tools.bench.step import StepPlan

    output = Output(json_file)
    pace = pace_of_steps(rounds, budget_s, quick)
    plan = StepPlan(choice_of("--models", models, MODELS), batch or None, (), quick, pace)
    measure_in_job("checks", run_checks, plan, output, limit_s=limit_s, threads=threads)


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


bench = typer.Typer(add_completion=False, help="Measure collectives and training steps beside their peers.")
for command in (collectives, step, overlap, offload, checks, scaling, memory, strategies, compression):
    bench.command()(command)
bench.command(context_settings=OF_PROGRAM)(layout)
