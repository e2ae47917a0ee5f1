"""Strategies, compressors and optimizers from texts: what they make, and that nothing else can be called."""

from __future__ import annotations

import pytest
import torch

import mpisgd
from mpisgd import compress
from mpisgd.errors import InvalidArgument
from mpisgd.methods.from_text import compressor_from_text, optimizer_from_text, strategy_from_text


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
        ("SparseLoCo(30, keep=128, lr=0.7)", mpisgd.SparseLoCo(30, keep=128, lr=0.7)),
        ("ElasticAveraging(every=2)", mpisgd.ElasticAveraging(every=2)),
        ("Sharded(2, master_dtype=float32)", mpisgd.Sharded(2, master_dtype=torch.float32)),
        (
            "Sharded(offload=Offload('/scratch', prefetch=4))",
            mpisgd.Sharded(offload=mpisgd.Offload("/scratch", prefetch=4)),
        ),
    ],
)
def test_a_strategy_is_made_as_written(text, strategy):
    assert strategy_from_text(text) == strategy


def test_a_cast_is_named():
    assert compressor_from_text("bf16") is mpisgd.Compression.bf16


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        ("PerHost(TopK(ratio=0.1))", compress.TopK(ratio=0.1)),
        ("PerHost(compressor=PowerSGD(2))", compress.PowerSGD(2)),
        ("PerHost(fp16)", mpisgd.Compression.fp16),
    ],
)
def test_a_compressor_may_be_in_another(text, inner):
    assert compressor_from_text(text) == compress.PerHost(inner)


def test_an_optimizer_is_made_of_parameters_as_written():
    choice = optimizer_from_text("SGD(lr=0.5, momentum=0.9)")
    made = choice.make([torch.zeros(2, requires_grad=True)], momentum=0.0)
    assert isinstance(made, torch.optim.SGD)
    assert (made.param_groups[0]["lr"], made.param_groups[0]["momentum"]) == (0.5, 0.0)
    assert optimizer_from_text("OneBitAdam(lr=0.1, freeze_step=50)").kind is mpisgd.OneBitAdam


@pytest.mark.parametrize(
    "text",
    ["SGD(0.5)", "SGD(lr=-1)", "Adam(speed=3)", "OneBitAdam", "LocalSGD(8)", "DistributedOptimizer", "torch"],
)
def test_an_optimizer_that_cannot_be_made_is_refused(text):
    with pytest.raises(InvalidArgument, match="optimizer"):
        optimizer_from_text(text)


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
        "Sharded(offload=Offload(what='optimizer,parameters'))",
        "Sharded(offload=Offload('/scratch', prefetch=0))",
        "Sharded(offload=open('/scratch'))",
        "Sharded(offload=LocalSGD(8))",
        "Sharded(master_dtype=Tensor)",
        "PerHost(TopK(ratio=7))",
        "PerHost(LocalSGD(8))",
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(InvalidArgument):
        strategy_from_text(text)
    with pytest.raises(InvalidArgument):
        compressor_from_text(text)
