"""The choice between direct and buffered I/O, and a file system that has no direct I/O."""

from __future__ import annotations

import pytest

from mpisgd.sharding.offload import disk_speed
from mpisgd.sharding.offload.description import Offload
from mpisgd.sharding.offload.disk_speed import DiskSpeed, is_direct_faster, measure


def speeds(direct, buffered):
    return lambda folder, block_bytes, nbytes, *, direct=direct, _={True: direct, False: buffered}: _[direct]


@pytest.mark.parametrize(
    ("direct", "buffered", "expected"),
    [
        (DiskSpeed(2e9, 2e9), DiskSpeed(1e9, 1e9), True),
        (DiskSpeed(1e9, 1e9), DiskSpeed(3e9, 2e9), False),
        (DiskSpeed(4e9, 1e9), DiskSpeed(1e9, 4e9), True),
        (None, DiskSpeed(1e9, 1e9), False),
    ],
)
def test_the_faster_one_is_taken(tmp_path, monkeypatch, direct, buffered, expected):
    monkeypatch.setattr(disk_speed, "measure", speeds(direct, buffered))
    assert is_direct_faster(Offload(tmp_path)) is expected


def test_what_the_user_chooses_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_speed, "measure", None)
    assert is_direct_faster(Offload(tmp_path, io="direct"))
    assert not is_direct_faster(Offload(tmp_path, io="buffered"))


def test_both_ways_are_measured_with_the_same_bytes(tmp_path):
    found = measure(tmp_path, 4096, 10_000, direct=False)
    assert found.read > 0
    assert found.write > 0
    assert measure(tmp_path, 4096, 10_000, direct=True) is None or found
    assert list(tmp_path.iterdir()) == []
