"""What `Dion`, `OneBitAdam`, `ZeroOneAdam` and `OneBitLamb` have in common."""

from __future__ import annotations

import copy

import pytest
import torch
from given_losses import torch_backward, torch_parameters
from verdicts import everyone, raises_everywhere, referee, same_on_all_ranks

import mpisgd
import mpisgd.horovod as hvd
from mpisgd.elastic.state_handlers import handler_for
from mpisgd.errors import CollectiveMismatch, InvalidArgument, UnsupportedTensor

Params = list[torch.nn.Parameter]

KINDS = {
    "Dion": lambda params, **how: mpisgd.Dion(params, 0.01, rank_fraction=0.5, **how),
    "OneBitAdam": lambda params, **how: mpisgd.OneBitAdam(params, 0.01, freeze_step=2, **how),
    "OneBitLamb": lambda params, **how: mpisgd.OneBitLamb(params, 0.01, freeze_step=2, **how),
    "ZeroOneAdam": lambda params, **how: mpisgd.ZeroOneAdam(
        params, 0.01, var_freeze_step=2, local_step_scaler=2, local_step_clipper=2, **how
    ),
}
kinds = pytest.mark.parametrize("kind", KINDS)
one_bit = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "Dion"])


@pytest.fixture(autouse=True)
def way():
    """Once is enough: no test here is about how gradients travel."""


def steps(params: Params, optimizer: torch.optim.Optimizer, first: int, num: int) -> None:
    for step in range(first, first + num):
        optimizer.zero_grad()
        torch_backward(params, step)
        optimizer.step()


def values(params: Params) -> list:
    return [param.tolist() for param in params]


@kinds
def test_training_goes_on_from_a_state(kind):
    """As from a checkpoint of each rank's own, after 5 steps; with the errors."""
    params = torch_parameters()
    optimizer = KINDS[kind](params)
    steps(params, optimizer, 0, 5)
    saved, at = copy.deepcopy(optimizer.state_dict()), [param.detach().clone() for param in params]
    steps(params, optimizer, 5, 3)
    again = [torch.nn.Parameter(param) for param in at]
    resumed = KINDS[kind](again)
    resumed.load_state_dict(saved)
    everyone(resumed.num_steps == 5)
    steps(again, resumed, 5, 3)
    everyone(values(again) == values(params))
    if kind == "Dion":  # nothing in its state is one rank's own
        return
    forgetful = [torch.nn.Parameter(param) for param in at]
    reset = KINDS[kind](forgetful)
    reset.load_state_dict({**saved, "mpisgd": {**saved["mpisgd"], "size": mpisgd.size() + 1}})
    steps(forgetful, reset, 5, 3)
    everyone(mpisgd.size() == 1 or values(forgetful) != values(params), "the errors make no difference")


@kinds
def test_learning_rates_that_are_zero_at_times_leave_the_ranks_alike(kind):
    """As of a warm-up from zero; with `ZeroOneAdam` such a step left the momenta apart for ever."""
    params = torch_parameters()
    optimizer = KINDS[kind](params)
    for step in range(12):
        optimizer.param_groups[0]["lr"] = 0.0 if step in (0, 3, 4, 6) else 0.01 / step
        steps(params, optimizer, step, 1)
        if getattr(optimizer, "is_synchronized", True):
            same_on_all_ranks(values(params))
        everyone(all(bool(param.isfinite().all()) for param in params), f"step {step}")


@kinds
def test_parameters_may_get_other_memory(kind):
    """`param.data = ...` after the optimizer was made, and in the middle of training."""
    params, moved = torch_parameters(), torch_parameters()
    optimizer, other = KINDS[kind](params), KINDS[kind](moved)
    for step in range(6):
        if step in (0, 4):
            for param in moved:
                param.data = param.data.clone()
        steps(params, optimizer, step, 1)
        steps(moved, other, step, 1)
    everyone(values(moved) == values(params))


