"""`op=Adasum`, for tensors and for the steps of an optimizer, against the formula."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from closed_form import given
from reductions import everyones, near
from torch import nn
from verdicts import everyone, raises_everywhere

import mpisgd
import mpisgd.horovod as hvd
from mpisgd.collectives.algorithms.adasum import adasum
from mpisgd.methods.adasum.paper import Adasum
from mpisgd.tools.verification.paper_run import Definition, PaperRun, gradients

F64 = torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64])
def test_each_tensor_by_itself(dtype):
    """Together they would be one long gradient, with other scalar products."""
    shapes = [(5,), (3, 4), ()]
    handles = [hvd.allreduce_async(given(hvd.rank(), dtype, s), name=f"{s}", op=hvd.Adasum) for s in shapes]
    grouped = hvd.grouped_allreduce([given(hvd.rank(), dtype, s) for s in shapes], op=hvd.Adasum)
    for shape, handle, member in zip(shapes, handles, grouped, strict=True):
        right = adasum(everyones(dtype, shape))
        near(hvd.synchronize(handle), right)
        near(member, right)


def test_orthogonal_and_parallel_gradients():
    eye = torch.eye(hvd.size(), dtype=F64)
    assert hvd.allreduce(eye[hvd.rank()], op=hvd.Adasum).tolist() == [1.0] * hvd.size()
    if hvd.size() != 3:  # three are combined in two steps, the first two count half
        x = given(0, F64)
        near(hvd.allreduce(x, op=hvd.Adasum), x)


def test_in_place_with_factors_strided_and_in_a_process_set():
    x = given(hvd.rank(), F64, (4, 6)).t()
    hvd.allreduce_(x, op=hvd.Adasum, prescale_factor=0.5, postscale_factor=4.0)
    near(x.contiguous(), adasum([t.t() * 0.5 for t in everyones(F64, (4, 6))]).contiguous() * 4.0)
    if hvd.size() > 2:
        some = hvd.add_process_set([0, hvd.size() - 1])
        if some.included():
            right = adasum([given(0, F64), given(hvd.size() - 1, F64)])
            near(hvd.allreduce(given(hvd.rank(), F64), op=hvd.Adasum, process_set=some), right)
        hvd.remove_process_set(some)


def test_integers_have_none():
    with raises_everywhere(mpisgd.UnsupportedOp):
        hvd.allreduce(torch.ones(2, dtype=torch.int32), op=hvd.Adasum)


# --- the optimizer ------------------------------------------------------------------------------------


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def loss_of(net: nn.Module, rank: int, step: int, part: int) -> torch.Tensor:
    return net(given(17 * rank + 5 * step + part, F64, (4, 3)) / 5).square().sum()


@pytest.mark.parametrize("passes", [1, 2])
def test_every_rank_steps_by_itself_and_the_steps_are_combined(passes):
    """Momentum stays with its rank."""
    ours = model()
    opt = hvd.DistributedOptimizer(
        torch.optim.SGD(ours.parameters(), lr=0.05, momentum=0.9),
        ours.named_parameters(),
        op=hvd.Adasum,
        backward_passes_per_step=passes,
    )
    nets = [model() for _ in range(hvd.size())]
    params = {rank: dict(net.named_parameters()) for rank, net in enumerate(nets)}
    opts = {rank: torch.optim.SGD(mine.values(), lr=0.05, momentum=0.9) for rank, mine in params.items()}
    run = PaperRun(Definition(Adasum(of_steps=True)), params, opts)
    for step in range(3):
        opt.zero_grad()
        for part in range(passes):
            loss_of(ours, hvd.rank(), step, part).backward()
        opt.step()
        losses = [
            sum(loss_of(net, rank, step, part) for part in range(passes)) for rank, net in enumerate(nets)
        ]
        run.step({rank: gradients(loss, params[rank]) for rank, loss in enumerate(losses)})
        expected = run.x[hvd.rank()].values()
        worst = max((a - b).abs().max().item() for a, b in zip(ours.parameters(), expected, strict=True))
        everyone(worst < 1e-12, f"step {step}: off by {worst}")


def test_what_scripts_call_beside_step():
    net = model()
    opt = hvd.DistributedOptimizer(torch.optim.Adam(net.parameters()), net.named_parameters(), op=hvd.Adasum)
    assert isinstance(opt, torch.optim.Adam)
    net(torch.ones(1, 3, dtype=F64)).sum().backward()
    opt.synchronize()
    opt.set_backward_passes_per_step(2)
    with pytest.raises(AssertionError, match="not supported when using Adasum"), opt.skip_synchronize():
        pass
    opt.step()


def test_compressed_steps_and_frozen_parameters():
    net = model()
    net[0].weight.requires_grad_(False)
    before = copy.deepcopy(net)
    opt = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.5), op=hvd.Adasum, compression=hvd.Compression.fp16
    )
    loss_of(net, hvd.rank(), 0, 0).backward()
    opt.step()
    assert torch.equal(net[0].weight, before[0].weight)
    assert not torch.equal(net[2].weight, before[2].weight)
    everyones = hvd.allgather_object([param.tolist() for param in net.parameters()])
    assert everyones[1:] == everyones[:-1]


def test_two_optimizers_whose_steps_are_combined_at_once_do_not_meet():
    # Both were known by one name: what ranks stepped in another order was added up, or was refused.
    nets = [model(), model()]
    opts = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), op=hvd.Adasum
        )
        for net in nets
    ]
    gradients = [[given(rank + at, F64, (1,)).item() for rank in range(hvd.size())] for at in (1, 40)]
    begun = torch.nn.utils.parameters_to_vector(model().parameters()).detach()
    for net, mine in zip(nets, gradients, strict=True):
        for param in net.parameters():
            param.grad = torch.full_like(param, mine[hvd.rank()])
    threads = [threading.Thread(target=opt.step) for opt in opts]
    for thread in threads if hvd.rank() % 2 else threads[::-1]:
        thread.start()
    for thread in threads:
        thread.join()
    for net, theirs in zip(nets, gradients, strict=True):
        steps = adasum([torch.full((12,), -0.1 * grad, dtype=F64) for grad in theirs])
        moved = torch.nn.utils.parameters_to_vector(net.parameters()).detach() - begun
        near(moved, torch.full_like(moved, steps[0].item()))
