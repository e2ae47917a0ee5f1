"""A shared file that cannot have its size is no shared file."""

from __future__ import annotations

import os

import pytest

from mpisgd.transport.ipc import memfd


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("call", ["memfd_create", "ftruncate"])
def test_what_the_kernel_refuses_leaves_nothing_open(monkeypatch, call):
    def refuse(*_):
        raise OSError("too large")

    before = num_open()
    monkeypatch.setattr(os, call, refuse, raising=False)
    assert memfd.create(2**20) == -1
    assert num_open() == before
