"""The folder: a file is there whole or not at all, and only what is superfluous goes."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from mpisgd.checkpoint import files
from mpisgd.checkpoint.files import Folder
from mpisgd.checkpoint.format import Document
from mpisgd.checkpoint.saving import Content, to_disk
from mpisgd.checkpoint.storage import checkpoints_in, name_of, remove_older, step_of
from mpisgd.config import NOTES_VARIABLE


def leave(folder: Path, *steps: int) -> None:
    for step in steps:
        files.write_file(folder / name_of(step), lambda file: file.write(b"content"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_comes_first_and_other_files_do_not_matter(tmp_path):
    leave(tmp_path, 9, 100_000_000, 10)
    (tmp_path / "step-1.safetensors").touch()
    (tmp_path / "step-00000011.safetensors.bak").touch()
    assert list(map(step_of, checkpoints_in(Folder(tmp_path)))) == [100_000_000, 10, 9]
    assert checkpoints_in(Folder(tmp_path / "nowhere")) == []


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    leave(tmp_path, 3)

    def fail(file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        files.write_file(tmp_path / name_of(3), fail)
    assert names(tmp_path) == ["step-00000003.safetensors"]
    assert (tmp_path / name_of(3)).read_bytes() == b"content"


def test_what_a_killed_writer_has_left_is_swept_up_and_what_is_being_written_is_not(tmp_path):
    dead, alive = (tmp_path / f".step-0000000{i}.safetensors.host-{i}.tmp" for i in (1, 2))
    dead.touch()
    with alive.open("xb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        files.remove_unfinished(tmp_path)
        assert names(tmp_path) == [alive.name]


def test_the_last_ones_are_kept_and_those_of_later_steps(tmp_path):
    leave(tmp_path, 10, 20, 30, 40, 90)
    remove_older(Folder(tmp_path), name_of(40), 2)
    assert list(map(step_of, checkpoints_in(Folder(tmp_path)))) == [90, 40, 30]


def test_who_has_started_the_job_is_told_of_a_checkpoint(tmp_path, monkeypatch):
    notes = tmp_path / "notes"
    monkeypatch.setenv(NOTES_VARIABLE, str(notes))
    to_disk(tmp_path, Content(Document(1, 1, {}, {}, []), {}), None, None)
    assert not notes.exists()  # another host
    notes.touch()
    to_disk(tmp_path, Content(Document(2, 1, {}, {}, []), {}), None, None)
    assert notes.read_text() == f"checkpoint {tmp_path / name_of(2)}\n"


def test_a_file_that_is_there_is_what_the_umask_allows(tmp_path):
    before = os.umask(0o077)
    try:
        leave(tmp_path, 1)
    finally:
        os.umask(before)
    assert (tmp_path / name_of(1)).stat().st_mode & 0o777 == 0o600


def test_two_writers_of_one_step_do_not_remove_each_others_file(tmp_path):
    # A Writer's thread and `save` had one temporary name: each removed the other's file, nothing was saved.
    path = tmp_path / name_of(5)

    def outer(file):
        file.write(b"outer")
        files.remove_unfinished(tmp_path)
        files.write_file(path, lambda inner: inner.write(b"inner"))
        assert path.read_bytes() == b"inner"

    files.write_file(path, outer)
    assert path.read_bytes() == b"outer"
    assert names(tmp_path) == [path.name]


def test_a_sweep_between_open_and_lock_does_not_lose_the_file(tmp_path, monkeypatch):
    flock, swept = fcntl.flock, []

    def sweep_first(file, operation):
        if not swept:
            swept.append(True)
            files.remove_unfinished(tmp_path)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    leave(tmp_path, 5)
    assert names(tmp_path) == ["step-00000005.safetensors"]


def test_unfinished_files_are_swept_up_where_locks_need_a_writable_descriptor(tmp_path, monkeypatch):
    # NFS refuses an exclusive lock on a descriptor opened for reading; the files stayed for ever.
    flock = fcntl.flock

    def nfs(file, operation):
        descriptor = file if isinstance(file, int) else file.fileno()
        access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        if operation & fcntl.LOCK_EX and access == os.O_RDONLY:
            raise OSError(9, "Bad file descriptor")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", nfs)
    (tmp_path / ".step-00000001.safetensors.host-1.tmp").touch()
    files.remove_unfinished(tmp_path)
    assert names(tmp_path) == []


def test_folders_above_a_new_one_are_synced_to_the_disk(tmp_path, monkeypatch):
    # After a crash of the machine a new folder was gone, with its checkpoint: its parent was not synced.
    synced, fsync = [], os.fsync

    def record(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    Folder(tmp_path / "runs" / "a").check_writable()
    assert synced == [str(tmp_path), str(tmp_path / "runs")]


@pytest.mark.parametrize(
    ("before", "mode", "after"),
    [
        (0o600, None, 0o600),
        (0o640, None, 0o640),
        (None, None, 0o644),
        (0o644, 0o600, 0o600),
        (None, 0o660, 0o660),
    ],
)
def test_permissions_are_those_asked_for_or_of_the_file_that_is_replaced(tmp_path, before, mode, after):
    # A file of 0600 became 0644 when its step was saved again.
    path = tmp_path / name_of(3)
    umask = os.umask(0o022)
    try:
        if before is not None:
            path.touch()
            path.chmod(before)

        def write(file):  # not even while it is written can others read more
            wider = os.fstat(file.fileno()).st_mode & 0o777 & ~after
            file.write(b"%o" % wider)

        files.write_file(path, write, mode)
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == after
    assert path.read_bytes() == b"0"


def test_a_folder_or_a_fifo_named_like_an_old_checkpoint_stays(tmp_path):
    # `keep_last` tried to unlink a folder: every save raised, and it took the place of a real checkpoint.
    (tmp_path / name_of(15)).mkdir()
    os.mkfifo(tmp_path / name_of(16))
    leave(tmp_path, 10, 20, 30)
    remove_older(Folder(tmp_path), name_of(30), 2)
    assert list(map(step_of, checkpoints_in(Folder(tmp_path)))) == [30, 20, 16, 15]
