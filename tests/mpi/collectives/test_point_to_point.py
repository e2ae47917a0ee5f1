"""Point to point: tags, sources, sizes, and messages that nobody waits for."""

from __future__ import annotations

import gc

import pytest
import torch
from closed_form import DTYPES, assert_equal, given
from verdicts import everyone, raises_everywhere

import mpisgd


def ring(group: mpisgd.Group) -> tuple[int, int]:
    """The global ranks before and after this one."""
    return group.ranks[group.rank - 1], group.ranks[(group.rank + 1) % group.size]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_ring_of_messages(groups, dtype):
    group = groups["world"]
    before, after = ring(group)
    out = torch.zeros(131, dtype=dtype)
    mine = given(group.rank, dtype)
    works = [mpisgd.irecv(out, before), mpisgd.isend(mine, after)]
    assert all(work.wait() for work in works)
    assert works[0].source == before
    assert_equal(out, given(before, dtype))
    assert_equal(mine, given(group.rank, dtype))


@pytest.mark.parametrize("length", [0, 1, 1000, 1_000_000])
def test_every_pair_of_every_group(group, length):
    for place, src in enumerate(group.ranks):
        for dst in group.ranks:
            if src == dst:
                continue
            if mpisgd.rank() == src:
                mpisgd.send(torch.full((length,), place + 0.5), dst, group)
            elif mpisgd.rank() == dst:
                out = torch.zeros(length)
                assert mpisgd.recv(out, src, group) == src
                assert_equal(out, torch.full((length,), place + 0.5))


def test_tags_are_taken_in_any_order(group):
    before, after = ring(group)
    sends = [mpisgd.isend(torch.full((50,), float(tag)), after, group, tag) for tag in range(10)]
    for tag in reversed(range(10)):
        out = torch.zeros(50)
        mpisgd.irecv(out, before, group, tag).wait()
        assert_equal(out, torch.full((50,), float(tag)))
    assert all(work.wait() for work in sends)


def test_messages_of_one_tag_arrive_in_order(group):
    before, after = ring(group)
    outs = [torch.zeros(50_000 if i % 2 else 5) for i in range(10)]
    receives = [mpisgd.irecv(out, before, group, 3) for out in outs]
    sends = [mpisgd.isend(torch.full_like(out, float(i)), after, group, 3) for i, out in enumerate(outs)]
    for work in [*receives, *sends]:
        work.wait()
    for i, out in enumerate(outs):
        assert_equal(out, torch.full_like(out, float(i)))


def test_any_source_tells_who_sent(group):
    first = group.ranks[0]
    if group.rank == 0:
        seen = {}
        for _ in range(group.size - 1):
            out = torch.zeros(3)
            src = mpisgd.recv(out, group=group, tag=7)
            seen[src] = out.tolist()
        assert seen == {src: [float(src)] * 3 for src in group.ranks[1:]}
    else:
        mpisgd.send(torch.full((3,), float(mpisgd.rank())), first, group, 7)


def test_groups_do_not_see_each_others_messages(groups):
    world, copy = groups["world"], groups["duplicate"]
    before, after = ring(world)
    sends = [mpisgd.isend(torch.ones(1), after, world), mpisgd.isend(torch.zeros(1), after, copy)]
    out = torch.full((1,), 5.0)
    mpisgd.irecv(out, before, copy).wait()
    assert out.item() == 0
    mpisgd.irecv(out, before, world).wait()
    assert out.item() == 1
    assert all(work.wait() for work in sends)


def test_messages_to_oneself(group):
    mine, out = torch.arange(5.0), torch.zeros(5)
    works = [mpisgd.isend(mine, mpisgd.rank(), group), mpisgd.irecv(out, mpisgd.rank(), group)]
    assert all(work.wait() for work in works)
    assert_equal(out, mine)


def test_blocking_messages_to_oneself_are_refused():
    for call in (mpisgd.send, mpisgd.recv):
        with pytest.raises(mpisgd.InvalidRank, match=f"use i{call.__name__}"):
            call(torch.zeros(1), mpisgd.rank())


