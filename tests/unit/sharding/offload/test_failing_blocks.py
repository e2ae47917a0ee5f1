"""Blocks that fail at any call: a clear error on every rank, and no wrong state afterwards."""

from __future__ import annotations

import functools
import os
import re
import tempfile
import threading
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn

import mpisgd
from mpisgd import checkpoint
from mpisgd.errors import OffloadError
from mpisgd.job.threads_as_ranks import run_ranks
from mpisgd.sharding import piece_update
from mpisgd.sharding.offload.private_file import PrivateFile

CALLS = ("allocate", "truncate", "write", "read")
BROKEN = 1  # the rank whose disk fails
# Which of the calls fails; scripts/test --long takes all of them.
CALL_NUMBERS = range(1, 200) if "MPISGD_TEST_LONG" in os.environ else (1, 6, 36, 200)


class FailingBlocks:
    """A `BlockStore` on another one that fails at one of its calls, and goes on afterwards."""

    def __init__(self, inner: PrivateFile, call: str) -> None:
        self._inner, self._call = inner, call
        self._lock = threading.Lock()  # several threads read and write
        self.calls = 0
        self.fails_at = -1

    @property
    def size(self) -> int:
        return self._inner.size

    @property
    def described(self) -> str:
        return self._inner.described

    def descriptor(self) -> int:
        return self._inner.descriptor()

    def _come_to(self, call: str) -> None:
        if call != self._call:
            return
        with self._lock:
            self.calls += 1
            fails = self.calls == self.fails_at
        if fails:
            raise OffloadError(f"offload: the file of {self.described} could not be used: a test says so")

    def allocate(self, nbytes: int) -> int:
        self._come_to("allocate")
        return self._inner.allocate(nbytes)

    def truncate(self, size: int) -> None:
        self._come_to("truncate")
        self._inner.truncate(size)

    def write(self, memory: memoryview, start: int) -> None:
        self._come_to("write")
        self._inner.write(memory, start)

    def read(self, memory: memoryview, start: int) -> None:
        self._come_to("read")
        self._inner.read(memory, start)


class Job:
    """What a rank trains, with blocks that may fail."""

    def __init__(self, folder: str, what: str, of: str, call: str) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(40, 90), nn.Tanh(), nn.Linear(90, 80), nn.Linear(80, 8))
        offload = mpisgd.Offload(folder, what=what, block_bytes=4096, io="buffered", prefetch=1)
        if "parameters" in what:
            mpisgd.offload_parameters(self.model, offload)
        inner = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.optimizer = mpisgd.DistributedOptimizer(inner, strategy=mpisgd.Sharded(1, offload=offload))
        self.blocks = self._blocks(of, call)

    def _blocks(self, of: str, call: str) -> FailingBlocks:
        """Put blocks that may fail in the place of those of the state, the parameters or the gradients."""
        if of == "state":
            store = self.optimizer.synchronizer._optimizer_state.store
        else:
            store = getattr(next(self.model.parameters())._mpisgd_streamed, of)
        blocks = FailingBlocks(store._blocks, call)
        store._blocks = store._cache._store = blocks
        return blocks

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        draw = torch.Generator().manual_seed(10 * number + mpisgd.rank())
        self.model(torch.randn(4, 40, generator=draw)).square().mean().backward()
        self.optimizer.step()

    def come_to(self) -> list[torch.Tensor]:
        state = self.optimizer.state_dict()["state"]
        values = [value for entries in state.values() for value in entries.values()]
        return [*self.model.state_dict().values(), *values]


class Outcome(NamedTuple):
    """What a rank has seen.

    Attributes:
        told: the errors of two steps, and of reading what they have come to, "" where there was none. In one
            of the steps a call fails; what is written is waited for later.
        read: what they have come to, None where it could not be read.
        is_as_saved: whether a checkpoint that is loaded then sets everything right.
    """

    told: list[str]
    read: list[torch.Tensor] | None
    is_as_saved: bool


def outcome(folder: str, what: str, of: str, call: str, at: int) -> Outcome:
    saved = f"{folder}/saved"
    job = Job(folder, what, of, call)
    job.step(0)
    checkpoint.save(saved, 1, model=job.model, optimizer=job.optimizer)
    expected = [tensor.clone() for tensor in job.come_to()]
    if mpisgd.rank() == BROKEN:
        job.blocks.fails_at = job.blocks.calls + at
    read: list[list[torch.Tensor]] = []
    uses = (
        lambda: job.step(1),
        lambda: job.step(2),
        lambda: read.append([tensor.clone() for tensor in job.come_to()]),
    )
    told = [error_of(use) for use in uses]
    job.blocks.fails_at = -1
    job.optimizer.zero_grad()
    checkpoint.load(saved, model=job.model, optimizer=job.optimizer)
    return Outcome(told, read[0] if read else None, are_equal(job.come_to(), expected))


@functools.lru_cache
def without(what: str, of: str, *steps: int) -> list[list[torch.Tensor]]:
    """What each rank comes to by these steps, where no call fails."""

    def program(folder: str) -> list[torch.Tensor]:
        job = Job(folder, what, of, "none")
        for step in steps:
            job.step(step)
        return [tensor.clone() for tensor in job.come_to()]

    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(2, lambda: program(folder))


def error_of(action: Callable[[], None]) -> str:
    try:
        action()
    except OffloadError as error:
        return str(error)
    return ""


def are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("what", "of"),
    [
        ("optimizer", "state"),
        ("optimizer,parameters", "state"),
        ("optimizer,parameters", "values"),
        ("optimizer,parameters", "gradients"),
    ],
)
def test_a_call_that_fails_is_told_to_every_rank_and_nothing_is_lost_in_silence(
    call, what, of, tmp_path, monkeypatch
):
    monkeypatch.setattr(piece_update, "BATCH_BYTES", 1)  # the pieces are small here
    for at in CALL_NUMBERS:
        folder = str(tmp_path / f"{at}")
        found = run_ranks(2, lambda f=folder, n=at: outcome(f, what, of, call, n))
        told = found[0].told
        assert [each.told for each in found] == [told] * 2
        assert all(each.is_as_saved for each in found)
        if not told[-1]:  # it has what it would have without the step that has failed
            expected = without(what, of, 0, *(step for step in (1, 2) if not told[step - 1]))
            is_continued = [are_equal(each.read, right) for each, right in zip(found, expected, strict=True)]
            assert all(is_continued), f"call {at}: it goes on from another state: {told}"
        if not any(told):
            break  # there are no more calls
        for error in filter(None, told):
            assert re.search("rank 1.*could not be used", error), error
    assert at > 1 or call in ("allocate", "truncate"), "no call has failed"
