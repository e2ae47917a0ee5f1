"""Who owns which parameter: everyone about equally much, decided alike everywhere."""

from __future__ import annotations

import itertools
import random

import pytest

from mpisgd.sharding.ownership import assign


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
