"""What messages say of values."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import mpisgd
from mpisgd.arguments import ranks_text
from mpisgd.compress import BlockQuantized, PerHost, TopK
from mpisgd.optim.choices import summary


@pytest.mark.parametrize(("ranks", "text"), [([3], "rank 3"), ([2, 0], "ranks 0, 2"), ((), "ranks ")])
def test_ranks_in_words(ranks, text):
    assert ranks_text(ranks) == text


def test_of_many_ranks_the_first_are_listed():
    assert ranks_text(range(14)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 2 more"


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (mpisgd.Sharded(stage=2), "Sharded(stage=2)"),
        (mpisgd.DiLoCo(4), "DiLoCo(sync_every=4)"),
        (mpisgd.DiLoCo(4, outer_optimizer=torch.optim.Adam), "DiLoCo(sync_every=4, outer_optimizer=Adam)"),
        (mpisgd.Gossip(), "Gossip(topology=Exponential())"),
        (mpisgd.Sharded(gradients=BlockQuantized(8)), "Sharded(gradients=BlockQuantized(bits=8))"),
        (PerHost(TopK(0.1)), "PerHost(compressor=TopK(ratio=0.1))"),
        (PerHost(mpisgd.Compression.fp16), "PerHost(compressor=Compression.fp16)"),
        (mpisgd.Compression.fp16, "Compression.fp16"),
    ],
)
def test_messages_have_a_method_as_a_program_writes_it(method, text):
    assert str(method) == text


def test_what_all_ranks_choose_alike_is_compared_in_full():
    training = SimpleNamespace(
        options=SimpleNamespace(
            op=mpisgd.ReduceOp.AVG,
            compression=TopK(0.1),
            predivide_factor=1.0,
            bucket_cap_bytes=1,
            error_if_nonfinite=False,
        ),
        check_in_sync_every=1,
        share_parameters=False,
        elementwise=True,
    )
    text = summary(mpisgd.LocalSGD(4), training, 1)
    assert repr(mpisgd.LocalSGD(4)) in text
    assert repr(TopK(0.1)) in text
