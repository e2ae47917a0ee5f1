"""Compressors are what their papers say, in the situations that a program can be in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paper_programs import (
    CLOSE,
    LR,
    Program,
    assert_equal,
    assert_same,
    by_mpisgd,
    by_paper,
    definition_of,
    momentum,
)

import mpisgd
from mpisgd import Compression, compress

# Of sums, sparse and signed numbers no bit may differ where gradients are dyadic and ranks a power of two.
EXACT = [
    Compression.none,
    compress.TopK(0.2),
    compress.TopK(0.2, error_feedback=False),
    compress.Threshold(300.0),
    compress.RandomK(0.25),
    compress.DeepGradient(0.2, momentum=0.5),
    compress.DeepGradient(0.2, momentum=0.5, nesterov=True),
    compress.SignSGD(),
    compress.SignSGD(majority_vote=False),
    compress.PerHost(compress.TopK(0.2)),
    compress.ChunkTopK(keep=2, chunk=7, error_decay=0.5),
    compress.ChunkTopK(keep=3, chunk=20, error_decay=0.0),
]
OTHERS = [
    compress.RandomK(0.25, error_feedback=False, seed=5),
    Compression.bf16,
    compress.DeepGradient(0.1, warmup_steps=4, warmup_ratio=0.6),
    compress.DeepGradient(0.2, momentum=0.7, clip_norm=1.5),
    compress.OneBit(),
    compress.OneBit(two_step=True),
    compress.PowerSGD(2, warmup_steps=2),
    compress.PowerSGD(1, error_feedback=False),
    compress.QSGD(4, segment=10),
    compress.QSGD(2, norm="l2", seed=3),
    compress.QSGD(4, error_feedback=True),
    compress.TernGrad(),
    compress.TernGrad(clip_sigmas=2.5, seed=1),
    compress.Natural(seed=2),
    compress.BlockQuantized(block=10),
    compress.BlockQuantized(bits=8, block=7, error_feedback=True),
    compress.Natural(error_feedback=True),
    compress.ChunkTopK(),
    compress.ChunkTopK(keep=3, chunk=10, bits=4),
    compress.PerHost(compress.ChunkTopK(keep=1, chunk=6, bits=3)),
]


def on_one_rank(rank: int, step: int) -> list[str]:
    return ["bias", "cube"] if rank == 1 and step in (2, 3) else []


def on_all_ranks(rank: int, step: int) -> list[str]:
    return ["matrix", "bias"] if step in (2, 4) else []


SITUATIONS = {
    "plain": Program(),
    "accumulated": Program(passes=lambda rank, step: 2, options={"backward_passes_per_step": 2}),
    "unused on a rank": Program(unused=on_one_rank),
    "unused on all ranks": Program(unused=on_all_ranks),
    "no backward on a rank": Program(passes=lambda rank, step: int(rank == 0 or step != 2)),
    "frozen": Program(frozen=["cube"]),
    "four ranks on two hosts": Program(size=4, hosts=(2, 2)),
}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("compression", EXACT, ids=repr)
def test_bit_for_bit(compression, situation):
    assert_equal(SITUATIONS[situation], compression=compression)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "compression",
    [
        compress.TopK(0.2),
        compress.DeepGradient(0.2),
        compress.SignSGD(),
        compress.PowerSGD(2),
        compress.OneBit(),
        compress.ChunkTopK(keep=2, chunk=7),
    ],
    ids=repr,
)
def test_buckets_make_no_difference(compression, overlap):
    """The matrix is alone in one, the rest is together. A random compressor draws other numbers."""
    options = {"bucket_cap_bytes": 42 * 8, "overlap": overlap}
    assert_equal(Program(dyadic=False, options=options), compression=compression)


@pytest.mark.parametrize("compression", [*EXACT, *OTHERS], ids=repr)
def test_a_sum_is_as_many_times_the_mean(compression):
    """Of signs by vote there is none."""
    if compression == compress.SignSGD():
        pytest.skip("a vote is no mean")
    program = Program(size=2, dyadic=False)
    halved = replace(program, make=lambda params: torch.optim.SGD(params, lr=LR / 2))
    found = by_mpisgd(halved, compression=compression, op=mpisgd.ReduceOp.SUM)
    assert_same(found, by_paper(program, definition_of(program, compression=compression)), CLOSE)


@pytest.mark.parametrize(
    "situation", ["plain", "unused on a rank", "unused on all ranks", "four ranks on two hosts"]
)
@pytest.mark.parametrize("compression", OTHERS, ids=repr)
def test_but_for_roundings(compression, situation):
    assert_equal(replace(SITUATIONS[situation], dyadic=False), compression=compression)


@pytest.mark.parametrize(
    "compression", [compress.TopK(0.2), compress.PowerSGD(2), compress.OneBit()], ids=repr
)
def test_three_ranks_clip_what_was_reduced(compression):
    program = Program(size=3, hosts=(2, 1), dyadic=False, max_norm=0.5, make=momentum)
    assert_equal(program, compression=compression)


@pytest.mark.parametrize("op", [mpisgd.ReduceOp.SUM, mpisgd.Adasum], ids=repr)
def test_other_combinations(op):
    assert_equal(Program(size=3, dyadic=False, unused=on_one_rank), op=op)
