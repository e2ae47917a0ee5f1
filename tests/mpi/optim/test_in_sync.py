"""Parameters that have drifted apart, and gradients that are no numbers: found on every rank, by name."""

from __future__ import annotations

import pytest
import torch
from harness import FEATURES, mlp, pair, plain_step
from torch import nn
from verdicts import everyone, raises_everywhere

import mpisgd
from mpisgd.errors import NonFiniteGradients, OutOfSync

several = pytest.mark.mpi(min_size=2)


def equal_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 3), nn.BatchNorm1d(3), nn.Linear(3, 2).bfloat16())


def last() -> int:
    return mpisgd.size() - 1


def nudge(tensor: torch.Tensor) -> None:
    """Change one number by one unit in its last place, on the last rank."""
    if mpisgd.rank() == last():
        with torch.no_grad():
            flat = tensor.view(-1)
            flat[-1] = torch.nextafter(flat[-1].float() + 1, torch.tensor(9.0)).to(flat.dtype)


def momentum_of(model: nn.Module) -> torch.optim.Optimizer:
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    opt.step()
    return opt


def test_what_is_equal_passes():
    model = equal_model()
    opt = momentum_of(model)
    for state in (model, opt, model.state_dict(), opt.state_dict(), model.named_parameters(), {}, nn.Tanh()):
        mpisgd.check_in_sync(state)
    mpisgd.check_in_sync(
        {"model": model.state_dict(), "epoch": 3, "seen": [1, 2.5, None], "object": object()}
    )


@several
@pytest.mark.parametrize("name", ["0.weight", "1.running_mean", "2.bias"])
def test_one_number_that_differs_is_found(name):
    model = equal_model()
    nudge(model.state_dict()[name])
    for state in (model, model.state_dict(), {"model": model.state_dict(), "epoch": 3}):
        with raises_everywhere(OutOfSync) as caught:
            mpisgd.check_in_sync(state)
        everyone(name in caught.text and "1 of " in caught.text, caught.text)
        everyone(f"rank {last()}: hash" in caught.text, caught.text)
        others = "rank 0: hash" if last() == 1 else "ranks 0, " if last() > 1 else ""
        everyone(others in caught.text, caught.text)
    mpisgd.barrier()


@several
def test_state_and_hyperparameters_of_an_optimizer():
    model = equal_model()
    opt = momentum_of(model)
    nudge(opt.state[model[0].bias]["momentum_buffer"])
    with raises_everywhere(OutOfSync) as caught:
        mpisgd.check_in_sync(opt)
    everyone("group 0, parameter 1: momentum_buffer: float32 [3]" in caught.text, caught.text)
    mpisgd.check_in_sync(model)
    opt = momentum_of(equal_model())
    opt.param_groups[0]["lr"] = 0.5 + mpisgd.rank()
    with raises_everywhere(OutOfSync) as caught:
        mpisgd.check_in_sync(opt)
    everyone("group 0: lr" in caught.text and "rank 1: 1.5" in caught.text, caught.text)


@several
def test_models_of_different_shape_are_no_drift():
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        mpisgd.check_in_sync(nn.Linear(3, 2 + (mpisgd.rank() == 0)))
    everyone("weight" in caught.text, caught.text)


@several
def test_a_part_of_the_job_has_a_model_of_its_own(groups):
    half = groups["half"]
    model = equal_model()
    with torch.no_grad():
        model[0].weight += half.ranks[0]
    mpisgd.check_in_sync(model, half)
    nudge(model[0].weight)
    if half.size > 1 and last() in half.ranks:
        with pytest.raises(OutOfSync, match=rf"rank {last()}: hash"):
            mpisgd.check_in_sync(model, half)
    else:
        mpisgd.check_in_sync(model, half)
    mpisgd.barrier()


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(mpisgd.InvalidArgument, match="generator"):
        mpisgd.check_in_sync(nn.Linear(2, 2).parameters())
    with pytest.raises(mpisgd.UnsupportedTensor, match="meta"):
        mpisgd.check_in_sync({"w": torch.empty(3, device="meta")})


# -- every k steps ------------------------------------------------------------------------------------


