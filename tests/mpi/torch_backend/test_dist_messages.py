"""torch.distributed's point to point: tags, any source, batches, sub-groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from closed_form import DTYPES, assert_equal, given
from verdicts import raises_everywhere

from mpisgd import ShapeMismatch


def neighbours(pg: dist.ProcessGroup) -> tuple[int, int]:
    """The group ranks before and after this one."""
    return (pg.rank() - 1) % pg.size(), (pg.rank() + 1) % pg.size()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)
def test_dist_messages_of_every_dtype_go_round(process_groups, dtype):
    pg = process_groups["reversed"]
    before, after = neighbours(pg)
    out, mine = torch.zeros(131, dtype=dtype), as_dtype(pg.rank(), dtype)
    receive = dist.irecv(out, group_src=before, group=pg)
    send = dist.isend(mine, group_dst=after, group=pg)
    assert receive.wait()
    assert send.wait()
    assert receive.is_completed()
    assert receive._source_rank() == before
    assert torch.equal(out.view(torch.uint8), as_dtype(before, dtype).view(torch.uint8))


def as_dtype(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return given(rank, dtype) if dtype in DTYPES else given(rank, torch.float32).to(dtype)


@pytest.mark.parametrize("length", [0, 1, 100_000])
def test_dist_send_and_recv_between_every_pair(pg, length):
    ranks = dist.get_process_group_ranks(pg)
    for place, src in enumerate(ranks):
        for dst in ranks:
            if src == dst:
                continue
            if dist.get_rank() == src:
                dist.send(torch.full((length,), place + 0.5), dst, pg)
            elif dist.get_rank() == dst:
                out = torch.zeros(length)
                assert dist.recv(out, src, pg) == src
                assert_equal(out, torch.full((length,), place + 0.5))


def test_what_a_functional_collective_returns_can_be_sent(pg):
    """A tensor-parallel stage of a pipeline sends such a tensor, which has no memory of its own."""
    before, after = neighbours(pg)
    summed = functional.all_reduce(torch.full((5,), pg.rank() + 1.0), "sum", pg)
    send, out = dist.isend(summed, group_dst=after, group=pg), torch.zeros(5)
    dist.irecv(out, group_src=before, group=pg).wait()
    send.wait()
    assert_equal(out, torch.full((5,), pg.size() * (pg.size() + 1) / 2))


def test_dist_tags_are_taken_in_any_order(pg):
    before, after = neighbours(pg)
    sends = [
        dist.isend(torch.full((50,), float(tag)), group=pg, tag=tag, group_dst=after) for tag in range(10)
    ]
    for tag in reversed(range(10)):
        out = torch.zeros(50)
        dist.irecv(out, group=pg, tag=tag, group_src=before).wait()
        assert_equal(out, torch.full((50,), float(tag)))
    assert all(work.wait() for work in sends)


def test_dist_recv_from_any_source_tells_who_sent(pg):
    ranks = dist.get_process_group_ranks(pg)
    if pg.rank() == 0:
        seen = {}
        for _ in ranks[1:]:
            out = torch.zeros(3)
            src = dist.recv(out, group=pg, tag=7)
            seen[src] = out.tolist()
        assert seen == {src: [float(src)] * 3 for src in ranks[1:]}
    else:
        dist.send(torch.full((3,), float(dist.get_rank())), ranks[0], pg, tag=7)


def test_dist_batches_of_messages_in_any_order(pg):
    """Everybody with everybody, receives behind the sends on the even ranks and before them on the odd."""
    others = [rank for rank in range(pg.size()) if rank != pg.rank()]
    out = {rank: torch.zeros(2000) for rank in others}
    ops = [
        dist.P2POp(dist.isend, torch.full((2000,), 10.0 * pg.rank() + peer), group=pg, group_peer=peer)
        for peer in others
    ]
    ops += [dist.P2POp(dist.irecv, out[peer], group=pg, group_peer=peer) for peer in others]
    if ops:
        for work in dist.batch_isend_irecv(ops if pg.rank() % 2 else ops[::-1]):
            work.wait()
    for peer in others:
        assert_equal(out[peer], torch.full((2000,), 10.0 * peer + pg.rank()))


def test_dist_messages_to_oneself(pg):
    out = torch.zeros(4)
    works = [dist.irecv(out, group=pg, group_src=pg.rank())]
    works += [dist.isend(torch.full((4,), 3.0), group=pg, group_dst=pg.rank())]
    assert all(work.wait() for work in works)
    assert_equal(out, torch.full((4,), 3.0))
    with raises_everywhere(ValueError):  # torch's own: it would wait for ever
        dist.send(out, group=pg, group_dst=pg.rank())


def test_futures_of_messages_make_progress_by_themselves(pg):
    before, after = neighbours(pg)
    out = torch.zeros(300_000)
    future = dist.irecv(out, group=pg, group_src=before).get_future()
    sent = dist.isend(torch.full((300_000,), float(pg.rank())), group=pg, group_dst=after).get_future()
    assert future.wait()[0].data_ptr() == out.data_ptr()
    sent.wait()
    assert_equal(out, torch.full((300_000,), float(before)))


def test_a_message_of_another_size_is_refused_by_its_receiver(pg):
    before, after = neighbours(pg)
    receive = dist.irecv(torch.zeros(5), group=pg, group_src=before)
    send = dist.isend(torch.ones(3), group=pg, group_dst=after)
    with raises_everywhere(ShapeMismatch):
        receive.wait()
    assert isinstance(receive.exception(), ShapeMismatch)
    send.wait()
    dist.barrier(pg)
