"""Hooks that a program adds to parameters change gradients before they are reduced, whenever it adds them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpisgd
from mpisgd.gradients.hook_order import after_others
from mpisgd.job.threads_as_ranks import run_ranks

NUM_STEPS = 3
KINDS = {
    "overlap": {"overlap": True, "bucket_cap_bytes": 100},
    "at the end": {"overlap": False},
    "sharded": {"strategy": mpisgd.Sharded(stage=2), "overlap": True, "bucket_cap_bytes": 100},
}


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def add_hooks(net: nn.Module, scale: float) -> None:
    def change(param: torch.Tensor) -> None:
        param.grad.mul_(scale)

    for param in net.parameters():
        param.register_post_accumulate_grad_hook(change)


def loss_of(net: nn.Sequential, x: torch.Tensor, *, checkpointed: bool) -> torch.Tensor:
    hidden = net[:1](x)
    hidden = checkpoint(net[1:4], hidden, use_reentrant=True) if checkpointed else net[1:4](hidden)
    return net[4:](hidden).square().sum()


def train(net: nn.Sequential, optimizer, ranks: list[int], *, checkpointed: bool) -> None:
    """Hooks come before the first step, and one more after it."""
    add_hooks(net, 0.5)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        losses = [loss_of(net, data(step, rank), checkpointed=checkpointed) for rank in ranks]
        (sum(losses) / len(losses)).backward()
        optimizer.step()
        if step == 0:
            add_hooks(net, 3.0)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def trained(net: nn.Sequential, *, checkpointed: bool, **options) -> list[torch.Tensor]:
    """The parameters of a rank, after its training."""
    optimizer = mpisgd.DistributedOptimizer(sgd(net), named_parameters=net.named_parameters(), **options)
    train(net, optimizer, [mpisgd.rank()], checkpointed=checkpointed)
    return [value.clone() for value in net.state_dict().values()]


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    """Of one process, where each gradient is accumulated once, and hooks see the mean."""
    alone = model()
    train(alone, sgd(alone), [0, 1, 2], checkpointed=False)
    return [param.detach() for param in alone.parameters()]


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_hook_makes_of_a_gradient_is_reduced(kind, checkpointed, expected):
    for found in run_ranks(3, lambda: trained(model(), checkpointed=checkpointed, **KINDS[kind])):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_so_it_is_where_gradients_leave_for_files_during_backward(checkpointed, expected, tmp_path):
    offload = mpisgd.Offload(str(tmp_path), what="optimizer,parameters")

    def rank() -> list[torch.Tensor]:
        net = model()
        mpisgd.offload_parameters(net, offload)
        return trained(net, checkpointed=checkpointed, strategy=mpisgd.Sharded(offload=offload))

    for found in run_ranks(3, rank):
        torch.testing.assert_close(found, expected)


def test_a_hook_that_comes_after_others_sees_what_they_have_made():
    first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    seen: list[float] = []
    for param in (first, second):
        after_others(param, lambda param: seen.append(param.grad.item()))
    handle = after_others(first, lambda param: seen.append(-param.grad.item()))  # a second one of ours

    def gradients() -> list[float]:
        seen.clear()
        first.grad = second.grad = None
        (first + second).sum().backward()
        return sorted(seen)

    assert gradients() == [-1.0, 1.0, 1.0]
    for factor in (2.0, 3.0):
        for param in (first, second):
            param.register_post_accumulate_grad_hook(lambda param, by=factor: param.grad.mul_(by) and None)
        expected = [-2.0, 2.0, 2.0] if factor == 2.0 else [-6.0, 6.0, 6.0]
        assert gradients() == expected
        assert gradients() == expected
    handle.remove()
    assert gradients() == [6.0, 6.0]
