"""What a training will take: the formulas of the ZeRO paper, and what optimizers really keep."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import mpisgd
from mpisgd.optim.memory_estimate import MemoryEstimates


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(100, 50), nn.BatchNorm1d(50), nn.Linear(50, 10))


def huge(numel: float, dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(torch.empty(int(numel), dtype=dtype, device="meta"))]


def model_states(estimates: MemoryEstimates, strategy: str) -> float:
    """In GB, without the buckets, which the paper leaves out."""
    found = estimates[strategy]
    return (found.total - found.buckets) / 1e9


def test_figure_1_of_the_paper():
    """7.5 billion parameters in 16 bits, Adam with float32 copies, 64 ranks: 120, 31.4 and 16.6 GB."""
    estimates = mpisgd.estimate_memory(
        huge(7.5e9, torch.bfloat16), torch.optim.Adam, ranks=64, ranks_per_host=1, master_dtype=torch.float32
    )
    assert model_states(estimates, "Synchronous()") == pytest.approx(120, abs=0.1)
    assert model_states(estimates, "Sharded(stage=1)") == pytest.approx(31.4, abs=0.05)
    assert model_states(estimates, "Sharded(stage=2)") == pytest.approx(16.6, abs=0.05)


OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "amsgrad": functools.partial(torch.optim.AdamW, amsgrad=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, centered=True, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("made", [False, True])
def test_state_is_what_the_optimizer_keeps(name, made):
    net = model()
    optimizer = OPTIMIZERS[name](net.parameters())
    estimate = mpisgd.estimate_memory(net, optimizer if made else OPTIMIZERS[name])["Synchronous()"]
    net(torch.ones(4, 100)).sum().backward()
    optimizer.step()
    kept = sum(v.nbytes for e in optimizer.state.values() for v in e.values() if isinstance(v, torch.Tensor))
    assert estimate.optimizer_state == kept
    assert estimate.gradients == sum(param.grad.nbytes for param in net.parameters())
    everything = [*net.parameters(), *net.buffers()]
    assert estimate.parameters == sum(tensor.nbytes for tensor in everything)


def test_an_optimizer_that_was_asked_is_unchanged():
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    before = [param.clone() for param in net.parameters()]
    mpisgd.estimate_memory(net, optimizer, ranks=4)
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert all(param.grad is None for param in net.parameters())


def test_frozen_parameters_have_no_gradient_and_no_state():
    net = model()
    net[0].requires_grad_(False)
    estimate = mpisgd.estimate_memory(net, torch.optim.Adam)["Synchronous()"]
    assert estimate.gradients == sum(p.nbytes for p in net.parameters() if p.requires_grad)


class Whole(torch.optim.SGD):
    """A step of its own: nobody knows whether it looks at a parameter as a whole."""

    def step(self, closure=None):
        return super().step(closure)


def test_whole_parameters_are_dealt_out_where_an_optimizer_needs_them():
    params = [nn.Parameter(torch.empty(n, 4, device="meta")) for n in (10, 10, 30)]
    estimates = mpisgd.estimate_memory(params, Whole, ranks=2)
    assert estimates["Sharded(stage=2)"].gradients == 30 * 4 * 4


def test_shared_parameters_count_once_for_a_host():
    estimates = mpisgd.estimate_memory(huge(1e6, torch.float32), torch.optim.Adam, ranks=8, ranks_per_host=4)
    assert estimates["Sharded(stage=2), share_parameters"].parameters == 1_000_000
    assert estimates["Sharded(stage=2)"].parameters == 4_000_000
    assert len(list(estimates)) == 6


def test_it_prints_as_a_table():
    text = str(mpisgd.estimate_memory(huge(1e9, torch.float32), torch.optim.AdamW, ranks=8))
    assert "each of 8 ranks" in text
    assert "8 GB" in text
    lines = text.splitlines()[2:]
    assert len({len(line) for line in lines}) == 1
    assert len(lines) == 7


@pytest.mark.parametrize(
    "wrong",
    [{"ranks": 0}, {"ranks_per_host": 0}, {"ranks": 2, "ranks_per_host": 3}, {"bucket_cap_bytes": -1}],
)
def test_numbers_that_make_no_sense_are_refused(wrong):
    with pytest.raises(mpisgd.InvalidArgument) as caught:
        mpisgd.estimate_memory(model(), torch.optim.SGD, **wrong)
    assert "estimate_memory" in str(caught.value)


def test_an_optimizer_that_cannot_be_asked_is_told_by_hand():
    with pytest.raises(mpisgd.InvalidArgument, match="state_per_parameter"):
        mpisgd.estimate_memory(model(), torch.optim.LBFGS)
    estimate = mpisgd.estimate_memory(huge(100, torch.float32), state_per_parameter=8)["Synchronous()"]
    assert estimate.optimizer_state == 800


def test_any_strategy_can_be_asked_about():
    strategies = [mpisgd.LocalSGD(8), mpisgd.DiLoCo(100), mpisgd.Sharded(2)]
    found = mpisgd.estimate_memory(
        huge(1e6, torch.float32), torch.optim.Adam, ranks=2, ranks_per_host=1, strategies=strategies
    )
    assert [each.strategy for each in found] == ["LocalSGD(sync_every=8)", "DiLoCo()", "Sharded(stage=2)"]
    copies = {each.strategy: each.copies for each in found}
    assert copies["DiLoCo()"] > copies["LocalSGD(sync_every=8)"] == copies["Sharded(stage=2)"] == 0
    assert all(
        each.total == each.parameters + each.gradients + each.optimizer_state + each.buckets + each.copies
        for each in found
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_lies_in_files_takes_blocks_and_layers(ranks):
    net = nn.Sequential(*[nn.Linear(10, 10, bias=False, device="meta") for _ in range(5)])
    block, layer = 4096, 400
    for what, parameters, state in (("optimizer", 5 * layer, 6), ("optimizer,parameters", layer, 3 * 6)):
        offload = mpisgd.Offload("/scratch", what=what, block_bytes=block)
        (found,) = mpisgd.estimate_memory(
            net, torch.optim.Adam, ranks=ranks, ranks_per_host=1, strategies=[mpisgd.Sharded(offload=offload)]
        )
        assert (found.parameters, found.optimizer_state) == (parameters, state * block)
        assert found.gradients == parameters
    with pytest.raises(mpisgd.InvalidArgument, match="without the layers"):
        mpisgd.estimate_memory(list(net.parameters()), ranks=2, strategies=[mpisgd.Sharded(offload=offload)])


def test_masters_stay_in_memory_beside_the_blocks():
    offload = mpisgd.Offload("/scratch", block_bytes=4096)
    (found,) = mpisgd.estimate_memory(
        huge(1000, torch.bfloat16),
        torch.optim.Adam,
        ranks=2,
        ranks_per_host=1,
        strategies=[mpisgd.Sharded(master_dtype=torch.float32, offload=offload)],
    )
    assert found.optimizer_state == 6 * 4096 + 4 * 500
