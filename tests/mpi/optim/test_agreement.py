"""What cannot work is refused by name: on this rank before anything is sent, or on every rank together."""

from __future__ import annotations

import contextlib

import pytest
import torch
from harness import FEATURES, batch, mlp, mse, pair, plain_step, share
from torch import nn
from verdicts import everyone, raises_everywhere

import mpisgd

several = pytest.mark.mpi(min_size=2)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@several
def test_an_order_of_elements_that_only_one_rank_has_is_found():
    model = nn.Conv2d(2, 3, 3)
    opt = mpisgd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    if mpisgd.rank() == 0:
        model.to(memory_format=torch.channels_last)
    with raises_everywhere(mpisgd.CollectiveMismatch):
        model(torch.randn(1, 2, 5, 5)).sum().backward()
        opt.step()


# -- refused locally ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"op": mpisgd.ReduceOp.MAX}, mpisgd.InvalidArgument, "MAX"),
        ({"op": "mean"}, mpisgd.InvalidArgument, "mean"),
        ({"compression": "fp16"}, mpisgd.InvalidArgument, "fp16"),
        ({"compression": torch.float16}, mpisgd.InvalidArgument, "float16"),
        ({"backward_passes_per_step": 0}, mpisgd.InvalidArgument, "backward_passes_per_step=0"),
        ({"backward_passes_per_step": 1.5}, mpisgd.InvalidArgument, "1.5"),
        ({"gradient_predivide_factor": 0.0}, mpisgd.InvalidArgument, "gradient_predivide_factor=0.0"),
        ({"gradient_predivide_factor": -2}, mpisgd.InvalidArgument, "-2"),
        (
            {"gradient_predivide_factor": 2.0, "op": mpisgd.ReduceOp.SUM},
            mpisgd.InvalidArgument,
            "gradient_predivide_factor",
        ),
        ({"bucket_cap_bytes": -1}, mpisgd.InvalidArgument, "bucket_cap_bytes=-1"),
        ({"bucket_cap_bytes": 0}, mpisgd.InvalidArgument, "bucket_cap_bytes=0"),
        ({"named_parameters": []}, mpisgd.InvalidArgument, r"\[5, 4\]"),
        ({"bukket_cap_bytes": 1}, TypeError, "bukket_cap_bytes"),
    ],
)
def test_wrong_options_are_named_and_leave_the_optimizer_as_it_was(options, error, named):
    model = mlp()
    opt = sgd(model)
    before = dict(vars(opt))
    with pytest.raises(error, match=named):
        mpisgd.DistributedOptimizer(opt, **options)
    assert type(opt) is torch.optim.SGD
    assert vars(opt) == before
    opt.zero_grad()
    model(torch.ones(1, FEATURES)).sum().backward()
    opt.step()
    mpisgd.DistributedOptimizer(opt)


@pytest.mark.parametrize("wrong", [None, "sgd", torch.optim.SGD, [torch.zeros(2)], nn.Linear(1, 1)])
def test_only_optimizers_can_be_wrapped(wrong):
    with pytest.raises(mpisgd.InvalidArgument, match=r"expected a torch optimizer"):
        mpisgd.DistributedOptimizer(wrong)


def test_wrapping_twice_is_refused_and_the_first_goes_on():
    _, ours = pair()
    with pytest.raises(mpisgd.InvalidArgument, match="already"):
        mpisgd.DistributedOptimizer(ours.opt)
    plain_step(ours, 0)


def test_names_must_be_unique_and_complete():
    model = mlp()
    opt = sgd(model)
    with pytest.raises(mpisgd.InvalidArgument, match=r"'w' twice"):
        mpisgd.DistributedOptimizer(opt, named_parameters=[("w", p) for p in model.parameters()])
    with pytest.raises(mpisgd.InvalidArgument, match=r"parameter 3.*named_parameters"):
        mpisgd.DistributedOptimizer(opt, named_parameters=list(model.named_parameters())[:3])
    assert type(opt) is torch.optim.SGD


@pytest.mark.parametrize("wrong", [lambda m: m.parameters(), lambda m: m.state_dict(), lambda m: 5])
def test_names_must_come_with_parameters(wrong):
    model = mlp()
    with pytest.raises(mpisgd.InvalidArgument, match=r"model\.named_parameters\(\)"):
        mpisgd.DistributedOptimizer(sgd(model), named_parameters=wrong(model))


def test_parameters_elsewhere_are_refused():
    opt = torch.optim.SGD([torch.empty(2, device="meta", requires_grad=True)], lr=0.1)
    with pytest.raises(mpisgd.UnsupportedTensor, match="meta"):
        mpisgd.DistributedOptimizer(opt)


# -- refused by all together --------------------------------------------------------------------------


def _missing(model):
    model[4].register_parameter("weight", None)


def _other_shape(model):
    model[2].weight = nn.Parameter(torch.zeros(4, 5))


def _other_dtype(model):
    model[2].weight = nn.Parameter(model[2].weight.double())


def _other_name(model):
    model[2].register_parameter("kernel", model[2].weight)
    model[2].register_parameter("weight", None)


