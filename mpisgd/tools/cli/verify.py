"""`python -m mpisgd verify`: compare every mode of training with one process, or with its definition.

python -m mpisgd verify --quick                         # starts jobs of 3 ranks, and of 4 on two hosts
python -m mpisgd verify --minutes 20                    # all pairs of situations, as far as it comes
python -m mpisgd verify --resume                        # the rest
python -m mpisgd verify --sabotage                      # breaks every mode, and sees that each is found
mpirun -np 8 -hostfile hosts python -m mpisgd verify    # with these ranks
"""

import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import mpisgd
from mpisgd import config
from mpisgd.config import is_launched
from mpisgd.tools.cli.provenance import provenance

if TYPE_CHECKING:
    from mpisgd.tools.verification.cell import Cell
    from mpisgd.tools.verification.matrix import Selection
    from mpisgd.tools.verification.method_matrix import Row, Tried
    from mpisgd.tools.verification.run_matrix import Matrix, Results

__all__ = ["verify"]

RANKS = {False: "1,2,3,4", True: "3,4"}  # by --quick
WIDTH = 200  # at most, where the table goes to a file

Json = Annotated[
    Path | None, typer.Option("--json", metavar="PATH", help="Write all cells into this JSON file.")
]
Picture = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="PATH",
        help="Draw the matrix into this PNG file, and that of methods x situations beside it.",
    ),
]


