"""Staged operations and streams: on a pretended GPU that does everything as late as it may.

What must come before a copy, and what must come after it, is then wrong whenever it is not waited for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closed_form import assert_near, combined, given
from devices import GARBAGE, LateDevice
from verdicts import everyone

import mpisgd
from mpisgd import ReduceOp
from mpisgd.accelerator.runtime import set_runtime
from mpisgd.job.groups import close_group
from mpisgd.job.lifecycle import current_job
from mpisgd.transport.device import chunked_pipeline

N = 40


@pytest.fixture
def device(monkeypatch) -> Any:
    stand_in = LateDevice()
    monkeypatch.setattr(current_job(), "gpu", "mpi")
    set_runtime(stand_in)
    yield stand_in
    set_runtime(None)


@pytest.fixture
def group(device) -> Any:
    made = mpisgd.new_group()
    yield made
    set_runtime(None)
    close_group(made)


class Case:
    """One collective: what this rank puts in, where the result is, and what it must be."""

    def __init__(self, group: mpisgd.Group, name: str, numel: int = N) -> None:
        self.group, self.name = group, name
        rank, size = group.rank, group.size
        everyones = [given(r, torch.float32, (numel,)) for r in range(size)]
        self.source = torch.zeros(numel)
        self.values = everyones[rank]
        self.result, self.wanted = self.source, combined(everyones, ReduceOp.SUM)
        if name == "broadcast":
            self.wanted = everyones[0]
        elif name == "all_gather":
            self.result, self.wanted = torch.zeros(size, numel), torch.stack(everyones)
        elif name == "reduce_scatter":
            self.source, self.values = torch.zeros(size * numel), torch.cat(everyones)
            self.result, self.wanted = torch.zeros(numel), everyones[rank] * size

    def call(self, **options: Any) -> Any:
        if self.name == "broadcast":
            return mpisgd.broadcast(self.source, self.group.ranks[0], self.group, **options)
        if self.name == "all_gather":
            return mpisgd.all_gather_into_tensor(self.result, self.source, self.group, **options)
        if self.name == "reduce_scatter":
            return mpisgd.reduce_scatter_tensor(self.result, self.source, group=self.group, **options)
        return mpisgd.all_reduce(self.source, group=self.group, **options)


NAMES = ["all_reduce", "broadcast", "all_gather", "reduce_scatter"]


@pytest.mark.parametrize("name", NAMES)
def test_a_blocking_operation_comes_after_its_input_and_before_its_use(device, group, name):
    case = Case(group, name)
    used = torch.zeros_like(case.result)
    device.kernel(lambda: case.source.copy_(case.values))
    case.call()
    device.kernel(lambda: used.copy_(case.result))
    device.current_stream().synchronize()
    assert_near(used, case.wanted)


@pytest.mark.parametrize("name", NAMES)
def test_the_streams_are_those_current_at_the_call_and_at_its_end(device, group, name):
    """Produced on a stream of the program's own, in which the operation is called; used there too."""
    case, mine = Case(group, name), device.new_stream()
    used = torch.zeros_like(case.result)
    with device.on(mine):
        device.kernel(lambda: case.source.copy_(case.values))
        case.call()
        device.kernel(lambda: used.copy_(case.result))
    mine.synchronize()
    assert_near(used, case.wanted)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_asynchronous_is_there_when_it_is_done(device, group, name):
    """Whatever the thread that waits has as its current stream: nobody runs it here."""
    case = Case(group, name)
    device.kernel(lambda: case.source.copy_(case.values))
    work = case.call(async_op=True)
    work.wait()
    assert_near(case.result, case.wanted)


def test_a_blocking_operation_behind_asynchronous_ones_runs_elsewhere_and_keeps_the_order(device, group):
    """The queue's thread does it; its current stream is not the caller's."""
    cases = [Case(group, "all_reduce", N + i) for i in range(3)]
    for case in cases:
        device.kernel(lambda case=case: case.source.copy_(case.values))
    works = [case.call(async_op=True) for case in cases[:2]]
    cases[2].call()
    used = torch.zeros(N + 2)
    device.kernel(lambda: used.copy_(cases[2].result))
    device.current_stream().synchronize()
    assert_near(used, cases[2].wanted)
    for work, case in zip(works, cases[:2], strict=True):
        work.wait()
        assert_near(case.result, case.wanted)


def test_nobody_waits_for_what_has_nothing_to_do_with_it(device, group):
    ran, other = [], device.new_stream()
    with device.on(other):
        device.kernel(lambda: ran.append("a kernel of the program's"))
    case = Case(group, "all_reduce")
    device.kernel(lambda: case.source.copy_(case.values))
    case.call()
    device.kernel(lambda: ran.append("behind the operation"))
    work = case.call(async_op=True)
    work.wait()
    everyone(ran == ["behind the operation"], f"{ran}")
    device.kernel(lambda: ran.append("behind the last operation"))
    everyone(len(ran) == 1, "the host has waited for the whole stream")


def test_chunks_of_a_long_tensor_overtake_nothing(device, group, monkeypatch):
    monkeypatch.setattr(chunked_pipeline, "CHUNK_BYTES", 64)
    for numel in (32, 100, 161):
        case, used = Case(group, "all_reduce", numel), torch.zeros(numel)
        device.kernel(lambda case=case: case.source.copy_(case.values))
        case.call()
        device.kernel(lambda case=case, used=used: used.copy_(case.result))
        device.current_stream().synchronize()
        assert_near(used, case.wanted)


def test_a_chunk_comes_down_while_the_one_before_is_being_reduced(device):
    """The host has begun the next copy before it works on what has arrived."""
    flat, begun = torch.arange(64.0), []
    real = device.copy
    device.copy = lambda out, source: (begun.append(source.data_ptr()), real(out, source))
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_pipeline, "CHUNK_BYTES", 64)
        chunked_pipeline.reduce_in_chunks(flat, lambda chunk: (seen.append(len(begun)), chunk.mul_(2)))
    device.current_stream().synchronize()
    everyone(torch.equal(flat, torch.arange(64.0) * 2))
    # 4 chunks; at the k-th, k + 2 copies down (4 at the end) and k copies up have begun.
    everyone(seen == [2, 4, 6, 7], f"{seen}")


@pytest.mark.mpi(min_size=2)
def test_messages_wait_for_what_is_sent_and_for_earlier_uses_of_where_it_arrives(device, group):
    size, rank = group.size, group.rank
    mine, place, before = torch.zeros(N), torch.full((N,), 1.0), torch.zeros(N)
    device.kernel(lambda: mine.copy_(given(rank, torch.float32, (N,))))
    device.kernel(lambda: before.copy_(place))  # still to be read when the message arrives
    work = mpisgd.irecv(place, group.ranks[(rank - 1) % size], group)
    sent = mpisgd.isend(mine, group.ranks[(rank + 1) % size], group)
    work.wait()
    sent.wait()
    everyone(torch.equal(place, given((rank - 1) % size, torch.float32, (N,))))
    device.current_stream().synchronize()
    everyone(torch.equal(before, torch.full((N,), 1.0)), "the message has overtaken the kernel before it")


def test_the_stand_in_shows_what_was_not_waited_for(device):
    """A test that passes on a device that is never late would show nothing."""
    there = device.pinned(3, torch.float32)
    source = torch.arange(3.0)
    device.copy(there, source)
    everyone(bool((there.view(torch.uint8) == GARBAGE).all()))
    device.current_stream().record_event().synchronize()
    everyone(torch.equal(there, source))