@pytest.mark.parametrize(("sent", "expected"), [(3, 5), (5, 3), (100_000, 99_999), (10, 100_000)])
def test_the_receiver_of_another_size_is_told(groups, sent, expected):
    """Smaller messages would fit and be taken for the whole; larger ones are cut off by MPI."""
    group = groups["world"]
    before, after = ring(group)
    work = mpisgd.isend(torch.ones(sent), after)
    receive = mpisgd.irecv(torch.zeros(expected), before)
    with raises_everywhere(mpisgd.ShapeMismatch) as caught:
        receive.wait()
    assert receive.is_completed()
    everyone(f"from rank {before}" in caught.text, caught.text)
    if sent < expected:
        everyone(str(sent * 4) in caught.text and str(expected * 4) in caught.text, caught.text)
    work.wait()
    out = torch.zeros(2)
    work = mpisgd.isend(torch.ones(2), after)
    mpisgd.irecv(out, before).wait()
    assert_equal(out, torch.ones(2))
    work.wait()


def test_receiving_into_part_of_a_tensor(group):
    before, after = ring(group)
    out = torch.zeros(4, 6)
    works = [mpisgd.irecv(out[1:3, ::2], before, group), mpisgd.isend(torch.ones(2, 3), after, group)]
    for work in works:
        work.wait()
    assert out.sum() == 6
    assert_equal(out[1:3, ::2], torch.ones(2, 3))


def test_futures_end_without_anyone_waiting(group):
    before, after = ring(group)
    out = torch.zeros(200_000)
    receive = mpisgd.irecv(out, before, group).get_future()
    send = mpisgd.isend(torch.full((200_000,), float(group.rank)), after, group).get_future()
    doubled = receive.then(lambda done: done.value()[0].sum().item() * 2)
    assert doubled.wait() == 400_000.0 * ((group.rank - 1) % group.size)
    assert receive.wait()[0] is out
    send.wait()


def test_the_future_of_a_message_of_another_size_fails(groups):
    before, after = ring(groups["world"])
    future = mpisgd.irecv(torch.zeros(4), before).get_future()
    work = mpisgd.isend(torch.ones(2), after)
    with raises_everywhere(mpisgd.ShapeMismatch):
        future.wait()
    work.wait()


def test_a_message_that_its_sender_forgot_still_arrives(group):
    before, after = ring(group)
    for i in range(5):
        mpisgd.isend(torch.full((300_000,), float(i)), after, group)
        _junk = torch.full((300_000,), 99.0)
    gc.collect()
    for i in range(5):
        out = torch.zeros(300_000)
        work = mpisgd.irecv(out, before, group)
        # Large messages move only while their sender is inside MPI: all ranks are, in their receives.
        work.wait()
        assert_equal(out, torch.full((300_000,), float(i)))
    mpisgd.barrier(group)


def test_messages_and_collectives_do_not_wait_for_each_other(group):
    before, after = ring(group)
    out = torch.zeros(10)
    receive = mpisgd.irecv(out, before, group)
    mpisgd.barrier(group)
    send = mpisgd.isend(torch.ones(10), after, group)
    mpisgd.all_reduce(torch.ones(10), group=group)
    receive.wait()
    send.wait()
    assert_equal(out, torch.ones(10))


def test_arguments_are_checked_before_anything_is_sent(groups):
    x, size = torch.zeros(1), mpisgd.size()
    for tag in (-1, 2**40, 1.5, "a"):
        with pytest.raises(mpisgd.InvalidArgument, match="tag"):
            mpisgd.isend(x, 0, tag=tag)
        with pytest.raises(mpisgd.InvalidArgument, match="tag"):
            mpisgd.irecv(x, 0, tag=tag)
    for rank in (-1, size, "0"):
        with pytest.raises(mpisgd.InvalidRank, match=r"dst=.*0"):
            mpisgd.isend(x, rank)
        with pytest.raises(mpisgd.InvalidRank, match=r"src=.*0"):
            mpisgd.irecv(x, rank)


def test_waiting_with_a_time_limit_and_waiting_again(groups):
    before, after = ring(groups["world"])
    out = torch.zeros(3)
    receive = mpisgd.irecv(out, before, tag=9)
    with raises_everywhere(mpisgd.CollectiveTimeout):
        receive.wait(0.01)
    work = mpisgd.isend(torch.ones(3), after, tag=9)
    receive.wait()
    work.wait()
    assert_equal(out, torch.ones(3))
