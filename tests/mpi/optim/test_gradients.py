"""What programs do with gradients between `backward()` and `step()`, and which gradients there are."""

from __future__ import annotations

import pytest
import torch
from harness import (
    ADAM_DRIFT,
    FEATURES,
    Run,
    adam,
    batch,
    check_equal_runs,
    digest,
    gradients,
    mlp,
    mse,
    pair,
    plain_step,
    share,
)
from torch import nn
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd.job.lifecycle import world

SMALL = 1  # bytes: each parameter alone in its bucket
caps = pytest.mark.parametrize("cap", [SMALL, 2**20], ids=["many buckets", "one bucket"])


# -- resetting gradients ------------------------------------------------------------------------------

RESETS = {
    "optimizer to none": lambda run: run.opt.zero_grad(set_to_none=True),
    "optimizer to zero": lambda run: run.opt.zero_grad(set_to_none=False),
    "model to none": lambda run: run.model.zero_grad(set_to_none=True),
    "model to zero": lambda run: run.model.zero_grad(set_to_none=False),
    "nothing": lambda run: None,
    "by hand": lambda run: [setattr(param, "grad", None) for param in run.model.parameters()],
}


def reset_in_turn(run: Run, step: int) -> None:
    """Another way after every step."""
    list(RESETS.values())[step % len(RESETS)](run)


# Each way of resetting, with the buckets alternating.
resets = pytest.mark.parametrize(
    ("reset", "cap"), [(reset, (SMALL, 2**20)[place % 2]) for place, reset in enumerate(RESETS)]
)


@resets
def test_gradients_may_be_reset_in_every_way_or_not_at_all(reset, cap):
    def body(run: Run, step: int) -> None:
        RESETS[reset](run)
        run.backward(step)
        if reset == "nothing":
            nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)  # they grow and grow
        run.opt.step()

    check_equal_runs(body, bucket_cap_bytes=cap)


@caps
def test_resets_may_alternate(cap):
    def body(run: Run, step: int) -> None:
        reset_in_turn(run, step)
        run.backward(step)
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.opt.step()

    check_equal_runs(body, bucket_cap_bytes=cap)


# -- looking at gradients -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "clip",
    [
        lambda params: nn.utils.clip_grad_norm_(params, 0.1),
        lambda params: nn.utils.clip_grad_norm_(params, 0.1, norm_type=float("inf"), foreach=True),
        lambda params: nn.utils.clip_grad_value_(params, 0.01),
    ],
    ids=["norm", "inf norm", "value"],
)
@caps
def test_clipping_sees_what_one_process_sees(clip, cap):
    def body(run: Run, step: int) -> None:
        run.opt.zero_grad()
        run.backward(step)
        clip(run.model.parameters())
        run.opt.step()

    check_equal_runs(body, optimizer=adam, tol=ADAM_DRIFT, bucket_cap_bytes=cap)


def test_backward_returns_with_the_joined_gradients():
    plain, ours = pair()
    for run in (plain, ours):
        run.backward(0)
    for one, other in zip(gradients(plain.model), gradients(ours.model), strict=True):
        everyone(torch.allclose(one, other, rtol=0, atol=1e-12))
    same_on_all_ranks(digest(gradients(ours.model)))


def test_operations_of_the_program_may_come_in_between():
    def body(run: Run, step: int) -> None:
        run.opt.zero_grad()
        pending = []
        if run.distributed:
            noise = [torch.full((1000 * (i + 1),), float(run.rank)) for i in range(3)]
            pending = [mpisgd.all_reduce(tensor, async_op=True) for tensor in noise]
        loss = run.backward(step)
        if run.distributed:
            mpisgd.all_reduce(loss.detach().clone())
            pending.append(mpisgd.broadcast(noise[0], 0, async_op=True))
        run.opt.step()
        for work in pending:
            work.wait()

    check_equal_runs(body)


# -- replaced gradients -------------------------------------------------------------------------------


def _scaled(run: Run) -> None:
    for param in run.model.parameters():
        param.grad = param.grad * 0.5


def _in_place(run: Run) -> None:
    for param in run.model.parameters():
        param.grad.mul_(0.5).add_(0.01)


def _dropped(run: Run) -> None:
    next(iter(run.model.parameters())).grad = None


