"""`Gossip` with a compression, which is CHOCO-SGD in tests/unit/methods."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import parameters_to_vector
from verdicts import everyone, raises_everywhere

import mpisgd
from mpisgd import Gossip, compress, config
from mpisgd.errors import InvalidArgument

LR, STEPS = 0.1, 20
SHAPES = ((4, 5), (7,))


def start(rank: int) -> list[torch.Tensor]:
    """Ranks begin apart from each other."""
    return [torch.sin(torch.arange(7.0 * rank, 7.0 * rank + n, dtype=torch.float64)) for n in (20, 7)]


def gradient(x: list[torch.Tensor], rank: int, step: int) -> list[torch.Tensor]:
    """Of 1/2 |x - t|^2 for a target of this rank and step."""
    return [p - torch.cos(torch.arange(len(p), dtype=torch.float64) * (rank + 1) + step) for p in x]


def own_params() -> list[torch.nn.Parameter]:
    tensors = start(mpisgd.rank())
    return [torch.nn.Parameter(t.view(shape)) for t, shape in zip(tensors, SHAPES, strict=True)]


def train(params, optimizer, first: int = 0, last: int = STEPS) -> torch.Tensor:
    for step in range(first, last):
        grads = gradient([param.detach().view(-1) for param in params], mpisgd.rank(), step)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.view(param.shape)
        optimizer.step()
    return parameters_to_vector(params).detach()


def wrap(params, strategy, compression, **options):
    return mpisgd.DistributedOptimizer(
        torch.optim.SGD(params, lr=LR), strategy=strategy, compression=compression, **options
    )


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-12) -> None:
    worst = (found - expected).abs().max().item()
    everyone(worst <= tolerance, f"differs by {worst}")


def test_everything_sent_and_a_whole_step_is_adapt_then_combine():
    params, plain = own_params(), own_params()
    found = train(params, wrap(params, Gossip("exponential", consensus_step=1.0), compress.TopK(1.0)))
    expected = train(plain, wrap(plain, Gossip("exponential"), None))
    assert_near(found, expected)


@pytest.mark.parametrize(
    "compression",
    [compress.TopK(0.1), compress.RandomK(0.2), compress.OneBit(), compress.QSGD(4), compress.Natural()],
    ids=repr,
)
def test_without_gradients_ranks_come_to_the_mean_which_stays(compression):
    params = own_params()
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD(params, lr=0.0),
        strategy=Gossip("ring", consensus_step=0.2),
        compression=compression,
    )
    mean = sum(torch.cat(start(rank)) for rank in range(mpisgd.size())) / mpisgd.size()
    first = (parameters_to_vector(params).detach() - mean).norm()
    found = train(params, optimizer, last=150)
    everyone(bool((found - mean).norm() <= 0.02 * first + 1e-12), f"{(found - mean).norm() / first}")
    total = found.clone()
    mpisgd.all_reduce(total, mpisgd.ReduceOp.AVG)
    assert_near(total, mean)


def test_a_saved_state_continues_as_if_nothing_had_been():
    strategy, compression = Gossip("ring", consensus_step=0.3), compress.QSGD(4)
    through, stopped = own_params(), own_params()
    expected = train(through, wrap(through, strategy, compression))
    first = wrap(stopped, strategy, compression)
    train(stopped, first, 0, 8)
    resumed = [torch.nn.Parameter(param.detach().clone()) for param in stopped]
    second = wrap(resumed, strategy, compression)
    second.load_state_dict(first.state_dict())
    assert_near(train(resumed, second, 8), expected)


@pytest.mark.mpi(min_size=2)
def test_a_rank_sends_its_message_to_each_neighbour(monkeypatch):
    monkeypatch.setattr(config, "shared_memory", lambda: False)
    group, sent = mpisgd.new_group(), []
    for last in (2, 7):
        before = group.queue.communicator.sent_bytes
        params = own_params()
        strategy = Gossip("ring", consensus_step=0.3)
        train(params, wrap(params, strategy, compress.TopK(0.2), group=group), last=last)
        sent.append(group.queue.communicator.sent_bytes - before)
    num_neighbours, elements = min(2, group.size - 1), 4 + 1  # of 20 and 7
    everyone(sent[1] - sent[0] == 5 * num_neighbours * elements * (8 + 4), f"{sent}")


@pytest.mark.parametrize(
    ("strategy", "compression", "said"),
    [
        (Gossip("ring", consensus_step=0.3), compress.PowerSGD(2), "PowerSGD"),
        (Gossip("ring", consensus_step=0.3), compress.QSGD(2), "QSGD of 4 bits"),
        (Gossip("ring", consensus_step=0.3), None, "goes with a compression"),
        (Gossip("ring"), compress.TopK(0.1), "a consensus_step such as 0.3"),
        (Gossip("one_peer_exponential", consensus_step=0.3), compress.TopK(0.1), "the same in every step"),
        (Gossip("ring", style="push_sum", consensus_step=0.3), compress.TopK(0.1), "adapt_then_combine"),
    ],
    ids=repr,
)
def test_what_does_not_go_together_is_refused(strategy, compression, said):
    if "same" in said and mpisgd.size() < 3:
        pytest.skip("of two ranks it has one phase")
    with raises_everywhere(InvalidArgument) as caught:
        wrap(own_params(), strategy, compression)
    everyone(said in caught.text, caught.text)
