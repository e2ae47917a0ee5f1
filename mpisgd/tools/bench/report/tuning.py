"""What `tune` found, for a terminal."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from rich.table import Table

from mpisgd.tools.bench.report.rows import as_bytes, as_time
from mpisgd.tools.bench.report.tables import new_table
from mpisgd.tuning import CostModel, Curve, MeasuredCurves
from mpisgd.tuning.profile import topology_name

__all__ = ["cost_table", "crossovers", "doubts", "one_line"]

POOR = 0.95  # an R² below it
# Sizes at which the choice is looked up for people: 1, 1.5, 2, 3, 4, 6 ... KiB, as one would say them.
LOOKED_AT = [2**power * part // 2 for power in range(8, 30) for part in (2, 3)]


def one_line(ranks_per_host: Sequence[int], nbytes: int, medians: Mapping[Curve, float]) -> str:
    """Return the medians of one size, to be said as soon as they are known."""
    said = (
        f"{_purpose(*curve.purpose)} {curve.name} {as_time(seconds)}" for curve, seconds in medians.items()
    )
    return f"{_where(ranks_per_host)}, {as_bytes(nbytes)}: " + ", ".join(said)


def cost_table(measured: MeasuredCurves) -> Table:
    """Return the lines of one set of ranks."""
    words, numbers = ("collective", "algorithm"), ("up to", "latency", "GB/s", "R²")
    table = new_table(_where(measured.ranks_per_host), words, numbers)
    for _, curves in groupby(measured.curves, key=attrgetter("purpose")):
        for cells in (row for curve in curves for row in _rows(curve)):
            table.add_row(*cells)
        table.add_section()
    return table


def _rows(curve: Curve) -> Iterator[tuple[str, ...]]:
    """Yield a row for each segment; what the rows share stands in the first."""
    head = (_purpose(*curve.purpose), curve.name)
    good = f"{curve.agreement():.3f}"
    for piece in curve.segments:
        end = "" if math.isinf(piece.up_to_bytes) else as_bytes(round(piece.up_to_bytes))
        rate = f"{1e-9 / piece.beta_s_per_byte:.3g}" if piece.beta_s_per_byte else "-"
        yield (*head, end, as_time(piece.alpha_s) if piece.alpha_s else "-", rate, good)
        head, good = ("", ""), ""


def crossovers(model: CostModel, measured: MeasuredCurves) -> Iterator[str]:
    """Yield for each collective and kind of dtype which algorithm is chosen from which size on."""
    here = model.at(measured.ranks_per_host)
    for purpose, curves in groupby(measured.curves, key=attrgetter("purpose")):
        names = tuple(dict.fromkeys(curve.algorithm for curve in curves))
        chosen = [(nbytes, _choice(here, names, nbytes, purpose)) for nbytes in LOOKED_AT]
        runs = [(name, next(run)[0]) for name, run in groupby(chosen, key=lambda pair: pair[1])]
        said = [runs[0][0], *(f"{name} from {as_bytes(nbytes)} on" for name, nbytes in runs[1:])]
        yield f"{_where(measured.ranks_per_host)}, {_purpose(*purpose)}: {', '.join(said)}"


def doubts(measured: Sequence[MeasuredCurves]) -> Iterator[str]:
    """Yield what should make one measure again."""
    lines = [curve for one in measured for curve in one.curves]
    poor = sum(curve.agreement() < POOR for curve in lines)
    if poor:
        yield f"{poor} of {len(lines)} fits are poor (R² below {POOR}): was the machine busy?"


def _choice(model: CostModel, names: tuple[str, ...], nbytes: int, purpose: tuple[str, bool]) -> str:
    collective, half = purpose
    name = model.choose(names, nbytes, half, collective)
    num_leaders = model.num_leaders(nbytes, half) if name == "hierarchical" else 1
    return Curve(name, half, num_leaders=num_leaders).name


def _where(ranks_per_host: Sequence[int]) -> str:
    """Return `2 ranks on one host`, `2+2 ranks on 2 hosts`."""
    if len(ranks_per_host) == 1:
        return f"{ranks_per_host[0]} ranks on one host"
    return f"{topology_name(ranks_per_host)} ranks on {len(ranks_per_host)} hosts"


def _purpose(collective: str, half: bool) -> str:
    """Return `all_reduce`, `all_reduce of half precision`."""
    return f"{collective} of half precision" if half else collective
