"""Micro-batches, skip connections and the ways to give stages, without ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mpisgd.errors import InvalidArgument
from mpisgd.pipeline import Pop, Stash
from mpisgd.pipeline.micro_batches import Batch, as_tensors, row_counts, split_rows
from mpisgd.pipeline.model_parts import build_stages, check_tied, tied_by_identity, unify_tied
from mpisgd.pipeline.skips import popped_names, skips_between, stashed_names


def test_rows_are_dealt_evenly_and_count_by_their_share():
    assert row_counts(10, 4) == [3, 3, 2, 2]
    batch = Batch(8, row_counts(10, 4), (), ())
    assert sum(batch.share(number) for number in range(8, 12)) == pytest.approx(1.0)
    assert batch.rows(11) == 2
    (first, _), *_, (last, _) = split_rows((torch.arange(10), torch.ones(10, 2)), row_counts(10, 4))
    assert (first.tolist(), last.tolist()) == ([0, 1, 2], [8, 9])


@pytest.mark.parametrize("value", [None, 3, torch.tensor(1.0), (), (torch.ones(2), torch.ones(3)), "text"])
def test_what_is_no_batch_is_refused(value):
    with pytest.raises(InvalidArgument, match="inputs"):
        as_tensors("inputs", value)


def test_fewer_rows_than_micro_batches_are_refused():
    with pytest.raises(InvalidArgument, match="3 rows for num_micro_batches=4"):
        row_counts(3, 4)


def test_a_model_with_skip_connections_works_outside_of_a_pipeline():
    model = nn.Sequential(Stash("a"), nn.Linear(2, 2), Pop("a", torch.mul))
    x = torch.randn(3, 2)
    assert torch.equal(model(x), model[1](x) * x)
    assert torch.equal(model(x), model[1](x) * x)


def test_connections_are_found_by_their_names():
    stages = [nn.Sequential(Stash("a"), Stash("b")), nn.Sequential(Pop("b"), Stash("c"), Pop("c")), Pop("a")]
    found = skips_between([stashed_names(s) for s in stages], [popped_names(s) for s in stages])
    assert found == {(0, 1): ("b",), (0, 2): ("a",)}


@pytest.mark.parametrize(
    ("stashed", "popped", "text"),
    [
        ([["a"], []], [[], []], "without a Pop"),
        ([[], []], [[], ["a"]], "without a Pop"),
        ([["a"], ["a"]], [[], ["a"]], "two Stashs have the name 'a'"),
        ([[], ["a"]], [["a"], []], "after it"),
    ],
)
def test_connections_that_lead_nowhere_are_refused(stashed, popped, text):
    with pytest.raises(InvalidArgument, match=text):
        skips_between(stashed, popped)


def test_functions_are_called_for_own_stages_alone():
    def never():
        raise AssertionError

    built = build_stages([never, lambda: nn.Linear(2, 2), nn.ReLU()], [1, 2])
    assert sorted(built) == [1, 2]
    with pytest.raises(InvalidArgument, match="stage 0 is 3"):
        build_stages([lambda: 3], [0])


def test_shared_parameters_are_tied_and_named_ones_become_one():
    first, last = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    last.weight = first.weight
    assert tied_by_identity([first, nn.ReLU(), last]) == [((0, "weight"), (2, "weight"))]
    a, b = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    tied = check_tied([[(0, "0.weight"), (1, "weight")]], 2)
    (param,) = unify_tied(tied[0], {0: a, 1: b})
    assert a[0].weight is b.weight is param
    assert unify_tied(tied[0], {2: nn.ReLU()}) == []


@pytest.mark.parametrize(
    "tied", [[3], [[(0, "weight")]], [[(0, "weight"), (9, "weight")]], [[(0, "a"), (0, "b")]]]
)
def test_ties_of_another_form_are_refused(tied):
    with pytest.raises(InvalidArgument, match="tied has"):
        check_tied(tied, 2)


def test_a_tie_of_a_parameter_that_is_not_there_is_refused():
    with pytest.raises(InvalidArgument, match=r"no parameter 'x\.weight'"):
        unify_tied(((0, "x.weight"), (1, "weight")), {0: nn.Linear(1, 1)})