@kinds
def test_a_deep_copy_trains_its_own_parameters_as_the_original_would(kind):
    params = torch_parameters()
    optimizer = KINDS[kind](params)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # it changes `step` of the original
    steps(params, optimizer, 0, 5)
    theirs, copied = copy.deepcopy((params, optimizer))
    everyone(copied.param_groups[0]["params"][0] is theirs[0] and copied.group is optimizer.group)
    before = values(params)
    steps(theirs, copied, 5, 3)
    everyone(values(params) == before and copied.num_steps == 8 and optimizer.num_steps == 5)
    steps(params, optimizer, 5, 3)
    everyone(values(theirs) == values(params))
    with pytest.raises(TypeError, match=f"{kind}: it averages over the ranks .* state_dict"):
        copy.copy(optimizer)


@kinds
def test_the_state_of_one_rank_serves_all(kind):
    params = torch_parameters()
    optimizer = KINDS[kind](params)
    steps(params, optimizer, 0, 5)  # ZeroOneAdam is between two meetings then
    mpisgd.broadcast_parameters([(f"{k}", param) for k, param in enumerate(params)])
    mpisgd.broadcast_optimizer_state(optimizer)
    steps(params, optimizer, 5, 1)
    same_on_all_ranks(values(params))
    everyone(all(torch.isfinite(param).all() for param in params))


@one_bit
def test_a_state_of_adam_is_taken_and_given(kind):
    params = torch_parameters()
    plain = torch.optim.Adam(params, 0.01)
    for _ in range(3):
        plain.zero_grad()
        sum((param**2).sum() for param in params).backward()
        plain.step()
    optimizer = KINDS[kind](params)
    optimizer.load_state_dict(plain.state_dict())
    everyone(optimizer.num_steps == 3)
    steps(params, optimizer, 3, 3)
    same_on_all_ranks(0 if kind == "ZeroOneAdam" else values(params))
    torch.optim.Adam(params, 0.01).load_state_dict(optimizer.state_dict())


@pytest.mark.mpi(min_size=2)
@kinds
def test_halves_train_by_themselves(kind, groups):
    group = groups["half"]
    params = torch_parameters()
    optimizer = KINDS[kind](params, group=group)
    steps(params, optimizer, 0, 6)
    bits = [None] * group.size
    mpisgd.all_gather_object(bits, values(params), group)
    everyone(all(other == bits[0] for other in bits))
    halves = referee().allgather(values(params))
    everyone(halves[0] != halves[1])


@pytest.mark.mpi(min_size=2)
def test_other_ranks_take_over(groups):
    params = torch_parameters()
    optimizer = mpisgd.OneBitAdam(params, freeze_step=2)
    steps(params, optimizer, 0, 4)
    optimizer.rebuild(groups["duplicate"])
    everyone(not optimizer.spans_job)
    everyone(optimizer.group is groups["duplicate"])
    steps(params, optimizer, 4, 2)
    same_on_all_ranks(values(params))


@pytest.mark.mpi(min_size=2)
@one_bit
def test_elastic_begins_without_errors_among_other_ranks(kind):
    """Where rank 1 is new: it gets the state of rank 0."""
    params = torch_parameters()
    optimizer = KINDS[kind](params)
    steps(params, optimizer, 0, 4)
    if mpisgd.rank() == 1:
        optimizer.param_groups[0]["lr"], optimizer.num_steps = 0.5, 0
    everyone("errors" in optimizer.state_dict()["mpisgd"]["own"])
    handler_for(optimizer).reset()
    everyone("errors" not in optimizer.state_dict()["mpisgd"]["own"])
    handler_for(optimizer).sync()
    same_on_all_ranks((optimizer.num_steps, optimizer.param_groups[0]["lr"]))
    steps(params, optimizer, 4, 2)
    same_on_all_ranks(values(params))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "make",
    [
        lambda params, r: mpisgd.OneBitAdam(params, lr=0.1 * (r + 1), freeze_step=2),
        lambda params, r: mpisgd.OneBitAdam(params, freeze_step=2 + r),
        lambda params, r: mpisgd.ZeroOneAdam(params, var_freeze_step=2, local_step_clipper=1 + r),
        lambda params, r: mpisgd.OneBitLamb(params[r:], freeze_step=2),
    ],
    ids=["lr", "freeze_step", "local_step_clipper", "parameters"],
)
def test_ranks_that_differ_find_out_at_construction(make):
    with raises_everywhere(CollectiveMismatch):
        make(torch_parameters(), int(mpisgd.rank() == 1))


