"""One copy of the parameters per host, updated in parts: the same training, and what is refused."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from harness import (
    ADAM_DRIFT,
    FEATURES,
    Run,
    adam,
    check_equal_runs,
    check_scaler,
    digest,
    mlp,
    pair,
    plain_step,
    shared_pair,
)
from test_optimizers import OPTIMIZERS, Bag, SharpnessAware
from torch import nn
from verdicts import everyone, raises_everywhere, referee, same_on_all_ranks

import mpisgd
from mpisgd.sharding.reduction.sharded_gradient import ShardedGradient
from mpisgd.threads import scheduling
from mpisgd.transport import staging_layout

pytestmark = pytest.mark.usefixtures("pieces")


def params_of(opt):
    return [param for group in opt.param_groups for param in group["params"]]


# -- the same training --------------------------------------------------------------------------------


# How gradients travel (`way`), and how parameters are divided (`pieces`).
TRAVELS = (("fused", "cut"), ("fused", "fused"), ("alone and overlapped", "fused"))

# All are divided through their tensors. Of what an optimizer keeps, and how it is asked for steps, these have
# all kinds: nothing, one tensor, some, numbers beside them, several groups, whole parameters, names.
OF_EACH_KIND = (
    "sgd",
    "sgd momentum",
    "adam fused",
    "several groups",
    "a user's",
    "muon and adamw",
    "adagrad",
)
OPTIMIZER_CASES = [
    pytest.param(name, *travels, marks=() if how == 0 or name in OF_EACH_KIND else pytest.mark.long)
    for name, (how, travels) in itertools.product(OPTIMIZERS, enumerate(TRAVELS))
]


@pytest.mark.parametrize(("name", "way", "pieces"), OPTIMIZER_CASES, indirect=["way", "pieces"])
def test_every_optimizer_equals_one_process(name, way, pieces):
    tol, optimizer = OPTIMIZERS[name]
    check_equal_runs(optimizer=optimizer, tol=tol, share_parameters=True)


@pytest.mark.parametrize("name", ["sgd momentum", "adam", "a user's"])
def test_a_closure_makes_no_difference(name):
    def body(run: Run, step: int) -> None:
        def closure():
            run.opt.zero_grad()
            return run.backward(step).detach()

        run.opt.step(closure)

    tol, optimizer = OPTIMIZERS[name]
    check_equal_runs(body, optimizer=optimizer, tol=tol, share_parameters=True)


@pytest.mark.parametrize(
    "options",
    [
        {"op": mpisgd.ReduceOp.SUM},
        {"gradient_predivide_factor": 3.0},
        {"bucket_cap_bytes": 1},
        {"error_if_nonfinite": True},
        {"check_in_sync_every": 3},
    ],
    ids=str,
)
def test_options_mean_what_they_mean(options):
    body = plain_step
    if "op" in options:

        def body(run: Run, step: int) -> None:
            run.opt.zero_grad()
            (run.loss(step) * (1 if run.distributed else run.size)).backward()
            run.opt.step()

    check_equal_runs(body, share_parameters=True, **options)


def test_compressed_gradients_give_what_they_give_without_sharing():
    runs = [pair(compression=mpisgd.Compression.fp16, share_parameters=yes)[1] for yes in (False, True)]
    for step in range(5):
        for run in runs:
            plain_step(run, step)
    everyone(digest(runs[0].model.parameters()) == digest(runs[1].model.parameters()), "other bits")


LARGE = 400  # a layer of as many inputs and outputs is cut through, and travels from where it lies
LARGE_PIECES = 2**15  # bytes; as small as those of the other models they would be thousands of barriers


def large() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, LARGE), nn.Tanh(), nn.Linear(LARGE, LARGE), nn.Linear(LARGE, 2))


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "several groups"),
        (torch.float32, "adam fused"),
        (torch.bfloat16, "adam"),
        (torch.float16, "sgd momentum"),  # the others divide by less than the smallest number of float16
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                (torch.float32, "rmsprop centered"),
                *itertools.product([torch.bfloat16, torch.float16], ["adam fused"]),
                *itertools.product([torch.float32, torch.bfloat16], ["sgd momentum"]),
                (torch.float32, "adam"),
                (torch.bfloat16, "several groups"),
            ]
        ),
    ],
    ids=str,
)
def test_the_bits_are_those_without_sharing(dtype, name, monkeypatch):
    if name != "several groups":
        pieces = max(LARGE_PIECES, staging_layout.BUFFER_BYTES)
        monkeypatch.setattr(staging_layout, "BUFFER_BYTES", pieces)

    def model():
        return (mlp() if name == "several groups" else large()).to(dtype)

    def loss(model, inputs, targets, rank, step):
        return nn.functional.mse_loss(model(inputs.to(dtype)).float(), targets.float())

    _, optimizer = OPTIMIZERS[name]
    how = {"model": model, "loss": loss, "double": False, "optimizer": optimizer}
    runs = [pair(share_parameters=yes, **how)[1] for yes in (False, True)]
    for step in range(3):
        for run in runs:
            plain_step(run, step)
    everyone(digest(runs[0].model.parameters()) == digest(runs[1].model.parameters()), "other bits")
    states = [run.opt.state_dict()["state"] for run in runs]
    bits = [digest(e[key] for e in state.values() for key in sorted(e)) for state in states]
    everyone(bits[0] == bits[1], "another state")


def test_an_optimizer_of_ones_own_may_be_elementwise():
    """Then ranks own parts of tensors, too."""
    tol, optimizer = OPTIMIZERS["a user's"]
    _, ours = check_equal_runs(optimizer=optimizer, tol=tol, share_parameters=True, elementwise=True)
    mean = [entries["mean"].shape for entries in ours.opt.state_dict()["state"].values()]
    everyone(mean == [param.shape for param in ours.model.parameters()], f"{mean}")


def test_passes_are_accumulated():
    def body(run: Run, step: int) -> None:
        run.opt.zero_grad()
        with run.no_sync():
            run.backward(step, 0)
        run.backward(step, 1)
        run.opt.step()

    check_equal_runs(body, share_parameters=True)


def test_a_partial_last_window_is_reduced_by_the_step():
    def body(run: Run, step: int) -> None:
        run.opt.zero_grad()
        for micro in range(1 if step % 3 == 2 else 2):
            run.backward(step, micro)
        run.opt.step()

    check_equal_runs(body, share_parameters=True, backward_passes_per_step=2)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_may_be_reset_to_none_or_zero(to_none):
    def body(run: Run, step: int) -> None:
        run.opt.zero_grad(set_to_none=to_none)
        run.backward(step)
        run.opt.step()

    check_equal_runs(body, share_parameters=True)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own optimizers make such tensors
def test_sparse_gradients():
    def optimizer(model):
        return torch.optim.SparseAdam(model.parameters(), lr=0.02)

    def body(run: Run, step: int) -> None:
        run.model.zero_grad()
        run.backward(step)
        run.opt.step()

    check_equal_runs(body, model=Bag, optimizer=optimizer, tol=ADAM_DRIFT, share_parameters=True)


class Branches(nn.Module):
    """Of three layers each step uses two; the fourth is frozen."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(4))
        self.layers[3].requires_grad_(False)


