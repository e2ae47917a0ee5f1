"""The report's numbers: where the time goes, what a link carried, from events that are known."""

from __future__ import annotations

import random

import numpy as np
import pytest
from invented_runs import counter, head, operation, span, step

from mpisgd.timeline.accounts import Coverage
from mpisgd.tools.timeline.report.figures import divisions_of, links_of, memory_of, steps_of
from mpisgd.tools.timeline.summary import executions


def test_coverage_is_what_counting_moments_gives():
    drawn = random.Random(3)
    intervals = [(begin := drawn.randrange(100), begin + drawn.randrange(12)) for _ in range(20)]
    covered = [any(begin <= at < end for begin, end in intervals) for at in range(130)]
    stretches = [(begin := drawn.randrange(110), begin + drawn.randrange(20)) for _ in range(50)]
    found = Coverage(intervals).within(*np.array(stretches, dtype=float).T)
    assert found.tolist() == [sum(covered[begin:end]) for begin, end in stretches]
    assert Coverage([]).within(np.array([0.0]), np.array([10.0])).tolist() == [0.0]


def division(events, begin: float = 0.0, end: float = 1000.0) -> list[float]:
    (found,) = divisions_of(events, {0: (np.array([begin]), np.array([end]))}).values()
    return [float(part[0]) for part in found]


def test_a_blocking_operation_is_communication_and_waiting():
    events = head(0, 2) + operation(0, 1, 100, 30, 200, arrived=5)
    assert division(events) == [765, 205, 30, 0, 0]


def test_what_moves_while_the_program_computes_is_hidden():
    events = head(0, 2) + operation(0, 1, 100, 30, 200, blocking=False)
    assert division(events) == [1000, 0, 0, 0, 200]
    events.append(
        span(0, 3, "wait for bucket 0", "blocked", 250, 150)
    )  # 80 us of the move, then 70 of nothing
    assert division(events) == [850, 80, 0, 70, 120]


def test_a_stretch_has_only_its_part():
    events = head(0, 2) + operation(0, 1, 100, 100, 200)
    assert division(events, 150, 250) == [0, 50, 50, 0, 0]


def test_while_one_group_moves_and_another_waits_it_is_communication():
    events = head(0, 2) + operation(0, 1, 100, 0, 100, blocking=False) + operation(0, 2, 150, 300, 0)
    assert division(events) == [700, 50, 250, 0, 50]


def test_the_wait_for_a_message_is_waiting():
    message = {
        "name": "recv from rank 1",
        "cat": "message",
        "id2": {"local": "message 7"},
        "pid": 0,
        "tid": 0,
    }
    events = [*head(0, 2), {**message, "ph": "b", "ts": 50.0, "args": {"bytes": 8}}]
    events += [{**message, "ph": "e", "ts": 300.0}, span(0, 3, "wait for recv", "blocked", 100, 210)]
    assert division(events) == [790, 0, 200, 10, 0]


def test_steps_are_those_of_the_optimizer_with_most_of_them():
    events = head(0, 1) + [step(0, number, 100 * number, 90) for number in (3, 2, 4)]
    events.append(span(0, 9, "step 2", "step", 0, 1, number=2))
    events.append({**events[1], "name": "thread_name", "tid": 9, "args": {"name": "steps of optimizer 2"}})
    (steps,) = steps_of(events).values()
    assert steps.numbers == [2, 3, 4]
    assert (steps.ends - steps.begins).tolist() == [90, 90, 90]
    assert steps_of(head(0, 1)) == {}


def test_links_join_hosts_and_count_nothing_twice():
    events = [*head(0, 3, "a"), *head(1, 3, "a"), *head(2, 3, "b")]
    for rank in range(3):
        events += operation(rank, 1, 0, 0, 10, transport="hierarchical")
        events += operation(rank, 2, 20, 0, 10, transport="ring")  # messages, which are counted as such
    events += [
        counter(0, "bytes sent", 10, **{"to rank 1": 5}),
        counter(0, "bytes sent", 20, **{"to rank 1": 7}),
    ]
    events += [counter(1, "bytes sent", 20, **{"to rank 2": 100, "to rank 0": 1})]
    found = {link[:3]: link.nbytes for link in links_of(events, executions(events), {0: "a", 1: "a", 2: "b"})}
    assert found == {
        ("a", "a", "shared memory"): 2000,
        ("b", "b", "shared memory"): 1000,
        ("a", "b", "messages"): 100,
        ("a", "a", "messages"): 8,
    }


def test_memory_is_by_rank_in_the_order_of_time():
    events = [
        counter(rank, "memory", at, own=at + rank, shared=1, device=0) for at in (5, 9) for rank in (1, 0)
    ]
    found = memory_of(events)
    assert list(found) == [0, 1]
    assert found[1].at_us == [5, 9]
    assert found[1].own == [6, 10]


@pytest.mark.parametrize("seed", range(3))
def test_the_parts_add_up_to_the_whole(seed):
    drawn = random.Random(seed)
    events = head(0, 2)
    for number in range(30):
        at, lengths = drawn.uniform(0, 900), [drawn.uniform(0, 80) for _ in range(2)]
        events += operation(0, number, at, *lengths, blocking=drawn.random() < 0.5)
        events.append(span(0, 3, "wait", "blocked", drawn.uniform(0, 900), drawn.uniform(0, 60)))
    *parts, hidden = division(events)
    assert sum(parts) == pytest.approx(1000)
    assert min(parts) >= 0
    moves = Coverage((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["name"] == "move")
    assert hidden + parts[1] == pytest.approx(float(moves.within(np.array([0.0]), np.array([1000.0]))[0]))
