"""A schedule that fails is reduced to what it needs; the program that is printed fails in the same way."""

from __future__ import annotations

import contextlib
import gc
import io
import sys
from pathlib import Path

import pytest

from mpisgd.job.threads_as_ranks import Loss
from mpisgd.transport.shm.transport import ShmTransport

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from fuzzing.schedule import WORLD, Schedule, draw  # noqa: E402
from fuzzing.schedules import check, python_text, shrink  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*failed and nobody waited:RuntimeWarning")


@pytest.fixture(autouse=True)
def _collects_what_nobody_waited_for():
    yield
    gc.collect()


def first_that(holds) -> Schedule:
    return next(schedule for seed in range(2000) if holds(schedule := draw(seed)))


def test_only_what_is_needed_is_left():
    def fails(schedule: Schedule) -> str:
        kinds = [act.kind for act in schedule.acts]
        draws = 10**6 if schedule.num_draws is None else schedule.num_draws
        wrong = "message" in kinds and "close" in kinds and schedule.size >= 2 and draws >= 37
        return "wrong: as wanted" if wrong else ""

    schedule = first_that(lambda each: fails(each) and len(each.acts) > 8 and each.loss is not None)
    shrunk = shrink(schedule, fails(schedule), fails, max_runs=500)
    assert sorted(act.kind for act in shrunk.acts) == ["close", "group", "message"]
    assert (shrunk.size, shrunk.loss, shrunk.num_draws) == (2, None, 37)
    assert all(act.numel == 1 and not act.async_op for act in shrunk.acts)


def test_a_loss_that_is_needed_stays():
    def fails(schedule: Schedule) -> str:
        return "wrong: as wanted" if schedule.loss is not None else ""

    shrunk = shrink(first_that(fails), "wrong: as wanted", fails)
    assert shrunk.acts == ()
    assert isinstance(shrunk.loss, Loss)


def test_acts_in_a_group_go_with_the_act_that_makes_it():
    schedule = first_that(lambda each: any(act.group != WORLD for act in each.acts))

    def fails(smaller: Schedule) -> str:
        made = {act.number for act in smaller.acts if act.kind == "group"} | {WORLD}
        assert all(act.group in made for act in smaller.acts)
        return "" if smaller == schedule else "wrong: as wanted"

    shrink(schedule, "wrong: as wanted", fails)


def test_the_printed_program_fails_as_the_schedule_did(monkeypatch):
    monkeypatch.setattr(ShmTransport, "swap_buffers", lambda self: None)
    schedule = first_that(check)
    said = check(schedule)
    shrunk = shrink(schedule, said, check, max_runs=100)
    assert len(shrunk.acts) <= 3
    assert shrunk.num_draws is not None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(python_text(shrunk), {})
    assert printed.getvalue().partition(":")[0] == said.partition(":")[0]