@several
@pytest.mark.parametrize("period", [1, 3])
def test_an_optimizer_finds_drift_at_the_next_check(period):
    _, ours = pair(check_in_sync_every=period)
    for step in range(3):
        plain_step(ours, step)
    nudge(ours.model[2].weight)
    for step in range(3, 2 + period):
        plain_step(ours, step)
    with raises_everywhere(OutOfSync) as caught:
        plain_step(ours, 9)
    everyone("2.weight" in caught.text and f"rank {last()}: hash" in caught.text, caught.text)


def test_an_optimizer_that_checks_trains_as_one_that_does_not():
    _, checked = pair(check_in_sync_every=2, error_if_nonfinite=True)
    _, ours = pair()
    for step in range(5):
        plain_step(checked, step)
        plain_step(ours, step)
    same = map(torch.equal, checked.model.parameters(), ours.model.parameters())
    everyone(all(same))


@pytest.mark.parametrize("wrong", [-1, 1.5, "often", None])
def test_periods_that_make_no_sense_are_refused(wrong):
    with pytest.raises(mpisgd.InvalidArgument, match="check_in_sync_every"):
        mpisgd.DistributedOptimizer(torch.optim.SGD(mlp().parameters(), lr=0.1), check_in_sync_every=wrong)


# -- gradients that are no numbers --------------------------------------------------------------------


@several
@pytest.mark.parametrize(
    ("value", "options"),
    [
        (float("inf"), {}),
        (float("nan"), {"overlap": True, "bucket_cap_bytes": 60}),
        (-float("inf"), {"op": mpisgd.ReduceOp.SUM}),
    ],
)
def test_the_rank_and_the_parameter_are_named(value, options):
    _, ours = pair(error_if_nonfinite=True, **options)
    plain_step(ours, 0)
    for name in ("0.weight", "4.bias"):
        ours.opt.zero_grad()
        param = ours.model.get_parameter(name)
        hook = param.register_hook(lambda grad: grad.index_fill(0, torch.tensor([1]), value))
        with raises_everywhere(NonFiniteGradients) as caught:
            if ours.rank == last():
                ours.backward(1)
            else:
                hook.remove()
                ours.backward(1)
        hook.remove()
        everyone(f"rank {last()}: {name}" in caught.text and "rank 0" not in caught.text, caught.text)
        everyone("step 1" in caught.text, caught.text)
    ours.opt.zero_grad()
    plain_step(ours, 2)


@several
def test_the_first_of_backward_comes_first():
    _, ours = pair(error_if_nonfinite=True)
    if ours.rank == 0:
        with torch.no_grad():
            ours.model[2].weight[0, 0] = float("nan")
    with raises_everywhere(NonFiniteGradients) as caught:
        ours.backward(0)
    first = caught.text.splitlines()[1].split(": ")[1].split(", ")[0]
    everyone(first.startswith("4."), caught.text)


@several
def test_sums_that_overflow_are_no_infinities():
    model = nn.Linear(4, 4, bias=False).half()
    mpisgd.broadcast_parameters(model)
    opt = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-9), error_if_nonfinite=True)
    model.weight.grad = torch.full_like(model.weight, 60000.0)
    opt.step()
    everyone(bool(model.weight.isfinite().all()))


@several
def test_sparse_gradients_are_looked_at():
    model = nn.Embedding(6, 2, sparse=True)
    mpisgd.broadcast_parameters(model)
    opt = mpisgd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), error_if_nonfinite=True
    )
    for step in range(3):
        opt.zero_grad()
        model(torch.tensor([mpisgd.rank(), 5])).sum().backward()
        opt.step()
        factor = float("inf") if mpisgd.rank() == 0 else 1.0
        opt.zero_grad()
        with raises_everywhere(NonFiniteGradients) as caught:
            (model(torch.tensor([1, step])).sum() * factor).backward()
        everyone("rank 0: weight" in caught.text and "rank 1" not in caught.text, caught.text)


def test_without_the_option_nobody_looks():
    _, ours = pair()
    (ours.model[0].weight.sum() * float("inf")).backward()
    everyone(bool(ours.model[0].weight.grad.isinf().all()))
