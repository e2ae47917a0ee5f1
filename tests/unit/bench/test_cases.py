"""Sizes, bandwidth factors and bounds, as data."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpisgd.errors import JobError
from mpisgd.tools.bench.cases import (
    COLLECTIVES,
    ITEM_BYTES,
    bus_factor,
    case_of,
    link_bytes,
    parse_bytes,
    powers,
    sizes,
)

MIB = 2**20


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("all_reduce", 1.5),
        ("reduce_scatter", 0.75),
        ("all_gather", 0.75),
        ("all_to_all", 0.75),
        ("gather", 0.75),
        ("scatter", 0.75),
        ("broadcast", 1.0),
        ("reduce", 1.0),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(collective, factor):
    assert bus_factor(collective, 4) == factor


def test_every_collective_has_a_bus_factor():
    assert all(0 < bus_factor(collective, 2) <= 1 for collective in COLLECTIVES)


@given(
    collective=st.sampled_from(COLLECTIVES),
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    nbytes=st.integers(1, 2**31 - 1),
    size=st.integers(1, 9),
)
def test_a_case_has_the_bytes_asked_for_less_a_remainder(collective, dtype, nbytes, size):
    case = case_of(collective, dtype, nbytes, size)
    granule = size * ITEM_BYTES[dtype]
    assert case.nbytes <= max(nbytes, granule)
    assert case.nbytes > nbytes - granule


def test_sizes_of_both_sides():
    gather, scatter = case_of("all_gather", "float32", 64, 4), case_of("reduce_scatter", "float32", 64, 4)
    assert (gather.input_numel, gather.output_numel, gather.nbytes) == (4, 16, 64)
    assert (scatter.input_numel, scatter.output_numel, scatter.nbytes) == (16, 4, 64)


def link_mib(collective, *ranks_per_host):
    case = case_of(collective, "float32", 60 * MIB, sum(ranks_per_host))
    return link_bytes(case, ranks_per_host) / MIB


def test_nothing_crosses_a_link_on_one_host():
    assert all(link_mib(collective, 4) == 0 for collective in COLLECTIVES)


def test_two_hosts_pass_the_whole_message_of_an_all_reduce_once_each_way():
    assert link_mib("all_reduce", 2, 2) == link_mib("all_reduce", 1, 1) == 60


def test_more_hosts_pass_more():
    assert link_mib("all_reduce", 1, 1, 1) == 80
    assert link_mib("all_gather", 1, 1, 1) == 40


def test_uneven_hosts_are_bound_by_the_busiest():
    assert link_mib("all_gather", 2, 1) == 40  # the host of one rank receives two thirds
    assert link_mib("gather", 2, 1) == 20  # what the host without the root sends
    assert link_mib("all_to_all", 2, 1) == 40  # two ranks send a third each
    assert link_mib("broadcast", 2, 1) == 60


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4", 4), ("4B", 4), ("64KiB", 65536), (" 1 mib ", MIB), ("1GiB", 2**30)]
)
def test_sizes_in_words(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "4KB", "1.5MiB", "-4", "2GiB", "many"])
def test_what_is_no_size_is_named(text):
    with pytest.raises(JobError, match="size"):
        parse_bytes(text)


def test_lists_and_ranges():
    assert sizes("4,1KiB") == [4, 1024]
    assert sizes("4-256MiB")[:3] == [4, 16, 64]
    assert sizes("4-256MiB")[-1] == 256 * MIB
    assert len(sizes("4-256MiB")) == 14


@given(first=st.integers(1, 1000), last=st.integers(1000, 10**8))
def test_a_range_ascends_from_its_first_to_its_last(first, last):
    found = powers(first, last)
    assert (found[0], found[-1]) == (first, last)
    assert all(a < b <= 4 * a for a, b in itertools.pairwise(found))


def test_a_range_the_wrong_way_round_is_refused():
    with pytest.raises(JobError, match="larger"):
        sizes("1MiB-4")
