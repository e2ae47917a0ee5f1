"""Blocks come back as they were put, few buffers serve many of them, and what fails is said."""

from __future__ import annotations

import contextlib
import os
import resource
import threading

import pytest

from mpisgd.errors import OffloadError
from mpisgd.sharding.offload.block_cache import BlockCache, checksum_of
from mpisgd.sharding.offload.private_file import PrivateFile

BLOCK = 4096


def make(folder, prefetch=1, checksum=None):
    file = PrivateFile(folder, "optimizer state of rank 3")
    return file, BlockCache(file, prefetch, BLOCK, checksum_of(checksum))


def fill(cache, count):
    for value in range(count):
        index, memory = cache.append(BLOCK)
        memory.fill_(value)
        cache.seal(index, BLOCK)
        cache.put(index, changed=True)


@contextlib.contextmanager
def largest_file(nbytes):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("prefetch", [1, 2, 5])
@pytest.mark.parametrize("checksum", [None, "crc32", "sha256"])
def test_every_block_comes_back_as_it_was_put_last(tmp_path, prefetch, checksum):
    _, cache = make(tmp_path, prefetch, checksum)
    fill(cache, 20)
    for turn in range(3):
        for index in (*range(20), *reversed(range(20))):
            memory = cache.get(index)
            assert (memory == index + turn).all(), index
            cache.put(index, changed=False)
        for index in range(20):
            cache.get(index).add_(1)
            cache.put(index, changed=True)
    assert cache.nbytes_in_memory <= (2 * prefetch + 2) * BLOCK


def test_the_next_blocks_are_read_while_one_is_in_use(tmp_path, monkeypatch):
    _, cache = make(tmp_path, prefetch=2)
    fill(cache, 12)
    read, lock = [], threading.Lock()
    of_file = PrivateFile.read

    def noting(self, memory, start):
        with lock:
            read.append(start // BLOCK)
        of_file(self, memory, start)

    monkeypatch.setattr(PrivateFile, "read", noting)
    for index in range(6):
        assert index == 0 or index in cache._held, "it was not read ahead"
        cache.get(index)
        cache.put(index, changed=False)
    for buffer in cache._held.values():
        buffer.wait()
    assert len(set(read)) == len(read), "one was read twice"
    assert set(range(6)) <= set(read) <= set(range(8)), "at most two more than were asked for"


def test_more_blocks_in_use_than_there_are_buffers_get_further_ones(tmp_path):
    _, cache = make(tmp_path)
    fill(cache, 10)
    memories = [cache.get(index) for index in range(10)]
    assert all((memory == index).all() for index, memory in enumerate(memories))


def test_a_full_disk_is_named_with_the_file_and_the_cause(tmp_path):
    _, cache = make(tmp_path)
    with largest_file(4 * BLOCK), pytest.raises(OffloadError) as caught:
        fill(cache, 10)
    assert "optimizer state of rank 3" in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "File too large" in str(caught.value)
    assert isinstance(caught.value, OSError)


def test_a_write_that_fails_behind_is_told_by_what_comes_next_and_ever_after(tmp_path, monkeypatch):
    _, cache = make(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OffloadError, match=r"No space left on device; [0-9]+ bytes are free"):
        fill(cache, 5)
    with pytest.raises(OffloadError, match="No space left"):
        cache.get(0)
    cache.clear()
    monkeypatch.undo()
    fill(cache, 5)
    assert (cache.get(2) == 2).all()


def test_a_file_that_ends_too_early_is_told(tmp_path):
    file, cache = make(tmp_path)
    fill(cache, 8)
    cache.flush()
    os.ftruncate(file.fd, BLOCK // 2)
    with pytest.raises(OffloadError, match="4096 bytes at 0: it ends at 2048"):
        cache.get(0)


def test_what_the_disk_has_changed_is_told(tmp_path):
    file, cache = make(tmp_path, checksum="crc32")
    fill(cache, 8)
    cache.flush()
    os.pwrite(file.fd, b"x", 17)
    with pytest.raises(OffloadError, match=r"block 0 of optimizer state of rank 3 in .* has checksum"):
        cache.get(0)


def test_nothing_is_in_the_folder_and_only_the_user_may_read_the_file(tmp_path):
    file, cache = make(tmp_path / "new")
    fill(cache, 8)
    assert list((tmp_path / "new").iterdir()) == []
    assert os.fstat(file.fd).st_mode & 0o777 == 0o600
    assert os.fstat(file.fd).st_nlink == 0


def test_without_unnamed_files_one_loses_its_name_at_once(tmp_path, monkeypatch):
    open_ = os.open

    def no_unnamed(path, flags, mode=0o777, **options):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return open_(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", no_unnamed)
    file, _ = make(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(file.fd).st_mode & 0o777 == 0o600


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OffloadError, match="file/run could not be made: Not a directory"):
        make(tmp_path / "file" / "run")
