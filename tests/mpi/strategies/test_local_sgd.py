"""`LocalSGD`, which is its paper in tests/unit/methods; with a period of 1 it is synchronous SGD."""

from __future__ import annotations

import copy

import pytest
import torch
from trainings import STEPS, batch, close, fresh_model, one_step, sgd, snapshot, trained, wrapped
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd import LocalSGD
from mpisgd.errors import InvalidArgument
from mpisgd.methods.local_sgd import paper
from mpisgd.tools.verification.paper_run import Definition, PaperRun, gradients


def test_a_period_of_one_is_synchronous_sgd():
    def plain(params):
        return torch.optim.SGD(params, lr=0.1)

    close(trained(plain, LocalSGD(1)), snapshot(trained(plain, mpisgd.Synchronous())))


@pytest.mark.mpi(min_size=2)
def test_between_two_means_the_models_differ():
    model = trained(sgd, LocalSGD(4), steps=STEPS - 1)
    with raises_everywhere(mpisgd.OutOfSync):
        mpisgd.check_in_sync(model)


def test_the_state_is_averaged_where_asked_for():
    models = [fresh_model() for _ in range(mpisgd.size())]
    params = {rank: dict(model.named_parameters()) for rank, model in enumerate(models)}
    optimizers = {rank: sgd(list(mine.values())) for rank, mine in params.items()}
    run = PaperRun(Definition(paper.LocalSGD(H=4)), params, optimizers)
    for step in range(1, STEPS + 1):
        losses = [model(batch(rank, step)).square().mean() for rank, model in enumerate(models)]
        run.step({rank: gradients(loss, params[rank]) for rank, loss in enumerate(losses)})
        for name in params[0] if step % 4 == 0 else ():
            states = [optimizers[rank].state[params[rank][name]] for rank in run.ranks]
            mean = torch.stack([state["momentum_buffer"] for state in states]).mean(0)
            for state in states:
                state["momentum_buffer"].copy_(mean)
    expected = list(run.x[mpisgd.rank()].values())
    close(trained(sgd, LocalSGD(4, average_state=True)), expected)


def test_buffers_take_their_mean_too():
    norm = torch.nn.BatchNorm1d(3).double()
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD(norm.parameters(), lr=0.0), strategy=LocalSGD(1), named_buffers=norm.named_buffers()
    )
    data = torch.arange(12, dtype=torch.float64).view(4, 3)
    norm(data * (mpisgd.rank() + 1)).sum().backward()
    optimizer.step()
    means = [0.1 * (data * (rank + 1)).mean(0) for rank in range(mpisgd.size())]
    everyone(torch.allclose(norm.running_mean, torch.stack(means).mean(0), atol=1e-12))
    everyone(int(norm.num_batches_tracked) == 1)


@pytest.mark.mpi(min_size=2)
def test_compressed_changes_keep_the_ranks_equal():
    exact = snapshot(trained(sgd, LocalSGD(4)))
    model = trained(sgd, LocalSGD(4), compression=mpisgd.Compression.bf16)
    same_on_all_ranks([param.tolist() for param in model.parameters()])
    close(model, exact, 0.02)
    everyone(any(not torch.equal(a, b) for a, b in zip(model.parameters(), exact, strict=True)))


def test_a_training_that_is_saved_goes_on_as_if_it_was_not():
    strategy = LocalSGD(4, warmup_steps=3, growth=1.3, average_state=True)
    model, optimizer = wrapped(sgd, strategy)
    again, resumed = wrapped(sgd, strategy)
    for step in range(1, STEPS + 1):
        one_step(model, optimizer, mpisgd.rank(), step)
        if step == 9:
            again.load_state_dict(model.state_dict())
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif step > 9:
            one_step(again, resumed, mpisgd.rank(), step)
    close(again, snapshot(model), 0.0)


def test_consensus_is_the_mean_and_gives_the_own_model_back():
    model, optimizer = wrapped(sgd, LocalSGD(100))
    for step in (1, 2, 3):
        one_step(model, optimizer, mpisgd.rank(), step)
    kept, mean = snapshot(model), snapshot(model)
    for tensor in mean:
        mpisgd.all_reduce(tensor, mpisgd.ReduceOp.AVG)
    with optimizer.consensus():
        close(model, mean)
    close(model, kept)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"share_parameters": True}, "share_parameters=True"),
        ({"op": mpisgd.ReduceOp.SUM}, "op=SUM"),
        ({"error_if_nonfinite": True}, "error_if_nonfinite=True"),
        ({"check_in_sync_every": 3}, "check_in_sync_every=3"),
    ],
)
def test_what_does_not_go_with_it_is_refused(options, what):
    with raises_everywhere(InvalidArgument) as caught:
        wrapped(sgd, LocalSGD(4), **options)
    everyone(f"{what} does not go with LocalSGD(sync_every=4" in caught.text, caught.text)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"sync_every": 0},
        {"sync_every": 2.5},
        {"sync_every": 4, "hierarchy": {"host": 2, "job": 4}},
        {"hierarchy": {"host": 3, "job": 4}},
        {"hierarchy": {"node": 3}},
        {"sync_every": 4, "growth": 0.5},
        {"sync_every": 4, "warmup_steps": -1},
    ],
)
def test_wrong_arguments_are_named(arguments):
    with pytest.raises(InvalidArgument, match="LocalSGD"):
        LocalSGD(**arguments)


@pytest.mark.mpi(min_size=2)
def test_what_is_not_sent_counts_once():
    """With a quadratic loss, four steps and a mean of changes are one synchronous step with a larger rate."""
    targets = torch.linspace(-1, 1, 40, dtype=torch.float64) * (mpisgd.rank() + 1)
    found = []
    for strategy, lr, steps in ((LocalSGD(4), 0.02, 40), (mpisgd.Synchronous(), 1 - 0.98**4, 10)):
        param = torch.nn.Parameter(torch.zeros(40, dtype=torch.float64))
        optimizer = mpisgd.DistributedOptimizer(
            torch.optim.SGD([param], lr=lr), strategy=strategy, compression=mpisgd.compress.TopK(0.2)
        )
        for _ in range(steps):
            param.grad = param.detach() - targets
            optimizer.step()
        found.append(param.detach())
    off = (found[0] - found[1]).abs().max().item()
    everyone(off < 1e-12, f"{off}")
