"""Mixing matrices of the user's: taken in any form, checked, and told apart."""

from __future__ import annotations

import numpy
import pytest
import torch

from mpisgd.errors import InvalidArgument
from mpisgd.gossip import MixingMatrix
from mpisgd.gossip.graphs import as_graph

THIRD = 1 / 3
DOUBLY = [[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]
COLUMNS = [[0.5, 0.0, 0.25], [0.5, 0.5, 0.0], [0.0, 0.5, 0.75]]  # rows sum to 0.75, 1, 1.25
ROWS = [list(row) for row in zip(*COLUMNS, strict=True)]


@pytest.mark.parametrize(
    "given",
    [DOUBLY, tuple(map(tuple, DOUBLY)), torch.tensor(DOUBLY), numpy.array(DOUBLY)],
    ids=["lists", "tuples", "tensor", "array"],
)
def test_a_matrix_is_taken_in_any_form(given):
    graph = as_graph("a test", given)
    assert graph == MixingMatrix(DOUBLY)
    assert hash(graph) == hash(MixingMatrix(DOUBLY))
    assert torch.equal(graph.matrix(3), torch.tensor(DOUBLY, dtype=torch.float64))


@pytest.mark.parametrize(
    "wrong",
    [
        [[0.5, 0.5], [0.4, 0.4]],
        [[1.5, -0.5], [-0.5, 1.5]],
        [[float("nan"), 0.5], [0.5, 0.5]],
        [[0.5, 0.5]],
        [[1.0], [1.0, 1.0]],
        [1.0, 2.0],
        [],
        torch.eye(2, dtype=torch.complex64),
        torch.full((3, 3), 0.33),
    ],
    ids=["sums", "negative", "nan", "not square", "ragged", "vector", "empty", "complex", "rounded"],
)
def test_what_is_not_stochastic_is_refused(wrong):
    with pytest.raises(InvalidArgument, match="topology"):
        MixingMatrix(wrong)


def test_only_what_has_a_weight_is_sent():
    graph = MixingMatrix(COLUMNS)
    assert [graph.exchange(rank, 3).destinations for rank in range(3)] == [(1,), (2,), (0,)]
    assert graph.exchange(0, 3).terms == ((0, 0.5), (2, 0.25))
    assert graph.destinations(3, 0) == [[1], [2], [0]]


def test_which_sums_a_strategy_needs():
    MixingMatrix(COLUMNS).check_mixing("a test", 3, doubly=False)
    with pytest.raises(InvalidArgument, match="a row of the mixing matrix"):
        MixingMatrix(COLUMNS).check_mixing("a test", 3, doubly=True)
    with pytest.raises(InvalidArgument, match="a column of the mixing matrix"):
        MixingMatrix(ROWS).check_mixing("a test", 3, doubly=False)


@pytest.mark.parametrize("weights", [[[1, 0], [0, 1]], [[0.5, 0.0], [0.5, 1.0]]])
def test_ranks_that_never_hear_of_each_other_are_refused(weights):
    with pytest.raises(InvalidArgument, match="is not connected"):
        MixingMatrix(weights).check_mixing("a test", 2, doubly=False)


def test_a_matrix_is_for_as_many_ranks_as_it_has_rows():
    with pytest.raises(InvalidArgument, match="is for 3 ranks; there are 4"):
        MixingMatrix(DOUBLY).exchange(0, 4)


def test_large_matrices_print_shortly_and_differ():
    mixed = torch.full((8, 8), 1 / 8, dtype=torch.float64)
    other = mixed + 1e-12 * torch.eye(8)
    assert len(repr(MixingMatrix(mixed))) < 60
    assert repr(MixingMatrix(mixed)) != repr(MixingMatrix(other))
    assert repr(MixingMatrix([[0.5, 0.5], [0.5, 0.5]])) == "MixingMatrix(((0.5, 0.5), (0.5, 0.5)))"
