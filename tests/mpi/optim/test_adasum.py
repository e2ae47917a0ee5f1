"""`op=mpisgd.Adasum`: each gradient is combined adaptively, as the paper in tests/unit/methods has it."""

from __future__ import annotations

import pytest
import torch
from given_losses import torch_backward, torch_parameters
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd import config
from mpisgd.compress.compressor import BucketLayout
from mpisgd.core.consistency import Operation
from mpisgd.errors import InvalidArgument, UnsupportedTensor
from mpisgd.methods.adasum.adasum import AdaptiveSum


def test_alike_gradients_become_one_of_them_and_orthogonal_ones_their_sum():
    alike, own = (torch.nn.Parameter(torch.zeros(mpisgd.size(), 3)) for _ in range(2))
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD([alike, own], 1.0), op=mpisgd.Adasum)
    (2.0 * alike.sum() + own[mpisgd.rank()].sum()).backward()
    optimizer.step()
    everyone(bool((alike.grad == 2.0).all() and (own.grad == 1.0).all()), f"{alike.grad} {own.grad}")


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_has_no_gradient_counts_as_zero():
    some, none = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD([some, none], 1.0), op=mpisgd.Adasum)
    used = torch.nn.Parameter(torch.zeros(3))
    ((some * 3.0).sum() if mpisgd.rank() == 0 else some[:0].sum() + used.sum()).backward()
    optimizer.step()
    everyone(bool((some.grad == 3.0).all()) and none.grad is None, f"{some.grad} {none.grad}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"compression": mpisgd.Compression.fp16}, "compression=Compression.fp16"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor=2.0"),
        ({"share_parameters": True}, "share_parameters=True"),
        ({"strategy": "elsewhere"}, "strategy='elsewhere'"),
        ({"strategy": mpisgd.LocalSGD(2)}, "op=Adasum does not go with LocalSGD"),
        ({"strategy": mpisgd.Sharded(1)}, "op=Adasum does not go with Sharded"),
    ],
)
def test_what_does_not_go_with_it_is_refused(options, said):
    optimizer = torch.optim.SGD(torch_parameters(), 1.0)
    with pytest.raises(InvalidArgument, match=said):
        mpisgd.DistributedOptimizer(optimizer, op=mpisgd.Adasum, **options)
    assert type(optimizer) is torch.optim.SGD


def test_it_is_no_compression():
    with pytest.raises(InvalidArgument, match="Adasum is no compression"):
        mpisgd.DistributedOptimizer(torch.optim.SGD(torch_parameters(), 1.0), compression=mpisgd.Adasum)


@pytest.mark.mpi(min_size=2)
def test_sparse_gradients_are_refused_everywhere():
    model = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0), op=mpisgd.Adasum)
    with raises_everywhere(UnsupportedTensor) as caught:
        model(torch.tensor([mpisgd.rank()])).sum().backward()
        optimizer.step()
    everyone("sparse=False" in caught.text, caught.text)


@pytest.mark.mpi(min_size=2)
def test_its_bytes_are_its_formula(monkeypatch):
    monkeypatch.setattr(config, "shared_memory", lambda: False)
    group = mpisgd.new_group()
    reducer = AdaptiveSum().reducer(BucketLayout((torch.Size([2, 50]),), torch.float32))
    communicator = group.queue.communicator
    before = communicator.given_bytes["Allgather"]
    bucket = torch.arange(100, dtype=torch.float32) + group.rank
    group.queue.run(Operation("a bucket"), lambda: reducer.reduce(bucket, group, mpisgd.ReduceOp.AVG))
    sent = (group.size - 1) * (communicator.given_bytes["Allgather"] - before)
    everyone(sent == reducer.bytes_on_the_wire(group.size) == (group.size - 1) * 400, f"{sent}")


def test_steps_may_be_accumulated_and_clipped():
    params = torch_parameters()
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD(params, 0.05), op=mpisgd.Adasum, backward_passes_per_step=2
    )
    optimizer.zero_grad()
    torch_backward(params, 0, 0.5)
    torch_backward(params, 0, 0.5)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    same_on_all_ranks([param.tolist() for param in params])


@pytest.mark.mpi(min_size=2)
def test_a_bucket_may_set_out_during_backward_on_some_ranks_only():
    # What it communicates within its operation was the optimizer's in the program's thread, and nobody's in
    # the queue's: ranks of which one sent a bucket early, and another at the end, did not agree.
    torch.manual_seed(3)
    params = [torch.nn.Parameter(torch.zeros(16)) for _ in range(3)]
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD(params, 1.0), op=mpisgd.Adasum, overlap=True, bucket_cap_bytes=64
    )
    for step in range(3):
        used = params if step == 0 else params[mpisgd.rank() % 2 :: 2]
        sum((param * (mpisgd.rank() + 1)).sum() for param in used).backward()
        optimizer.step()
        optimizer.zero_grad()
    same_on_all_ranks([param.tolist() for param in params])