def branched(model, inputs, targets, rank, step):
    outputs = model.layers[3](model.layers[step % 3](inputs)) + torch.tanh(
        model.layers[(step + 1) % 3](inputs)
    )
    return nn.functional.mse_loss(outputs[:, :2], targets)


def test_unused_and_frozen_parameters_stay_as_they_are():
    check_equal_runs(model=Branches, loss=branched, share_parameters=True, by_rank=True)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_by_the_norm_of_all_gradients(norm_type):
    def body(run: Run, step: int) -> None:
        run.opt.zero_grad()
        run.backward(step)
        norm = run.clip(0.1, norm_type)
        run.memory.setdefault("norms", []).append(float(norm))
        run.opt.step()

    plain, ours = check_equal_runs(body, optimizer=adam, tol=ADAM_DRIFT, share_parameters=True)
    pairs = zip(plain.memory["norms"], ours.memory["norms"], strict=True)
    everyone(all(abs(a - b) <= 1e-9 for a, b in pairs), "the norms differ")
    same_on_all_ranks(ours.memory["norms"])


def test_a_norm_that_is_not_finite_is_an_error_on_every_rank():
    _, ours = shared_pair()
    (ours.loss(0) * (float("inf") if mpisgd.rank() == mpisgd.size() - 1 else 1.0)).backward()
    with raises_everywhere(RuntimeError):
        ours.opt.clip_grad_norm_(1.0, error_if_nonfinite=True)


# -- one copy, and parts of the work ------------------------------------------------------------------


def test_a_host_has_one_copy(here):
    _, ours = shared_pair()
    weight = ours.model[0].weight
    mpisgd.barrier()
    if mpisgd.rank() == here[-1]:
        with torch.no_grad():
            weight.fill_(3.0)
    mpisgd.barrier()
    everyone(bool((weight == 3.0).all()), "another copy")


