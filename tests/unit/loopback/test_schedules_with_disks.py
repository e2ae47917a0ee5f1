"""Schedules that save and load checkpoints on disks that fail, and what these must find."""

from __future__ import annotations

import contextlib
import gc
import sys
from pathlib import Path

import pytest

from mpisgd.checkpoint import files, newest, saving
from mpisgd.errors import CheckpointError

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from fuzzing import schedules  # noqa: E402
from fuzzing.schedule import Act, Schedule  # noqa: E402

NUM_SEEDS = 25
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*failed and nobody waited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*share a host but no memory:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _collects_what_nobody_waited_for():
    yield
    gc.collect()


def wrong(seeds: int = NUM_SEEDS) -> str:
    """Return what the first schedule says that goes wrong."""
    drawn = (schedules.draw(seed, writes=True) for seed in range(seeds))
    return next((said for each in drawn if (said := schedules.check(each))), "")


def test_nothing_goes_wrong():
    assert wrong() == ""


def test_a_schedule_is_the_same_from_its_seed_and_some_have_checkpoints_anyway():
    assert [schedules.draw(seed, writes=True) for seed in range(9)] == [
        schedules.draw(seed, writes=True) for seed in range(9)
    ]
    kinds = [{act.kind for act in schedules.draw(seed).acts} for seed in range(100)]
    assert 5 < sum(bool(each & {"save", "write", "load"}) for each in kinds) < 40


def write_where_it_is_read(monkeypatch):
    @contextlib.contextmanager
    def beside(path, *, private):
        with files.DiskFile(path, "wb") as file:
            yield file, path

    monkeypatch.setattr(files, "_temporary_beside", beside)


def leave_temporary_files(monkeypatch):
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: None)


def tell_the_first_rank_alone(monkeypatch):
    at_root = saving.at_root

    def tells(group, operation, action):
        try:
            return at_root(group, operation, action)
        except CheckpointError:
            if group.rank == 0:
                raise
            return Path()

    monkeypatch.setattr(saving, "at_root", tells)


def take_no_notice(monkeypatch):
    def write(path, write, mode):
        with contextlib.suppress(OSError):
            write_file(path, write, mode)

    write_file = files.write_file
    monkeypatch.setattr(files, "write_file", write)


@pytest.mark.parametrize(
    "mutation", [write_where_it_is_read, leave_temporary_files, tell_the_first_rank_alone, take_no_notice]
)
def test_a_fault_is_found(monkeypatch, mutation):
    mutation(monkeypatch)
    assert wrong(150)


# Seed 9. A checkpoint appeared after the first rank had looked, and before another host's did: `load` said
# that each host has a folder of its own.

WRITTEN_MEANWHILE = (Act("write", numel=1, async_op=True, number=5), Act("load", number=6))


def test_a_checkpoint_that_is_written_while_ranks_look_is_no_folder_of_another_host():
    assert schedules.check(Schedule(9, 3, (1, 1, 1), WRITTEN_MEANWHILE, num_draws=0)) == ""


def test_a_folder_of_another_host_is_still_told(tmp_path):
    seen = [newest.Seen("here", -1), newest.Seen("there", 5)]
    with pytest.raises(CheckpointError, match="a folder of its own"):
        newest.newest_intact(tmp_path, seen, ())
