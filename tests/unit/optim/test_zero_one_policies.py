"""When 0/1 Adam renews its variance and when its ranks meet."""

from __future__ import annotations

import pytest

from mpisgd.methods.zero_one_adam.zero_one_adam import is_variance_step, local_interval


@pytest.mark.parametrize("scaler", [1, 2, 3, 16])
def test_the_intervals_between_renewals_double_after_so_many_of_them(scaler):
    expected, step = [], 1
    while step <= 500:
        expected.append(step)
        step += 2 ** ((len(expected) - 1) // scaler)
    assert [step for step in range(1, 501) if is_variance_step(step, scaler)] == expected


@pytest.mark.parametrize(("scaler", "clipper"), [(1, 16), (5, 4), (3, 6), (7, 1)])
def test_the_ranks_meet_at_doubling_intervals_up_to_the_clipper(scaler, clipper):
    expected = [min(clipper, 2 ** ((step - 1) // scaler)) for step in range(1, 200)]
    assert [local_interval(step, scaler, clipper) for step in range(1, 200)] == expected