@pytest.mark.parametrize("kind", ["adam", "a user's"])
def test_each_rank_updates_a_part(here, kind):
    """Of torch's Adam each has an equal part of the elements, whole tensors of one that is not known."""
    _, optimizer = OPTIMIZERS[kind]
    _, ours = shared_pair(optimizer=optimizer)
    seen = []

    def count(opt, *_):
        seen.append(sum(p.numel() for p in params_of(opt)))

    torch.optim.Optimizer.register_step_pre_hook(
        ours.opt, count
    )  # after mpisgd's own, other than a program's
    ours.opt.zero_grad()
    ours.backward(0)
    ours.opt.clip_grad_norm_(1e9)  # then all are updated at once
    ours.opt.step()
    everyones = referee().allgather(seen[0])
    mine = [everyones[rank] for rank in here]
    total = sum(param.numel() for param in ours.model.parameters())
    everyone(total <= sum(mine) < 2 * total, f"{mine} of {total}")  # with the padding between them
    if kind == "adam":
        everyone(max(mine) - min(mine) <= 16, f"{mine}")


def test_gradients_are_sharded_and_not_none(here):
    _, ours = shared_pair()
    ours.backward(0)
    everyone(all(isinstance(p.grad, ShardedGradient) for p in ours.model.parameters()), "other gradients")


def test_parameters_begin_as_those_of_the_first_rank_of_the_host(here):
    torch.manual_seed(mpisgd.rank())
    model = mlp()
    before = referee().allgather(digest(model.parameters()))
    mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), share_parameters=True)
    everyone(digest(model.parameters()) == before[here[0]], "other values")


def test_layouts_are_kept():
    model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    strides = [param.stride() for param in model.parameters()]
    mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), share_parameters=True)
    everyone([param.stride() for param in model.parameters()] == strides, "other strides")


def test_a_model_is_saved_without_its_neighbours(tmp_path):
    """Each parameter has a storage of its own: torch saves whole storages."""
    _, ours = shared_pair()
    for param in ours.model.parameters():
        everyone(param.untyped_storage().nbytes() == param.nbytes, "a larger storage")
    twin = copy.deepcopy(ours.model)
    everyone(digest(twin.parameters()) == digest(ours.model.parameters()), "another copy")
    path = tmp_path / f"model-{mpisgd.rank()}"
    torch.save(ours.model.state_dict(), path)
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    twin.load_state_dict(torch.load(path))
    everyone(digest(twin.parameters()) == digest(ours.model.parameters()), "another file")


class Slow:
    """One of the ranks takes its time before it updates."""

    slow_rank = 0

    def step(self, closure=None):
        if mpisgd.rank() == Slow.slow_rank:
            scheduling.sleep(0.05)
        return super().step(closure)


class SlowDescent(Slow, torch.optim.SGD):
    """Plain otherwise."""


class SlowClimb(Slow, SharpnessAware):
    """Its closure needs the parameters of all ranks where they have climbed to."""


def test_nobody_reads_what_is_not_updated_yet(monkeypatch):
    """A fast rank goes on to the next forward when the slowest has updated its own."""
    for slow in range(mpisgd.size()):
        monkeypatch.setattr(Slow, "slow_rank", slow)
        check_equal_runs(
            optimizer=lambda m: SlowDescent(m.parameters(), lr=0.1), steps=3, share_parameters=True
        )


def test_a_closure_sees_the_parameters_of_all_ranks_where_they_are(monkeypatch):
    def body(run: Run, step: int) -> None:
        run.opt.zero_grad()
        run.backward(step)
        run.opt.step(lambda: run.backward(step).detach())

    for slow in range(mpisgd.size()):
        monkeypatch.setattr(Slow, "slow_rank", slow)
        check_equal_runs(
            body, optimizer=lambda m: SlowClimb(m.parameters(), lr=0.1), steps=3, share_parameters=True
        )


def test_nobody_updates_what_is_still_read():
    """A slow rank looks at parameters between backward and step; they are those of the backward."""
    _, ours = shared_pair()
    for step in range(4):
        ours.opt.zero_grad()
        ours.backward(step)
        before = digest(ours.model.parameters())
        if step % mpisgd.size() == mpisgd.rank():
            scheduling.sleep(0.05)
        everyone_reads = digest(ours.model.parameters())
        ours.opt.step()
        everyone(before == everyone_reads, f"step {step}: changed while it was read")


# -- what a program must not do ----------------------------------------------------------------------------


