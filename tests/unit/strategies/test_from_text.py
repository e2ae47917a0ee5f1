"""Strategies and compressors from texts: what they make, and that nothing else can be called."""

from __future__ import annotations

import pytest
import torch

import mpisgd
from mpisgd.errors import InvalidArgument
from mpisgd.strategies.from_text import compressor_from_text, strategy_from_text


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("Synchronous", mpisgd.Synchronous()),
        ("LocalSGD(8)", mpisgd.LocalSGD(8)),
        (" LocalSGD(hierarchy={'host': 2, 'job': 8}) ", mpisgd.LocalSGD(hierarchy={"host": 2, "job": 8})),
        (
            "DiLoCo(5, outer_optimizer=Adam, outer_options={'lr': 0.1})",
            mpisgd.DiLoCo(5, torch.optim.Adam, {"lr": 0.1}),
        ),
        ("ElasticAveraging(every=2)", mpisgd.ElasticAveraging(every=2)),
    ],
)
def test_a_strategy_is_made_as_written(text, strategy):
    assert strategy_from_text(text) == strategy


def test_a_cast_is_named():
    assert compressor_from_text("bf16") is mpisgd.Compression.bf16


@pytest.mark.parametrize(
    "text",
    [
        "",
        "LocalSGD(",
        "LocalSgd(8)",
        "LocalSGD(eight)",
        "LocalSGD(0)",
        "LocalSGD(speed=3)",
        "LocalSGD(*[8])",
        "LocalSGD(**{'sync_every': 8})",
        "shutdown()",
        "__import__('os')",
        "Compression",
        "mpisgd.LocalSGD(8)",
        "Strategy()",
        "DiLoCo(outer_optimizer=Module)",
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(InvalidArgument):
        strategy_from_text(text)
    with pytest.raises(InvalidArgument):
        compressor_from_text(text)
