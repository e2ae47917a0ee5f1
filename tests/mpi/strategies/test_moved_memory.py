"""Parameters that get other memory after the optimizer was made are trained as if they had kept theirs.

`model.to(memory_format=...)`, `model.double()` and `param.data = ...` leave the parameter the same object and
give it other memory. What a strategy has noted of the old one is of no use then.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from verdicts import everyone, raises_everywhere

import mpisgd
from mpisgd import DiLoCo, ElasticAveraging, Gossip, InvalidArgument, LocalSGD, ParameterServer, compress
from mpisgd.job.lifecycle import world

STEPS = 6


class Net(torch.nn.Module):
    """Two parameters, one of which has four dimensions, and a loss that treats elements one by one."""

    def __init__(self) -> None:
        super().__init__()
        start = torch.arange(48, dtype=torch.float32)
        self.filter = torch.nn.Parameter(torch.sin(start).view(4, 3, 2, 2))
        self.bias = torch.nn.Parameter(torch.cos(start[:5]))

    def loss(self, rank: int, step: int) -> torch.Tensor:
        """Of targets that differ by rank, step and element."""
        targets = [torch.sin(torch.arange(48.0) + 9 * rank + step).view(4, 3, 2, 2), torch.arange(5.0) * rank]
        return sum(
            (param - target.to(param.dtype)).square().sum()
            for param, target in zip(self.parameters(), targets, strict=True)
        )


def new_data(model: Net) -> None:
    for param in model.parameters():
        param.data = param.data.clone()


def channels_last(model: Net) -> None:
    model.to(memory_format=torch.channels_last)


def double(model: Net) -> None:
    model.double()


def train(
    change: Callable[[Net], object], at: tuple[int, ...], strategy: mpisgd.Strategy, **options
) -> tuple[Net, torch.optim.Optimizer]:
    """Train, and change the model after so many steps."""
    model = Net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.0625)
    optimizer = mpisgd.DistributedOptimizer(sgd, strategy=strategy, **options)
    for step in range(STEPS):
        if step in at:
            change(model)
        optimizer.zero_grad()
        model.loss(mpisgd.rank(), step).backward()
        optimizer.step()
    return model, optimizer


def values(model: Net) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


TOP_K = {"compression": compress.TopK(0.25)}
ONE_BIT = {"compression": compress.OneBit()}

CASES = {
    "synchronous": (mpisgd.Synchronous(), {}),
    "synchronous, top-k": (mpisgd.Synchronous(), TOP_K),
    "local": (LocalSGD(2), {}),
    "local, warm-up": (LocalSGD(2, warmup_steps=3), {}),
    "local, hierarchy": (LocalSGD(hierarchy={"host": 1, "job": 2}), {}),
    "local, top-k": (LocalSGD(2), TOP_K),
    "diloco": (DiLoCo(2), {}),
    "diloco, fragments": (DiLoCo(2, fragments=2, overlap_steps=1), {}),
    "diloco, one bit": (DiLoCo(2), ONE_BIT),
    "elastic": (ElasticAveraging(every=2), {}),
    "elastic, bf16": (ElasticAveraging(every=2), {"compression": mpisgd.Compression.bf16}),
    "adapt": (Gossip("ring"), {}),
    "combine": (Gossip("ring", style="combine_then_adapt"), {}),
    "push-sum": (Gossip("exponential", style="push_sum"), {}),
    "choco": (Gossip("ring", consensus_step=0.5), TOP_K),
    "one server": (ParameterServer("ssp", staleness_steps=0), {}),
}


def differ_by(plain: Net, model: Net) -> float:
    pairs = zip(values(plain), values(model), strict=True)
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("change", [new_data, channels_last])
@pytest.mark.parametrize("case", CASES)
def test_other_memory_makes_no_difference(case, change):
    strategy, options = CASES[case]
    tolerance = 1e-6 if isinstance(strategy, ParameterServer) else 0.0  # who pushes first
    plain, kept = train(change, (), strategy, **options)
    model, moved = train(change, (0, 2), strategy, **options)
    everyone(differ_by(plain, model) <= tolerance, f"{case}: {differ_by(plain, model)}")
    with kept.consensus(), moved.consensus():
        everyone(differ_by(plain, model) <= tolerance, f"{case}: {differ_by(plain, model)}")


FOLLOWING = [case for case in CASES if case != "one server"]


@pytest.mark.parametrize("case", FOLLOWING)
def test_another_dtype_is_trained_on(case):
    strategy, options = CASES[case]
    plain, _ = train(double, (), strategy, **options)
    model, _ = train(double, (3,), strategy, **options)
    everyone(all(param.dtype == torch.float64 for param in model.parameters()))
    tolerance = 1.0 if case == "choco" else 1e-4  # whose copies begin anew
    everyone(differ_by(plain, model) <= tolerance, f"{case}: {differ_by(plain, model)}")


@pytest.mark.parametrize(
    "strategy",
    [
        ParameterServer("async"),
        ParameterServer("ssp", staleness_steps=1, locked=False),
        Gossip("complete", style="asynchronous"),
    ],
)
def test_what_cannot_follow_to_another_dtype_says_so(strategy):
    if isinstance(strategy, ParameterServer) and not strategy.locked and world().shared_memory is None:
        pytest.skip("needs memory that all ranks share")
    if isinstance(strategy, Gossip) and mpisgd.size() == 1:
        pytest.skip("sends nothing")
    model = Net()
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
    model.loss(0, 0).backward()
    optimizer.step()
    mpisgd.barrier()
    model.double()
    optimizer.zero_grad()
    model.loss(0, 0).backward()
    with raises_everywhere(InvalidArgument) as caught:
        optimizer.step()
    everyone("other dtypes or shapes" in caught.text, caught.text)


def test_ranks_that_write_without_locks_go_on_to_share_their_memory():
    """Parameters were given shared memory in the first step only: the ranks trained alone afterwards."""
    if mpisgd.size() > 1 and world().shared_memory is None:
        pytest.skip("needs memory that all ranks share")
    strategy, size = ParameterServer("async", locked=False), mpisgd.size()
    param = torch.nn.Parameter(torch.arange(5.0))
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD([param], lr=0.5), strategy=strategy, op=mpisgd.ReduceOp.SUM
    )
    optimizer.synchronizer.pull()
    for rank in range(size):  # in turn: no update is lost
        if rank == mpisgd.rank():
            param.data = param.data.clone()
            param.grad = torch.full_like(param, rank + 1.0)
            optimizer.step()
        mpisgd.barrier()
    optimizer.synchronizer.finish()
    everyone(torch.equal(param.detach(), torch.arange(5.0) - 0.25 * size * (size + 1)), f"{param}")


def test_pairs_average_the_memory_that_parameters_have_now():
    """The views of construction were averaged; and parameters that were frozen then, never."""
    param, frozen = (torch.nn.Parameter(torch.arange(3.0) + 4 * mpisgd.rank()) for _ in range(2))
    frozen.requires_grad_(False)
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD([param, frozen], lr=0.1), strategy=Gossip("complete", style="asynchronous")
    )
    for tensor in (param, frozen.requires_grad_()):
        tensor.data = tensor.data.clone()
    for _ in range(2000):
        param.grad, frozen.grad = torch.zeros(3), torch.zeros(3)
        optimizer.step()
        time.sleep(0.001)
        low, high = (
            torch.stack([param.detach(), frozen.detach()]),
            torch.stack([param.detach(), frozen.detach()]),
        )
        mpisgd.all_reduce(low, mpisgd.ReduceOp.MIN)
        mpisgd.all_reduce(high, mpisgd.ReduceOp.MAX)
        if (apart := (high - low).max().item()) < 1e-3:
            break
    optimizer.rebuild()
    everyone(apart < 1e-3, f"{apart}")


@pytest.mark.parametrize(
    "strategy", [LocalSGD(1), DiLoCo(1), ElasticAveraging(), Gossip("ring"), Gossip("ring", style="push_sum")]
)
def test_buffers_that_a_conversion_has_replaced_are_missed(strategy):
    """`model.double()` puts new tensors in the place of buffers: the old ones were averaged, for nobody."""
    model = torch.nn.BatchNorm1d(3)
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy, named_buffers=model.named_buffers()
    )
    model.double()
    model(torch.arange(12.0, dtype=torch.float64).view(4, 3)).sum().backward()
    with raises_everywhere(InvalidArgument) as caught:
        optimizer.step()
    everyone("'running_mean'" in caught.text, caught.text)
