"""Parts of a data set: nothing lost, nothing twice, of the right size, the same everywhere."""

import subprocess
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from mpisgd.data.partition import apportion, partition, split_evenly

totals = st.one_of(st.integers(0, 50), st.integers(0, 10**15))


@st.composite
def fraction_lists(draw: st.DrawFn) -> list[float]:
    weights = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=12).filter(any))
    return [weight / sum(weights) for weight in weights]


@given(totals, fraction_lists())
def test_sizes_sum_to_the_total_and_are_less_than_one_off(total, fractions):
    sizes = apportion(total, fractions)
    assert sum(sizes) == total
    whole = sum(map(Fraction, fractions))
    for size, fraction in zip(sizes, fractions, strict=True):
        assert abs(size - Fraction(fraction) / whole * total) < 1


@given(totals, fraction_lists(), st.randoms())
def test_sizes_do_not_depend_on_the_order_of_the_fractions(total, fractions, random):
    shuffled = random.sample(fractions, len(fractions))
    pairs = sorted(zip(fractions, apportion(total, fractions), strict=True))
    assert sorted(zip(shuffled, apportion(total, shuffled), strict=True)) == pairs


@given(totals, fraction_lists())
def test_a_fraction_of_zero_gets_nothing_and_a_larger_one_never_less(total, fractions):
    sizes = apportion(total, fractions)
    pairs = sorted(zip(fractions, sizes, strict=True))
    assert all(size == 0 for fraction, size in pairs if fraction == 0)
    assert [size for _, size in pairs] == sorted(sizes)


@pytest.mark.parametrize(
    ("total", "fractions", "sizes"),
    [
        (100, [0.29, 0.71], [29, 71]),
        (10, [0.7, 0.2, 0.1], [7, 2, 1]),
        (10, [0.1] * 10, [1] * 10),
        (10, [1 / 3] * 3, [4, 3, 3]),
        (3, [0.5, 0.5], [2, 1]),
        (1, [0.2, 0.2, 0.6], [0, 0, 1]),
        (0, [0.5, 0.5], [0, 0]),
        (7, [1.0], [7]),
    ],
)
def test_known_sizes(total, fractions, sizes):
    assert apportion(total, fractions) == sizes


@given(totals, st.integers(1, 200))
def test_an_even_split_loses_nothing_and_differs_by_at_most_one(total, num_parts):
    sizes = split_evenly(total, num_parts)
    assert len(sizes) == num_parts
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("total", "fractions", "named"),
    [
        (-1, [1.0], "-1"),
        (5, [], "sum to 0"),
        (5, [0.5, 0.4], r"\[0.5, 0.4\] sum to 0.9"),
        (5, [1.5, -0.5], "fraction 1 is -0.5"),
        (5, [float("nan"), 1.0], "fraction 0 is nan"),
        (5, [float("inf")], "fraction 0 is inf"),
        (5, [3, 2], "sum to 5"),
    ],
)
def test_impossible_fractions_are_refused_by_name(total, fractions, named):
    with pytest.raises(ValueError, match=named):
        apportion(total, fractions)


@pytest.mark.parametrize(("total", "num_parts"), [(-1, 2), (3, 0)])
def test_impossible_splits_are_refused(total, num_parts):
    with pytest.raises(ValueError, match=f"{total} items into {num_parts} parts"):
        split_evenly(total, num_parts)


def numbers(total: int) -> TensorDataset:
    return TensorDataset(torch.arange(total))


@given(st.integers(0, 300), fraction_lists(), st.integers(0, 2**63 - 1))
def test_parts_hold_every_item_once(total, fractions, seed):
    parts = partition(numbers(total), fractions, seed=seed)
    assert [len(part) for part in parts] == apportion(total, fractions)
    items = [int(item) for part in parts for (item,) in part]
    assert sorted(items) == list(range(total))


def test_parts_are_shuffled_by_the_seed_alone():
    first = [part.indices for part in partition(numbers(100), [0.5, 0.5], seed=3)]
    state = torch.random.get_rng_state()
    torch.rand(7)
    again = [part.indices for part in partition(numbers(100), [0.5, 0.5], seed=3)]
    other = [part.indices for part in partition(numbers(100), [0.5, 0.5], seed=4)]
    assert first == again != other
    assert first[0] != sorted(first[0])
    torch.random.set_rng_state(state)


def test_the_global_random_state_is_left_alone():
    before = torch.random.get_rng_state()
    partition(numbers(100), [1.0])
    assert torch.equal(torch.random.get_rng_state(), before)


def test_parts_are_the_same_in_another_process():
    program = (
        "import torch\n"
        "from mpisgd.data import partition\n"
        "torch.manual_seed(99); torch.set_num_threads(1)\n"
        "print([p.indices for p in partition(range(50), [0.6, 0.4], seed=11)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == str([part.indices for part in partition(numbers(50), [0.6, 0.4], seed=11)])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))

    def __len__(self):
        return 5


class Endless(Dataset):
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("dataset", [Stream(), Endless()])
def test_a_dataset_that_cannot_be_cut_is_refused_by_name(dataset):
    with pytest.raises(ValueError, match=f"partition: {type(dataset).__name__} has no length"):
        partition(dataset, [1.0])
