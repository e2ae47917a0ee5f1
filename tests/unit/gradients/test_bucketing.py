"""Bucket plans as data: nothing lost, nothing twice, no overlap, aligned, bounded, in order."""

import dataclasses
import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpisgd.gradients.bucketing import Bucket, Item, join_buckets, launch_order, plan_buckets, plan_hash

ITEMSIZES = {"float32:cpu": 4, "bfloat16:cpu": 2, "complex128:cpu": 16, "odd:cpu": 3, "float32:cuda:0": 4}


@st.composite
def item_lists(draw: st.DrawFn) -> list[Item]:
    indices = draw(st.lists(st.integers(0, 60), unique=True, max_size=20))
    keys = draw(st.lists(st.sampled_from(sorted(ITEMSIZES)), min_size=len(indices), max_size=len(indices)))
    numels = st.one_of(st.integers(0, 8), st.integers(0, 2000))
    return [Item(i, draw(numels), ITEMSIZES[key], key) for i, key in zip(indices, keys, strict=True)]


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[Item], list[int], int, int, tuple[Bucket, ...]]:
    """Items, the order they are taken in, cap, alignment, and the plan made of them."""
    items = draw(item_lists())
    order = draw(st.permutations([item.index for item in items]))
    cap = draw(st.integers(1, 10_000))
    align = draw(st.sampled_from([1, 4, 16, 48, 64, 4096]))
    return items, order, cap, align, plan_buckets(items, cap_bytes=cap, order=order, align_bytes=align)


def by_index(items: list[Item]) -> dict[int, Item]:
    return {item.index: item for item in items}


@given(plans())
def test_every_item_is_in_exactly_one_bucket_of_its_key(plan):
    items, _, _, _, buckets = plan
    placed = [(index, bucket.key) for bucket in buckets for index in bucket.indices]
    assert sorted(placed) == sorted((item.index, item.key) for item in items)


@given(plans())
def test_items_do_not_overlap_and_end_where_the_bucket_ends(plan):
    items, _, _, _, buckets = plan
    for bucket in buckets:
        ends = [
            offset + by_index(items)[index].numel
            for index, offset in zip(bucket.indices, bucket.offsets, strict=True)
        ]
        assert bucket.offsets[0] == 0
        assert all(end <= start for end, start in zip(ends, bucket.offsets[1:], strict=False))
        assert bucket.numel == ends[-1]


@given(plans())
def test_every_item_begins_at_the_alignment_and_wastes_less_than_one_step(plan):
    items, _, _, align, buckets = plan
    for bucket in buckets:
        end_bytes = 0
        for index, offset in zip(bucket.indices, bucket.offsets, strict=True):
            item = by_index(items)[index]
            assert offset * item.itemsize % align == 0
            assert offset * item.itemsize - end_bytes < align * item.itemsize
            end_bytes = (offset + item.numel) * item.itemsize


@given(plans())
def test_a_bucket_passes_the_cap_only_with_a_single_item(plan):
    items, _, cap, _, buckets = plan
    for bucket in buckets:
        itemsize = by_index(items)[bucket.indices[0]].itemsize
        assert bucket.numel * itemsize <= cap or len(bucket.indices) == 1


@given(plans())
def test_no_bucket_closes_while_the_next_item_of_its_key_still_fits(plan):
    items, _, cap, align, buckets = plan
    for key in ITEMSIZES:
        mine = [bucket for bucket in buckets if bucket.key == key]
        for closed, following in itertools.pairwise(mine):
            joined = [by_index(items)[i] for i in (*closed.indices, following.indices[0])]
            order = [item.index for item in joined]
            assert len(plan_buckets(joined, cap_bytes=cap, order=order, align_bytes=align)) == 2


@given(plans())
def test_the_order_is_kept_within_a_key(plan):
    items, order, _, _, buckets = plan
    for key in ITEMSIZES:
        launched = [index for bucket in buckets if bucket.key == key for index in bucket.indices]
        assert launched == [index for index in order if by_index(items)[index].key == key]


@given(plans())
def test_buckets_are_launched_in_the_order_in_which_they_are_complete(plan):
    _, order, _, _, buckets = plan
    completed_at = [max(order.index(index) for index in bucket.indices) for bucket in buckets]
    assert completed_at == sorted(completed_at)


@given(item_lists(), st.randoms())
def test_the_plan_does_not_depend_on_how_the_items_are_listed(items, random):
    shuffled = random.sample(items, len(items))
    assert plan_buckets(shuffled, cap_bytes=256) == plan_buckets(items, cap_bytes=256)


@given(item_lists())
def test_the_default_order_is_the_reverse_of_registration(items):
    order = sorted((item.index for item in items), reverse=True)
    assert plan_buckets(items, cap_bytes=512) == plan_buckets(items, cap_bytes=512, order=order)


def test_mixed_types_are_launched_when_complete_and_not_when_begun():
    f32 = dict.fromkeys((0, 2, 3, 4), "f32")
    items = [Item(i, 16, 4 if i in f32 else 2, f32.get(i, "bf16")) for i in range(6)]
    plan = plan_buckets(items, cap_bytes=3 * 64, order=range(6))
    assert [bucket.indices for bucket in plan] == [(0, 2, 3), (4,), (1, 5)]


def test_no_items_make_no_buckets():
    assert plan_buckets([], cap_bytes=1) == ()


