"""Random divisions of data among ranks inside `join()` equal one process, bit for bit."""

from __future__ import annotations

import pytest
from uneven.division import METHODS, drawn
from uneven.main import try_division

from mpisgd.gradients.uneven_window import UnevenWindow
from mpisgd.gradients.weight import Weight
from mpisgd.methods.strategy.example_counts import ExampleCounts

SEEDS = 3 * len(METHODS)


@pytest.mark.parametrize("method", range(len(METHODS)), ids=METHODS)
def test_a_division_equals_one_process(method):
    for seed in range(method, SEEDS, len(METHODS)):
        assert not try_division(seed)


def test_what_is_drawn_has_all_kinds():
    divisions = [drawn(seed) for seed in range(200)]
    assert {each.size for each in divisions} == {1, 2, 3, 4}
    assert {each.method for each in divisions} == {*METHODS}
    assert any(() in each.batches and each.size > 1 for each in divisions)  # a rank without any data
    for kind in ("scaled", "scheduled", "clips", "gives_examples"):
        assert {bool(getattr(each, kind)) for each in divisions} == {False, True}
    assert {each.way for each in divisions} == {"", "no_sync", "passes"}


def differing():
    return any(try_division(seed) for seed in range(SEEDS))


def test_the_weight_is_needed(monkeypatch):
    monkeypatch.setattr(Weight, "before", lambda self, flat: None)
    assert differing()


def test_the_division_after_the_sum_is_needed(monkeypatch):
    monkeypatch.setattr(Weight, "after", lambda self, flat: None)
    assert differing()


def test_a_rank_without_data_must_contribute_nothing(monkeypatch):
    monkeypatch.setattr(UnevenWindow, "clear", lambda self, params: None)
    assert differing()


def test_models_must_be_weighted(monkeypatch):
    monkeypatch.setattr(ExampleCounts, "of_mean", lambda self, name, group: None)
    assert differing()
