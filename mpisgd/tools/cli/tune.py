"""`python -m mpisgd tune`: benchmark each algorithm by message size, and save a profile for `auto`.

mpirun -np 2 python -m mpisgd tune
mpirun -np 4 -hostfile hosts python -m mpisgd tune --budget 60
"""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

import mpisgd
from mpisgd.tools.bench.cases import parse_bytes
from mpisgd.tools.cli.provenance import provenance

if TYPE_CHECKING:
    from mpisgd.tools.bench.tune import RankSet
    from mpisgd.tuning import Curve, MeasuredCurves

__all__ = ["tune"]


def tune(
    budget_s: float = typer.Option(
        30.0, "--budget", min=0.0, help="Seconds for all measurements; more allow larger sizes."
    ),
    last: str = typer.Option("64MiB", "--max-size", help="Largest message, if the budget suffices."),
    passes: int = typer.Option(2, min=1, help="Number of measurements, of which the best is used."),
    out: Path | None = typer.Option(
        None,
        readable=False,
        help="Write the profile into this file, not to the place where jobs look for it.",
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the measurements and write nothing."),
) -> None:
    """Benchmark each algorithm by message size on these ranks, and save a profile for `auto`."""
    # Here, since they load torch: seconds that `--help` need not take.
    from mpisgd.tools.bench.report.tables import show
    from mpisgd.tools.bench.report.tuning import cost_table, crossovers, doubts
    from mpisgd.tools.bench.tune import tune as measure_all
    from mpisgd.tuning import CostModel

    last_bytes = parse_bytes(last)
    mpisgd.init()
    if mpisgd.size() == 1:
        raise mpisgd.JobError("tune measures what goes on between ranks: mpirun -np 2 python -m mpisgd tune")
    measured = measure_all(budget_s, last_bytes, passes, _report)
    if mpisgd.rank() != 0:
        return
    model = CostModel("measured now", tuple(measured))
    chosen = [line for one in measured for line in crossovers(model, one)]
    show([cost_table(one) for one in measured], [*chosen, *doubts(measured)])
    if not dry_run:
        _write(out, measured)


def _report(place: "RankSet", nbytes: int, medians: "dict[Curve, float]") -> None:
    """Print the medians of one size as soon as they are known; on rank 0."""
    from mpisgd.tools.bench.report.tuning import one_line

    if mpisgd.rank() == 0:
        typer.echo(one_line(place.ranks_per_host, nbytes, medians), err=True)


def _write(out: Path | None, measured: "list[MeasuredCurves]") -> None:
    """Write the profile; on rank 0."""
    from mpisgd.job.rank_info import topology
    from mpisgd.tuning.profile import as_profile, default_path, write

    path = out or default_path(topology().ranks_per_host)
    try:
        write(path, as_profile(measured, provenance()))
    except OSError as exc:
        raise mpisgd.JobError(f"cannot write the profile {path}: {exc.strerror}") from exc
    print(f"written to {path}{f'; MPISGD_PROFILE={out} makes jobs use it' if out else ''}", flush=True)
