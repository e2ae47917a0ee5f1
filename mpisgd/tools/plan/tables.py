"""Predictions as tables for a terminal, lines below them, and rows for a file."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from mpisgd.tools.bench.report.rows import as_bytes, as_time
from mpisgd.tools.bench.report.tables import new_table
from mpisgd.tools.plan.advice import Change
from mpisgd.tools.plan.checked import CHECKED, checked_by
from mpisgd.tools.plan.cluster import Cluster
from mpisgd.tools.plan.failures import HOUR_S
from mpisgd.tools.plan.methods import planned_methods
from mpisgd.tools.plan.prediction import LeftOut, Prediction
from mpisgd.tools.plan.simulation.collectives import cost_of, fastest
from mpisgd.tools.plan.simulation.messages import ALL_REDUCE

__all__ = [
    "checked_lines",
    "collectives_table",
    "failure_lines",
    "left_out_lines",
    "plan_table",
    "rows_of",
    "what_to_change",
]

PARTS = ("parameters", "gradients", "optimizer", "strategy", "compression", "buffers", "activations")
METHOD_WIDTH, BOUND_WIDTH = 18, 9
LEAST_SAVED = 0.02  # of a step: less is not worth a line
MOST_PAIRS = 2**22  # messages of a round that are listed one by one


def plan_table(predictions: Sequence[Prediction], title: str) -> Table:
    """Return a row for each prediction, in the order given."""
    priced = any(each.price_per_hour for each in predictions)
    parts = "compute+exposed\n+optimizer, ms"
    numbers = [
        "ranks",
        "step",
        parts,
        "memory",
        "sent",
        "examples\nper s",
        *(["price\nof 1M"] if priced else []),
    ]
    table = new_table(title, ["method", "bound by", "checked"], numbers)
    table.columns[0].min_width, table.columns[1].min_width = METHOD_WIDTH, BOUND_WIDTH
    table.columns[2].no_wrap = True
    table.box, table.padding = None, (0, 1, 0, 0)  # the names of methods are long
    for each in predictions:
        times = (each.compute_s + each.straggler_s, each.exposed_s, each.step.optimizer_s)
        cells = [str(each.cluster.size), as_time(each.step_s), "+".join(map(_milliseconds, times))]
        memory = as_bytes(round(each.memory.total)) + ("" if each.fits else " !")
        price = [f"{each.price_per_million:.3g}"] if priced else []
        sent = as_bytes(round(each.step.sent_bytes))
        table.add_row(
            each.method,
            each.bound,
            _checked(each),
            *cells,
            memory,
            sent,
            f"{each.examples_per_s:,.0f}",
            *price,
        )
    return table


def _checked(prediction: Prediction) -> str:
    return checked_by(prediction.cluster, planned_methods(prediction.method)[0])


def checked_lines(predictions: Sequence[Prediction]) -> list[str]:
    """Explain the words that occur in the column."""
    found = set(map(_checked, predictions))
    return [f"checked, {word}: {meaning}" for word, meaning in CHECKED.items() if word in found]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.{2 if seconds < 0.01 else 1 if seconds < 0.1 else 0}f}"


def collectives_table(cluster: Cluster, ranks: Sequence[int], nbytes: int) -> Table:
    """Return the time of an all-reduce by each algorithm on so many ranks, and which one `auto` takes."""
    table = new_table(f"all_reduce of {as_bytes(nbytes)}", ["ranks"], [*ALL_REDUCE, "auto"])
    for size in ranks:
        here = cluster.at(size)
        times = [
            as_time(cost_of(here, name).seconds(nbytes)) if _lists(name, size) else "-" for name in ALL_REDUCE
        ]
        table.add_row(str(size), *times, fastest(here, nbytes))
    return table


def _lists(algorithm: str, size: int) -> bool:
    return algorithm != "all_to_all" or size * size <= MOST_PAIRS


def rows_of(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Return the predictions as data."""
    return [
        {
            "method": each.method,
            "ranks": each.cluster.size,
            "hosts": each.cluster.hosts,
            "step_s": each.step_s,
            "compute_s": each.compute_s,
            "straggler_s": each.straggler_s,
            "exposed_s": each.exposed_s,
            "optimizer_s": each.step.optimizer_s,
            "communication_s": each.step.communication_s,
            "examples_per_s": each.examples_per_s,
            "memory_bytes": {part: getattr(each.memory, part) for part in PARTS},
            "memory_total_bytes": each.memory.total,
            "fits": each.fits,
            "sent_bytes": each.step.sent_bytes,
            "busiest_link_bytes": each.step.traffic,
            "price_per_million_examples": each.price_per_million,
            "bound": each.bound,
            "checked": _checked(each),
            "interruptions": each.interruptions and each.interruptions._asdict(),
        }
        for each in predictions
    ]


def what_to_change(changes: Sequence[Change]) -> list[str]:
    """Return lines of what would make the step shorter, and by how much."""
    worth = [change for change in changes if change.saved >= LEAST_SAVED]
    lines = [
        f"{change.what}: the step would take {as_time(change.step_s)}, {change.saved:.0%} less"
        for change in worth
    ]
    return lines or [f"nothing here, twice as fast, would make the step shorter by {LEAST_SAVED:.0%}"]


def failure_lines(prediction: Prediction) -> list[str]:
    """Return the rows of failures for the job of a prediction."""
    found = prediction.interruptions
    if found is None:
        return []
    steps = found.daly_s / prediction.step_s
    kept = f"{found.restart_share:.1%} of the time is work with restarts"
    elastic = f", {found.elastic_share:.1%} with elastic training" if found.elastic_share else ""
    return [
        f"failures: one every {found.mtbf_s / HOUR_S:.3g} h of {prediction.cluster.hosts} host(s); "
        f"a checkpoint every {as_time(found.daly_s)} ({steps:,.0f} steps; Daly), "
        f"{as_time(found.young_s)} (Young); {kept}{elastic}"
    ]


def left_out_lines(left_out: Sequence[LeftOut]) -> list[str]:
    """Return a line for each reason for which methods were left out."""
    where: dict[tuple[str, str], list[str]] = {}
    for each in left_out:
        where.setdefault((each.method, each.reason), []).append(str(each.ranks))
    return [
        f"left out: {method} on {', '.join(ranks)} ranks: {reason.removeprefix('plan: ')}"
        for (method, reason), ranks in where.items()
    ]