def test_empty_items_keep_their_place():
    items = [Item(0, 0, 4, "k"), Item(1, 3, 4, "k"), Item(2, 0, 4, "k")]
    assert plan_buckets(items, cap_bytes=64, order=[0, 1, 2]) == (Bucket("k", (0, 1, 2), (0, 0, 16), 16),)


@pytest.mark.parametrize(
    ("items", "options", "named"),
    [
        ([], {"cap_bytes": 0}, "0"),
        ([], {"cap_bytes": -7}, "-7"),
        ([], {"cap_bytes": 1, "align_bytes": -3}, "-3"),
        ([Item(4, -5, 4, "k")], {"cap_bytes": 1}, "item 4.*-5"),
        ([Item(4, 5, 0, "k")], {"cap_bytes": 1}, "item 4.*0"),
        ([Item(4, 1, 4, "k"), Item(4, 2, 4, "k")], {"cap_bytes": 1}, "index 4 occurs twice"),
        ([Item(0, 1, 4, "k"), Item(1, 2, 8, "k")], {"cap_bytes": 1}, "item 1: itemsize 8.*'k'.*4"),
        ([Item(0, 1, 4, "k")], {"cap_bytes": 1, "order": [0, 0]}, "order index 0 occurs twice"),
        ([Item(0, 1, 4, "k")], {"cap_bytes": 1, "order": [0, 9]}, "index 9"),
        ([Item(0, 1, 4, "k"), Item(8, 1, 4, "k")], {"cap_bytes": 1, "order": [0]}, "lacks index 8"),
    ],
)
def test_impossible_requests_are_refused_by_name(items, options, named):
    with pytest.raises(ValueError, match=named):
        plan_buckets(items, **options)


PLAN = (Bucket("float32:cpu", (3, 1), (0, 16), 20), Bucket("bfloat16:cpu", (2, 0), (0, 32), 40))


def variants_of(bucket: Bucket) -> list[Bucket]:
    return [
        dataclasses.replace(bucket, key="other"),
        dataclasses.replace(bucket, indices=bucket.indices[::-1]),
        dataclasses.replace(bucket, offsets=(0, bucket.offsets[1] + 16)),
        dataclasses.replace(bucket, numel=bucket.numel + 1),
    ]


def test_the_hash_changes_when_anything_changes():
    changed = [
        *((variant, PLAN[1]) for variant in variants_of(PLAN[0])),
        *((PLAN[0], variant) for variant in variants_of(PLAN[1])),
        PLAN[::-1],
        PLAN[:1],
        (),
    ]
    hashes = {plan_hash(plan) for plan in (PLAN, *changed)}
    assert len(hashes) == 1 + len(changed)
    assert all(0 <= value < 2**64 for value in hashes)


@given(plans(), plans())
def test_plans_hash_alike_only_if_equal(one, other):
    assert (plan_hash(one[-1]) == plan_hash(other[-1])) == (one[-1] == other[-1])


def test_the_hash_is_the_same_in_another_process():
    program = (
        "from mpisgd.gradients.bucketing import Bucket, plan_hash\n"
        f"print(plan_hash({PLAN!r}))"  # a dataclass's repr is the call that makes it
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) == plan_hash(PLAN)


def test_the_hash_of_a_known_plan_never_changes():
    # Ranks may run different Python versions: the number itself is the contract.
    assert plan_hash(PLAN) == 3357110221363071717


@given(st.data(), st.integers(0, 30))
def test_launch_order_is_the_observed_then_the_rest_descending(data, num_items):
    observed = data.draw(st.lists(st.integers(0, num_items - 1), unique=True)) if num_items else []
    order = launch_order(num_items, observed)
    assert sorted(order) == list(range(num_items))
    assert list(order[: len(observed)]) == observed
    rest = order[len(observed) :]
    assert list(rest) == sorted(rest, reverse=True)


@pytest.mark.parametrize(("observed", "named"), [([1, 1], "1 occurs twice"), ([4], "4"), ([-1], "-1")])
def test_launch_order_refuses_what_was_not_possible_to_observe(observed, named):
    with pytest.raises(ValueError, match=named):
        launch_order(4, observed)


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 200))
def test_buckets_are_joined_in_order_up_to_the_cap(sizes: list[int], cap: int) -> None:
    joined = join_buckets(sizes, cap)
    assert [place for places in joined for place in places] == list(range(len(sizes)))
    for places in joined:
        assert len(places) == 1 or sum(sizes[place] for place in places) <= cap
    for places, following in itertools.pairwise(joined):
        assert sum(sizes[place] for place in places) + sizes[following[0]] > cap


@given(plans(), st.randoms())
def test_the_items_of_a_bucket_may_lie_in_another_order(plan, draw):
    """The same ones are in it, and it is launched at the same time."""
    items, order, cap, align, buckets = plan
    lie = sorted(order, key=lambda _: draw.random())
    others = plan_buckets(items, cap_bytes=cap, order=order, align_bytes=align, storage_order=lie)
    assert [sorted(b.indices) for b in others] == [sorted(b.indices) for b in buckets]
    of = by_index(items)
    for bucket in others:
        assert list(bucket.indices) == [index for index in lie if index in bucket.indices]
        ends = [at + of[index].numel for index, at in zip(bucket.indices, bucket.offsets, strict=True)]
        assert all(end <= start for end, start in zip(ends, bucket.offsets[1:], strict=False))
        assert bucket.numel == ends[-1]
        assert all(offset * of[bucket.indices[0]].itemsize % align == 0 for offset in bucket.offsets)
