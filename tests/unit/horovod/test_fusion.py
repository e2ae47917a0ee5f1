"""`fuse`: nothing lost, order kept, the limit kept, and only together what may be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpisgd.horovod.engine.request import Request
from mpisgd.horovod.engine.request_table import Decision, fuse

PLAIN = Request("allreduce.x", "allreduce", 0, "Sum", ("float32",), ((2,),))

requests = st.builds(
    Request,
    name=st.sampled_from(["a", "b"]),
    kind=st.sampled_from(["allreduce", "allgather", "barrier"]),
    set_id=st.integers(0, 1),
    op=st.sampled_from(["Sum", "Adasum"]),
    dtypes=st.sampled_from([("float32",), ("float32", "float32"), ("int8",), ("int8", "float32"), ()]),
    prescale=st.sampled_from([1.0, 0.5]),
)
decisions = st.builds(Decision, requests, st.sampled_from([frozenset(), frozenset({1})]))
loads = st.lists(st.tuples(decisions, st.integers(0, 50)), max_size=20)


@given(loads, st.integers(0, 100))
def test_nothing_is_lost_and_the_order_within_and_between_batches_is_kept(load, limit):
    given_order = [decision for decision, _ in load]
    batches = fuse(given_order, [size for _, size in load], limit)
    place = {id(decision): i for i, decision in enumerate(given_order)}
    places = [[place[id(decision)] for decision in batch] for batch in batches]
    assert sorted(itertools.chain.from_iterable(places)) == list(range(len(load)))
    assert all(batch == sorted(batch) for batch in places)
    assert [batch[0] for batch in places] == sorted(batch[0] for batch in places)


@given(loads, st.integers(0, 100))
def test_a_batch_is_within_the_limit_or_a_single_operation(load, limit):
    size_of = {id(decision): size for decision, size in load}
    for batch in fuse([decision for decision, _ in load], [size for _, size in load], limit):
        assert len(batch) == 1 or sum(size_of[id(decision)] for decision in batch) <= limit


@given(loads)
def test_what_travels_together_is_reduced_alike(load):
    for batch in fuse([decision for decision, _ in load], [size for _, size in load], 10**6):
        if len(batch) > 1:
            assert {decision.request.kind for decision in batch} == {"allreduce"}
            assert len({(d.request.set_id, d.request.op, d.request.prescale, d.absent) for d in batch}) == 1
            assert len({dtype for decision in batch for dtype in decision.request.dtypes}) == 1
            assert batch[0].request.op != "Adasum"


@pytest.mark.parametrize(
    "other",
    [
        {"set_id": 1},
        {"op": "Max"},
        {"op": "Adasum"},
        {"dtypes": ("float64",)},
        {"dtypes": ("float32", "float64")},
        {"device": "cuda"},
        {"prescale": 2.0},
        {"postscale": 2.0},
        {"kind": "reducescatter"},
    ],
    ids=str,
)
def test_others_in_between_do_not_part_what_travels_together(other):
    first, last = Decision(PLAIN), Decision(PLAIN._replace(shapes=((9,),)))
    different = Decision(PLAIN._replace(**other))
    assert fuse([first, different, last], [8, 8, 36], 100) == [[first, last], [different]]


def test_who_takes_part_without_data_parts_operations():
    mine, absent = Decision(PLAIN), Decision(PLAIN, frozenset({2}))
    assert fuse([mine, absent, mine], [8] * 3, 100) == [[mine, mine], [absent]]


def test_a_full_batch_is_followed_by_a_new_one():
    listed = [Decision(PLAIN)] * 5
    assert [len(batch) for batch in fuse(listed, [40] * 5, 100)] == [2, 2, 1]
    assert [len(batch) for batch in fuse(listed, [40] * 5, 0)] == [1] * 5


def test_all_tensors_of_one_operation_stay_together_beyond_the_limit():
    listed = [Decision(PLAIN._replace(dtypes=("float32",) * 3, shapes=((9,),) * 3))] * 2
    assert [len(batch) for batch in fuse(listed, [108] * 2, 50)] == [1, 1]