def _swapped(run: Run) -> None:
    for param in run.model.parameters():
        param.grad = param.grad.clone()


def _other_data(run: Run) -> None:
    for param in run.model.parameters():
        param.grad.data = param.grad.data * 0.5


@pytest.mark.parametrize("change", [_scaled, _in_place, _dropped, _swapped, _other_data])
def test_the_program_may_replace_gradients_before_step(change):
    def body(run: Run, step: int) -> None:
        reset_in_turn(run, step)
        run.backward(step)
        change(run)
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.opt.step()

    check_equal_runs(body)


@pytest.mark.parametrize("kind", ["tensor", "view", "none"])
def test_gradients_set_before_backward_are_added_to(kind):
    def body(run: Run, step: int) -> None:
        run.opt.zero_grad()
        for place, param in enumerate(run.model.parameters()):
            if kind == "tensor":
                param.grad = torch.full_like(param, 0.1 * place)
            elif kind == "view":
                param.grad = torch.full((3, *param.shape), 0.1 * place, dtype=param.dtype)[1]
            else:
                param.grad = None
        run.backward(step)
        run.opt.step()

    check_equal_runs(body)


def test_gradients_computed_by_hand_are_reduced_by_step():
    def body(run: Run, step: int) -> None:
        reset_in_turn(run, step)
        params = list(run.model.parameters())
        for param, grad in zip(params, torch.autograd.grad(run.loss(step), params), strict=True):
            param.grad = grad
        run.opt.step()

    check_equal_runs(body)


# -- several passes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("passes", "cap"), [(2, SMALL), (3, 2**20)])
def test_passes_are_accumulated(passes, cap):
    def body(run: Run, step: int) -> None:
        run.opt.zero_grad()
        for micro in range(passes):
            run.backward(step, micro)
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        run.opt.step()

    check_equal_runs(body, backward_passes_per_step=passes, bucket_cap_bytes=cap)


@pytest.mark.parametrize("clipping", [False, True])
def test_the_last_window_may_be_partial(clipping):
    def body(run: Run, step: int) -> None:
        reset_in_turn(run, step)
        for micro in range((3, 1, 3, 2)[step % 4]):
            run.backward(step, micro)
        if clipping:
            run.synchronize()
            run.synchronize()  # nothing is left to do
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.2)
        run.opt.step()

    check_equal_runs(body, backward_passes_per_step=3)


def test_nothing_is_sent_before_the_window_is_full():
    _, ours = pair(backward_passes_per_step=2)
    ours.backward(0)
    local = [grad.clone() for grad in gradients(ours.model)]
    torch.manual_seed(100)
    alone = mlp().double()
    mse(alone, *(share(tensor, ours.rank, ours.size) for tensor in batch(0))).backward()
    everyone(all(torch.equal(a, b) for a, b in zip(local, gradients(alone), strict=True)))
    ours.opt.synchronize()


def test_no_sync_accumulates_until_the_next_backward_outside():
    def body(run: Run, step: int) -> None:
        run.opt.zero_grad()
        with run.no_sync():
            run.backward(step, 0)
            run.backward(step, 1)
        run.backward(step, 2)
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        run.opt.step()

    check_equal_runs(body)


def test_step_reduces_what_no_sync_left():
    def body(run: Run, step: int) -> None:
        run.opt.zero_grad()
        run.backward(step, 0)
        with run.no_sync():
            run.backward(step, 1)
        run.opt.step()

    check_equal_runs(body)


def test_several_backward_passes_before_one_step():
    def body(run: Run, step: int) -> None:
        run.opt.zero_grad()
        for micro in range(3):
            run.backward(step, micro)
        run.opt.step()

    check_equal_runs(body)


def test_a_graph_may_be_used_twice():
    def body(run: Run, step: int) -> None:
        run.opt.zero_grad()
        loss = run.loss(step)
        loss.backward(retain_graph=True)
        (loss * loss).backward() if run.size == 1 else loss.backward()
        run.opt.step()

    check_equal_runs(body)


def test_synchronize_then_step_without_more():
    def body(run: Run, step: int) -> None:
        run.opt.zero_grad()
        with run.no_sync():
            run.backward(step)
        run.synchronize()
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        with run.opt.skip_synchronize() if run.distributed else run.no_sync():
            run.opt.step()

    check_equal_runs(body)


