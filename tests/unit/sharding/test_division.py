"""Where parameters lie, and who owns which part: everyone about equally much, decided alike everywhere."""

from __future__ import annotations

import itertools
import random

import pytest

from mpisgd.sharding.division import Item, assign, divide, lay_out


def loads_of(sizes, owners, before):
    loads = list(before)
    for size, owner in zip(sizes, owners, strict=True):
        loads[owner] += size
    return loads


def test_the_largest_come_first():
    assert assign([1, 2, 3, 10], [0, 0]) == [1, 1, 1, 0]


def test_equal_ones_go_round():
    assert assign([5] * 6, [0, 0, 0]) == [0, 1, 2, 0, 1, 2]


def test_who_has_much_already_gets_the_rest_last():
    assert assign([4, 4], [9, 0, 0]) == [1, 2]


def test_nothing_to_own():
    assert assign([], [0, 0]) == []


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_no_load_is_above_four_thirds_of_the_best(ranks):
    draw = random.Random(ranks)
    nobody = [0] * ranks
    for count in range(1, 8):
        sizes = [draw.randint(0, 50) for _ in range(count)]
        every_way = itertools.product(range(ranks), repeat=count)
        best = min(max(loads_of(sizes, owners, nobody)) for owners in every_way)
        assert max(loads_of(sizes, assign(sizes, nobody), nobody)) <= 4 / 3 * best


# -- pieces -----------------------------------------------------------------------------------------------


def some_items(seed):
    """Return parameters of several kinds and of all sizes, empty ones among them."""
    draw = random.Random(seed)
    kinds = [(0, "float32", False), (0, "float32", True), (1, "float32", False), (1, "float64", False)]
    items = []
    for index in range(draw.randint(1, 25)):
        kind = draw.choice(kinds)
        numel = draw.choice([0, 1, 15, 16, 17, draw.randint(1, 3000)])
        items.append(Item(index, numel, 8 if kind[1] == "float64" else 4, kind))
    return items


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_every_element_is_in_one_piece(seed, size):
    items = some_items(seed)
    whole = {item.param for item in items if item.param % 5 == 4}
    pieces = divide(items, whole, size, piece_bytes=1024)
    starts = dict(zip([item.param for item in lay_out(items)[0]], lay_out(items)[1], strict=True))
    seen = {item.param: [0] * item.numel for item in items}
    for piece in itertools.chain(*pieces):
        for member in piece.members:
            itemsize = items[member.param].itemsize
            for i in range(member.numel):
                seen[member.param][member.first + i] += 1
            # It lies in the piece where the parameter lies in memory.
            assert piece.start + member.at * itemsize == starts[member.param] + member.first * itemsize
            assert member.at + member.numel <= piece.numel
    assert all(count == 1 for counts in seen.values() for count in counts)
    empty = [m.param for piece in itertools.chain(*pieces) for m in piece.members if not m.numel]
    assert sorted(empty) == [item.param for item in items if not item.numel]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_pieces_are_of_one_kind_small_and_aligned(seed, size):
    items = some_items(seed)
    for piece in itertools.chain(*divide(items, (), size, piece_bytes=1024)):
        kinds = {items[member.param].kind for member in piece.members}
        assert len(kinds) == 1
        assert piece.start % 64 == 0
        assert piece.numel * items[piece.members[0].param].itemsize <= 1024
        assert len(piece.members) == 1 or not kinds.pop()[2]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_have_equally_much_to_do(size):
    """Also where one tensor is larger than a rank's share: it is cut."""
    items = [
        Item(0, 100_000, 4, (0, "float32", True)),
        *(Item(i, 70, 4, (0, "float32", False)) for i in (1, 2)),
    ]
    loads = [
        sum(m.numel for piece in of_rank for m in piece.members) for of_rank in divide(items, (), size, 2**20)
    ]
    assert max(loads) - min(loads) <= 64


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_bucket_is_divided_by_itself(seed, size):
    """So every rank receives about equally much of each; and all elements still have one owner."""
    draw = random.Random(seed)
    items = [Item(i, draw.randint(1, 5000), 4, (i % 2, "float32", True)) for i in range(12)]
    buckets = [(11, 10, 9), (8, 7), (6, 5, 4, 3)]  # the rest is in none
    pieces = divide(items, (), size, 1024, buckets)
    numel = [sum(m.numel for piece in of_rank for m in piece.members) for of_rank in pieces]
    assert sum(numel) == sum(item.numel for item in items)
    for bucket in (*buckets, (0, 1, 2)):
        loads = [sum(m.numel for p in rank for m in p.members if m.param in bucket) for rank in pieces]
        assert max(loads) - min(loads) <= 16 * (len(bucket) + 1)


def test_whole_parameters_are_not_cut():
    items = [Item(i, 5000, 4, (0, "float32", True)) for i in range(4)]
    pieces = divide(items, {0, 1, 2, 3}, 2, 1024)
    assert [[piece.members[0].numel for piece in of_rank] for of_rank in pieces] == [[5000] * 2] * 2
