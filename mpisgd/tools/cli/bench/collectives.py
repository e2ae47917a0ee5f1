"""`bench collectives`: each collective beside MPI's own, gloo's and Horovod's."""

from typing import Annotated

import typer

from mpisgd.tools.bench import cases
from mpisgd.tools.cli.bench.options import (
    ALL_PEERS,
    Budget,
    Device,
    Frameworks,
    Json,
    Plot,
    Quick,
    Rounds,
    TimeLimit,
    choice_of,
    device_of,
    peers_of,
)
from mpisgd.tools.cli.record import Output, measure_in_job

__all__ = ["collectives"]


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