def test_reduced_gradients_may_not_be_added_to(here):
    _, ours = shared_pair()
    ours.backward(0)
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        ours.backward(1)
    everyone("zero_grad()" in caught.text, caught.text)
    ours.opt.zero_grad()
    plain_step(ours, 2)


def test_the_norm_of_some_gradients_is_an_error_and_no_number(here):
    _, ours = shared_pair()
    ours.backward(0)
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        nn.utils.clip_grad_norm_(ours.model.parameters(), 1.0)
    everyone("optimizer.clip_grad_norm_()" in caught.text and "is divided among" in caught.text, caught.text)


# Each two of an optimizer, clipping and how gradients travel meet once; torch looks for infinities by itself
# in what is fused.
SCALED = {
    *(("sgd momentum", False, 0), ("sgd momentum", True, 1), ("sgd momentum", True, 2)),
    *(("adam fused", True, 0), ("adam fused", False, 1), ("adam fused", False, 2)),
    *(("a user's", True, 0), ("a user's", False, 1), ("a user's", True, 2)),
}
SCALER_CASES = [
    pytest.param(name, clips, *TRAVELS[how], marks=() if (name, clips, how) in SCALED else pytest.mark.long)
    for name, clips, how in itertools.product(
        ["sgd momentum", "adam", "adam fused", "a user's"], [False, True], range(len(TRAVELS))
    )
]


@pytest.mark.parametrize(("name", "clips", "way", "pieces"), SCALER_CASES, indirect=["way", "pieces"])
def test_a_scaler_skips_the_same_steps_as_one_process(name, clips, way, pieces):
    """Infinities on one rank, in a gradient that another one owns, are seen by all."""
    tol, optimizer = OPTIMIZERS[name]
    check_scaler(clips, optimizer=optimizer, tol=tol, share_parameters=True)


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.half(),
        lambda model: setattr(model[2].weight, "data", torch.zeros_like(model[2].weight)),
    ],
    ids=["half", "data"],
)
def test_parameters_that_were_moved_are_found(here, move):
    _, ours = shared_pair(named_parameters=None)
    move(ours.model)
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        ours.opt.step()
    everyone("no longer where" in caught.text, caught.text)


def test_an_optimizer_that_needs_all_gradients_is_refused():
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        shared_pair(optimizer=lambda m: torch.optim.LBFGS(m.parameters()))
    everyone("LBFGS" in caught.text, caught.text)


def test_parameters_in_one_storage_are_refused():
    flat = torch.zeros(8)
    views = [nn.Parameter(flat[:4]), nn.Parameter(flat[4:])]
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        mpisgd.DistributedOptimizer(torch.optim.SGD(views, lr=0.1), share_parameters=True)
    everyone("lies in the memory of" in caught.text, caught.text)


def test_all_ranks_must_choose_alike():
    if mpisgd.size() == 1:
        pytest.skip("one rank agrees with itself")
    model = mlp()
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        mpisgd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), share_parameters=mpisgd.rank() == 0
        )
    everyone("share_parameters" in caught.text, caught.text)


def test_a_step_that_raised_leaves_all_parameters_to_the_next(here):
    _, ours = shared_pair()

    def fails():
        raise ValueError("not now")

    with raises_everywhere(ValueError):
        ours.opt.step(fails)
    ours.opt.zero_grad()
    everyone(len(params_of(ours.opt)) == 5, f"{len(params_of(ours.opt))} parameters")
    plain_step(ours, 0)


@pytest.mark.parametrize(
    "wrong", [{"max_norm": "1"}, {"max_norm": 0.0}, {"max_norm": 1.0, "norm_type": None}]
)
@pytest.mark.parametrize("shares", [False, True])
def test_what_makes_no_norm_is_refused_before_anything_is_sent(wrong, shares):
    _, ours = pair(share_parameters=shares)
    ours.backward(0)
    with raises_everywhere(mpisgd.InvalidArgument):
        ours.opt.clip_grad_norm_(**wrong)
    ours.opt.clip_grad_norm_(1.0)


@pytest.mark.mpi(min_size=2)
def test_who_owns_all_that_has_a_gradient_agrees_with_who_owns_nothing(here):
    """A second step on the same gradients reduces nothing; a second backward is refused on every rank."""
    model = nn.Linear(FEATURES, 1, bias=False)
    opt = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), share_parameters=True)
    model(torch.ones(1, FEATURES)).sum().backward()
    opt.step()
    opt.step()
    with raises_everywhere(mpisgd.InvalidArgument):
        model(torch.ones(1, FEATURES)).sum().backward()
    opt.zero_grad()
    model(torch.ones(1, FEATURES)).sum().backward()
    opt.step()
