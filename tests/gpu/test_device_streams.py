"""Staged operations and streams: on a simulated GPU, which does everything late.

What must come before a copy, and what must come after it, is then wrong whenever it is not waited for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closed_form import assert_near, combined, given
from gpu_under_test import DEVICE, gpu
from verdicts import everyone

import mpisgd
from mpisgd import ReduceOp
from mpisgd.accelerator.own_streams import OwnStreams
from mpisgd.job.groups import close_group
from mpisgd.job.lifecycle import current_job
from mpisgd.transport.device import chunked_pipeline
from mpisgd.transport.device.chunked_pipeline import reduce_in_chunks

N = 40


@pytest.fixture
def group(simulated, monkeypatch) -> Any:
    monkeypatch.setattr(current_job(), "gpu", "mpi")
    made = mpisgd.new_group()
    yield made
    close_group(made)


class Case:
    """One collective: what this rank puts in, where the result is, and what it must be."""

    def __init__(self, group: mpisgd.Group, name: str, numel: int = N) -> None:
        self.group, self.name = group, name
        rank, size = group.rank, group.size
        everyones = [given(r, torch.float32, (numel,)) for r in range(size)]
        self.source = torch.zeros(numel, device=DEVICE)
        self.values = everyones[rank].to(DEVICE)
        self.result, self.wanted = self.source, combined(everyones, ReduceOp.SUM)
        if name == "broadcast":
            self.wanted = everyones[0]
        elif name == "all_gather":
            self.result, self.wanted = torch.zeros(size, numel, device=DEVICE), torch.stack(everyones)
        elif name == "reduce_scatter":
            self.source, self.values = (
                torch.zeros(size * numel, device=DEVICE),
                torch.cat(everyones).to(DEVICE),
            )
            self.result, self.wanted = torch.zeros(numel, device=DEVICE), everyones[rank] * size

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
def test_a_blocking_operation_comes_after_its_input_and_before_its_use(group, name):
    case = Case(group, name)
    used = torch.zeros_like(case.result)
    case.source.copy_(case.values)
    case.call()
    used.copy_(case.result)
    gpu.current_stream().synchronize()
    assert_near(used.cpu(), case.wanted)


@pytest.mark.parametrize("name", NAMES)
def test_the_streams_are_those_current_at_the_call_and_at_its_end(group, name):
    """Produced on a stream of the program's own, in which the operation is called; used there too."""
    case, mine = Case(group, name), gpu.Stream()
    used = torch.zeros_like(case.result)
    gpu.synchronize()
    with gpu.stream(mine):
        case.source.copy_(case.values)
        case.call()
        used.copy_(case.result)
    mine.synchronize()
    assert_near(used.cpu(), case.wanted)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_asynchronous_is_there_when_it_is_done(group, name):
    """Whatever the thread that waits has as its current stream: nobody runs it here."""
    case = Case(group, name)
    case.source.copy_(case.values)
    work = case.call(async_op=True)
    work.wait()
    assert_near(case.result.cpu(), case.wanted)


def test_a_blocking_operation_behind_asynchronous_ones_runs_elsewhere_and_keeps_the_order(group):
    """The queue's thread does it; its current stream is not the caller's."""
    cases = [Case(group, "all_reduce", N + i) for i in range(3)]
    for case in cases:
        case.source.copy_(case.values)
    works = [case.call(async_op=True) for case in cases[:2]]
    cases[2].call()
    used = torch.zeros(N + 2, device=DEVICE)
    used.copy_(cases[2].result)
    gpu.current_stream().synchronize()
    assert_near(used.cpu(), cases[2].wanted)
    for work, case in zip(works, cases[:2], strict=True):
        work.wait()
        assert_near(case.result.cpu(), case.wanted)


def test_nobody_waits_for_what_has_nothing_to_do_with_it(group):
    other, case = gpu.Stream(), Case(group, "all_reduce")
    with gpu.stream(other):
        torch.zeros(1, device=DEVICE)
    case.source.copy_(case.values)
    case.call()
    case.call(async_op=True).wait()
    everyone(not other.query())
    torch.zeros(1, device=DEVICE)
    everyone(not gpu.current_stream().query(), "the host has waited for the whole stream")


def test_chunks_of_a_long_tensor_overtake_nothing(group, monkeypatch):
    monkeypatch.setattr(chunked_pipeline, "CHUNK_BYTES", 64)
    for numel in (32, 100, 161):
        case, used = Case(group, "all_reduce", numel), torch.zeros(numel, device=DEVICE)
        case.source.copy_(case.values)
        case.call()
        used.copy_(case.result)
        gpu.current_stream().synchronize()
        assert_near(used.cpu(), case.wanted)


def test_a_chunk_comes_down_while_the_one_before_is_being_reduced(simulated, monkeypatch):
    """The host has begun the next copy before it works on what has arrived."""
    flat, begun = torch.arange(64.0).to(DEVICE), []
    real, streams = simulated.copy, OwnStreams()
    monkeypatch.setattr(simulated, "copy", lambda *pair: (begun.append(1), real(*pair)))
    monkeypatch.setattr(chunked_pipeline, "CHUNK_BYTES", 64)
    seen = []
    reduce_in_chunks(flat, lambda chunk: (seen.append(len(begun)), chunk.mul_(2)), streams)
    everyone(torch.equal(flat.cpu(), torch.arange(64.0) * 2))
    # 4 chunks; at the k-th, k + 2 copies down (4 at the end) and k copies up have begun.
    everyone(seen == [2, 4, 6, 7], f"{seen}")


@pytest.mark.mpi(min_size=2)
def test_messages_wait_for_what_is_sent_and_for_earlier_uses_of_where_it_arrives(group):
    size, rank = group.size, group.rank
    mine, place = torch.zeros(N, device=DEVICE), torch.full((N,), 1.0, device=DEVICE)
    mine.copy_(given(rank, torch.float32, (N,)))
    before = place * 1  # still to be read when the message arrives
    work = mpisgd.irecv(place, group.ranks[(rank - 1) % size], group)
    sent = mpisgd.isend(mine, group.ranks[(rank + 1) % size], group)
    work.wait()
    sent.wait()
    everyone(torch.equal(place.cpu(), given((rank - 1) % size, torch.float32, (N,))))
    everyone(torch.equal(before.cpu(), torch.full((N,), 1.0)), "the message was earlier")
