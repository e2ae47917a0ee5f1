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

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import mpisgd
from mpisgd.bench import cases
from mpisgd.bench.jobs import mpirun
from mpisgd.bench.memory.peak import OPTIMIZERS, MemoryPlan, run_memory
from mpisgd.bench.report.rows import as_number
from mpisgd.bench.scaling import launch, scaling_rows
from mpisgd.cli.provenance import provenance
from mpisgd.cli.record import Output, log_rows, measure_in_job, title
from mpisgd.config import available_cores, is_launched

if TYPE_CHECKING:
    from mpisgd.bench.measure import Pace

__all__ = ["bench", "choice_of", "counts_of", "refuse_under_mpirun"]

bench = typer.Typer(add_completion=False, help="Measure collectives and training steps beside their peers.")

# An option is called like its parameter unless it has a name here.
Json = Annotated[
    Path | None,
    typer.Option("--json", readable=False, help="Write everything measured here, with machine and versions."),
]
Plot = Annotated[Path | None, typer.Option("--plot", readable=False, help="Draw it into this PNG file.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="A few seconds, to see that it works; the numbers mean little.")
]
Frameworks = Annotated[
    str, typer.Option(help="Other frameworks to measure beside; those not there are left out.")
]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds that count, unless the budget ends them before.")]
Budget = Annotated[float, typer.Option("--budget", min=0.0, help="Seconds for each case.")]
TimeLimit = Annotated[
    float, typer.Option("--time-limit", min=1.0, help="Seconds after which a job is ended.")
]
Models = Annotated[str, typer.Option(help="mlp, deep, transformer, separated by commas.")]
Batch = Annotated[int, typer.Option(min=0, help="Examples of one rank; 0: each model's own.")]
Threads = Annotated[int, typer.Option(min=0, help="Of torch on each rank; 0: mpisgd's choice.")]
BestThreads = Annotated[
    int, typer.Option(min=0, help="Of torch on each rank; 0: the fastest, by a short trial before.")
]
DdpBuckets = Annotated[str, typer.Option("--ddp-buckets", help="Bucket sizes to try with DDP.")]
Launcher = Annotated[str, typer.Option(help='For example "mpirun -hostfile hosts".')]
ALL_PEERS = "gloo,horovod"
MODELS = tuple(cases.BATCHES)


@bench.command()
def collectives(
    only: Annotated[str, typer.Option(help="Collectives, separated by commas.")] = "all",
    sizes: Annotated[str, typer.Option(help="A range (times 4), or a list: 4,64KiB,1MiB.")] = "4-256MiB",
    dtypes: Annotated[str, typer.Option(help="Separated by commas.")] = "float32",
    algorithms: Annotated[str, typer.Option(help="Of mpisgd.all_reduce: auto,mpi,ring,...")] = "auto",
    peers: Frameworks = ALL_PEERS,
    rounds: Rounds = 20,
    budget_s: Budget = 4.0,
    json_file: Json = None,
    plot_file: Plot = None,
    quick: Quick = False,
    limit_s: TimeLimit = 3600.0,
) -> None:
    """Time each collective beside MPI's own, gloo's, Horovod's, and what memory or link allow."""
    from mpisgd.bench.collectives import CollectivesPlan, run_collectives
    from mpisgd.bench.measure import Pace
    from mpisgd.collectives.all_reduce import CHOICES

    output = Output(json_file, plot_file)
    if quick:
        only, sizes, rounds = "all_reduce,broadcast" if only == "all" else only, "4,64KiB", min(rounds, 3)
    plan = CollectivesPlan(
        choice_of("--only", only, cases.COLLECTIVES),
        cases.sizes(sizes),
        choice_of("--dtypes", dtypes, tuple(cases.ITEM_BYTES)),
        choice_of("--algorithms", algorithms, CHOICES),
        Pace(rounds, min(rounds, 3), budget_s, turn_s=0.004, max_calls=100),
    )
    measure_in_job("collectives", run_collectives, plan, output, _peers(peers), limit_s=limit_s)


@bench.command()
def step(
    models: Models = "all",
    batch: Batch = 0,
    optimizer: Annotated[str, typer.Option(help="sgd, momentum or adamw.")] = "sgd",
    threads: BestThreads = 0,
    buckets: DdpBuckets = "25MiB,100MiB",
    peers: Frameworks = ALL_PEERS,
    rounds: Rounds = 20,
    budget_s: Budget = 60.0,
    json_file: Json = None,
    plot_file: Plot = None,
    quick: Quick = False,
    limit_s: TimeLimit = 3600.0,
) -> None:
    """Time training steps beside those without communication, one process with all cores, DDP and Horovod."""
    from mpisgd.bench.peers.framework import REFERENCES
    from mpisgd.bench.step import StepPlan, run_steps
    from mpisgd.bench.training import OPTIMIZERS

    output = Output(json_file, plot_file)
    pace = _pace_of_steps(rounds, budget_s, quick)
    chosen = choice_of("--models", models, MODELS)
    (kind,) = choice_of("--optimizer", optimizer, tuple(OPTIMIZERS))
    plan = StepPlan(chosen, batch or None, cases.sizes(buckets), quick, pace, threads or None, kind)
    wanted = [*_peers(peers), *REFERENCES]
    measure_in_job("step", run_steps, plan, output, wanted, limit_s=limit_s, threads=threads)


@bench.command()
def overlap(
    model: Annotated[str, typer.Option(help="mlp, deep or transformer.")] = "mlp",
    batch: Annotated[int, typer.Option(min=0, help="Examples of one rank; 0: found, see --share.")] = 0,
    share: Annotated[float, typer.Option(min=0.0, help="Of the link's time that compute shall take.")] = 0.25,
    factor: Annotated[int, typer.Option(min=2, help="The second batch is so many times the first.")] = 4,
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
    """Compare a step between hosts with its parts: compute, link, all-reduce. Needs several hosts."""
    from mpisgd.bench.measure import Pace
    from mpisgd.bench.overlap import OverlapPlan, run_overlap

    output = Output(json_file, plot_file)
    (name,) = choice_of("--model", model, MODELS)
    pace = Pace(min(rounds, 2) if quick else rounds, min(rounds, 2), budget_s, turn_s=0.0, max_calls=1)
    plan = OverlapPlan(name, batch or None, share, factor, cases.sizes(buckets), quick, pace)
    measure_in_job(
        "overlap", run_overlap, plan, output, _peers(peers), limit_s=limit_s, threads=threads, min_hosts=2
    )


@bench.command()
def offload(
    folder: Annotated[str, typer.Option(help="On the disk that is to keep the state.")] = "",
    width: Annotated[int, typer.Option(min=8, help="Of the model's four layers.")] = 4096,
    batch: Annotated[int, typer.Option(min=1, help="Examples of one rank.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="That are timed.")] = 10,
    prefetch: Annotated[int, typer.Option(min=1, help="Blocks that are read ahead.")] = 2,
    block: Annotated[str, typer.Option(help="What is read or written at once.")] = "8MiB",
    io: Annotated[str, typer.Option(help="direct,buffered, or one of them.")] = "all",
    checksum: Annotated[str, typer.Option(help="crc32, or one of hashlib's.")] = "",
    threads: Threads = 0,
    json_file: Json = None,
    quick: Quick = False,
    limit_s: TimeLimit = 3600.0,
) -> None:
    """Time steps with the optimizer's state in files, beside the disk alone and the state in memory."""
    from mpisgd.bench.offload import OffloadPlan, run_offload

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


@bench.command()
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
    """Time training steps beside those in which the ranks meet without comparing what they do."""
    from mpisgd.bench.checks import run_checks
    from mpisgd.bench.step import StepPlan

    output = Output(json_file)
    pace = _pace_of_steps(rounds, budget_s, quick)
    plan = StepPlan(choice_of("--models", models, MODELS), batch or None, (), quick, pace)
    measure_in_job("checks", run_checks, plan, output, limit_s=limit_s, threads=threads)


@bench.command()
def scaling(
    ranks: Annotated[str, typer.Option(help="Rank counts; 1 is always among them.")] = "1,2,4",
    models: Models = "all",
    batch: Batch = 0,
    threads: BestThreads = 0,
    launcher: Launcher = "",
    repeats: Annotated[int, typer.Option(min=1, help="Times to go through all rank counts.")] = 2,
    rounds: Rounds = 20,
    budget_s: Budget = 20.0,
    json_file: Json = None,
    plot_file: Plot = None,
    quick: Quick = False,
    limit_s: TimeLimit = 1200.0,
) -> None:
    """Time training steps over rank counts. Run it without mpirun: it starts one for each count."""
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


@bench.command()
def memory(
    ranks: Annotated[int, typer.Option(min=1, help="All of them on this host.")] = 2,
    models: Models = "all",
    threads: Annotated[int, typer.Option(min=0, help="Of torch on each rank; 0: cores / ranks.")] = 0,
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
    record["title"] = title("memory", size=ranks, hosts=1, threads=plan.threads, library=library)
    output.put(record)


# -- what was asked for --------------------------------------------------------------------------------


def choice_of(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Return the names of a list, each known; `all` is all of them."""
    if text == "all":
        return list(known)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise mpisgd.JobError(f"{option}: {name!r} is none of {', '.join(known)}")
    return list(dict.fromkeys(names))


def counts_of(option: str, text: str) -> list[int]:
    """Return the positive numbers of a list such as `1,2,4`."""
    if not all(part.strip().isdigit() and int(part) > 0 for part in text.split(",")):
        raise mpisgd.JobError(f"{option}: {text!r}; expected for example 1,2,4")
    return [int(part) for part in text.split(",")]


def _peers(text: str) -> list[str]:
    from mpisgd.bench.peers.framework import FRAMEWORKS

    return [] if text in ("", "none") else choice_of("--peers", text, tuple(FRAMEWORKS))


def _pace_of_steps(rounds: int, budget_s: float, quick: bool) -> "Pace":
    from mpisgd.bench.measure import Pace

    if quick:
        return Pace(min(rounds, 2), 1, budget_s, turn_s=0.01, max_calls=5)
    return Pace(rounds, min(rounds, 3), budget_s, turn_s=0.25, max_calls=20)


def refuse_under_mpirun(command: str) -> None:
    """Raise JobError if mpirun has started this process."""
    if is_launched():
        raise mpisgd.JobError(f"bench {command} starts mpirun itself; run it without")
