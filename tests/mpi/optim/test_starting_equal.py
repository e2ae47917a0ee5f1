"""`broadcast_parameters` and `broadcast_optimizer_state`: one rank's values, bit for bit, on every rank."""

from __future__ import annotations

import collections

import pytest
import torch
from harness import (
    FEATURES,
    SGD_DRIFT,
    STEPS,
    Run,
    check_equal_runs,
    compare,
    digest,
    judge,
    mlp,
    mse,
    pair,
    plain_step,
)
from test_optimizers import OPTIMIZERS, Bag
from torch import nn
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd.config import launcher_size
from mpisgd.optim import broadcast as broadcast_module

every_src = pytest.mark.parametrize("src", range(launcher_size() or 1))


class Buffered(nn.Module):
    """Parameters and buffers of every kind."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.inward = nn.Linear(FEATURES, 3)
        self.turned = nn.Parameter(torch.randn(3, 4).T)
        self.narrow = nn.Parameter(torch.randn(5).bfloat16(), requires_grad=False)
        self.register_buffer("mask", torch.rand(3) < 0.5)
        self.register_buffer("scratch", torch.randn(2, 2), persistent=False)
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("absent", None)
        self.table = nn.Embedding(5, 2, sparse=True)

    def forward(self, inputs):
        return self.norm(self.inward(inputs))


def model_of_rank(make=Buffered):
    """A model that no other rank has; its BatchNorm has seen other data."""
    torch.manual_seed(1000 + mpisgd.rank())
    model = make()
    if make is Buffered:
        for _ in range(mpisgd.rank() + 1):
            model(torch.randn(4, FEATURES))
    return model


def all_tensors(model):
    return [*model.parameters(), *model.buffers()]


def digest_on(src, value):
    return mpisgd.broadcast_object(value, src)


@every_src
@pytest.mark.parametrize("pack_bytes", [1, 50, 2**22], ids=["each alone", "a few together", "all together"])
def test_a_module_comes_with_all_its_buffers(src, pack_bytes, monkeypatch):
    monkeypatch.setattr(broadcast_module, "PACK_BYTES", pack_bytes)
    model = model_of_rank()
    addresses = [tensor.data_ptr() for tensor in all_tensors(model)]
    expected = digest_on(src, digest(all_tensors(model)))
    mpisgd.broadcast_parameters(model, src)
    everyone(digest(all_tensors(model)) == expected)
    everyone(addresses == [tensor.data_ptr() for tensor in all_tensors(model)], "not in place")
    everyone(int(model.norm.num_batches_tracked) == src + 1)
    everyone(not model.narrow.requires_grad and model.turned.requires_grad)


@every_src
def test_a_state_dict_may_hold_more_than_tensors(src):
    model = model_of_rank()
    state = model.state_dict()
    state.update(epoch=mpisgd.rank() + 1, history=[float(mpisgd.rank())], best={"loss": mpisgd.rank() / 7})
    mpisgd.broadcast_parameters(state, src)
    everyone((state["epoch"], state["history"], state["best"]) == (src + 1, [float(src)], {"loss": src / 7}))
    same_on_all_ranks(digest(model.state_dict().values()))
    everyone(isinstance(state, collections.OrderedDict))


@every_src
@pytest.mark.parametrize("kind", [list, iter])
def test_pairs_of_names_and_tensors(src, kind):
    model = model_of_rank()
    untouched = model.norm.running_mean.clone()
    expected = digest_on(src, digest(model.parameters()))
    mpisgd.broadcast_parameters(kind(list(model.named_parameters())), src)
    everyone(digest(model.parameters()) == expected)
    everyone(torch.equal(untouched, model.norm.running_mean))


def test_a_model_without_anything():
    mpisgd.broadcast_parameters(nn.Tanh())
    mpisgd.broadcast_parameters({})
    mpisgd.broadcast_parameters([])


def test_tied_weights_stay_tied():
    model = model_of_rank(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    model[1].weight = model[0].weight
    mpisgd.broadcast_parameters(model, mpisgd.size() - 1)
    same_on_all_ranks(digest(model.parameters()))
    assert model[1].weight is model[0].weight


def test_the_graph_of_a_forward_pass_notices():
    """As after any in-place operation: a backward that would use other values raises."""
    model = mlp()
    loss = mse(model, torch.ones(2, FEATURES), torch.ones(2, 2))
    mpisgd.broadcast_parameters(model)
    if mpisgd.rank() == 0:
        loss.backward()  # nothing was written here
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda m: m.parameters(),
        lambda m: [("a", 1)],
        lambda m: [("a", m.weight, 3)],
        lambda m: m.weight,
        lambda m: "weights.pt",
        lambda m: None,
        lambda m: 5,
    ],
)
def test_anything_else_is_refused_before_anything_is_sent(wrong):
    with pytest.raises(mpisgd.InvalidArgument, match="expected a module, a state dict or"):
        mpisgd.broadcast_parameters(wrong(nn.Linear(2, 3)))


@pytest.mark.parametrize("src", [-1, 99, None])
def test_a_source_that_does_not_exist(src):
    with pytest.raises(mpisgd.InvalidRank, match=f"src={src}"):
        mpisgd.broadcast_parameters(mlp(), src)
    with pytest.raises(mpisgd.InvalidRank, match=f"src={src}"):
        mpisgd.broadcast_optimizer_state(torch.optim.SGD(mlp().parameters(), lr=0.1), src)


@pytest.mark.mpi(min_size=2)
def test_sources_that_differ_are_refused_by_every_rank():
    with raises_everywhere(mpisgd.CollectiveMismatch):
        mpisgd.broadcast_parameters(mlp(), min(mpisgd.rank(), 1))


# -- optimizer state ----------------------------------------------------------------------------------

STATEFUL = {
    **{
        name: OPTIMIZERS[name]
        for name in ("sgd", "sgd momentum", "adam tensor lr", "adagrad", "rmsprop centered")
    },
    **{name: OPTIMIZERS[name] for name in ("adam fused", "a user's", "named", "several groups")},
    "sparse adam": (1e-10, lambda m: torch.optim.SparseAdam(m.parameters(), lr=0.02)),
    "lbfgs": (1e-6, lambda m: torch.optim.LBFGS(m.parameters(), 0.1, max_iter=3, history_size=4)),
    "adamw amsgrad": (1e-10, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, amsgrad=True)),
}


def step_of(run: Run, step: int) -> None:
    def closure():
        run.opt.zero_grad()
        return run.backward(step).detach()

    if isinstance(run.opt, torch.optim.LBFGS):
        run.opt.step(closure)
    else:
        plain_step(run, step)


def told(tree):
    """Optimizer state as something that can be compared, tensors by their bits."""
    if isinstance(tree, torch.Tensor):
        return digest([tree])
    if isinstance(tree, dict):
        return {key: told(value) for key, value in tree.items()}
    return [told(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_state_that_only_one_rank_has_becomes_everyones(name):
    src = mpisgd.size() - 1
    _, optimizer = STATEFUL[name]
    torch.manual_seed(mpisgd.rank())
    model = (Bag() if name == "sparse adam" else mlp()).double()
    opt = optimizer(model)
    if mpisgd.rank() == src:  # the others have none, or (rank 0 of several) an older one
        for step in range(3):
            step_of(Run(model, opt, mse, False, False), step)
        opt.param_groups[0]["weight_decay"] = 0.0625
    if len(name) % 2:  # some plain, some distributed
        opt = mpisgd.DistributedOptimizer(opt)
    before = digest_on(src, told(opt.state_dict()))
    mpisgd.broadcast_parameters(model, src)
    mpisgd.broadcast_optimizer_state(opt, src)
    everyone(told(opt.state_dict()) == before, "not what src has")
    same_on_all_ranks(digest(model.parameters()))


@pytest.mark.parametrize("name", ["adam fused", "a user's", "several groups"])
def test_training_goes_on_from_what_was_broadcast(name):
    """Interrupted after 7 steps, read by the last rank only, and equal to the run that was not."""
    tol, optimizer = OPTIMIZERS[name]

    def body(run: Run, step: int) -> None:
        if step == 7 and run.distributed:
            saved = run.model.state_dict(), run.opt.state_dict()
            torch.manual_seed(run.rank)
            run.model = mlp().double()
            fresh = optimizer(run.model)
            if run.rank == run.size - 1:
                run.model.load_state_dict(saved[0])
                fresh.load_state_dict(saved[1])
            run.opt = mpisgd.DistributedOptimizer(fresh, named_parameters=run.model.named_parameters())
            mpisgd.broadcast_parameters(run.model, run.size - 1)
            mpisgd.broadcast_optimizer_state(run.opt, run.size - 1)
        plain_step(run, step)

    check_equal_runs(body, optimizer=optimizer, tol=tol, steps=STEPS)


@pytest.mark.mpi(min_size=2)
def test_optimizers_of_other_parameters_are_refused_by_every_rank():
    model = mlp()
    params = list(model.parameters())[mpisgd.rank() == 0 :]
    with raises_everywhere(mpisgd.CollectiveMismatch):
        mpisgd.broadcast_optimizer_state(torch.optim.SGD(params, lr=0.1))


@pytest.mark.mpi(min_size=2)
def test_state_that_is_wider_than_its_parameters_is_the_same_on_every_rank():
    """load_state_dict makes state as narrow as the parameter: then it must do so on the source too."""
    weight = nn.Parameter(torch.ones(3).bfloat16())
    opt = torch.optim.SGD([weight], lr=0.1)
    if mpisgd.rank() == 0:
        opt.state[weight]["master"] = torch.full((3,), 1 / 3)
    mpisgd.broadcast_optimizer_state(opt)
    same_on_all_ranks(told(opt.state_dict()))


# -- average_gradients --------------------------------------------------------------------------------


def averaged_step(run: Run, step: int, set_to_none: bool = True) -> None:
    run.opt.zero_grad(set_to_none)
    run.backward(step)
    if run.memory["average"]:
        mpisgd.average_gradients(run.model)
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
    run.opt.step()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("used", ["all", "some"])
def test_a_loop_of_ones_own_equals_one_process(set_to_none, used):
    def loss(model, inputs, targets, rank, step):
        if used == "some":  # layer 2 by the ranks in turn, layer 4 never
            hidden = torch.tanh(model[0](inputs))
            return (torch.tanh(model[2](hidden)) if (rank + step) % 2 else hidden)[:, :2].square().mean()
        return mse(model, inputs, targets)

    plain, ours = pair(loss=loss, by_rank=True)
    ours.opt = torch.optim.SGD(ours.model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    plain.memory["average"], ours.memory["average"] = False, True
    seen = []
    for step in range(STEPS):
        for run in (plain, ours):
            averaged_step(run, step, set_to_none)
        seen.append(compare(plain, ours))
        exist = [[p.grad is not None for p in run.model.parameters()] for run in (plain, ours)]
        everyone(exist[0] == exist[1], f"step {step}: {exist}")
    judge(seen, SGD_DRIFT)


def test_averaging_takes_sparse_gradients_too():
    torch.manual_seed(0)
    model = Bag().double()
    inputs = torch.full((2, FEATURES), mpisgd.rank() + 0.5, dtype=torch.float64)
    for _ in range(2):
        model.zero_grad()
        model(inputs).sum().backward()
        mine = [param.grad.to_dense() for param in model.parameters()]
        mpisgd.average_gradients(model)
        for grad, param in zip(mine, model.parameters(), strict=True):
            mpisgd.all_reduce(grad, mpisgd.ReduceOp.AVG)
            everyone(torch.allclose(param.grad.to_dense(), grad, rtol=0, atol=1e-12))


def test_averaging_in_a_group():
    model = mlp()
    alone = mpisgd.new_group([mpisgd.size() - 1])
    for param in model.parameters():
        param.grad = torch.full_like(param, float(mpisgd.rank()))
    if alone.rank < 0:
        with pytest.raises(mpisgd.NotInGroup):
            mpisgd.average_gradients(model, alone)
    else:
        mpisgd.average_gradients(model, alone)
    everyone(all(bool((p.grad == mpisgd.rank()).all()) for p in model.parameters()))
    mpisgd.average_gradients(model)
    mean = (mpisgd.size() - 1) / 2
    everyone(all(torch.allclose(p.grad, torch.full_like(p, mean)) for p in model.parameters()))
