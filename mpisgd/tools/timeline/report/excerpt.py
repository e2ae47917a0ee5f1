"""`Excerpt`: the events of a few steps, as rows and columns that a page can draw.

Each rank has rows: for its steps, for where its program waits, for each of its groups, and as many as needed
for what overlaps (messages, negotiated tensors, operations in a queue). What lies within an event is drawn in
the row below.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from mpisgd.tools.timeline.report.figures import Steps

__all__ = ["KINDS", "Excerpt", "excerpt_of", "slowest_steps", "typical_steps"]

Event = dict[str, Any]
MAX_SPANS = 10_000  # of an excerpt; some 30 bytes each, and a detail of 120 at most
NUM_STEPS = 5
ROUNDING_US = 5e-4  # events are noted in nanoseconds
# What a span is drawn as, and in which colour; the page has the same list.
KINDS = ("step", "operation", "move", "wait", "blocked", "queue", "message", "other")
BY_CATEGORY = {
    "step": "step",
    "collective": "operation",
    "carried": "operation",
    "horovod": "operation",
    "blocked": "blocked",
    "queue": "queue",
    "message": "message",
}


class _Span(NamedTuple):
    """An event with a beginning and an end; `track` is what it is drawn beside, in order."""

    rank: int
    track: tuple[int, str]
    begin: float
    end: float
    name: str
    kind: str
    detail: str
    nbytes: int


class Excerpt(NamedTuple):
    """Some stretch of a timeline.

    Attributes:
        title: what it shows.
        begin_us: where it starts.
        end_us: where it ends.
        rows: for each row its rank and its name.
        spans: (row, begin in microseconds since `begin_us`, duration, name, index in KINDS, detail, bytes).
        left_out: how many more there were, the shortest ones.
    """

    title: str
    begin_us: float
    end_us: float
    rows: list[tuple[int, str]]
    spans: list[tuple[int, int, int, str, int, str, int]]
    left_out: int


def typical_steps(steps: dict[int, Steps]) -> tuple[int, int]:
    """Return the first and the last of some steps in a row that took a median time on the first rank."""
    first = next(iter(steps.values()))
    num = min(NUM_STEPS, len(first.numbers))
    times = sorted(
        (first.ends[i + num - 1] - first.begins[i], i) for i in range(len(first.numbers) - num + 1)
    )
    at = times[len(times) // 2][1]
    return first.numbers[at], first.numbers[at + num - 1]


def slowest_steps(steps: dict[int, Steps]) -> tuple[int, int]:
    """Return the slowest step of any rank with its neighbours."""
    _, number = max(
        (float(end - begin), number)
        for each in steps.values()
        for number, begin, end in zip(each.numbers, each.begins, each.ends, strict=True)
    )
    return number - 1, number + 1


def excerpt_of(
    events: Sequence[Event], title: str, begin_us: float, end_us: float, max_spans: int = MAX_SPANS
) -> Excerpt:
    """Return the spans that lie between two moments, wholly or in part."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    inside = (e for e in events if e["ph"] == "X" and e["ts"] <= end_us and e["ts"] + e["dur"] >= begin_us)
    overlapping = (each for each in _overlapping(events) if each.begin <= end_us and each.end >= begin_us)
    found = [*(_on_track(event, names) for event in inside), *overlapping]
    spans = [span for span in found if round(span.end - span.begin) > 0]
    longest = sorted(spans, key=lambda span: span.begin - span.end)[:max_spans]
    rows: dict[tuple[int, tuple[int, str], int], int] = {}
    placed = sorted((span.rank, span.track, row, span) for span, row in _laid_out(longest))
    for rank, track, row, _ in placed:
        rows.setdefault((rank, track, row), len(rows))
    drawn = [
        (
            rows[span.rank, span.track, row],
            round(span.begin - begin_us),
            round(span.end - span.begin),
            span.name,
            KINDS.index(span.kind),
            span.detail,
            span.nbytes,
        )
        for *_, row, span in placed
    ]
    labels = [(rank, track[1]) for rank, track, _ in rows]
    return Excerpt(title, begin_us, end_us, labels, drawn, len(spans) - len(longest))


def _on_track(event: Event, names: dict[tuple[int, int], str]) -> _Span:
    """Return the spans of a track, nested or in turn: first the steps, then the program."""
    track, kind = names[event["pid"], event["tid"]], _kind(event)
    order = {"step": 0, "blocked": 1}.get(kind, 2)
    return _Span(
        event["pid"],
        (order, f"{track} waits" if kind == "blocked" else track),
        event["ts"],
        event["ts"] + event["dur"],
        event["name"],
        kind,
        _detail(event["args"]),
        event["args"].get("bytes", 0),
    )


def _kind(event: Event) -> str:
    if event["cat"] == "phase":
        return {"wait for the others": "wait", "move": "move"}.get(event["name"], "other")
    return BY_CATEGORY.get(event["cat"], "other")


def _detail(args: dict[str, Any]) -> str:
    """Return the details of a span beside its name."""
    return ", ".join(args[name] for name in ("what", "transport") if name in args)


def _overlapping(events: Iterable[Event]) -> Iterator[_Span]:
    """Return the spans that may overlap others of their kind, each from a pair of events."""
    begun: dict[tuple[int, str, str, str], Event] = {}
    for event in events:
        if event["ph"] not in ("b", "e"):
            continue
        key = (event["pid"], event["cat"], event["id2"]["local"], event["name"])
        if event["ph"] == "b":
            begun[key] = event
        elif (begin := begun.pop(key, None)) is not None:
            yield _Span(
                event["pid"],
                (3, event["cat"]),
                begin["ts"],
                event["ts"],
                event["name"],
                "wait" if event["name"].startswith("NEGOTIATE_") else BY_CATEGORY.get(event["cat"], "other"),
                _detail(begin.get("args", {})),
                begin.get("args", {}).get("bytes", 0),
            )


def _laid_out(spans: Iterable[_Span]) -> Iterator[tuple[_Span, int]]:
    """Return each span with a row of its track in which it overlaps no other: as high up as possible."""
    free_from: dict[tuple[int, tuple[int, str]], list[float]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        rows = free_from[span.rank, span.track]
        row = next((i for i, free in enumerate(rows) if free <= span.begin + ROUNDING_US), len(rows))
        rows[row : row + 1] = [span.end]
        yield span, row
