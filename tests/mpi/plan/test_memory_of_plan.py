"""What a rank is planned to keep is what it keeps: all tensors there are after some steps are counted."""

from __future__ import annotations

import gc

import pytest
import torch
from verdicts import everyone

import mpisgd
from mpisgd.plan.cluster import Cluster, Link
from mpisgd.plan.methods import planned_methods
from mpisgd.plan.models.model import Gradient, StepProfile
from mpisgd.plan.prediction import predict

WIDTH = 512  # a matrix has 1 MiB: large enough to travel from where it lies
LAYERS = 3
KINDS = (torch.Tensor, torch.nn.Parameter)
MODEL = LAYERS * WIDTH * WIDTH * 4


def has_memory(tensor):
    """Whether `tensor` lies in memory of its own: other tests of this process leave sparse and fake ones."""
    return type(tensor) in KINDS and tensor.layout is torch.strided


def tensor_bytes():
    """The bytes of all memory that tensors lie in."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if has_memory(each)]
    grads = [each.grad for each in tensors if each.is_leaf and has_memory(each.grad)]
    storages = [each.untyped_storage() for each in (*tensors, *grads)]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def kept(method):
    """What five steps have left behind on this rank, beside the group's staging memory, which others made."""
    trained(method)
    before = tensor_bytes()
    left = trained(method)
    return tensor_bytes() - before if left else 0


def trained(method):
    """A model and its optimizer after five steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    (choice,) = planned_methods(method)
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters()), strategy=choice.strategy, compression=choice.compression
    )
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.full((2, WIDTH), float(mpisgd.rank()))).sum().backward()
        optimizer.step()
    return model, optimizer


def planned(method):
    """The same, less what is needed only while the ranks communicate."""
    gradients = tuple(Gradient(f"{i}", LAYERS - 1 - i, (WIDTH, WIDTH), 4, 1.0) for i in range(LAYERS))
    profile = StepProfile("model", 2, 1.0, 1.0, 1.0, gradients, "adamw")
    cluster = Cluster(1, mpisgd.size(), Link(1e-6, 1e9), Link(1e-6, 1e9))
    (choice,) = planned_methods(method)
    return predict(cluster, profile, choice).memory.total


# And what is gone after the step: the changes of the parameters.
METHODS = {
    "Synchronous": 0,
    "Synchronous + TopK(ratio=0.01)": 0,
    "Synchronous + PowerSGD(rank=2)": 0,
    "LocalSGD(2)": 0,
    "DiLoCo(2)": MODEL,
    "ElasticAveraging(every=2)": MODEL,
}
SHORT = ("Synchronous + PowerSGD(rank=2)", "DiLoCo(2)")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "method",
    [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in METHODS],
)
def test_a_rank_keeps_what_was_planned(method):
    expected, found = planned(method) - METHODS[method], kept(method)
    everyone(abs(found / expected - 1) < 0.05, f"planned {expected:,.0f} bytes, kept {found:,.0f}")
