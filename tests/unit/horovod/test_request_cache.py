"""`RequestCache`: numbers mean the same on all ranks, and a bit per number comes back as it went."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mpisgd.horovod.engine.request import Request, RequestCache


def request(number: int) -> Request:
    return Request(f"allreduce.{number}", "allreduce")


def there_and_back(cache: RequestCache, slots: list[int]) -> list[int]:
    return cache.from_words(torch.tensor(cache.as_words(slots), dtype=torch.int64))


@given(st.integers(1, 200), st.data())
def test_words_round_trip(capacity, data):
    slots = data.draw(st.sets(st.integers(0, capacity - 1)))
    assert there_and_back(RequestCache(capacity), list(slots)) == sorted(slots)


def test_the_sign_bit_is_a_bit_like_the_others():
    assert RequestCache(128).as_words([63, 127, 64]) == [-(2**63), -(2**63) + 1]
    assert there_and_back(RequestCache(128), [63, 127, 64]) == [63, 64, 127]


def test_a_message_has_room_for_all_numbers_and_no_more():
    assert [RequestCache(capacity).num_words for capacity in (0, 1, 64, 65, 1024)] == [0, 1, 1, 2, 16]


@given(st.integers(1, 5), st.lists(st.integers(0, 9), max_size=60))
def test_it_remembers_those_used_last_under_numbers_that_stay(capacity, uses):
    cache, recent, slots = RequestCache(capacity), [], {}
    for number in uses:
        cache.use(request(number))
        recent = [*[other for other in recent if other != number], number][-capacity:]
        slots = {other: slot for other, slot in slots.items() if other in recent}
        slots.setdefault(number, cache.slot(request(number)))
        known = {other: cache.slot(request(other)) for other in range(10)}
        assert {other: slot for other, slot in known.items() if slot is not None} == slots
        assert all(cache.request(slot) == request(other) for other, slot in slots.items())
        assert sorted(slots.values()) == list(range(len(slots)))


def test_two_requests_of_one_name_that_differ_are_two():
    cache = RequestCache(4)
    cache.use(request(0))
    assert cache.slot(request(0)._replace(shapes=((1,),))) is None


def test_without_capacity_nothing_is_remembered():
    cache = RequestCache(0)
    cache.use(request(0))
    assert cache.slot(request(0)) is None
    assert there_and_back(cache, []) == []
