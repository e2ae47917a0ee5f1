"""Every optimizer: N ranks equal one process on the joined batch, after each of 20 steps."""

from __future__ import annotations

import itertools

import pytest
import torch
from harness import (
    ADAGRAD_DRIFT,
    ADAM_DRIFT,
    LBFGS_DRIFT,
    RMSPROP_DRIFT,
    SGD_DRIFT,
    Run,
    check_equal_runs,
    mlp,
    plain_step,
)
from torch import nn
from verdicts import everyone

import mpisgd


class SignedMomentum(torch.optim.Optimizer):
    """As a user writes one: arguments of its own, positional ones too, and state in plain attributes."""

    def __init__(self, params, step_size, inertia, *, squash):
        if squash <= 0:
            raise ValueError("squash")
        super().__init__(params, {"step_size": step_size, "inertia": inertia})
        self.squash = squash
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.num_steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                mean = state.setdefault("mean", torch.zeros_like(param))
                mean.mul_(group["inertia"]).add_(torch.tanh(param.grad / self.squash))
                param.sub_(group["step_size"] * mean)
        return loss


class SharpnessAware(torch.optim.SGD):
    """Two gradients per step: climbs by the first, takes the second, the closure's, from there."""

    @torch.no_grad()
    def step(self, closure):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        climbs = [0.05 * param.grad for param in params]
        torch._foreach_add_(params, climbs)
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        torch._foreach_sub_(params, climbs)
        super().step()
        return loss


OPTIMIZERS = {
    "sgd": (SGD_DRIFT, lambda m: torch.optim.SGD(m.parameters(), lr=0.1)),
    "sgd momentum": (
        SGD_DRIFT,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    "sgd dampening maximize": (
        SGD_DRIFT,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.5, dampening=0.3, maximize=True),
    ),
    "sgd nesterov": (
        SGD_DRIFT,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "sgd foreach": (SGD_DRIFT, lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=True)),
    "sgd fused": (SGD_DRIFT, lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True)),
    "adam": (ADAM_DRIFT, lambda m: torch.optim.Adam(m.parameters(), lr=0.01)),
    "adam amsgrad": (ADAM_DRIFT, lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True)),
    "adam foreach": (ADAM_DRIFT, lambda m: torch.optim.Adam(m.parameters(), lr=0.01, foreach=True)),
    "adam fused": (ADAM_DRIFT, lambda m: torch.optim.Adam(m.parameters(), lr=0.01, fused=True)),
    "adam tensor lr": (ADAM_DRIFT, lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01))),
    "adamw": (ADAM_DRIFT, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1)),
    "adamw fused": (ADAM_DRIFT, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True)),
    "adagrad": (ADAGRAD_DRIFT, lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05)),
    "adagrad fused": (ADAGRAD_DRIFT, lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05, fused=True)),
    "rmsprop": (RMSPROP_DRIFT, lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01)),
    "rmsprop centered": (
        RMSPROP_DRIFT,
        lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5, centered=True),
    ),
    "a user's": (SGD_DRIFT, lambda m: SignedMomentum(m.parameters(), 0.05, 0.7, squash=0.5)),
    "named": (SGD_DRIFT, lambda m: torch.optim.SGD(m.named_parameters(), lr=0.1, momentum=0.9)),
    **(
        {
            "muon and adamw": (
                ADAM_DRIFT,
                lambda m: mpisgd.MuonWithAdamW(m.named_parameters(), lr=0.02, adamw=["4"]),
            )
        }
        if hasattr(torch.optim, "Muon")
        else {}
    ),
    "several groups": (
        ADAM_DRIFT,
        lambda m: torch.optim.Adam(
            [{"params": m[0].parameters(), "lr": 0.02}, {"params": m[2:].parameters()}], lr=0.003
        ),
    ),
}


# What they keep: nothing, one tensor, some, numbers beside them, whole parameters, several groups. The others
# take no other way where gradients travel alone.
OF_EACH_KIND = (
    *("sgd", "sgd momentum", "adam amsgrad", "adam tensor lr", "adamw fused", "adagrad", "a user's"),
    *("muon and adamw", "several groups"),
)
CASES = [
    pytest.param(way, name, marks=() if way == "fused" or name in OF_EACH_KIND else pytest.mark.long)
    for way, name in itertools.product(("fused", "alone and overlapped"), OPTIMIZERS)
]


@pytest.mark.parametrize(("way", "name"), CASES, indirect=["way"])
def test_equals_one_process_on_the_joined_batch(way, name):
    tol, optimizer = OPTIMIZERS[name]
    check_equal_runs(optimizer=optimizer, tol=tol)


