"""`Shares`, which says where papers round, beside the plans by which gradients are divided."""

from __future__ import annotations

import random
import sys

import pytest
import torch

from mpisgd.accelerator.buffers import ALONE_BYTES
from mpisgd.gradients.bucket_plan import item_of
from mpisgd.gradients.bucketing import ALIGN_BYTES, plan_buckets
from mpisgd.methods.paper_kit import Slice, Vec
from mpisgd.sharding.division import Item, divide
from mpisgd.sharding.state_exchange import runs_of
from mpisgd.tools.verification.shares import Place, Shares

SHAPES = ((1,), (7,), (8,), (2, 5), (), (129,), (40, 33), (0,), (70_000,))
DTYPES = (torch.float64, torch.float64, torch.float32)


def as_planned(x: Vec, shares: Shares) -> list[list[Slice]]:
    names = list(x)
    buckets = plan_buckets(
        [item_of(i, x[name], "cpu") for i, name in enumerate(names)],
        cap_bytes=shares.cap_bytes,
        align_bytes=ALIGN_BYTES,
        alone_bytes=ALONE_BYTES,
    )
    memories: dict[int, list[Item]] = {}
    for index, name in enumerate(names):
        place, tensor = shares.places.get(name, Place()), x[name]
        item = Item(index, tensor.numel(), tensor.element_size(), (place.group, str(tensor.dtype), False))
        memories.setdefault(place.memory, []).append(item)
    members = [[] for _ in range(shares.size)]
    for items in memories.values():
        divided = divide(items, (), shares.size, sys.maxsize, [bucket.indices for bucket in buckets])
        for mine, pieces in zip(members, divided, strict=True):
            mine += [member for piece in pieces for member in piece.members if member.numel]
    return [
        sorted(
            Slice(names[run.param], run.first, run.first + run.numel)
            for of_one in runs_of(mine).values()
            for run in of_one
        )
        for mine in members
    ]


@pytest.mark.parametrize("seed", range(40))
def test_shares_are_cut_as_the_gradients_are(seed):
    chance = random.Random(seed)
    dtypes = {name: chance.choice(DTYPES) for name in "abcdefgh"}
    x = Vec({name: torch.zeros(chance.choice(SHAPES), dtype=dtypes[name]) for name in dtypes})
    later = chance.randrange(4, 9)
    places = {name: Place(int(i >= later), i * chance.randrange(1, 4) // 8) for i, name in enumerate(x)}
    for name, number in zip(x, sorted(place.group for place in places.values()), strict=True):
        places[name] = places[name]._replace(group=number)
    shares = Shares(chance.randrange(1, 5), chance.choice((1, 64, 1000, 2**20)), places)
    assert [sorted(share) for share in shares(x)] == as_planned(x, shares)


def test_every_element_is_in_one_share():
    x = Vec({"w": torch.zeros(40, 33), "b": torch.zeros(7)})
    pieces = [piece for share in Shares(3)(x) for piece in share]
    covered = sorted((name, at) for name, begin, end in pieces for at in range(begin, end))
    assert covered == sorted((name, at) for name in x for at in range(x[name].numel()))
