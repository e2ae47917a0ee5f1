"""What `DistributedOptimizer` forbids, warns of, and leaves as it was; and that the comparison notices."""

from __future__ import annotations

import warnings

import pytest
import torch
from joined_batch import check, inputs_of, mlp, pair, plain_step, sgd, square
from torch import nn
from verdicts import everyone, raises_everywhere

import mpisgd.horovod as hvd
from mpisgd.arguments import ranks_text
from mpisgd.horovod.gradients import GradientExchange


@pytest.mark.mpi(min_size=2)
def test_the_comparison_notices_ranks_that_train_alone(monkeypatch):
    monkeypatch.setattr(hvd, "DistributedOptimizer", lambda opt, named_parameters: opt)
    with pytest.raises(pytest.fail.Exception, match=r"step 0: .* is off by"):
        check()


@pytest.mark.mpi(min_size=2)
def test_gradients_must_not_be_zeroed_while_they_are_under_way():
    _, ours = pair()
    ours.backward(0)
    with raises_everywhere(AssertionError) as caught:
        ours.opt.zero_grad()
    assert "zero_grad() was called after loss.backward() but before optimizer.step()" in caught.text
    ours.opt.step()
    plain_step(ours, 1)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("early", [False, True])
def test_gradients_must_not_be_unscaled_while_they_are_under_way(early, monkeypatch):
    """Between hosts they had been sent with the scale; on one, each rank looked for its own infinities."""
    monkeypatch.setattr(GradientExchange, "_sends_early", lambda exchange: early)
    _, ours = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(ours.loss(0)).backward()
    scaler.unscale_(ours.opt)
    with raises_everywhere(AssertionError) as caught:
        scaler.step(ours.opt)
    assert "scaler.unscale_(optimizer) was called after loss.backward() but before" in caught.text
    ours.opt.synchronize()
    ours.opt.zero_grad()
    scaler.update()
    scaler.scale(ours.loss(1)).backward()
    ours.opt.synchronize()
    scaler.unscale_(ours.opt)
    with ours.opt.skip_synchronize():
        scaler.step(ours.opt)


@pytest.mark.mpi(min_size=2)
def test_more_backward_passes_than_announced():
    _, ours = pair()
    loss = ours.loss(0)
    loss.backward(retain_graph=True)
    with raises_everywhere(AssertionError) as caught:
        loss.backward()
    assert "Gradients were computed more than backward_passes_per_step times" in caught.text
    ours.opt.synchronize()


def test_accumulated_gradients_may_be_zeroed_before_they_set_out():
    check(body=thrown_away, backward_passes_per_step=2)


def thrown_away(run, step: int) -> None:
    """The first pass of a window is thrown away; the window goes on."""
    run.opt.zero_grad()
    run.backward(step)
    run.opt.zero_grad()
    run.backward(step, 1)
    run.opt.step()


def test_synchronizing_twice_warns_and_an_average_stays_what_it_is():
    def body(run, step: int) -> None:
        run.opt.zero_grad()
        run.backward(step)
        if not run.distributed:
            run.opt.step()
            return
        run.opt.synchronize()
        with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
            run.opt.step()

    check(body)


def test_nothing_warns_in_an_ordinary_loop():
    _, ours = pair()
    scheduler = torch.optim.lr_scheduler.StepLR(ours.opt, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(2):
            plain_step(ours, step)
            scheduler.step()


def test_steps_without_a_backward_pass_change_nothing():
    _, ours = pair(optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.1))
    before = [param.detach().clone() for param in ours.model.parameters()]
    ours.opt.step()
    ours.opt.step()
    everyone(all(map(torch.equal, before, ours.model.parameters())))


def test_gradients_after_step_are_those_of_all_ranks():
    plain, ours = pair()
    for run in (plain, ours):
        plain_step(run, 0)
    for a, b in zip(plain.model.parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-14)


