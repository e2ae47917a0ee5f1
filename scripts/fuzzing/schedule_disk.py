"""Checkpoints in a schedule: saved at once or in the background, and loaded, on disks that fail.

Each group has a folder. Its ranks note alike which steps must be there and which may be: those of which a
save has failed, or has not ended yet. What is loaded must be one of these, whole, and not older than one that
must be there.
"""

import re
from pathlib import Path
from typing import Any

import torch

import mpisgd
from fuzzing.schedule import WORLD, Act, Schedule
from mpisgd import checkpoint
from mpisgd.job.threads_as_ranks import run_ranks

OF_A_DISK = re.compile("No space left on device|Input/output error")
NONE_THERE = "holds no whole checkpoint"
KEPT = 2  # checkpoints, of a save at once


class Disk:
    """The folder of a run, and what its ranks say of it.

    Args:
        folder: of this run alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._told: dict[tuple[int, str], dict[int, str]] = {}
        self._certain: dict[int, Act] = {}  # the newest that must be there, by group

    def tell(self, act: Act, what: str, rank: int, outcome: str) -> None:
        """Note what a rank has got: all of its group must have the same."""
        self._told.setdefault((act.number, what), {})[rank] = outcome

    def note_saved(self, act: Act) -> None:
        """Note that a checkpoint was saved."""
        newest = self._certain.get(act.group)
        if newest is None or newest.number < act.number:
            self._certain[act.group] = act

    def wrong(self) -> str:
        """Return what must not be after the end, "" if nothing."""
        for (number, what), outcomes in self._told.items():
            if len(set(outcomes.values())) > 1:
                return f"apart: {what} of act {number}: {outcomes}"
        if left := [path.name for path in self.folder.rglob("*.tmp")]:
            return f"left over: files {left}"
        for group, act in self._certain.items():
            run_ranks(1, lambda group=group, act=act: _check_loaded(folder_of(self, group), act))
        return ""


def folder_of(disk: Disk, group: int) -> Path:
    """Return the folder of a group."""
    return disk.folder / f"group {group}"


def _value(act: Act) -> torch.Tensor:
    return torch.full((act.numel,), act.number + 1.0)


def _check_loaded(folder: Path, oldest: Act) -> None:
    loaded = checkpoint.load(folder, rng=False)
    assert loaded.step >= oldest.number, f"step {oldest.number} was saved, and {loaded.step} is there"


class RankDisk:
    """The checkpoints of one rank.

    Args:
        schedule: whose acts are done.
        disk: of the run.
    """

    def __init__(self, schedule: Schedule, disk: Disk) -> None:
        self._disk, self._me = disk, mpisgd.rank()
        self._acts = {act.number: act for act in schedule.acts}
        self._must: dict[int, set[int]] = {}
        self._may: dict[int, set[int]] = {}
        self._writers: dict[int, checkpoint.Writer] = {}
        self._written: dict[int, Act] = {}  # by group: what is being written

    def save(self, act: Act, group: Any) -> None:
        """Save at once."""
        folder = folder_of(self._disk, act.group)
        try:
            path = checkpoint.save(
                folder, act.number, keep_last=KEPT, rng=False, group=group, value=_value(act)
            )
        except mpisgd.CheckpointError as exc:
            self._failed(act, "save", exc)
            return
        assert path == folder / f"step-{act.number:08d}.safetensors", path
        self._disk.tell(act, "save", self._me, "saved")
        may, must = self._sets(act.group)
        may |= must  # they may have been removed
        must.clear()
        self._saved(act)

    def write(self, act: Act, group: Any) -> None:
        """Save in the background; the next one, or the end, waits for it."""
        try:
            writer = self._writer(act, group)
            begins = writer.save(act.number, value=_value(act))
        except mpisgd.CheckpointError as exc:  # an earlier one could not be written, or no folder be made
            self._failed(self._written.pop(act.group, act), "write", exc)
            return
        self._disk.tell(act, "write", self._me, "begun" if begins else "skipped")
        if begins:
            if (before := self._written.pop(act.group, None)) is not None:
                self._saved(before)
            self._written[act.group] = act
            self._sets(act.group)[0].add(act.number)
        if not act.async_op:
            self.wait(act.group)

    def _writer(self, act: Act, group: Any) -> checkpoint.Writer:
        if act.group not in self._writers:
            folder, when_busy = folder_of(self._disk, act.group), "skip" if act.number % 2 else "wait"
            self._writers[act.group] = checkpoint.Writer(folder, when_busy=when_busy, rng=False, group=group)
        return self._writers[act.group]

    def wait(self, group: int) -> None:
        """Wait for what is being written in a group."""
        if group not in self._writers:
            return
        act = self._written.pop(group, None)
        try:
            self._writers[group].wait()
        except mpisgd.CheckpointError as exc:
            if act is None:
                raise AssertionError(f"nothing was being written: {exc}") from exc
            self._failed(act, "write", exc)
        else:
            if act is not None:
                self._saved(act)

    def close(self, group: int) -> None:
        """Write nothing in a group any more."""
        self.wait(group)
        self._writers.pop(group, None)

    def wait_for_all(self) -> None:
        """Wait for what is being written in any group."""
        for group in self._writers:
            self.wait(group)

    def load(self, act: Act, group: Any) -> None:
        """Load the newest one."""
        may, must = self._sets(act.group)
        try:
            loaded = checkpoint.load(folder_of(self._disk, act.group), rng=False, group=group)
        except mpisgd.CheckpointError as exc:
            if must or NONE_THERE not in str(exc):
                raise AssertionError(f"{act}: steps {sorted(must)} were saved: {exc}") from exc
            self._disk.tell(act, "load", self._me, "none")
            return
        if loaded.step not in may | must or loaded.step < max(must, default=0):
            raise AssertionError(
                f"{act}: step {loaded.step} was loaded; there must be {sorted(must)} and may be {sorted(may)}"
            )
        self._check(loaded)
        self._disk.tell(act, "load", self._me, f"step {loaded.step}")

    def load_after_loss(self) -> None:
        """Load what there is of the job before."""
        folder = folder_of(self._disk, WORLD)
        if checkpoint.latest(folder) is not None:
            self._check(checkpoint.load(folder, rng=False))

    def _check(self, loaded: checkpoint.Loaded) -> None:
        """Raise where a checkpoint is not what was saved."""
        if not torch.equal(loaded["value"], _value(self._acts[loaded.step])):
            raise AssertionError(f"step {loaded.step} has {loaded['value'].flatten()[:4].tolist()}")

    def _sets(self, group: int) -> tuple[set[int], set[int]]:
        return self._may.setdefault(group, set()), self._must.setdefault(group, set())

    def _saved(self, act: Act) -> None:
        self._sets(act.group)[1].add(act.number)
        self._disk.note_saved(act)

    def _failed(self, act: Act, what: str, exc: mpisgd.CheckpointError) -> None:
        if not OF_A_DISK.search(str(exc)):
            raise AssertionError(f"{act}: no fault of a disk: {exc}") from exc
        self._sets(act.group)[0].add(act.number)
        self._disk.tell(act, f"end of the {what}", self._me, str(exc))
