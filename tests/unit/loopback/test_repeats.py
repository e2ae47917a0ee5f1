"""A run repeats from its seed in one process, whatever ran before, is garbage, or ends late in real time."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

import pytest
import torch

import mpisgd
from mpisgd import checkpoint
from mpisgd.job.threads_as_ranks import run_ranks
from mpisgd.transport.loopback.communicator import LoopbackCommunicator
from mpisgd.transport.loopback.draws import Draws
from mpisgd.transport.loopback.network import Context, Network
from mpisgd.transport.loopback.scheduler import SeededScheduler

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from fuzzing import schedules  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*failed and nobody waited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*share a host but no memory:RuntimeWarning"),
]
Trace = list[tuple[str, float, int]]
SEEDS = range(50)


@pytest.fixture
def traces(monkeypatch) -> list[Trace]:
    """What each scheduler has chosen: who runs, when, and how many numbers were drawn by then."""
    made: list[Trace] = []
    choose, make = SeededScheduler._choose, SeededScheduler.__init__

    def begin(self, *args, **options):
        make(self, *args, **options)
        made.append([])
        self.trace = made[-1]

    def choose_and_note(self):
        task = choose(self)
        self.trace.append((task.thread.name if task else "", self._now_s, self.draws.number))
        return task

    monkeypatch.setattr(SeededScheduler, "__init__", begin)
    monkeypatch.setattr(SeededScheduler, "_choose", choose_and_note)
    yield made
    gc.collect()


def test_schedules_repeat_at_once_and_after_others(traces):
    def run(seed: int) -> tuple[str, list[Trace]]:
        traces.clear()
        return schedules.check(schedules.draw(seed)), list(traces)

    first = {seed: run(seed) for seed in SEEDS}
    for seed in SEEDS:
        assert run(seed) == first[seed], seed
        assert run(seed) == first[seed], seed


def test_another_seed_gives_another_trace(traces):
    for seed in range(5):
        run_ranks(3, mpisgd.barrier, seed=seed)
    assert len({str(trace) for trace in traces}) == 5


# `is_alive()` of a thread tells what is so in real time: one that has ended may not quite have.


def test_whether_a_checkpoint_is_skipped_depends_on_no_real_time(traces, tmp_path, monkeypatch):
    def program(folder: Path) -> list[bool]:
        begun = []
        with checkpoint.Writer(folder, when_busy="skip") as writer:
            for step in range(4):
                begun.append(writer.save(step, value=torch.zeros(3)))
                mpisgd.barrier()
        return begun

    def run(name: str, seed: int) -> tuple[list[list[bool]], list[Trace]]:
        traces.clear()
        return run_ranks(2, lambda: program(tmp_path / f"{name} {seed}"), seed=seed), list(traces)

    soon = [run("soon", seed) for seed in range(6)]
    end = SeededScheduler._end

    def end_late(self, task):
        end(self, task)
        time.sleep(0.02)

    monkeypatch.setattr(SeededScheduler, "_end", end_late)
    assert [run("late", seed) for seed in range(6)] == soon


# Which communicators of a rank are revoked was decided by a WeakSet: by when garbage was collected.


def test_which_communicators_are_revoked_does_not_depend_on_garbage():
    def revoked(collects: bool) -> tuple[bool, int]:
        draws = Draws(0)
        network = Network(SeededScheduler(draws), [0, 0], 60.0)
        context = Context(network, [0, 1])
        forgotten = LoopbackCommunicator(context, 0)
        forgotten.itself = forgotten
        del forgotten
        if collects:
            gc.collect()
        network.revoke_all(0)
        return context.is_revoked, draws.number

    assert revoked(True) == revoked(False) == (True, 1)
