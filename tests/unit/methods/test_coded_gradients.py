"""`Sharded(gradients=BlockQuantized(...))`: codes between hosts, equal to the paper."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paper_programs import Program, assert_equal, assert_same, by_mpisgd, by_paper, momentum

import mpisgd
from mpisgd import Sharded
from mpisgd.compress import BlockQuantized
from mpisgd.job.threads_as_ranks import RankFailed
from mpisgd.methods.paper_kit import Vec
from mpisgd.methods.sharded.paper import CodedGradients
from mpisgd.tools.verification.draws import Layout
from mpisgd.tools.verification.paper_run import Definition
from mpisgd.tools.verification.papers import shares_of

GRADIENTS = BlockQuantized(bits=4, block=5)
FOUR = Program(size=4, hosts=(2, 2), make=momentum)
SITUATIONS = {
    "one rank": replace(FOUR, size=1, hosts=()),
    "two hosts of one rank": replace(FOUR, size=2, hosts=(1, 1)),
    "uneven hosts": replace(FOUR, size=3, hosts=(2, 1)),
    "three hosts": replace(FOUR, size=3, hosts=(1, 1, 1)),
    "two hosts of two": FOUR,
    "accumulated": replace(FOUR, passes=lambda rank, step: 2, options={"backward_passes_per_step": 2}),
    "clipped": replace(FOUR, dyadic=False, max_norm=0.5),
    "Adam, clipped": replace(FOUR, dyadic=False, max_norm=0.5, make=lambda p: torch.optim.Adam(p, lr=0.1)),
    "frozen": replace(FOUR, frozen=("bias",)),
    "unused on a rank": replace(FOUR, unused=lambda rank, step: ["bias", "cube"] if rank == 1 else []),
    "unused on all": replace(FOUR, unused=lambda rank, step: ["bias"] if step in (2, 3) else []),
    "no backward on a rank": replace(FOUR, passes=lambda rank, step: int(rank != 1 or step != 2)),
    "sent ahead": replace(FOUR, options={"overlap": True}),
}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_equal_to_the_paper(situation, stage):
    assert_equal(SITUATIONS[situation], strategy=Sharded(stage, gradients=GRADIENTS))


def of_each(x: Vec, size: int) -> Layout:
    """A bucket of each parameter, divided by itself."""
    each = [shares_of(Vec({name: tensor}), size) for name, tensor in x.items()]
    return tuple(tuple(piece for shares in each for piece in shares[rank]) for rank in range(size))


def test_buckets_are_divided_one_by_one():
    found = by_mpisgd(FOUR, strategy=Sharded(2, gradients=GRADIENTS), bucket_cap_bytes=1)
    definition = Definition(CodedGradients(L=7, B=5), layout=lambda x: of_each(x, FOUR.size))
    assert_same(found, by_paper(FOUR, definition), 0.0)


def test_on_one_host_no_bit_differs():
    one = replace(FOUR, hosts=(), dyadic=False)
    assert_same(
        by_mpisgd(one, strategy=Sharded(2, gradients=GRADIENTS)), by_mpisgd(one, strategy=Sharded(2)), 0.0
    )


def test_ranks_stay_bit_for_bit_equal():
    uneven = replace(FOUR, size=3, hosts=(2, 1), dyadic=False, options={"check_in_sync_every": 1})
    ranks = by_mpisgd(uneven, strategy=Sharded(2, gradients=GRADIENTS))
    assert_same(ranks, [ranks[0]] * 3, 0.0)


REFUSED = {
    "whole parameters": (
        {"strategy": Sharded(gradients=GRADIENTS), "make": torch.optim.Adafactor},
        "Adafactor, whose step is none of",
    ),
    "a cast": ({"compression": mpisgd.Compression.bf16}, "compression="),
    "one copy for each host": ({"share_parameters": True}, "share_parameters"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_verified_is_refused_by_name(case):
    options, words = REFUSED[case]
    make, rest = options.get("make", momentum), {k: v for k, v in options.items() if k != "make"}
    with pytest.raises(RankFailed, match=words):
        by_mpisgd(replace(FOUR, make=make), **{"strategy": Sharded(gradients=GRADIENTS), **rest})


def test_what_is_no_block_code_is_refused():
    with pytest.raises(mpisgd.InvalidArgument, match=r"expected None or mpisgd\.compress\.BlockQuantized"):
        Sharded(gradients=mpisgd.Compression.bf16)
    with pytest.raises(mpisgd.InvalidArgument, match="error_feedback"):
        Sharded(gradients=BlockQuantized(error_feedback=True))
    with pytest.raises(mpisgd.InvalidArgument, match="does not go with offload"):
        Sharded(gradients=GRADIENTS, offload=mpisgd.Offload("/scratch"))
