"""Objects, parameters and optimizer states: how ranks start equal."""

from __future__ import annotations

import pytest
import torch
from closed_form import given
from torch import nn
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd.horovod as hvd


def thing(rank: int) -> dict:
    return {"rank": rank, "list": list(range(rank * 100)), "tensor": given(rank, torch.float32), "none": None}


def alike(a: dict, b: dict) -> bool:
    return {**a, "tensor": None} == {**b, "tensor": None} and torch.equal(a["tensor"], b["tensor"])


@pytest.mark.parametrize("last", [False, True])
def test_the_roots_object_for_everyone(last):
    root = hvd.size() - 1 if last else 0
    mine = thing(hvd.rank())
    got = hvd.broadcast_object(mine, root, name="thing")
    everyone(alike(got, thing(root)), f"{got}")
    if hvd.rank() == root:
        assert got is mine


def test_the_others_need_not_have_one():
    """A checkpoint that only the root could read, in a script that names nothing."""
    got = hvd.broadcast_object({"epoch": 3} if hvd.rank() == 0 else None, root_rank=0)
    everyone(got == {"epoch": 3}, f"{got}")
    everyone(hvd.broadcast_object("text" if hvd.rank() == 0 else 5) == "text")
    assert hvd.broadcast_object(None) is None


def test_everyones_objects_in_order_of_rank():
    """Their types differ too."""
    kinds = [None, "text", 3.5, {"a": 1}]
    assert hvd.allgather_object(kinds[hvd.rank() % 4]) == [kinds[rank % 4] for rank in range(hvd.size())]
    got = hvd.allgather_object(thing(hvd.rank()), name="things")
    everyone(all(alike(each, thing(rank)) for rank, each in enumerate(got)), f"{got}")


