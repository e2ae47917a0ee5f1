"""What messages say of values."""

from __future__ import annotations

import pytest

from mpisgd.arguments import ranks_text


@pytest.mark.parametrize(("ranks", "text"), [([3], "rank 3"), ([2, 0], "ranks 0, 2"), ((), "ranks ")])
def test_ranks_in_words(ranks, text):
    assert ranks_text(ranks) == text


def test_of_many_ranks_the_first_are_listed():
    assert ranks_text(range(14)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 2 more"
