"""Layouts that are not legal, or not the same on all ranks, are refused on every rank."""

from __future__ import annotations

import pytest
import torch
from two_layers import IO, NAMES, transformer
from verdicts import everyone, raises_everywhere

import mpisgd
from mpisgd.layouts.rules import Rule

pytestmark = pytest.mark.mpi(min_size=2)


def test_a_mesh_for_another_number_of_ranks_is_refused_by_its_rule():
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        mpisgd.layout("batch:a", mesh={"a": mpisgd.size() + 1}).distribute(transformer(), NAMES, **IO)
    everyone(Rule.ALL_RANKS.value in caught.text, caught.text)


@pytest.mark.parametrize(
    ("rules", "rule", "said"),
    [
        ("model:a; vocab:a", Rule.ONE_DIMENSION, "embedding.weight"),
        ("batch:a; model:a", Rule.ONE_DIMENSION, "the output of embedding"),
        ("hiden:a", Rule.KNOWN_DIMENSION, "hiden:a"),
    ],
)
def test_what_the_model_does_not_allow_is_refused_by_its_rule(rules, rule, said):
    layout = mpisgd.layout(rules, mesh={"a": mpisgd.size()})
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        layout.distribute(transformer(), NAMES, **IO)
    everyone(rule.value in caught.text and said in caught.text, caught.text)


def test_a_batch_that_does_not_divide_is_refused_in_forward():
    layout = mpisgd.layout("batch:a", mesh={"a": mpisgd.size()})
    model = layout.distribute(transformer(), NAMES, **IO)
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        model(torch.zeros(2 * mpisgd.size() + 1, 12, dtype=torch.int64))
    everyone(Rule.EVEN.value in caught.text and "input 0" in caught.text, caught.text)
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        model(torch.zeros(2 * mpisgd.size(), 11, dtype=torch.int64))
    everyone(Rule.ONE_SIZE.value in caught.text, caught.text)


def test_ranks_that_disagree_are_told():
    rules = "batch:a" if mpisgd.rank() == 0 else "hidden:a"
    layout = mpisgd.layout(rules, mesh={"a": mpisgd.size()})
    with raises_everywhere(mpisgd.CollectiveMismatch):
        layout.distribute(transformer(), NAMES, **IO)


def test_a_model_is_distributed_once():
    layout = mpisgd.layout("batch:a", mesh={"a": mpisgd.size()})
    model = layout.distribute(transformer(), NAMES, **IO)
    with raises_everywhere(mpisgd.InvalidArgument):
        layout.distribute(model, NAMES, **IO)


def test_sequences_that_all_ranks_have_whole_are_not_divided_once_more():
    layout = mpisgd.layout("batch:a", mesh={"a": mpisgd.size()})
    model = layout.distribute(transformer(), NAMES, **IO)
    tokens = torch.zeros(2 * mpisgd.size(), 12, dtype=torch.int64)
    with mpisgd.context_parallel(mpisgd.new_group()), raises_everywhere(mpisgd.InvalidArgument) as caught:
        model(tokens)
    everyone("this model is in a layout" in caught.text, caught.text)
