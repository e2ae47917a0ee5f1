"""Folders of launchers that are gone are removed, all others stay; other jobs mark theirs meanwhile."""

from __future__ import annotations

import os
import threading

import pytest

from mpisgd.job import stale_files

GONE = 2**22 + 1  # no process has such a number


@pytest.fixture
def folder_of(tmp_path):
    """Make the folder of a launcher."""

    def made(pid: int):
        folder = tmp_path / f"ompi.{pid}"
        folder.mkdir()
        return folder

    return made


def test_what_belongs_to_a_launcher_that_is_gone_is_removed(folder_of, tmp_path):
    alive, gone, not_ours = folder_of(os.getpid()), folder_of(GONE), folder_of(GONE + 1)
    stale_files.mark(alive)
    stale_files.mark(gone)
    (gone / stale_files.MARK).write_text((alive / stale_files.MARK).read_text())  # as while it was there
    stale_files.sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([alive, not_ours])
    assert [entry.name for entry in alive.iterdir()] == [stale_files.MARK]


@pytest.mark.parametrize("text", ["", "boot", "boot\n", "boot\n12", "\n", "a\nb\nc\n", b"\xff\xfe\n1\n"])
def test_a_mark_that_is_none_of_ours_or_not_whole_is_left_alone(folder_of, tmp_path, text):
    mine = stale_files._machine()
    folder = folder_of(GONE)
    raw = text if isinstance(text, bytes) else text.replace("boot", mine).encode()
    (folder / stale_files.MARK).write_bytes(raw)
    stale_files.sweep(tmp_path)
    assert folder.exists()


def test_a_mark_is_never_seen_half_written(folder_of, tmp_path):
    """A job that starts marks its folder again and again, while another one looks at it."""
    folder = folder_of(os.getpid())
    stale_files.mark(folder)
    whole = (folder / stale_files.MARK).read_text()
    over = threading.Event()

    def marks() -> None:
        while not over.is_set():
            stale_files.mark(folder)

    thread = threading.Thread(target=marks)
    thread.start()
    seen = {(folder / stale_files.MARK).read_text() for _ in range(3000)}
    over.set()
    thread.join()
    assert seen == {whole}
