"""The page of the report: a timeline's numbers as compact JSON in one HTML file that needs nothing else.

Its size is bounded whatever the record's: long runs have fewer points per chart, and excerpts fewer spans.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from mpisgd.errors import InvalidArgument
from mpisgd.timeline.accounts import Division, Floats
from mpisgd.tools.timeline.report.excerpt import KINDS, Excerpt, excerpt_of, slowest_steps, typical_steps
from mpisgd.tools.timeline.report.figures import (
    MemoryFigures,
    Steps,
    divisions_of,
    links_of,
    memory_of,
    steps_of,
)
from mpisgd.tools.timeline.summary import Execution, Summary, executions, summarise

__all__ = ["data_of", "html_of"]

Event = dict[str, Any]
MAX_POINTS = 1_000  # along a chart
MAX_CELLS = 60_000  # points of all ranks in a chart
MAX_ROWS = 30  # of a table
MAX_DETAILS = 120  # characters
WITHOUT_STEPS_US = 1e6  # what an excerpt shows then
ORDER = ("computation", "communication", "wait", "other", "hidden")


def html_of(data: dict[str, Any]) -> str:
    """Return the page for `data_of` a timeline."""
    folder = files(__package__)
    page, style, script = ((folder / f"page.{suffix}").read_text() for suffix in ("html", "css", "js"))
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # else it could end the script
    return page.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script).replace("/*RECORD*/", text)


def data_of(events: Sequence[Event], title: str, chosen: tuple[int, int] | None = None) -> dict[str, Any]:
    """Return the content of the page for a timeline, ready for JSON; times in microseconds.

    Args:
        events: of the timeline.
        title: of the page.
        chosen: the first and the last step of the excerpt; None: typical ones, and the slowest.
    """
    about = {e["args"]["rank"]: e["args"] for e in events if e["name"] == "mpisgd"}
    hosts = {rank: str(args.get("host", "?")) for rank, args in sorted(about.items())}
    summary, done, steps = summarise(events), executions(events), steps_of(events)
    start_us = min((e["ts"] for e in events if "ts" in e), default=0.0)
    whole = np.array([start_us]), np.array([start_us + summary.duration_us])
    stretches = {rank: (steps[rank].begins, steps[rank].ends) if rank in steps else whole for rank in hosts}
    divisions = divisions_of(events, stretches)
    excerpts = _excerpts(events, steps, start_us, start_us + summary.duration_us, chosen)
    return {
        "title": title,
        "ranks": list(hosts),
        "hosts": list(hosts.values()),
        "duration": round(summary.duration_us),
        "notes": _notes(summary, steps),
        "steps": _per_step(steps, divisions),
        "division": _totals(divisions),
        **_tables(summary, done, start_us),
        "links": [link._asdict() for link in links_of(events, done, hosts)][:MAX_ROWS],
        "memory": _memory(memory_of(events), start_us),
        "kinds": KINDS,
        "excerpts": [_as_columns(excerpt, start_us) for excerpt in excerpts],
    }


def _notes(summary: Summary, steps: dict[int, Steps]) -> list[str]:
    notes = []
    if not steps:
        notes.append("No steps are in the record: no torch optimizer has made two while it was recorded.")
    if summary.clock_error_us:
        notes.append(f"Clocks of different hosts may differ by {summary.clock_error_us:.0f} us.")
    if summary.lost:
        notes.append(f"{summary.lost} events were lost: more came than were kept until they were written.")
    return notes


def _totals(divisions: dict[int, Division]) -> dict[int, dict[str, int]]:
    return {
        rank: {name: round(float(getattr(each, name).sum())) for name in ORDER}
        for rank, each in divisions.items()
    }


# -- over the steps ----------------------------------------------------------------------------------------


def _per_step(steps: dict[int, Steps], divisions: dict[int, Division]) -> dict[str, Any]:
    """Return for each rank the times of its steps, and how much of them it waited.

    Of a long run a point stands for several steps: their median, and the slowest of them beside it.
    """
    if not steps:
        return {"numbers": [], "together": 1, "time": {}}
    first = min(each.numbers[0] for each in steps.values())
    num = max(each.numbers[-1] for each in steps.values()) - first + 1
    together = -(-num // max(1, min(MAX_POINTS, MAX_CELLS // len(steps))))
    lengths = {rank: each.ends - each.begins for rank, each in steps.items()}

    def columns(values: dict[int, Floats], merge: Callable[..., Floats]) -> dict[int, list[int | None]]:
        places = {rank: np.array(each.numbers) - first for rank, each in steps.items()}
        return {rank: _merged(places[rank], values[rank], num, together, merge) for rank in steps}

    return {
        "numbers": list(range(first, first + num, together)),
        "together": together,
        "time": columns(lengths, np.nanmedian),
        "slowest": columns(lengths, np.nanmax) if together > 1 else {},
        "communication": columns(
            {rank: each.communication for rank, each in divisions.items()}, np.nanmedian
        ),
        "wait": columns({rank: each.wait for rank, each in divisions.items()}, np.nanmedian),
    }


def _merged(
    places: Any, values: Floats, num: int, together: int, merge: Callable[..., Floats]
) -> list[int | None]:
    """Return one number for `together` steps, None where a rank has made none of them."""
    by_step = np.full(-(-num // together) * together, np.nan)
    by_step[places] = values
    groups = by_step.reshape(-1, together)
    made = ~np.isnan(groups).all(axis=1)
    merged = np.zeros(len(groups))
    merged[made] = merge(groups[made], axis=1)
    return [round(value) if known else None for value, known in zip(merged.tolist(), made, strict=True)]


# -- tables ------------------------------------------------------------------------------------------------


def _tables(summary: Summary, done: Iterable[Execution], start_us: float) -> dict[str, Any]:
    """Return the rows of the tables; the numbers are those of `python -m mpisgd trace`."""
    slowest = sorted(done, key=lambda each: -each.moving_us)[: MAX_ROWS // 2]
    return {
        "common": summary.num_common,
        "operations": [_rounded(row._asdict()) for row in summary.rows[:MAX_ROWS]],
        "slowest": [
            _rounded(
                {
                    "rank": each.rank,
                    "at_us": each.arrival_us - start_us,
                    "what": each.label[:MAX_DETAILS],
                    "algorithm": each.what[2],
                    "moving_us": each.moving_us,
                    "wait_us": each.wait_us,
                    "nbytes": each.nbytes,
                }
            )
            for each in slowest
        ],
        "late": [_rounded(late._asdict()) for late in summary.late[:MAX_ROWS]],
        "overlaps": [_rounded(each._asdict()) for each in summary.overlaps],
    }


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value) if isinstance(value, float) else value for name, value in row.items()}


def _memory(memory: dict[int, MemoryFigures], start_us: float) -> dict[int, dict[str, list[int]]]:
    num_points = max(1, min(MAX_POINTS, MAX_CELLS // max(1, len(memory))) // 2)
    return {rank: _thinned(each, start_us, num_points) for rank, each in memory.items()}


def _thinned(memory: MemoryFigures, start_us: float, num_points: int) -> dict[str, list[int]]:
    """Return the memory of a rank in few enough points: of several the one with the most, in KiB."""
    every = -(-len(memory.at_us) // num_points)
    total = np.add(memory.own, memory.device)
    kept = [i + int(np.argmax(total[i : i + every])) for i in range(0, len(memory.at_us), every)]
    return {
        "at": [round(memory.at_us[i] - start_us) for i in kept],
        "own": [memory.own[i] // 1024 for i in kept],
        "shared": [memory.shared[i] // 1024 for i in kept],
        "device": [memory.device[i] // 1024 for i in kept] if any(memory.device) else [],
    }


# -- excerpts ----------------------------------------------------------------------------------------------


def _excerpts(
    events: Sequence[Event],
    steps: dict[int, Steps],
    start_us: float,
    end_us: float,
    chosen: tuple[int, int] | None,
) -> list[Excerpt]:
    if not steps:
        end_us = min(end_us, start_us + WITHOUT_STEPS_US)
        return [excerpt_of(events, "the beginning", start_us, end_us)]
    if chosen is not None:
        return [_of_steps(events, "the chosen steps", steps, *chosen)]
    return [
        _of_steps(events, "typical steps", steps, *typical_steps(steps)),
        _of_steps(events, "around the slowest step", steps, *slowest_steps(steps)),
    ]


def _of_steps(events: Sequence[Event], name: str, steps: dict[int, Steps], first: int, last: int) -> Excerpt:
    """Return the excerpt from the first beginning of some steps to their last end, on any rank."""
    inside = [
        (float(begin), float(end), number)
        for each in steps.values()
        for number, begin, end in zip(each.numbers, each.begins, each.ends, strict=True)
        if first <= number <= last
    ]
    if not inside:
        known = [number for each in steps.values() for number in each.numbers]
        raise InvalidArgument(
            f"steps {first} to {last} are not in the record, which has {min(known)} to {max(known)}"
        )
    begin_us, end_us = min(begin for begin, *_ in inside), max(end for _, end, _ in inside)
    numbers = sorted({number for *_, number in inside})
    title = f"{name}: {numbers[0]} to {numbers[-1]}"
    return excerpt_of(events, title, begin_us, end_us)


def _as_columns(excerpt: Excerpt, start_us: float) -> dict[str, Any]:
    """Return an excerpt with a list for each field of its spans, and each text once."""
    texts: dict[str, int] = {}
    columns = [list(column) for column in zip(*excerpt.spans, strict=True)] or [[] for _ in range(7)]
    rows, begins, lengths, names, kinds, details, nbytes = columns
    return {
        "title": excerpt.title,
        "at": round(excerpt.begin_us - start_us),
        "length": round(excerpt.end_us - excerpt.begin_us),
        "leftOut": excerpt.left_out,
        "rows": excerpt.rows,
        "row": rows,
        "begin": begins,
        "duration": lengths,
        "name": [texts.setdefault(name, len(texts)) for name in names],
        "kind": kinds,
        "detail": [texts.setdefault(detail[:MAX_DETAILS], len(texts)) for detail in details],
        "bytes": nbytes,
        "texts": list(texts),
    }
