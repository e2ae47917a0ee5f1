"""`hvd.SyncBatchNorm`: n ranks compute what one process computes on the joined batch."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from verdicts import everyone, raises_everywhere

import mpisgd
import mpisgd.horovod as hvd

CHANNELS = 3
TOLERANCE = 1e-12


def batch_of(rank: int) -> torch.Tensor:
    """Batches of different sizes and different means."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(rank + 2, CHANNELS, 4, dtype=torch.float64, generator=generator)
    return values * (rank + 1) + rank


def make_norm(kind: type, **options) -> torch.nn.Module:
    norm = kind(CHANNELS, dtype=torch.float64, **options)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(1.0, CHANNELS + 1))
        norm.bias.copy_(torch.arange(CHANNELS))
    return norm


def results(norm: torch.nn.Module, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Everything that a step gives; the loss weighs each element by its place in its own batch."""
    batch = torch.cat(batches).requires_grad_()
    out = norm(batch)
    places = torch.cat([torch.arange(b.numel(), dtype=b.dtype).view_as(b) for b in batches])
    (out.sin() * places).sum().backward()
    grads = {"weight.grad": norm.weight.grad, "bias.grad": norm.bias.grad}
    running = {"running_mean": norm.running_mean, "running_var": norm.running_var}
    return {"out": out.detach(), "in.grad": batch.grad, **grads, **running}


def differences(norm: hvd.SyncBatchNorm, ranks: list[int]) -> dict[str, float]:
    """Largest differences of this rank's results from those of one process with the batches of `ranks`."""
    expected = results(make_norm(torch.nn.BatchNorm1d), [batch_of(rank) for rank in ranks])
    start = sum(len(batch_of(rank)) for rank in ranks if rank < hvd.rank())
    mine = slice(start, start + len(batch_of(hvd.rank())))
    given = results(norm, [batch_of(hvd.rank())])
    for name in ("weight.grad", "bias.grad"):  # each rank has its share of them
        given[name] = hvd.allreduce(given[name], name=name, op=hvd.Sum, process_set=norm.process_set)
    for name in ("out", "in.grad"):
        expected[name] = expected[name][mine]
    return {name: float((given[name] - expected[name]).abs().max()) for name in expected}


def test_equals_one_process_on_the_joined_batch():
    found = differences(make_norm(hvd.SyncBatchNorm), list(range(hvd.size())))
    print("max differences", found)
    everyone(max(found.values()) < TOLERANCE, str(found))


@pytest.mark.mpi(min_size=2)
def test_without_communication_results_differ():
    alone = hvd.add_process_set([0])
    norm = make_norm(hvd.SyncBatchNorm, process_set=alone)
    wrong = [1.0]
    if alone.included():
        mine = differences(norm, [0])
        assert max(mine.values()) < TOLERANCE
        joined = results(make_norm(torch.nn.BatchNorm1d), [batch_of(rank) for rank in range(hvd.size())])
        wrong = [float((norm.running_mean - joined["running_mean"]).abs().max())]
    hvd.remove_process_set(alone)
    everyone(min(wrong) > 1e-3)


@pytest.mark.mpi(min_size=3)
def test_process_sets_have_statistics_of_their_own():
    evens, odds = (list(range(start, hvd.size(), 2)) for start in (0, 1))
    sets = [hvd.add_process_set(ranks) for ranks in (evens, odds) if len(ranks) < hvd.size()]
    mine = sets[hvd.rank() % 2]
    found = differences(make_norm(hvd.SyncBatchNorm, process_set=mine), mine.ranks)
    for process_set in sets:
        hvd.remove_process_set(process_set)
    everyone(max(found.values()) < TOLERANCE, str(found))


@pytest.mark.mpi(min_size=2)
def test_ranks_that_have_joined_have_no_images():
    last = hvd.size() - 1
    found = {"": 0.0}
    if hvd.rank() != last:
        norm = make_norm(hvd.SyncBatchNorm)
        given = results(norm, [batch_of(hvd.rank())])
        joined = results(make_norm(torch.nn.BatchNorm1d), [batch_of(rank) for rank in range(last)])
        for name in ("running_mean", "running_var"):
            found[name] = float((given[name] - joined[name]).abs().max())
        start = sum(len(batch_of(rank)) for rank in range(hvd.rank()))
        grad = joined["in.grad"][start : start + len(given["in.grad"])]
        found["in.grad"] = float((given["in.grad"] - grad).abs().max())
    hvd.join()
    everyone(max(found.values()) < TOLERANCE, str(found))


@pytest.mark.mpi(min_size=2)
def test_layers_that_differ_are_refused_on_every_rank():
    channels = 5 if hvd.rank() == 1 else 4
    with raises_everywhere(hvd.HorovodInternalError) as caught:
        hvd.SyncBatchNorm(channels)(torch.randn(6, channels))
    everyone("sync_batch_norm" in caught.text and "11" in caught.text and "9" in caught.text, caught.text)
    found = differences(make_norm(hvd.SyncBatchNorm), list(range(hvd.size())))
    everyone(max(found.values()) < TOLERANCE)


def test_a_model_is_converted_in_one_line():
    model = torch.nn.Sequential(make_norm(torch.nn.BatchNorm1d), torch.nn.Flatten())
    weight = model[0].weight
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert type(model[0]) is hvd.SyncBatchNorm
    assert isinstance(model[0], mpisgd.SyncBatchNorm)
    assert model[0].weight is weight
    assert model[0].process_set is hvd.global_process_set
    everyone(max(differences(model[0], list(range(hvd.size()))).values()) < TOLERANCE)


def test_evaluation_sends_nothing():
    norm = make_norm(hvd.SyncBatchNorm).eval()
    if hvd.rank() == 0:  # the others would be missing
        assert torch.equal(norm(batch_of(0)), make_norm(torch.nn.BatchNorm1d).eval()(batch_of(0)))


def test_copies_and_files_synchronize_with_the_same_ranks():
    chosen = hvd.ProcessSet([0])
    norm = hvd.SyncBatchNorm(CHANNELS, process_set=chosen)
    assert copy.deepcopy(norm).process_set is chosen
    memory = io.BytesIO()
    torch.save(hvd.SyncBatchNorm(CHANNELS), memory)
    memory.seek(0)
    assert torch.load(memory, weights_only=False).process_set is hvd.global_process_set