def verify(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer modes, methods and steps: minutes.")] = False,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="Every pair of situations with every number of ranks, on 1 to 3 hosts: a night."
        ),
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a run of the same source that was stopped.")
    ] = False,
    minutes: Annotated[
        float, typer.Option(help="Stop the methods in situations after this many minutes; 0: no limit.")
    ] = 0.0,
    under_mpi: Annotated[
        bool,
        typer.Option(
            "--confirm",
            help="Only methods in situations, under mpirun on 2 and 3 ranks and on 2 hosts: the bits must be "
            "those of threads.",
        ),
    ] = False,
    sabotage: Annotated[
        bool, typer.Option("--sabotage", help="Break every mode on purpose; each fault must be found.")
    ] = False,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Run only modes whose name contains TEXT.")] = "",
    ranks: Annotated[
        str,
        typer.Option(
            help="Numbers of ranks of the jobs; default: 1,2,3,4, with --quick 3,4, and 4 on two hosts alone."
        ),
    ] = "",
    launcher: Annotated[str, typer.Option(help="Command that starts a job; default: mpirun.")] = "",
    cluster: Annotated[
        str,
        typer.Option(
            help='Command that starts a job on emulated hosts, with the options of "scripts/cluster"; '
            'default: that of a checkout; "none": ranks of this host count as those of two.'
        ),
    ] = "",
    method: Annotated[
        str, typer.Option(metavar="MODULE:CALL", help="Verify only this strategy or compressor of your own.")
    ] = "",
    refusals: Annotated[
        bool, typer.Option("--refusals", help="Print why methods are refused in situations.")
    ] = False,
    json_file: Json = None,
    plot_file: Picture = None,
    html_file: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="PATH",
            help="Write methods x situations into this HTML file, as a table to filter.",
        ),
    ] = None,
    limit_s: Annotated[float, typer.Option("--limit", help="Seconds for each job.")] = 600.0,
    cells: Annotated[Path | None, typer.Option(hidden=True)] = None,
    losing: Annotated[str, typer.Option(hidden=True)] = "",
    beyond: Annotated[int, typer.Option(hidden=True)] = 0,
    plain: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Compare every mode of training with one process on the joined batch, or with its paper.

    Then every method in every situation, on ranks that are threads; without --quick all pairs of situations.

    The exit code is 1 if a mode is not equal, or with --sabotage if one that was broken is. It is 1 as well
    if the time is over before all methods are done.
    """
    if quick and everything:
        raise mpisgd.JobError("--quick and --all are opposites; take one of them")
    from mpisgd.job.lazy_dynamo import defer_import
    from mpisgd.tools.verification.matrix import Selection
    from mpisgd.tools.verification.matrix_report import one_of_each_kind, text_of_matrix
    from mpisgd.tools.verification.method_matrix import row_of, rows
    from mpisgd.tools.verification.sabotage import Sabotage

    defer_import()  # before `mpisgd.init` does: examples of methods have optimizers
    killed = Sabotage(losing) if losing else None
    selection = Selection(
        quick=quick, sabotage=sabotage, only=only, losing=killed, beyond=beyond, plain=plain
    )
    here = is_launched()
    if method:
        if here:
            raise mpisgd.JobError("--method: its ranks are threads; start it without mpirun")
        tried, modes = _tried([row_of(method)], selection, everything, None), []
    else:
        named = [] if here else [row for row in rows() if only.lower() in row.name.lower()]
        if (quick or under_mpi) and not only:
            named = one_of_each_kind(named)
        if under_mpi:
            _confirm(named, launcher, cluster)
            return
        kept = None if quick or sabotage else _kept(minutes, resume=resume)
        tried, modes = _tried(named, selection, everything, kept), selection.modes()
        if not tried.found and not modes:
            raise mpisgd.JobError(f"--only: no mode's name contains {only!r}")
    if not modes:
        found = []
    elif here:
        found = _in_this_job(selection, cells)
    else:
        found = _in_started_jobs(selection, ranks or RANKS[quick], launcher, cluster, limit_s)
    if cells is None and (not here or mpisgd.rank() == 0):
        _finish(found, tried.found, json_file, plot_file, html_file)
        if refusals:
            typer.echo(text_of_matrix(tried.found), nl=False)
        if tried.unfinished:
            typer.echo(f"{len(tried.unfinished)} methods are not done; --resume goes on with them")
    if cells is None and not all(cell.is_as_wanted for cell in found):
        raise typer.Exit(1)
    if tried.unfinished or any(each.is_fault for each in tried.found):
        raise typer.Exit(1)


def _confirm(chosen: "Sequence[Row]", launcher: str, cluster: str) -> None:
    """Try methods in situations under mpirun, and print what became of them."""
    from mpisgd.tools.bench.jobs import mpirun
    from mpisgd.tools.verification.confirm import confirm
    from mpisgd.tools.verification.hosts import checked, find_cluster
    from mpisgd.tools.verification.run_matrix import summary_of_matrix

    hosts = find_cluster(cluster)
    if obstacle := checked(hosts):
        typer.echo(f"hosts are pretended: {obstacle}", err=True)
        hosts = []
    with _progress("methods under mpirun") as report:
        found = confirm(chosen, report, launcher=mpirun(launcher), cluster=hosts)
    for line in summary_of_matrix(found):
        typer.echo(line)
    if any(each.is_fault for each in found):
        raise typer.Exit(1)


@contextmanager
def _progress(text: str) -> "Iterator[Callable[[int, int], None]]":
    """Yield what shows how far something is, on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _kept(minutes: float, *, resume: bool) -> "Results":
    """Return where results are kept; those of before are deleted, unless this is to go on with them."""
    from mpisgd.tools.verification.known_results import results_file
    from mpisgd.tools.verification.run_matrix import Results

    path = results_file(config.cache_folder())
    if not resume:
        path.unlink(missing_ok=True)
    return Results(path, time.time() + 60 * minutes if minutes else 0.0)


def _tried(
    chosen: "Sequence[Row]", selection: "Selection", everything: bool, kept: "Results | None"
) -> "Matrix":
    """Try methods in situations, on ranks that are threads, and show how far that is."""
    from mpisgd.tools.verification.run_matrix import Extent, Matrix, run_matrix

    if not chosen:
        return Matrix([], [])
    with _progress("methods x situations") as report:
        return run_matrix(
            chosen,
            report,
            extent=Extent.QUICK if selection.quick else Extent.ALL if everything else Extent.PAIRS,
            sabotage=selection.sabotage,
            results=kept,
        )


