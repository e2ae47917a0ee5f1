"""Which faults a seed chooses, and what is made of the journals of a run."""

from __future__ import annotations

import mmap
import os
import random

import pytest
from fault_injector import MAX_DELAY_S, MOMENTS, Fault, draw, read, write
from fault_resources import resources
from fault_verdict import judge, read_events

LOSSES = [1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125]


def drawn(seed: int, **options: object) -> Fault:
    choices = {"ranks": range(4), "steps": range(3, 30), "every": 5, **options}
    return draw("kill", random.Random(seed), **choices)  # type: ignore[arg-type]


def test_a_seed_is_a_fault():
    assert drawn(3) == drawn(3)
    assert len({drawn(seed) for seed in range(50)}) == 50


@pytest.mark.parametrize("seed", range(40))
def test_faults_are_where_they_may_be(seed):
    fault = drawn(seed)
    assert fault.rank in range(4)
    assert fault.step in range(3, 30)
    assert fault.moment in MOMENTS
    assert 0 <= fault.delay_s <= MAX_DELAY_S
    if fault.moment in ("commit", "checkpoint"):
        assert fault.step % 5 == 4, "there is none behind other steps"


def test_every_moment_and_every_rank_is_hit():
    faults = [drawn(seed) for seed in range(300)]
    assert {fault.moment for fault in faults} == set(MOMENTS)
    assert {fault.rank for fault in faults} == set(range(4))


def test_ranks_read_the_plan_that_was_written(tmp_path):
    plan = [drawn(1), Fault("stop", 0, 3, "commit", 0.001, 2.0)]
    write(tmp_path / "plan.json", plan)
    assert read(tmp_path / "plan.json") == plan
    assert read(tmp_path / "none.json") == []


class Story:
    """What two ranks write down, made up."""

    def __init__(self) -> None:
        self.events: list[dict[str, object]] = []

    def tell(self, event: str, pid: int = 1, **facts: object) -> Story:
        self.events.append({"event": event, "pid": pid, "t": float(len(self.events)), **facts})
        return self

    def steps(self, *steps: int, size: int = 2, off: float = 0.0) -> Story:
        for step in steps:
            for pid in range(1, size + 1):
                self.tell("step", pid, step=step, loss=LOSSES[step] + off, size=size)
        return self

    def begin(self, step: int, size: int) -> Story:
        for pid in range(1, size + 1):
            self.tell("begin", pid, step=step, size=size)
        return self

    def committed(self, step: int) -> Story:
        return self.tell("committed", 1, step=step).tell("committed", 2, step=step)


def a_loss(resumed: int) -> Story:
    """Two ranks, a commit behind step 2, one is lost in step 4, and the other goes on from `resumed`."""
    story = Story().begin(0, 2).steps(0, 1).committed(2).steps(2, 3).tell("fault", 9, kind="kill")
    return story.begin(resumed, 1).steps(*range(resumed, 6), size=1).tell("end")


def test_a_run_as_it_should_be():
    verdict = judge(a_loss(2).events, LOSSES)
    assert (verdict.faults, verdict.finished, verdict.wrong, verdict.ended) == (1, True, [], 1)
    assert (verdict.steps_lost, verdict.sizes) == ([2], [2, 1])
    assert verdict.recovery_s == [2.0]


def test_a_commit_that_is_lost_is_told():
    assert "went on from step 1, although step 2 was kept" in judge(a_loss(1).events, LOSSES).wrong


def test_a_loss_that_is_another_is_told():
    story = Story().begin(0, 2).steps(0, 1).steps(2, off=1e-4)
    wrong = judge(story.events, LOSSES).wrong
    assert len(wrong) == 2
    assert wrong[0].startswith("step 2 on 2 ranks")


def test_a_run_that_stops_early_is_not_finished():
    assert not judge(Story().begin(0, 2).steps(0, 1, 2).events, LOSSES).finished


def test_a_fault_that_nobody_notices_loses_nothing():
    story = Story().begin(0, 2).steps(0, 1).tell("fault", 9, kind="stop").steps(2, 3, 4, 5)
    verdict = judge(story.events, LOSSES)
    assert (verdict.steps_lost, verdict.recovery_s, verdict.wrong) == ([0], [1.0], [])


def test_a_new_start_must_know_what_was_saved():
    story = Story().begin(0, 2).steps(0, 1).tell("saved", 1, step=2).tell("fault", 9, kind="kill")
    story.tell("begin", 7, step=0, size=2)
    assert judge(story.events, LOSSES).wrong == ["went on from step 0, although step 2 was kept"]


def test_memory_that_grows_with_the_losses_is_told():
    """One process keeps what it had in its first world, two losses long, the other does not."""
    kept = {"memory": 2, "memory_bytes": 9000, "of_mpi": 4, "files": 25, "sockets": 3}
    story = Story()
    for loss in range(3):
        story.tell("begin", 1, step=0, size=2, holds={**kept, "files": 25 + 4 * loss})
        story.tell("begin", 2, step=0, size=2, holds={**kept, "memory": 2 + 3 * loss})
    assert judge(story.events, LOSSES).wrong == ["process 2 survived 2 losses: it has memory 8, before 2"]


def test_what_is_held_counts_memory_that_is_mapped_and_files_that_are_open():
    before = resources()
    descriptor = os.memfd_create("counted")
    os.ftruncate(descriptor, 8192)
    with mmap.mmap(descriptor, 8192):
        during = resources()
    os.close(descriptor)
    assert during["memory"] - before["memory"] == 1
    assert during["memory_bytes"] - before["memory_bytes"] == 8192
    assert during["files"] - before["files"] == 2, "Python's mmap keeps a descriptor of its own"
    assert resources() == before


def test_half_a_line_of_a_process_that_was_killed_is_left_out(tmp_path):
    (tmp_path / "rank-1.jsonl").write_text('{"event": "step", "t": 2.0}\n{"event": "st')
    (tmp_path / "rank-2.jsonl").write_text('{"event": "begin", "t": 1.0}\n')
    assert [event["event"] for event in read_events(tmp_path)] == ["begin", "step"]