class Different(nn.Module):
    """Parameters and buffers of several dtypes, two names for one tensor, and a number among the state."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.linear.weight
        self.norm = nn.BatchNorm1d(3)
        self.brief = nn.Parameter(torch.full((3,), float(rank)).bfloat16())
        self.turned = nn.Parameter(torch.full((2, 3), float(rank)).t())
        self.register_buffer("mask", torch.tensor([rank == 0, True]))
        for param in self.parameters():
            nn.init.constant_(param, rank + 1.5)
        self.norm.num_batches_tracked.fill_(rank)
        self.norm.running_mean.fill_(rank)

    def get_extra_state(self) -> dict:
        return {"number": 1}

    def set_extra_state(self, _: dict) -> None:
        pass


@pytest.mark.parametrize(
    "params",
    [
        lambda m: m.state_dict(),
        lambda m: [(name, value) for name, value in m.state_dict().items()],
        lambda m: iter([*m.named_parameters(), *m.named_buffers()]),
        lambda m: [*m.parameters(), *m.buffers()],
    ],
    ids=["state_dict", "pairs", "generator", "tensors"],
)
def test_parameters_of_the_root_for_everyone(params):
    root = hvd.size() - 1
    model, right = Different(hvd.rank()), Different(root).state_dict()
    tensors = dict(model.named_parameters())
    hvd.broadcast_parameters(params(model), root_rank=root)
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            everyone(torch.equal(value, right[name]), f"{name}: {value}")
    assert all(param is tensors[name] and param.requires_grad for name, param in model.named_parameters())


@pytest.mark.parametrize("params", [3, "weights", torch.ones(2), [("a", 1, 2)]])
def test_what_are_no_parameters(params):
    with raises_everywhere(ValueError) as caught:
        hvd.broadcast_parameters(params, 0)
    assert "invalid params of type" in caught.text


@pytest.mark.mpi(min_size=2)
def test_models_that_differ_are_an_error_that_names_the_parameter():
    model = nn.Linear(2, 3 if hvd.rank() else 4)
    with raises_everywhere(hvd.HorovodInternalError) as caught:
        hvd.broadcast_parameters(model.state_dict(), 0)
    assert "bias'" in caught.text
    assert "rank 0 gave [4]" in caught.text


OPTIMIZERS = {
    "sgd": lambda p, n: torch.optim.SGD(p, lr=0.1 * n, momentum=0.5, nesterov=True),
    "plain sgd": lambda p, n: torch.optim.SGD(p, lr=0.1 * n),
    "adamw": lambda p, n: torch.optim.AdamW(p, lr=0.1 * n, betas=(0.5, 0.9 / n), amsgrad=True),
    "adagrad": lambda p, n: torch.optim.Adagrad(p, lr=0.1 * n),
    "lbfgs": lambda p, n: torch.optim.LBFGS(p, lr=0.1 * n),
}


def trained(make, rank: int, steps: int) -> torch.optim.Optimizer:
    params = [
        nn.Parameter(given(rank, torch.float64, (3,))),
        nn.Parameter(given(rank, torch.float64, (2, 2))),
    ]
    opt = make(params, rank + 1)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = sum(param.square().sum() for param in params)
        loss.backward()
        return loss

    for _ in range(steps):
        opt.step(closure)
    return opt


def content(opt: torch.optim.Optimizer) -> str:
    torch.set_printoptions(precision=17)
    try:
        return str(opt.state_dict())
    finally:
        torch.set_printoptions(profile="default")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_of_the_root_for_everyone(name):
    """Only the root has taken steps: the others have no state to put it in, and other options."""
    root = hvd.size() - 1
    opt = trained(OPTIMIZERS[name], hvd.rank(), 2 if hvd.rank() == root else 0)
    hvd.broadcast_optimizer_state(opt, root_rank=root)
    everyone(content(opt) == content(trained(OPTIMIZERS[name], root, 2)), content(opt))
    same_on_all_ranks(opt.param_groups[0]["lr"])


def test_optimizer_state_of_a_distributed_optimizer_and_of_a_root_without_any():
    opt = trained(OPTIMIZERS["adamw"], hvd.rank(), 0 if hvd.rank() == 0 else 3)
    opt = hvd.DistributedOptimizer(opt)
    hvd.broadcast_optimizer_state(opt, 0)
    assert not opt.state
    same_on_all_ranks(content(opt))


class Partly(nn.Module):
    """A parameter that is trained, one that is not, and one whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 2, sparse=True)
        self.line = nn.Linear(2, 2, bias=False)
        self.kept = nn.Parameter(torch.ones(3), requires_grad=False)


def test_a_fresh_optimizer_has_zero_gradients_afterwards():
    """As Horovod leaves it; programs broadcast these gradients or look at them."""
    model = Partly()
    opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    before = [param.detach().clone() for param in model.parameters()]
    hvd.broadcast_optimizer_state(opt, 0, model)
    assert torch.equal(hvd.broadcast(model.line.weight.grad, 0), torch.zeros(2, 2))
    assert model.kept.grad is None
    assert model.words.weight.grad.is_sparse
    assert torch.equal(model.words.weight.grad.to_dense(), torch.zeros(4, 2))
    assert all(map(torch.equal, before, model.parameters()))
    same_on_all_ranks(content(opt))


def test_gradients_that_sparse_adam_can_take_are_left_behind():
    words = nn.Embedding(4, 2, sparse=True)
    opt = torch.optim.SparseAdam(list(words.parameters()), lr=0.1)
    hvd.broadcast_optimizer_state(opt, 0)
    assert words.weight.grad.is_sparse
    words(torch.tensor([1, 2])).sum().backward()
    opt.step()


def test_gradients_of_an_optimizer_that_has_state_are_left_alone():
    opt = trained(OPTIMIZERS["adamw"], hvd.rank(), 1)
    opt.zero_grad()
    hvd.broadcast_optimizer_state(opt, 0)
    assert all(param.grad is None for param in opt.param_groups[0]["params"])