@several
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_missing, "4.weight"),
        (_other_shape, "2.weight"),
        (_other_dtype, "2.weight"),
        (_other_name, "2.kernel"),
    ],
)
def test_models_that_differ_are_refused_by_every_rank(change, name):
    model = mlp()
    if mpisgd.rank() == mpisgd.size() - 1:
        change(model)
    for refused in (
        lambda: mpisgd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters()),
        lambda: mpisgd.broadcast_parameters(model),
        lambda: mpisgd.broadcast_parameters(model.state_dict()),
        lambda: mpisgd.average_gradients(model),
    ):
        with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
            refused()
        everyone(name in caught.text, caught.text)


@several
def test_the_order_of_parameters_counts():
    model = mlp()
    named = list(model.named_parameters())
    params = [param for _, param in named]
    if mpisgd.rank() == 0:
        params.reverse()
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        mpisgd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), named_parameters=named)
    everyone("0.weight" in caught.text, caught.text)


@several
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"op": mpisgd.ReduceOp.SUM}, {}),
        ({"compression": mpisgd.Compression.bf16}, {}),
        ({"backward_passes_per_step": 2}, {"backward_passes_per_step": 3}),
        ({"bucket_cap_bytes": 100}, {"bucket_cap_bytes": 101}),
        ({"gradient_predivide_factor": 2.0}, {}),
    ],
)
def test_options_that_differ_are_refused_by_every_rank(one, other):
    opt = sgd(mlp())
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        mpisgd.DistributedOptimizer(opt, **(one if mpisgd.rank() == 0 else other))
    everyone(next(iter(one)) in caught.text, caught.text)
    everyone(type(opt) is torch.optim.SGD)


# -- while training -----------------------------------------------------------------------------------


@several
@pytest.mark.parametrize("steps_before", [0, 2])
def test_freezing_on_one_rank_only_is_refused_by_every_rank(steps_before):
    _, ours = pair()
    for step in range(steps_before):
        plain_step(ours, step)
    ours.opt.zero_grad()
    ours.model[2].requires_grad_(ours.rank != 0)
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        ours.backward(5)
    everyone("frozen" in caught.text, caught.text)


@several
@pytest.mark.parametrize("passes", [1, 2])
def test_a_rank_that_skips_a_step_is_not_paired_with_the_next(passes):
    _, ours = pair(backward_passes_per_step=passes)
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        for step in range(3):
            ours.opt.zero_grad()
            for micro in range(passes):
                ours.backward(step, micro)
            if ours.rank or step != 1:
                ours.opt.step()
    everyone("step 1" in caught.text and "step 2" in caught.text, caught.text)


@several
def test_a_rank_that_skips_an_iteration_is_found_at_the_end_of_the_loop():
    """Nobody can tell before: to that rank, the next iteration is the one the others are in."""
    _, ours = pair()
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        for step in range(3):
            if ours.rank or step != 1:
                plain_step(ours, step)
        mpisgd.barrier()
    everyone("barrier" in caught.text and "step 2" in caught.text, caught.text)


@several
def test_another_operation_in_the_place_of_a_gradient_is_refused():
    _, ours = pair()
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        if ours.rank == 0:
            mpisgd.all_reduce(torch.ones(3))
        else:
            ours.backward(0)
    everyone("all_reduce" in caught.text and "gradients" in caught.text, caught.text)
    everyone("harness.py" in caught.text and "test_agreement.py" in caught.text, caught.text)


@several
@pytest.mark.parametrize("factor", [1.0, 2.0, 0.25])
def test_a_disagreement_leaves_gradients_as_they_were(factor):
    """Also if they had been divided before; large ones where they lay, small ones in their buffer."""
    rank, numels = mpisgd.rank(), (3, 200_000)
    weights = [nn.Parameter(torch.ones(numel)) for numel in numels]
    opt = mpisgd.DistributedOptimizer(torch.optim.SGD(weights, lr=0.1), gradient_predivide_factor=factor)
    given = [torch.arange(numel) % 5 + rank + 1.0 for numel in numels]
    for round_ in range(2):
        opt.zero_grad()
        loss = sum((weight * values).sum() for weight, values in zip(weights, given, strict=True))
        with raises_everywhere(mpisgd.CollectiveMismatch) if round_ else contextlib.nullcontext():
            if round_ and rank == 0:
                mpisgd.all_reduce(torch.ones(3))
            else:
                loss.backward()
    same = all(torch.equal(w.grad, values) for w, values in zip(weights, given, strict=True) if rank)
    everyone(same, "changed")


@several
def test_groups_added_later_must_agree():
    model = mlp()
    opt = mpisgd.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1))
    added = model[2] if mpisgd.rank() else model[4]
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        opt.add_param_group({"params": list(added.parameters())})
    everyone("group 1" in caught.text, caught.text)


@several
def test_training_goes_on_after_a_disagreement():
    _, ours = pair()
    with raises_everywhere(mpisgd.CollectiveMismatch):
        mpisgd.all_reduce(torch.ones(2 + (ours.rank == 0)))
    for step in range(3):
        plain_step(ours, step)
    inputs, targets = (share(tensor, ours.rank, ours.size) for tensor in batch(0))
    everyone(bool(mse(ours.model, inputs, targets).isfinite()))
