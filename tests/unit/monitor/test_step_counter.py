"""The count of a program's steps: by optimizer, in words that may move, and in the timeline."""

from __future__ import annotations

import pytest
import torch

from mpisgd import tracing
from mpisgd.monitor.step_counter import MAX_OPTIMIZERS, StepCounter

FIRST, SECOND = (torch.optim.SGD([torch.zeros(1)], lr=0.1) for _ in range(2))


class Clock:
    """What the counter reads, in milliseconds."""

    def __init__(self) -> None:
        self.now_ms = 0

    def __call__(self) -> int:
        return self.now_ms * 1_000_000


class Spans(list):
    """A sink that keeps the spans."""

    def span(self, track, name, begin_ns, end_ns, cat, args) -> None:
        self.append((track.name, name, begin_ns // 1_000_000, end_ns // 1_000_000, cat, args))


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.monotonic_ns", clock)
    return clock


def step(counter: StepCounter, clock: Clock, optimizer, at_ms: int) -> None:
    clock.now_ms = at_ms
    counter(optimizer, (), {})


def test_the_words_are_of_the_optimizer_that_made_the_last_step(clock):
    counter = StepCounter()
    for at_ms in (100, 140, 180):
        step(counter, clock, FIRST, at_ms)
    assert counter.words == [3, 180_000_000, 40_000_000]
    step(counter, clock, SECOND, 200)
    assert counter.words == [1, 200_000_000, 0]
    step(counter, clock, FIRST, 300)  # after 120 ms: an eighth of the way from 40 to 120
    assert counter.words == [4, 300_000_000, 50_000_000]


def test_a_new_optimizer_begins_at_one_whatever_id_it_has(clock):
    # It went on from the count of one that had been deleted, where Python gave it the same memory.
    counter, gone = StepCounter(), torch.optim.SGD([torch.zeros(1)], lr=0.1)
    for at_ms in (100, 140):
        step(counter, clock, gone, at_ms)
    counter._steps[id(FIRST)] = counter._steps.pop(id(gone))
    del gone
    step(counter, clock, FIRST, 200)
    assert counter.words == [1, 200_000_000, 0]


def test_it_goes_on_in_other_words(clock):
    counter, words = StepCounter(), memoryview(bytearray(24)).cast("Q")
    step(counter, clock, FIRST, 5)
    counter.move_to(words)
    assert words.tolist() == [1, 5_000_000, 0]
    step(counter, clock, FIRST, 7)
    assert words.tolist() == [2, 7_000_000, 2_000_000]
    counter.detach()  # as a child process does, which has the same memory
    step(counter, clock, FIRST, 9)
    assert words.tolist() == [2, 7_000_000, 2_000_000]
    assert counter.words == [3, 9_000_000, 2_000_000]


def test_steps_are_in_the_timeline_from_the_second_one_on_that_it_has_seen(clock, monkeypatch):
    counter, sink = StepCounter(), Spans()
    step(counter, clock, FIRST, 10)
    monkeypatch.setattr(tracing, "sink", sink)
    for at_ms in (500, 510, 530):  # nobody knows when the step that ended at 500 began
        step(counter, clock, FIRST, at_ms)
    step(counter, clock, SECOND, 540)
    step(counter, clock, SECOND, 560)
    assert sink == [
        ("steps", "step 3", 500, 510, "step", {"number": 3}),
        ("steps", "step 4", 510, 530, "step", {"number": 4}),
        ("steps of optimizer 2", "step 2", 540, 560, "step", {"number": 2}),
    ]


def test_a_traced_step_is_none(clock, monkeypatch):
    counter = StepCounter()
    monkeypatch.setattr("mpisgd.monitor.step_counter.is_compiling", lambda: True)
    step(counter, clock, FIRST, 5)
    assert counter.words == [0, 0, 0]


def test_a_program_that_makes_optimizers_all_the_time_fills_no_memory(clock):
    counter = StepCounter()
    many = [torch.optim.SGD([torch.zeros(1)], lr=0.1) for _ in range(3 * MAX_OPTIMIZERS)]
    for optimizer in many:
        step(counter, clock, optimizer, 1)
    assert len(counter._steps) == MAX_OPTIMIZERS