@pytest.mark.parametrize("name", ["sgd momentum", "adam", "adagrad", "a user's"])
def test_a_closure_makes_no_difference(name):
    tol, optimizer = OPTIMIZERS[name]
    check_equal_runs(_closure_step, optimizer=optimizer, tol=tol)


def _closure_step(run: Run, step: int, kind: type = torch.Tensor) -> None:
    def closure():
        run.opt.zero_grad()
        loss = run.backward(step).detach()
        return loss if kind is torch.Tensor else kind(loss)

    loss = run.opt.step(closure) if step % 2 else run.opt.step(closure=closure)
    run.memory.setdefault("losses", []).append(float(loss))


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("kind", [torch.Tensor, pytest.param(float, marks=pytest.mark.long)])
def test_lbfgs_equals_one_process(search, kind):
    def optimizer(model):  # without a search, longer steps magnify the last bit to 1e-4 within 20 of them
        lr = 0.3 if search else 0.1
        return torch.optim.LBFGS(model.parameters(), lr, max_iter=4, history_size=5, line_search_fn=search)

    def body(run: Run, step: int) -> None:
        _closure_step(run, step // 7, kind)

    plain, ours = check_equal_runs(body, optimizer=optimizer, tol=LBFGS_DRIFT)
    pairs = zip(plain.memory["losses"], ours.memory["losses"], strict=True)
    everyone(all(abs(a - b) < 1e-9 for a, b in pairs), "the losses differ")


def test_an_optimizer_that_takes_two_gradients_per_step():
    def body(run: Run, step: int) -> None:
        run.opt.zero_grad()
        run.backward(step)
        run.opt.step(lambda: run.backward(step).detach())

    check_equal_runs(body, optimizer=lambda m: SharpnessAware(m.parameters(), lr=0.1, momentum=0.9))


@pytest.mark.parametrize("name", ["sgd momentum", "adam", "rmsprop"])
def test_the_comparison_fails_without_communication(name):
    """Honesty: the harness sees it when nothing is sent."""
    if mpisgd.size() == 1:
        pytest.skip("one rank has nothing to send")
    tol, optimizer = OPTIMIZERS[name]

    def alone(run: Run, step: int) -> None:
        with run.no_sync(), run.opt.skip_synchronize() if run.distributed else run.no_sync():
            plain_step(run, step)

    with pytest.raises(pytest.fail.Exception, match=r"different bits|off by"):
        check_equal_runs(alone, optimizer=optimizer, tol=tol, steps=2)


@pytest.mark.parametrize("shares", [False, True], ids=["own copies", "shared parameters"])
def test_parameter_groups_added_later_are_trained_too(shares):
    def optimizer(model):
        return torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)

    def body(run: Run, step: int) -> None:
        if step == 5:
            run.opt.add_param_group({"params": list(run.model[2].parameters()), "lr": 0.05})
        if step == 9:
            run.opt.add_param_group({"params": run.model[4].parameters(), "weight_decay": 0.1})
        run.model.zero_grad()
        run.backward(step)
        run.opt.step()

    check_equal_runs(body, optimizer=optimizer, share_parameters=shares)


def test_it_is_an_instance_of_everything_it_should_be():
    model = mlp()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = mpisgd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    assert opt is plain
    assert isinstance(opt, torch.optim.SGD)
    assert isinstance(opt, torch.optim.Optimizer)
    assert isinstance(opt, mpisgd.DistributedOptimizer)
    assert type(opt).__name__ == "DistributedSGD"


class Bag(nn.Module):
    """Embeddings with sparse gradients and nothing else."""

    def __init__(self, sparse=True):
        super().__init__()
        self.table = nn.Embedding(10, 3, sparse=sparse)
        self.other = nn.EmbeddingBag(7, 3, sparse=sparse, mode="sum")

    def forward(self, inputs):
        at = (inputs * 1e6).long()
        return (self.table(at % 10).mean(1) * torch.tanh(self.other(at % 7)))[:, :2]


@pytest.mark.parametrize(
    ("tol", "optimizer"),
    [
        (ADAM_DRIFT, lambda m: torch.optim.SparseAdam(m.parameters(), lr=0.02)),
        (SGD_DRIFT, lambda m: torch.optim.SGD(m.parameters(), lr=0.1)),
        (ADAGRAD_DRIFT, lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1)),
    ],
    ids=["sparse adam", "sgd", "adagrad"],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own optimizers make such tensors
def test_sparse_gradients_equal_one_process(tol, optimizer):
    def body(run: Run, step: int) -> None:
        (run.opt if step % 2 else run.model).zero_grad()
        run.backward(step)
        assert all(param.grad.is_sparse for param in run.model.parameters())
        run.opt.step()

    check_equal_runs(body, model=Bag, optimizer=optimizer, tol=tol)
