"""Collectives on Python objects: every root, every group, and objects that cannot travel."""

from __future__ import annotations

import threading
from typing import NamedTuple

import pytest
import torch
from verdicts import raises_everywhere

import mpisgd
from mpisgd.collectives.objects import allocate_tensors, extract_tensors


def thing(rank: int) -> dict[str, object]:
    return {"rank": rank, "text": "x" * (rank * 1000), "tensor": [float(rank), None], "set": {rank}}


def test_broadcast_object(group):
    for place, src in enumerate(group.ranks):
        mine = thing(group.rank)
        got = mpisgd.broadcast_object(mine, src, group)
        assert got == thing(place)
        assert (got is mine) == (group.rank == place)


def test_the_others_need_not_have_an_object(group):
    first = group.ranks[0]
    assert mpisgd.broadcast_object("here" if group.rank == 0 else None, first, group) == "here"


def test_all_gather_object(group):
    everything = [None] * group.size
    mpisgd.all_gather_object(everything, thing(group.rank), group)
    assert everything == [thing(rank) for rank in range(group.size)]


def test_gather_object(group):
    for dst in group.ranks:
        here = mpisgd.rank() == dst
        everything = [None] * group.size if here else None
        mpisgd.gather_object(thing(group.rank), everything, dst, group)
        assert everything == ([thing(rank) for rank in range(group.size)] if here else None)


def test_scatter_object(group):
    for place, src in enumerate(group.ranks):
        objects = [thing(10 * place + rank) for rank in range(group.size)] if mpisgd.rank() == src else None
        assert mpisgd.scatter_object(objects, src, group) == thing(10 * place + group.rank)


def test_tensors_travel_as_objects(group):
    got = mpisgd.broadcast_object(torch.arange(5) if group.rank == 0 else None, group.ranks[0], group)
    assert torch.equal(got, torch.arange(5))


@pytest.mark.parametrize("name", ["broadcast", "all_gather", "gather", "scatter"])
def test_objects_that_cannot_be_pickled_raise_before_anything_is_sent(group, name):
    bad, size, me = threading.Lock(), group.size, mpisgd.rank()
    calls = {
        "broadcast": lambda: mpisgd.broadcast_object(bad, me, group),
        "all_gather": lambda: mpisgd.all_gather_object([None] * size, bad, group),
        "gather": lambda: mpisgd.gather_object(bad, [None] * size, me, group),
        "scatter": lambda: mpisgd.scatter_object([bad] * size, me, group),
    }
    begun = group.queue.consistency.number
    with raises_everywhere(TypeError) as caught:
        calls[name]()
    assert "pickle" in caught.text
    assert group.queue.consistency.number == begun
    assert mpisgd.broadcast_object(group.rank, group.ranks[-1], group) == size - 1


def test_lists_of_the_wrong_length_are_refused_before_anything_is_sent(group):
    me, wrong = mpisgd.rank(), group.size + 1
    for call in (
        lambda: mpisgd.all_gather_object([None] * wrong, 1, group),
        lambda: mpisgd.gather_object(1, [None] * wrong, me, group),
        lambda: mpisgd.gather_object(1, None, me, group),
        lambda: mpisgd.scatter_object([1] * wrong, me, group),
        lambda: mpisgd.scatter_object(None, me, group),
    ):
        with pytest.raises(ValueError, match=str(group.size)):
            call()
    mpisgd.barrier(group)


def test_an_object_that_cannot_be_unpickled_leaves_the_group_usable(group):
    """It raises on every rank that receives it, after the exchange."""
    with raises_everywhere(ZeroDivisionError):
        mpisgd.all_gather_object([None] * group.size, Poison(), group)
    mpisgd.barrier(group)


class Poison:
    """Travels well and explodes on arrival."""

    def __reduce__(self):
        return divmod, (1, 0)


class Moments(NamedTuple):
    first: torch.Tensor
    rest: list[torch.Tensor]


def test_a_named_tuple_in_a_tree_of_tensors_travels():
    """It was made anew from one argument, which raised on the source alone."""
    outline, tensors = extract_tensors({"state": Moments(torch.ones(2), [torch.zeros(3)])})
    tree, room = allocate_tensors(outline)
    for place, tensor in zip(room, tensors, strict=True):
        place.copy_(tensor)
    assert isinstance(tree["state"], Moments)
    assert tree["state"].first.tolist() == [1.0, 1.0]
    assert tree["state"].rest[0].tolist() == [0.0] * 3