def test_the_object_the_class_and_what_scripts_read():
    net = mlp()
    plain = sgd(net)
    opt = hvd.DistributedOptimizer(plain, named_parameters=net.named_parameters(), backward_passes_per_step=3)
    assert opt is plain
    assert isinstance(opt, torch.optim.SGD)
    assert type(opt).__name__ == "SGD"
    assert opt.backward_passes_per_step == 3
    assert opt._parameter_names == {param: name for name, param in net.named_parameters()}
    assert opt.defaults["lr"] == 0.1


@pytest.mark.mpi(min_size=2)
def test_models_that_differ_are_an_error_and_no_hang():
    torch.manual_seed(5)
    net = nn.Linear(4, 2 + (hvd.rank() == 0)).double()
    opt = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    with raises_everywhere(hvd.HorovodInternalError) as caught:
        net(inputs_of(0)).sum().backward()
        opt.step()
    assert "mismatched parameter: rank 0 gave weight float64[3, 4], rank" in caught.text
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


OURS = {"a": (2, 3), "b": (3, 2)}
# What rank 0 has instead, of the same size; the first difference.
OTHERS = {
    "names": ({"a": (2, 3), "c": (3, 2)}, "rank 0 gave c float64[3, 2], {others} gave b float64[3, 2]"),
    "shapes": ({"a": (3, 2), "b": (2, 3)}, "rank 0 gave a float64[3, 2], {others} gave a float64[2, 3]"),
    "order": ({"b": (3, 2), "a": (2, 3)}, "rank 0 gave b float64[3, 2], {others} gave a float64[2, 3]"),
    "number": ({"a": (2, 6)}, "rank 0 gave a float64[2, 6], {others} gave a float64[2, 3]"),
    "the last one": ({"a": (2, 3)}, "rank 0 gave nothing, {others} gave b float64[3, 2]"),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("case", OTHERS)
def test_models_that_differ_are_an_error_that_names_the_first_parameter(case, early, monkeypatch):
    monkeypatch.setattr(GradientExchange, "_sends_early", lambda exchange: early)
    shapes, said = OTHERS[case]
    own = shapes if hvd.rank() == 0 else OURS
    named = [(name, nn.Parameter(torch.ones(shape, dtype=torch.float64))) for name, shape in own.items()]
    opt = hvd.DistributedOptimizer(torch.optim.SGD([param for _, param in named], lr=0.1), named)
    with raises_everywhere(hvd.HorovodInternalError) as caught:
        sum(param.sum() for _, param in named).backward()
        opt.step()
    assert said.format(others=ranks_text(range(1, hvd.size()))) in caught.text
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@pytest.mark.mpi(min_size=2)
def test_a_parameter_frozen_on_one_rank_is_an_error_and_no_hang():
    net = mlp().double()
    if hvd.rank() == 0:
        net[0].weight.requires_grad_(False)
    opt = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    with raises_everywhere(hvd.HorovodInternalError) as caught:
        square(net, inputs_of(0), 0, 0).backward()
        opt.step()
    assert "mismatched parameter: rank 0 gave 0.bias float64[5], rank" in caught.text
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


class Inherited(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Adasum])
def test_a_class_that_calls_its_parents_step_reduces_once(op):
    """torch runs hooks in both: gradients were added up twice, and so were steps."""

    def trained(kind: type[torch.optim.Optimizer]) -> torch.Tensor:
        param = nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(kind([param], lr=0.5), [("x", param)], op=op)
        for step in range(2):
            optimizer.zero_grad()
            (param * torch.tensor([hvd.rank() + 1.0, 1.0 - step])).sum().backward()
            optimizer.step()
        return param.detach()

    expected, found = trained(torch.optim.SGD), trained(Inherited)
    everyone(torch.equal(found, expected), f"{found}, {expected}")


def test_a_class_that_takes_care_of_a_scalers_steps_goes_on_saying_so():
    kind = type("Scaled", (torch.optim.SGD,), {"_step_supports_amp_scaling": True})
    opts = [hvd.DistributedOptimizer(cls(mlp().parameters(), 0.1)) for cls in (kind, torch.optim.SGD)]
    assert [opt._step_supports_amp_scaling for opt in opts] == [True, False]
