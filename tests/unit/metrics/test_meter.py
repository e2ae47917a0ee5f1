"""What a rank did, added up while it goes on: the same as a report says afterwards."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mpisgd import tracing
from mpisgd.metrics.meter import Meter
from mpisgd.monitor.mailbox_pages import Meters
from mpisgd.timeline.accounts import Activity
from mpisgd.tracing import Track

TRACK = Track("group world", (0, 1))
MS = 1_000_000


class Clock:
    """What the meter reads."""

    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.monotonic_ns", clock)
    monkeypatch.setattr(tracing, "under_way", {})
    return clock


def drawn_spans(drawn: random.Random) -> list[tuple[str, int, int, dict]]:
    """Operations of two groups, some beside the program, and its waits; several overlap. In milliseconds."""
    spans = []
    for _ in range(60):
        begin, took = drawn.randrange(2000), drawn.randrange(1, 400)
        arrived, wait = took * drawn.random() / 3, took * drawn.random() / 3
        args = {"arrived_us": arrived * 1000, "wait_us": wait * 1000, "bytes": 8, "transport": "node"}
        args["blocking"] = drawn.random() < 0.3
        cat = drawn.choice(["collective", "carried", "negotiation", "blocked", "message"])
        spans.append((cat, begin, begin + took, args))
    return spans


def given(meter: Meter, cat: str, begin_ns: int, end_ns: int, args: dict) -> None:
    if cat == "message":
        meter.overlapping("message", "message 7", [("recv from rank 1", begin_ns, end_ns)], {})
    else:
        meter.span(TRACK, "any", begin_ns, end_ns, cat, args)


@pytest.mark.parametrize("seed", range(8))
def test_sums_made_on_the_way_are_those_of_the_whole(clock, seed):
    """Whatever is under way meanwhile, however often they are made."""
    drawn, words = random.Random(seed), [0] * len(Meters._fields)
    meter, spans, whole = Meter(words, [0, 1]), drawn_spans(drawn), Activity()
    moments = sorted(
        [(begin, 0, i) for i, (_, begin, _, _) in enumerate(spans)]
        + [(end, 1, i) for i, (_, _, end, _) in enumerate(spans)]
        + [(drawn.randrange(2400), 2, -1) for _ in range(30)]
    )
    for at_ms, what, i in moments:
        clock.now_ns = at_ms * MS
        if what == 0:
            tracing.under_way[i] = clock.now_ns
        elif what == 1:
            cat, begin, end, args = spans[i]
            given(meter, cat, begin * MS, end * MS, args)
            del tracing.under_way[i]
        else:
            meter.add_up()
    clock.now_ns = 2400 * MS
    meter.add_up()
    for cat, begin, end, args in spans:
        if cat == "message":
            whole.add_overlapping(cat, "recv from rank 1", begin, end)
        else:
            whole.add_span(cat, begin, end, args, us=1e-3)
    expected = [float(part[0]) for part in whole.divide(np.array([0.0]), np.array([2400.0]))]
    sums = Meters(*words)
    assert [ns / MS for ns in sums[1:6]] == pytest.approx(expected, abs=1e-3)
    assert sum(expected[:4]) == pytest.approx(2400)
    assert sums.shared_bytes == 8 * sum(cat in ("collective", "carried") for cat, *_ in spans)


def test_what_is_under_way_is_not_taken_for_computation(clock):
    """It was, once the rank had waited for a second, and the wait was lost."""
    words = [0] * len(Meters._fields)
    meter = Meter(words, [0, 1])
    tracing.under_way["all_reduce"] = clock.now_ns = 100 * MS
    clock.now_ns = 5000 * MS
    meter.add_up()
    assert Meters(*words) == Meters(computation_ns=100 * MS)
    args = {"arrived_us": 0.0, "wait_us": 4_900_000.0, "blocking": True, "bytes": 8, "transport": "direct"}
    meter.span(TRACK, "all_reduce", 100 * MS, 5000 * MS, "collective", args)
    del tracing.under_way["all_reduce"]
    meter.span(Track("steps"), "step 2", 0, 5000 * MS, "step", {"number": 2})
    meter.sent(1, 30)
    meter.sent(2, 500)
    meter.add_up()
    assert Meters(*words) == Meters(
        num_steps=1,
        computation_ns=100 * MS,
        wait_ns=4900 * MS,
        to_host_bytes=30,
        to_others_bytes=500,
        attached_bytes=8,
    )
