"""`Sharded(gradients=BlockQuantized(...))`: codes between hosts, equal to the paper."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from coded_programs import FOUR, assert_resumes, on_hosts
from paper_programs import (
    CLOSE,
    assert_equal,
    assert_same,
    by_mpisgd,
    by_paper,
    definition_of,
    gradient,
    momentum,
    paper_run,
    sgd,
)
from torch import nn

import mpisgd
from mpisgd import Sharded
from mpisgd.compress import BlockQuantized
from mpisgd.job.threads_as_ranks import RankFailed
from mpisgd.methods.sharded.paper import CodedGradients
from mpisgd.tools.verification.paper_run import Definition
from mpisgd.tools.verification.shares import Shares

GRADIENTS = BlockQuantized(bits=4, block=5)
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


def test_buckets_are_divided_one_by_one():
    found = by_mpisgd(FOUR, strategy=Sharded(2, gradients=GRADIENTS), bucket_cap_bytes=1)
    definition = Definition(CodedGradients(L=7, B=5), layout=Shares(FOUR.size, cap_bytes=1))
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


def test_one_copy_for_each_host():
    found = by_mpisgd(FOUR, strategy=Sharded(2, gradients=GRADIENTS), share_parameters=True)
    assert_same(found, by_mpisgd(FOUR, strategy=Sharded(2, gradients=GRADIENTS)), 0.0)


def wrapped(params: dict[str, nn.Parameter], lr: float = 0.5, strategy=None) -> mpisgd.DistributedOptimizer:
    sgd = torch.optim.SGD(params.values(), lr=lr)
    coded = Sharded(2, gradients=GRADIENTS)
    return mpisgd.DistributedOptimizer(sgd, params.items(), strategy=strategy or coded)


def test_ranks_without_data_count_nothing():
    """Their gradients are zero in the sums of hosts, which those with data divide."""
    batches = {0: 4, 1: 4, 2: 4, 3: 2}

    def train() -> list[dict[str, torch.Tensor]]:
        params, rows = FOUR.start(mpisgd.rank()), []
        optimizer = wrapped(params)
        with optimizer.join():
            for step in range(batches[mpisgd.rank()]):
                optimizer.zero_grad()
                for term in FOUR.terms(mpisgd.rank(), step):
                    FOUR.loss(params, mpisgd.rank(), term).backward()
                optimizer.step()
        rows.append({name: param.detach().clone() for name, param in params.items()})
        return rows

    run = paper_run(replace(FOUR, make=sgd), definition_of(FOUR, strategy=Sharded(2, gradients=GRADIENTS)))
    for step in range(4):
        weight = {rank: int(step < count) for rank, count in batches.items()}
        g = {rank: gradient(FOUR, run, rank, step) for rank in run.ranks if weight[rank]}
        run.step(g, weight=weight)
    assert_same(on_hosts(train), [[run.x[rank]] for rank in run.ranks], CLOSE)


def test_a_resumed_run_goes_on_as_if_it_had_not_ended():
    assert_resumes(
        lambda params: mpisgd.DistributedOptimizer(
            momentum(list(params.values())), params.items(), strategy=Sharded(2, gradients=GRADIENTS)
        )
    )


def test_what_is_not_finite_on_one_rank_skips_the_step_of_all():
    def train() -> list[dict[str, torch.Tensor]]:
        params, rows = {"w": nn.Parameter(torch.ones(100))}, []
        optimizer, scaler = wrapped(params), torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            optimizer.zero_grad()
            slope = torch.full((100,), float(mpisgd.rank() + 1))
            slope[17] = torch.inf if step == 1 and mpisgd.rank() == 3 else 1.0
            scaler.scale((params["w"] * slope).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            rows.append({"w": params["w"].detach().clone(), "scale": torch.tensor(scaler.get_scale())})
        return rows

    ranks = on_hosts(train)
    assert_same(ranks, [ranks[0]] * 4, 0.0)
    first, second, third = ranks[0]
    assert torch.equal(first["w"], second["w"])
    assert second["scale"] == first["scale"] / 2
    assert third["w"].isfinite().all()
    assert not torch.equal(second["w"], third["w"])


def test_sparse_gradients_travel_as_they_are():
    def train(strategy: Sharded) -> list[dict[str, torch.Tensor]]:
        table = nn.Embedding(8, 3, sparse=True)
        with torch.no_grad():
            table.weight.copy_(torch.arange(24.0).view(8, 3))
        params = {"table": table.weight, "w": nn.Parameter(torch.ones(50))}
        optimizer, rows = wrapped(params, strategy=strategy), []
        for step in range(3):
            optimizer.zero_grad()
            slope = torch.arange(50.0) * (mpisgd.rank() + 1) / 64
            loss = table(torch.tensor([mpisgd.rank(), step])).sum() * 0.25 + (params["w"] * slope).sum()
            loss.backward()
            optimizer.step()
            rows.append({name: param.detach().clone() for name, param in params.items()})
        return rows

    coded = on_hosts(lambda: train(Sharded(2, gradients=GRADIENTS)))
    plain = on_hosts(lambda: train(Sharded(2)))
    of_table = [[[{"table": row["table"]} for row in rows] for rows in ranks] for ranks in (coded, plain)]
    assert_same(*of_table, 0.0)
    assert_same(coded, [coded[0]] * 4, 0.0)
    assert not torch.equal(coded[0][-1]["w"], plain[0][-1]["w"])


REFUSED = {
    "whole parameters": (
        {"strategy": Sharded(gradients=GRADIENTS), "make": torch.optim.Adafactor},
        "Adafactor, whose step is none of",
    ),
    "a cast": ({"compression": mpisgd.Compression.bf16}, "compression="),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_verified_is_refused_by_name(case):
    options, words = REFUSED[case]
    make, rest = options.get("make", momentum), {k: v for k, v in options.items() if k != "make"}
    with pytest.raises(RankFailed, match=words):
        by_mpisgd(replace(FOUR, make=make), **{"strategy": Sharded(gradients=GRADIENTS), **rest})


def test_what_has_no_code_cannot_be_added():
    def train() -> list[dict[str, torch.Tensor]]:
        params = FOUR.start(mpisgd.rank())
        optimizer = wrapped(params)
        half = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        with pytest.raises(mpisgd.InvalidArgument, match=r"do not go with .*, torch\.bfloat16 on cpu"):
            optimizer.add_param_group({"params": [half]})
        for term in FOUR.terms(mpisgd.rank(), 0):
            FOUR.loss(params, mpisgd.rank(), term).backward()
        optimizer.step()
        return [{name: param.detach().clone() for name, param in params.items()}]

    plain = replace(FOUR, steps=1, make=sgd)
    assert_same(on_hosts(train), by_mpisgd(plain, strategy=Sharded(2, gradients=GRADIENTS)), 0.0)


def test_what_is_no_block_code_is_refused():
    with pytest.raises(mpisgd.InvalidArgument, match=r"expected None or mpisgd\.compress\.BlockQuantized"):
        Sharded(gradients=mpisgd.Compression.bf16)
    with pytest.raises(mpisgd.InvalidArgument, match="error_feedback"):
        Sharded(gradients=BlockQuantized(error_feedback=True))
    with pytest.raises(mpisgd.InvalidArgument, match="does not go with offload"):
        Sharded(gradients=GRADIENTS, offload=mpisgd.Offload("/scratch"))
    with pytest.raises(mpisgd.InvalidArgument, match="does not go with master_dtype"):
        Sharded(gradients=GRADIENTS, master_dtype=torch.float64)
    with pytest.raises(mpisgd.InvalidArgument, match="does not go with overlap_forward"):
        Sharded(gradients=GRADIENTS, overlap_forward=True)
