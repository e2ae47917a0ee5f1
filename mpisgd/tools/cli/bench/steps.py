"""`bench step`, `bench overlap` and `bench checks`: what a training step takes, and of what it consists."""

from typing import Annotated

import typer

from mpisgd.tools.bench import cases
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
    Models,
    Plot,
    Quick,
    Rounds,
    Threads,
    TimeLimit,
    choice_of,
    device_of,
    pace_of_steps,
    peers_of,
)
from mpisgd.tools.cli.record import Output, measure_in_job

__all__ = ["checks", "overlap", "step"]


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