def test_a_gradient_penalty_differentiates_twice():
    def loss(model, inputs, targets, rank, step):
        inputs = inputs.clone().requires_grad_()
        error = ((model(inputs) - targets) ** 2).sum(1)
        (slope,) = torch.autograd.grad(error.sum(), inputs, create_graph=True)
        return error.mean() + 0.1 * (slope**2).sum(1).mean()

    check_equal_runs(loss=loss)


# -- which gradients there are ------------------------------------------------------------------------


class Branches(nn.Module):
    """Three heads on one body; which are used is up to the loss."""

    def __init__(self, sparse=False):
        super().__init__()
        self.body = nn.Linear(FEATURES, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))
        self.never = nn.Linear(4, 4)

    def forward(self, inputs, which=()):
        hidden = torch.tanh(self.body(inputs))
        return sum((self.heads[i](hidden) for i in which), hidden[:, :2])


def used_by(rank: int, step: int) -> tuple[int, ...]:
    """Head 0 by rank 0 only, head 1 by all in turn, head 2 by all or by none."""
    return (0,) * (rank == 0) + (1,) * ((rank + step) % 2) + (2,) * (step % 3 == 0)


def branched(model, inputs, targets, rank, step):
    return nn.functional.mse_loss(model(inputs, used_by(rank, step)), targets)


@resets
def test_parameters_may_be_unused_on_some_ranks_or_on_all(reset, cap):
    def body(run: Run, step: int) -> None:
        RESETS[reset](run)
        run.backward(step)
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.opt.step()
        run.memory[step] = [grad is not None for grad in gradients(run.model)]
        assert run.model.never.weight.grad is None

    plain, ours = check_equal_runs(body, model=Branches, loss=branched, by_rank=True, bucket_cap_bytes=cap)
    everyone(plain.memory == ours.memory, f"{plain.memory} {ours.memory}")


@pytest.mark.parametrize(
    ("passes", "reset"), [(1, "model to zero"), (1, "nothing"), (2, "optimizer to none"), (2, "by hand")]
)
def test_a_rank_may_use_no_parameter_at_all(passes, reset):
    def loss(model, inputs, targets, rank, step):
        return None if (step + rank) % 3 == 0 else mse(model, inputs, targets)

    def body(run: Run, step: int) -> None:
        RESETS[reset](run)
        for micro in range(passes):
            run.backward(step, micro)
        run.synchronize()
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.opt.step()

    check_equal_runs(body, loss=loss, by_rank=True, backward_passes_per_step=passes)


def test_a_rank_without_a_loss_may_still_clip_after_synchronize():
    def loss(model, inputs, targets, rank, step):
        return None if step % 2 and rank == 0 else mse(model, inputs, targets)

    def body(run: Run, step: int) -> None:
        run.opt.zero_grad()
        run.backward(step)
        run.synchronize()
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.opt.step()

    check_equal_runs(body, loss=loss, by_rank=True)


def test_momentum_leaves_what_nobody_uses_alone():
    model = Branches().double()
    mpisgd.broadcast_parameters(model)
    before = model.never.weight.detach().clone()
    opt = mpisgd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
    )
    for _ in range(3):
        opt.zero_grad()
        model(torch.ones(2, FEATURES, dtype=torch.float64), (0,)).sum().backward()
        opt.step()
    everyone(torch.equal(before, model.never.weight))
    everyone(model.never.weight not in opt.state)


# -- frozen parameters --------------------------------------------------------------------------------


def _freeze(run: Run, layers: dict[int, bool]) -> None:
    for place, trainable in layers.items():
        run.model[place].requires_grad_(trainable)


@resets
def test_parameters_may_be_frozen_and_released_at_any_time(reset, cap):
    def body(run: Run, step: int) -> None:
        if step == 0:
            _freeze(run, {0: False})
        if step == 4:
            _freeze(run, {0: True, 2: False})
        if step == 9:
            _freeze(run, {2: True, 4: False})
        if step == 13:
            _freeze(run, {4: True})
        RESETS[reset](run)
        run.backward(step)
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.opt.step()

    check_equal_runs(body, bucket_cap_bytes=cap)


