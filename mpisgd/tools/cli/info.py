"""`python -m mpisgd info`: one page about the software, the machine and the job, printed by rank 0."""

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import typer

import mpisgd
from mpisgd.tools.cli.program import is_reporting_rank

if TYPE_CHECKING:
    from mpisgd.tools.cli.collect_env import RankInfo

__all__ = ["info"]


def info(as_json: bool = typer.Option(False, "--json", help="Print everything as JSON.")) -> None:
    """Show what mpisgd finds here: alone, or for a whole job under mpirun."""
    # Here, since they load torch: seconds that `--help` need not take.
    from mpisgd.tools.cli.collect_env import mpi_info, rank_info, settings

    before = settings()
    try:
        mpisgd.init()
    except mpisgd.MpiNotFound as exc:
        _print([rank_info(before, None)], as_json, no_mpi=str(exc.__cause__ or exc))
        raise typer.Exit(1) from exc
    except mpisgd.JobError:  # each rank is alone, and the page says so
        from mpisgd.job.startup import load_mpi

        mpisgd.init(load_mpi().MPI.COMM_WORLD)
    ranks: list[Any] = [None] * mpisgd.size()
    mpisgd.all_gather_object(ranks, rank_info(before, mpi_info()))
    if mpisgd.rank() == 0:
        _print(ranks, as_json)


def _print(ranks: "list[RankInfo]", as_json: bool, no_mpi: str = "") -> None:
    from mpisgd.tools.cli.info_text import as_text, uses

    if not is_reporting_rank():  # under another MPI's mpirun every process is rank 0 of a world of one
        return
    if not as_json:
        print(as_text(ranks, no_mpi), flush=True)
        return
    facts = [dataclasses.asdict(rank) for rank in ranks]
    page = {"ranks": facts, "uses": {} if no_mpi else uses(ranks), "no_mpi": no_mpi or None}
    print(json.dumps(page, indent=2), flush=True)
