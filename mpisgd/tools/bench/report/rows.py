"""From measured seconds to rows: statistics, bandwidths and ratios."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpisgd.tools.bench.cases import Case, bus_factor

__all__ = [
    "AS_TEXT",
    "BOUND",
    "COMPUTE",
    "LIMIT",
    "NONE",
    "NONE_NOT_KEPT",
    "ONE_PROCESS",
    "OURS",
    "PING_PONG",
    "SHARDED",
    "SHARED",
    "Spread",
    "as_bytes",
    "as_number",
    "as_text",
    "as_time",
    "collective_rows",
    "overlap_rows",
    "spread",
    "step_rows",
    "timed_rows",
    "unit_of",
]

# Names of variants.
OURS, SHARED = "mpisgd", "mpisgd, shared parameters"
SHARDED = {1: "mpisgd, Sharded(1)", 2: "mpisgd, Sharded(2)"}  # by stage
LIMIT, PING_PONG = "limit", "ping-pong"
COMPUTE, BOUND = "compute alone", "bound"
# Without communication. Both forms of zero_grad, since it depends on the model which is faster.
NONE = ("none, gradients dropped", "none, gradients zeroed")
# The same where the C library does with freed memory as it does by default, in other processes.
NONE_NOT_KEPT = ("none, dropped, not kept", "none, zeroed, not kept")
# What a user would run instead on one host: all cores, the batches of all ranks joined.
ONE_PROCESS = ("one process", "one process, not kept")

TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
BYTES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


@dataclass(frozen=True)
class Spread:
    """Seconds of one call, over the rounds."""

    median_s: float
    min_s: float
    max_s: float
    rounds: int


def spread(seconds: Sequence[float]) -> Spread:
    """Return median and range of what the rounds took."""
    return Spread(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


def collective_rows(case: Case, seconds: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return one row for each variant of one case, in the order given."""
    what = {"collective": case.collective, "dtype": case.dtype, "bytes": case.nbytes}
    bases = {"limit": _fastest(seconds, [LIMIT]), "ping_pong": _fastest(seconds, [PING_PONG])}
    rows = timed_rows(what, seconds, bases)
    for row in rows:
        row["algbw_gb_s"] = case.nbytes / row["median_s"] / 1e9
        row["busbw_gb_s"] = row["algbw_gb_s"] * bus_factor(case.collective, case.size)
    return rows


def _fastest(seconds: Mapping[str, Sequence[float]], names: Sequence[str]) -> float | None:
    """Return the smallest median of these variants, None where none was measured."""
    medians = [statistics.median(seconds[name]) for name in names if seconds.get(name)]
    return min(medians, default=None)


def step_rows(
    model: str,
    seconds: Mapping[str, Sequence[float]],
    threads: Mapping[str, int],
    controls: Sequence[str],
    batch: int,
) -> list[dict[str, Any]]:
    """Return one row for each variant of a training step.

    Of the variants NONE, NONE_NOT_KEPT and ONE_PROCESS, the fastest of each is what ratios refer to.

    Args:
        model: its name.
        seconds: of one step, by variant.
        threads: of torch, in each process of a variant.
        controls: other variants without communication.
        batch: examples of all ranks together.
    """
    bases = {"no_communication": NONE, "not_kept": NONE_NOT_KEPT, "one_process": ONE_PROCESS}
    fastest = {base: _fastest(seconds, names) for base, names in bases.items()}
    rows = timed_rows({"model": model}, seconds, fastest)
    for row in rows:
        name = row["variant"]
        row["threads"] = threads.get(name)
        row["communicates"] = name not in (*NONE, *NONE_NOT_KEPT, *ONE_PROCESS, *controls)
        row["examples_per_s"] = batch / row["median_s"]
    return rows


def overlap_rows(name: str, batch: int, seconds: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return one row for each variant of a step between hosts, and for each of its parts.

    Args:
        name: of model and batch.
        batch: examples of one rank.
        seconds: by variant; those of the link, of compute and of the bound are among them.
    """
    link, compute, bound = (statistics.median(seconds[part]) for part in (LIMIT, COMPUTE, BOUND))
    bases = {"link": link, "larger": max(link, compute), "bound": bound}
    return timed_rows({"model": name, "batch_per_rank": batch}, seconds, bases)


def timed_rows(
    what: Mapping[str, Any], seconds: Mapping[str, Sequence[float]], bases: Mapping[str, float | None]
) -> list[dict[str, Any]]:
    """Return one row for each variant, in the order given.

    Args:
        what: the same in all rows.
        seconds: by variant.
        bases: what medians are compared with, if it is known; each gives a `ratio_to_` of its name.
    """
    spreads = {name: spread(values) for name, values in seconds.items() if values}
    return [
        {
            **what,
            "variant": name,
            **vars(found),
            **{f"ratio_to_{base}": found.median_s / s if s else None for base, s in bases.items()},
        }
        for name, found in spreads.items()
    ]


def unit_of(row: Mapping[str, Any]) -> str:
    """Return `s` or `bytes`, the unit of what a row tells: the end of `median_s` or `median_bytes`."""
    return "s" if "median_s" in row else "bytes"


def as_text(row: Mapping[str, Any], which: str) -> str:
    """Return the `median`, `min` or `max` of a row for people."""
    unit = unit_of(row)
    return AS_TEXT[unit](row[f"{which}_{unit}"])


def as_number(number: int, what: str) -> str:
    """Return `1 rank`, `2 ranks`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def as_time(seconds: float) -> str:
    """Return `12.3 us`, `4.56 ms`, `1.20 s`."""
    if not math.isfinite(seconds):
        return "-"
    scale, unit = next((pair for pair in TIMES if seconds >= pair[0]), TIMES[-1])
    value = seconds / scale
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def as_bytes(nbytes: int) -> str:
    """Return `4 B`, `64 KiB`, `1.5 MiB`."""
    scale, unit = next(pair for pair in BYTES if nbytes >= pair[0] or pair[0] == 1)
    return f"{nbytes / scale:.4g} {unit}"


AS_TEXT: dict[str, Callable[[Any], str]] = {"s": as_time, "bytes": as_bytes}