@pytest.mark.parametrize("reset", ["optimizer to none", "model to zero", "nothing"])
def test_what_was_frozen_when_wrapped_may_later_train_alone(reset):
    def optimizer(model):
        model[0].requires_grad_(False)
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def body(run: Run, step: int) -> None:
        RESETS[reset](run)
        if step % 4 == 2:
            _freeze(run, {0: True, 2: False, 4: False})
        if step % 4 == 0:
            _freeze(run, {0: False, 2: True, 4: True})
        run.backward(step)
        nn.utils.clip_grad_norm_([p for p in run.model.parameters() if p.requires_grad], 0.05)
        run.opt.step()

    check_equal_runs(body, optimizer=optimizer)


def test_everything_may_be_frozen_for_a_step():
    def body(run: Run, step: int) -> None:
        run.model.requires_grad_(step % 3 != 1)
        run.opt.zero_grad()
        if step % 3 != 1:
            run.backward(step)
        run.opt.step()

    check_equal_runs(body)


# -- reduction options --------------------------------------------------------------------------------


@caps
def test_sum_equals_one_process_on_the_summed_loss(cap):
    def small(model):
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    check_equal_runs(plain_step, op=mpisgd.ReduceOp.SUM, by_rank=True, optimizer=small, bucket_cap_bytes=cap)


@pytest.mark.parametrize(
    "reset", ["optimizer to none", "optimizer to zero", "model to none", "model to zero"]
)
def test_sum_takes_every_reset(reset):
    def body(run: Run, step: int) -> None:
        RESETS[reset](run)
        with run.no_sync():
            run.backward(step, 1)
        run.backward(step)
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.opt.step()

    check_equal_runs(body, op=mpisgd.ReduceOp.SUM, by_rank=True)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_sum_is_not_summed_twice(steps):
    if mpisgd.size() == 1:
        pytest.skip("the sum of one is what it was")
    _, ours = pair(op=mpisgd.ReduceOp.SUM)
    ours.backward(0)
    for _ in range(steps):
        ours.opt.step()
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        ours.backward(1)
    assert "reduced once more" in caught.text
    ours.opt.zero_grad()


def test_a_second_step_on_the_same_gradients():
    def body(run: Run, step: int) -> None:
        run.model.zero_grad()
        run.backward(step)
        run.opt.step()
        run.opt.step()

    for op in (mpisgd.ReduceOp.AVG, mpisgd.ReduceOp.SUM):
        check_equal_runs(body, op=op, by_rank=True, steps=5)


@pytest.mark.parametrize("factor", [2.0, 0.5, 3.0])
def test_predividing_changes_nothing_but_the_range(factor):
    check_equal_runs(gradient_predivide_factor=factor)


def test_predividing_avoids_an_overflow():
    if mpisgd.size() == 1:
        pytest.skip("one rank adds nothing")
    for factor, finite in ((1.0, False), (float(mpisgd.size()), True)):
        weight = nn.Parameter(torch.zeros(3))
        opt = mpisgd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), gradient_predivide_factor=factor)
        (weight * 3e38).sum().backward()
        everyone(weight.grad.isfinite().all().item() is finite, f"{factor}: {weight.grad}")
        del opt


def test_a_group_of_one_is_told_of_nonfinite_gradients_too():
    """Regression: a reducer of one rank returned before it looked."""
    alone = next(
        group for group in [mpisgd.new_group([rank]) for rank in range(mpisgd.size())] if group.rank >= 0
    )
    weight = nn.Parameter(torch.zeros(3))
    opt = mpisgd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), error_if_nonfinite=True, group=alone)
    with pytest.raises(mpisgd.NonFiniteGradients, match=f"rank {mpisgd.rank()}"):
        (weight * float("nan")).sum().backward()
    del opt


# -- how often the ranks meet -------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("overlap", [False, True])
def test_without_overlap_the_ranks_meet_once_for_all_buckets(overlap):
    """Which gradients there are travels with them; with overlap, the ranks meet once for each bucket."""
    queue = world().queue
    _, ours = pair(bucket_cap_bytes=SMALL, overlap=overlap)
    num_buckets = len(list(ours.model.parameters()))
    assert num_buckets > 2
    met = []
    for step in range(4):  # plans are made anew in the first steps
        before = queue.consistency.number
        plain_step(ours, step)
        met.append(queue.consistency.number - before)
    everyone(met[-2:] == [num_buckets if overlap else 1] * 2, str(met))
