"""`compression="auto"`: all ranks take the same candidate, and one of them says which."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd import Compression, compress
from mpisgd.methods.auto import compression_choice


@dataclass(frozen=True)
class Slow(mpisgd.Compressor):
    """Sums as it is, late on the last rank."""

    def reducer(self, layout):
        reducer = Compression.none.reducer(layout)
        reduce = reducer.reduce

        def late(bucket, group, op):
            time.sleep(0.05 * (group.rank == group.size - 1))
            reduce(bucket, group, op)

        reducer.reduce = late
        return reducer


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 10))


def distributed(module, **options):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return mpisgd.DistributedOptimizer(optimizer, module.named_parameters(), **options)


@pytest.mark.mpi(min_size=2)
def test_a_later_candidate_is_taken_where_it_is_clearly_faster(capfd):
    optimizer = distributed(model(), compression=compress.Auto((Slow(), Compression.bf16)))
    everyone(optimizer.compression == Compression.bf16, f"{optimizer.compression}")
    said = capfd.readouterr().err
    everyone(said.count("takes bf16: it is clearly faster") == (mpisgd.rank() == 0), said)


@pytest.mark.mpi(min_size=2)
def test_the_first_candidate_is_taken_where_others_do_not_pay(capfd):
    optimizer = distributed(model(), compression=compress.Auto((Compression.none, Slow())))
    everyone(optimizer.compression == Compression.none, f"{optimizer.compression}")
    said = capfd.readouterr().err
    everyone(("no other one clearly pays" in said) == (mpisgd.rank() == 0), said)


@pytest.mark.mpi(min_size=1)
def test_auto_chooses_alike_on_all_ranks_and_leaves_random_numbers_alone():
    module = model()
    before = torch.get_rng_state()
    optimizer = distributed(module, compression="auto")
    everyone(torch.equal(before, torch.get_rng_state()))
    everyone(optimizer.compression in compress.Auto().candidates)
    same_on_all_ranks(repr(optimizer.compression))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("strategy", [mpisgd.Synchronous(), mpisgd.DiLoCo(1)], ids=str)
def test_training_is_that_with_the_chosen_compressor(strategy):
    results = []
    for compression in (compress.Auto((Slow(), compress.PowerSGD(rank=2))), compress.PowerSGD(rank=2)):
        module = model()
        optimizer = distributed(module, compression=compression, strategy=strategy)
        generator = torch.Generator().manual_seed(mpisgd.rank())
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.randn(8, 64, generator=generator)).square().sum().backward()
            optimizer.step()
        results.append([param.detach() for param in module.parameters()])
    everyone(all(map(torch.equal, *results)))


@pytest.mark.mpi(min_size=2)
def test_a_candidate_that_cannot_be_used_is_left_out(monkeypatch):
    def seconds(self, compressor):
        if compressor == Compression.none:
            raise mpisgd.UnsupportedOp("not here")
        return 1.0

    monkeypatch.setattr(compression_choice.Trial, "seconds", seconds)
    optimizer = distributed(model(), compression="auto")
    everyone(optimizer.compression == Compression.bf16, f"{optimizer.compression}")


@pytest.mark.mpi(min_size=2)
def test_after_a_rebuild_all_ranks_use_the_choice_of_the_first(monkeypatch):
    mine = Compression.bf16 if mpisgd.rank() == 0 else Compression.fp16
    auto = compress.Auto((Compression.bf16, Compression.fp16))
    alone = [mpisgd.new_group([rank]) for rank in range(mpisgd.size())][mpisgd.rank()]
    monkeypatch.setattr(
        compression_choice, "choose_compression", lambda *_: compression_choice.Choice(mine, 0, {})
    )
    optimizer = distributed(model(), compression=auto, group=alone)
    optimizer.rebuild()
    everyone(optimizer.compression == Compression.bf16, f"{optimizer.compression}")


@pytest.mark.mpi(min_size=1)
def test_an_unknown_word_is_refused():
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        distributed(model(), compression="best")
    everyone('"auto"' in caught.text, caught.text)