@pytest.mark.parametrize(
    "make",
    [
        lambda params: mpisgd.OneBitAdam(params, lr=-1.0, freeze_step=2),
        lambda params: mpisgd.OneBitAdam(params, betas=(0.9, 1.0), freeze_step=2),
        lambda params: mpisgd.OneBitAdam(params, freeze_step=0),
        lambda params: mpisgd.ZeroOneAdam(params, var_freeze_step=2.5),
        lambda params: mpisgd.OneBitLamb(params, eps="small", freeze_step=2),
    ],
)
def test_arguments_are_checked(make):
    with pytest.raises(InvalidArgument, match="expected"):
        make(torch_parameters())


@kinds
def test_what_does_not_go_with_them_is_refused(kind):
    param = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = KINDS[kind]([param])
    with pytest.raises(InvalidArgument, match=f"{kind} averages by itself"):
        mpisgd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match=f"{kind} averages by itself"):
        hvd.DistributedOptimizer(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(param.sum()).backward()
    with raises_everywhere(InvalidArgument):
        scaler.step(optimizer)
    param.grad = torch.eye(3, 2).to_sparse()
    with raises_everywhere(UnsupportedTensor):
        KINDS[kind]([param]).step()
    with raises_everywhere(UnsupportedTensor):
        KINDS[kind]([torch.zeros(2, dtype=torch.complex64, requires_grad=True)])


@pytest.mark.parametrize("kind", ["Dion", "OneBitAdam", "OneBitLamb"])
def test_parameters_that_no_rank_has_used_stay(kind):
    """And those that some have used are updated alike, before the freeze and after it."""
    params = torch_parameters()
    optimizer = KINDS[kind](params)
    steps(params, optimizer, 0, 1)
    for step in range(1, 6):
        optimizer.zero_grad()
        torch_backward(params, step)
        params[0].grad = None
        if mpisgd.rank() > 0:
            params[3].grad = None
        before = params[0].detach().clone()
        optimizer.step()
        everyone(torch.equal(params[0], before), f"step {step}")
        same_on_all_ranks(values(params))


@one_bit
def test_a_first_gradient_after_the_freeze_is_refused(kind):
    params = torch_parameters()
    optimizer = KINDS[kind](params)
    for step in range(4):
        optimizer.zero_grad()
        torch_backward(params, step)
        if step < 3 or mpisgd.rank() > 0:
            params[1].grad = None
        if step == 3:
            break
        optimizer.step()
    with raises_everywhere(InvalidArgument) as caught:
        params[1].grad = torch.ones_like(params[1]) if mpisgd.rank() == 0 else None
        optimizer.step()
        params[1].grad = None
        optimizer.step()
    everyone("group 0, parameter 1" in caught.text, caught.text)


@one_bit
def test_elements_without_a_gradient_before_the_freeze_stay(kind):
    param = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = KINDS[kind]([param])
    for _ in range(6):
        optimizer.zero_grad()
        (param[:2] * (1.0 + mpisgd.rank())).sum().backward()
        optimizer.step()
    everyone(bool((param[2:] == 1.0).all() and (param[:2] < 1.0).all()), f"{param}")


@kinds
def test_parameters_may_come_later(kind):
    params = torch_parameters()
    optimizer = KINDS[kind](params[:2])
    torch_backward(params, 0)
    optimizer.step()
    optimizer.add_param_group({"params": params[2:], "lr": 0.02})
    steps(params, optimizer, 1, 5)
    everyone(all(torch.isfinite(param).all() for param in params))
    if kind != "ZeroOneAdam" or optimizer.is_synchronized:
        same_on_all_ranks(values(params))


def test_half_precision_and_closures():
    params = [torch.nn.Parameter(param.detach().bfloat16()) for param in torch_parameters()]
    optimizer = mpisgd.OneBitAdam(params, 0.01, freeze_step=2)
    for step in range(5):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum((param.float() ** 2).sum() for param in params)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
    everyone(loss.requires_grad)
    same_on_all_ranks(values(params))
