"""`InFlightReduction`: buckets are sent in the plan's order, each when its gradients are complete."""

from __future__ import annotations

import pytest
import torch

from mpisgd.compress.sum_reducer import SumReducer
from mpisgd.core.work import QueuedWork
from mpisgd.errors import CollectiveMismatch
from mpisgd.gradients.bucket_plan import BucketPlan, BucketSlot
from mpisgd.gradients.bucketing import Item, plan_buckets
from mpisgd.gradients.fusion_buffer import FusionBuffer
from mpisgd.gradients.in_flight import InFlightReduction
from mpisgd.gradients.in_place_gradient import InPlaceGradient

PARAMS = [torch.zeros(4) for _ in range(5)]


def plan() -> BucketPlan:
    """Buckets [4, 3], [2], [1, 0]; the one in the middle is a single large gradient."""
    items = [Item(i, 8 if i == 2 else 4, 4, "k") for i in range(5)]
    first, alone, last = plan_buckets(items, cap_bytes=32, align_bytes=4, alone_bytes=32)
    assert [first.indices, alone.indices, last.indices] == [(4, 3), (2,), (1, 0)]
    pairs = [FusionBuffer(b, [PARAMS[i] for i in b.indices], torch.zeros(b.numel)) for b in (first, last)]
    loads = [pairs[0], InPlaceGradient(alone, PARAMS[2]), pairs[1]]
    return BucketPlan(
        tuple(range(5)), tuple(BucketSlot(load, SumReducer(16)) for load in loads), frozenset(), "p"
    )


def complete(reduction: InFlightReduction, order: list[int]) -> list[list[tuple[int, ...]]]:
    """Which buckets are sent at each gradient."""
    told = []
    for index in order:
        reduction.complete(index)
        gone = []
        while (place := reduction.next_complete()) is not None:
            reduction.launched[place] = None
            gone.append(reduction.slots[place].bucket.indices)
        told.append(gone)
    return told


def test_nothing_waits_for_what_comes_later_in_the_plan():
    reduction = InFlightReduction(plan(), "now", in_background=True)
    assert complete(reduction, [4, 3, 2, 1, 0]) == [[], [(4, 3)], [(2,)], [], [(1, 0)]]
    assert reduction.not_launched() == []


def test_nothing_overtakes():
    reduction = InFlightReduction(plan(), "now", in_background=True)
    assert complete(reduction, [0, 1, 2, 3, 4]) == [[], [], [], [], [(4, 3), (2,), (1, 0)]]


def test_a_gradient_counts_once_and_strangers_do_not():
    reduction = InFlightReduction(plan(), "now", in_background=True)
    assert complete(reduction, [4, 4, 99]) == [[], [], []]
    assert not reduction.was_launched(4)
    assert complete(reduction, [3]) == [[(4, 3)]]
    assert reduction.was_launched(4)
    assert reduction.was_launched(3)
    assert not reduction.was_launched(2)
    assert not reduction.was_launched(99)


def test_buckets_that_need_no_order_are_told_when_they_are_complete():
    reduction = InFlightReduction(plan(), "now", in_background=True)
    assert [reduction.complete(index) for index in [0, 2, 1, 3, 3, 99]] == [None, 1, 2, None, None, None]
    reduction.launched.update({2: None, 1: None})
    assert reduction.not_launched() == [0]
    assert reduction.was_launched(0)
    assert not reduction.was_launched(4)


def test_what_is_held_is_not_launched():
    reduction = InFlightReduction(plan(), "now", in_background=True)
    complete(reduction, [4, 3])
    reduction.held = True
    assert complete(reduction, [2, 1, 0]) == [[], [], []]
    assert reduction.not_launched() == [1, 2]


def test_in_the_foreground_everything_is_not_launched():
    reduction = InFlightReduction(plan(), "now")
    assert complete(reduction, [4, 3, 2, 1, 0]) == [[]] * 5
    assert len(reduction.not_launched()) == 3


def test_the_first_error_is_told_and_all_are_waited_for():
    reduction = InFlightReduction(plan(), "now", in_background=True)
    works = [QueuedWork("gradients", None, queue=None) for _ in range(3)]
    first, second = CollectiveMismatch("first"), CollectiveMismatch("second")
    for place, (work, error) in enumerate(zip(works, (None, first, second), strict=True)):
        work.complete(error)
        reduction.launched[place] = work
    with pytest.raises(CollectiveMismatch, match="first"):
        reduction.wait()
    del works, work
    reduction.launched.clear()  # nothing warns of an error that nobody waited for
