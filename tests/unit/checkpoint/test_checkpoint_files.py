"""The folder: a file is there whole or not at all, and only what is superfluous goes."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from mpisgd.checkpoint import files
from mpisgd.config import NOTES_VARIABLE


def leave(folder: Path, *steps: int) -> None:
    for step in steps:
        files.write_file(files.path_of(folder, step), lambda file: file.write(b"content"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_comes_first_and_other_files_do_not_matter(tmp_path):
    leave(tmp_path, 9, 100_000_000, 10)
    (tmp_path / "step-1.safetensors").touch()
    (tmp_path / "step-00000011.safetensors.bak").touch()
    assert [files.step_of(path) for path in files.checkpoints_in(tmp_path)] == [100_000_000, 10, 9]
    assert files.checkpoints_in(tmp_path / "nowhere") == []


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    leave(tmp_path, 3)

    def fail(file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        files.write_file(files.path_of(tmp_path, 3), fail)
    assert names(tmp_path) == ["step-00000003.safetensors"]
    assert files.path_of(tmp_path, 3).read_bytes() == b"content"


def test_what_a_killed_writer_has_left_is_swept_up_and_what_is_being_written_is_not(tmp_path):
    dead, alive = (tmp_path / f".step-0000000{i}.safetensors.host-{i}.tmp" for i in (1, 2))
    dead.touch()
    with alive.open("xb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        files.remove_unfinished(tmp_path)
        assert names(tmp_path) == [alive.name]


def test_the_last_ones_are_kept_and_those_of_later_steps(tmp_path):
    leave(tmp_path, 10, 20, 30, 40, 90)
    files.remove_older(files.path_of(tmp_path, 40), 2)
    assert [files.step_of(path) for path in files.checkpoints_in(tmp_path)] == [90, 40, 30]


def test_who_has_started_the_job_is_told_of_a_checkpoint(tmp_path, monkeypatch):
    notes = tmp_path / "notes"
    monkeypatch.setenv(NOTES_VARIABLE, str(notes))
    leave(tmp_path, 1)
    assert not notes.exists()  # another host
    notes.touch()
    leave(tmp_path, 2)
    assert notes.read_text() == f"checkpoint {files.path_of(tmp_path, 2)}\n"


def test_a_file_that_is_there_is_what_the_umask_allows(tmp_path):
    before = os.umask(0o077)
    try:
        leave(tmp_path, 1)
    finally:
        os.umask(before)
    assert files.path_of(tmp_path, 1).stat().st_mode & 0o777 == 0o600