def _in_this_job(selection: "Selection", path: Path | None) -> "list[Cell]":
    """Verify with the ranks of this job."""
    if any(mode.loads_much for mode in selection.modes()):
        import torch.distributed.fsdp  # noqa: F401
    gc.freeze()  # all that is imported: `init` would look for garbage in it, which takes a second
    mpisgd.init()
    from mpisgd.tools.verification.jobs import append_cell
    from mpisgd.tools.verification.matrix import run_here

    def report(cell: "Cell") -> None:
        if path is not None and mpisgd.rank() == 0:
            append_cell(path, cell)

    return run_here(selection, report)


def _in_started_jobs(
    selection: "Selection", ranks: str, launcher: str, cluster: str, limit_s: float
) -> "list[Cell]":
    """Start a job for each number of ranks and each transport, one after the other."""
    from mpisgd.tools.bench.jobs import mpirun
    from mpisgd.tools.cli.bench.options import counts_of
    from mpisgd.tools.cli.run import WITH_FAULT_TOLERANCE, is_open_mpi
    from mpisgd.tools.verification.hosts import PRETENDED, checked, find_cluster
    from mpisgd.tools.verification.jobs import jobs_of, run_started

    counts, words = counts_of("--ranks", ranks), mpirun(launcher)
    outlives = is_open_mpi(words[0])
    hosts = [] if launcher and not cluster else find_cluster(cluster)
    obstacle = checked(hosts)
    jobs = jobs_of(selection, counts, selection.modes(), emulates_hosts=not obstacle)
    if cluster != PRETENDED and any("pretended" in job.transport for job in jobs):
        typer.echo(f"hosts are pretended: {obstacle}", err=True)
    found: list[Cell] = []
    with _live(found) as show:
        for job in jobs:
            show(f"{job.ranks} ranks, {job.transport} ...")
            if job.losing is None or outlives:
                launch = [*words, *WITH_FAULT_TOLERANCE] if job.losing is not None else words
                found += run_started(job, selection, launch, limit_s, lambda cell: show("", cell), hosts)
            else:
                typer.echo(f"left out: {job.transport}, which needs Open MPI 5", err=True)
    return found


@contextmanager
def _live(found: "Sequence[Cell]") -> "Iterator[Callable[..., None]]":
    """Yield what shows the matrix as it grows on a terminal, and elsewhere a line for each job."""
    from rich.console import Console
    from rich.live import Live

    from mpisgd.tools.verification.report import table_of

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text, cell=None: typer.echo(text, err=True) if text else None
        return
    current: list[Cell] = []
    with Live(console=console, transient=True, refresh_per_second=4) as live:

        def show(text: str, cell: "Cell | None" = None) -> None:
            if cell is None:
                current.clear()
            else:
                current.append(cell)
            live.update(table_of([*found, *current]) if found or current else text)

        yield show


def _finish(
    found: "Sequence[Cell]",
    tried: "Sequence[Tried]",
    json_file: Path | None,
    plot_file: Path | None,
    html_file: Path | None,
) -> None:
    """Print the table and what is wrong; write the files."""
    from rich.console import Console

    from mpisgd.tools.verification.matrix_page import write_page
    from mpisgd.tools.verification.matrix_report import draw_matrix
    from mpisgd.tools.verification.report import draw, summary_of, table_of
    from mpisgd.tools.verification.run_matrix import summary_of_matrix

    if found:
        Console(width=None if Console().is_terminal else WIDTH).print(table_of(found))
    for line in [*(summary_of_matrix(tried) if tried else []), *(summary_of(found) if found else [])]:
        typer.echo(line)
    try:
        if json_file is not None:
            record = {"kind": "verify", **provenance(), "cells": [cell._asdict() for cell in found]}
            record["methods"] = [each._asdict() for each in tried]
            json_file.write_text(json.dumps(record, indent=1) + "\n")
        if plot_file is not None and found:
            draw(found, plot_file)
        if plot_file is not None and tried:
            draw_matrix(tried, plot_file.with_stem(f"{plot_file.stem}-methods"))
        if html_file is not None and tried:
            write_page(tried, html_file)
    except OSError as exc:
        raise mpisgd.JobError(f"cannot write {exc.filename}: {exc.strerror}") from exc
