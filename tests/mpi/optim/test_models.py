"""Models of every kind under `DistributedOptimizer`: dtypes, layouts, sparse and tied parameters, graphs."""

from __future__ import annotations

import copy
import gc
import pickle
import time

import pytest
import torch
from harness import (
    ADAM_DRIFT,
    FEATURES,
    SGD_DRIFT,
    STEPS,
    Run,
    batch,
    check_equal_runs,
    digest,
    drift,
    gradients,
    mlp,
    mse,
    pair,
    plain_step,
    share,
)
from torch import nn
from torch.utils.checkpoint import checkpoint
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd.errors import InvalidArgument

caps = pytest.mark.parametrize("cap", [1, 2**20], ids=["many buckets", "one bucket"])


def clipped_step(run: Run, step: int) -> None:
    run.opt.zero_grad()
    run.backward(step)
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
    run.opt.step()


# -- dtypes and layouts -------------------------------------------------------------------------------


class Mixed(nn.Module):
    """float64, float32, bfloat16 and complex parameters in one model."""

    def __init__(self, dtypes):
        super().__init__()
        self.first = nn.Linear(FEATURES, 3).double()
        self.layers = nn.ModuleList(nn.Linear(3, 3).to(dtype) for dtype in dtypes)
        self.turn = nn.Parameter(torch.randn(3, 2, dtype=torch.complex128))

    def forward(self, inputs):
        hidden = torch.tanh(self.first(inputs.to(self.first.weight.dtype)))
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden.to(layer.weight.dtype)))
        return (hidden.to(torch.complex128) @ self.turn).abs()


@pytest.mark.parametrize(
    ("dtypes", "tol", "cap"),
    [
        ([torch.float64, torch.float64], 1e-11, 1),
        ([torch.float64, torch.float32], 1e-5, 2**20),
        ([torch.float32, torch.bfloat16, torch.float16, torch.float64], 3e-2, 1),
        ([torch.float32, torch.bfloat16, torch.float16, torch.float64], 3e-2, 2**20),
    ],
    ids=["complex", "float32", "halves alone", "halves"],
)
def test_dtypes_may_be_mixed(dtypes, tol, cap):
    check_equal_runs(
        model=lambda: Mixed(dtypes),
        double=False,
        tol=tol,
        bucket_cap_bytes=cap,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.5),
    )


def test_the_dtype_of_a_model_may_change():
    """Also where the parameters that have gradients at that moment differ by rank."""

    def loss(model, inputs, targets, rank, step):
        inputs = inputs.to(model[0].weight.dtype)
        used = model if (rank + step) % 2 else model[:3]
        return used(inputs)[:, :2].square().mean()

    def body(run: Run, step: int) -> None:
        if step == 5:
            run.model.float()
            run.opt.state.clear()
        plain_step(run, step)

    check_equal_runs(body, loss=loss, by_rank=True, tol=1e-4)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 3, 2)

    def forward(self, inputs):
        images = inputs.repeat(1, 8).view(-1, 2, 4, 4).to(memory_format=torch.channels_last)
        return self.second(torch.tanh(self.first(images))).mean((2, 3))[:, :2]


def test_channels_last():
    _, ours = check_equal_runs(
        model=Convolutions, prepare=lambda model: model.to(memory_format=torch.channels_last)
    )
    everyone(ours.model.first.weight.grad.is_contiguous(memory_format=torch.channels_last))


def test_the_layout_of_a_model_may_change():
    def body(run: Run, step: int) -> None:
        if step in (3, 9):
            layout = torch.channels_last if step == 3 else torch.contiguous_format
            run.model.to(memory_format=layout)
        run.opt.zero_grad(set_to_none=step < 9)
        run.backward(step)
        run.opt.step()

    check_equal_runs(body, model=Convolutions)


class LateReader(torch.autograd.Function):
    """Lets the others of backward go first."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.05)
        return grad


class OneRow(nn.Module):
    """The gradient of its bias is a view of one that a later part of backward still reads."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, 6))
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, inputs):
        return LateReader.apply(inputs.sum(0, keepdim=True) @ self.weight) + self.bias[None]


def test_a_gradient_is_left_alone_while_backward_reads_its_memory():
    def loss(model, inputs, targets, rank, step):
        return model(inputs).tanh().pow(2).sum()

    check_equal_runs(model=OneRow, loss=loss, by_rank=True, steps=4)


class Odd(nn.Module):
    """Parameters of no element, of one, transposed, of no dimension."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.none_either = nn.Parameter(torch.empty(3, 0))
        self.scale = nn.Parameter(torch.randn(()))
        self.turned = nn.Parameter(torch.randn(2, FEATURES).T)
        self.one = nn.Parameter(torch.randn(1, 1, 1))

    def forward(self, inputs):
        return torch.tanh(inputs @ self.turned) * self.scale + self.one.sum() + self.nothing.sum()


@caps
def test_odd_shapes(cap):
    check_equal_runs(model=Odd, bucket_cap_bytes=cap)


# -- shared and sparse parameters ---------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(FEATURES, 3, bias=False)
        self.back = nn.Linear(3, FEATURES, bias=False)
        self.back.weight = nn.Parameter(self.inward.weight.T.detach())
        self.again = nn.Linear(FEATURES, 3)
        self.again.weight = self.inward.weight

    def forward(self, inputs):
        return self.again(torch.tanh(self.back(torch.tanh(self.inward(inputs)))))[:, :2]


def test_tied_weights():
    check_equal_runs(model=Tied)


class Words(nn.Module):
    """An embedding that is asked for sparse or dense gradients call by call, and a dense layer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 3))
        self.last = nn.Linear(3, 2)

    def forward(self, inputs, kind):
        if kind == "none":
            return self.last(inputs[:, :3])
        at = (inputs * 1e6).long() % 6
        return self.last(torch.tanh(nn.functional.embedding(at, self.table, sparse=kind == "sparse").mean(1)))


KINDS = {
    "sparse": lambda rank, step: "sparse",
    "sparse on some ranks": lambda rank, step: "sparse" if rank % 2 == 0 else "none",
    "sparse in turn": lambda rank, step: "sparse" if (rank + step) % 2 else "none",
    "sparse here, dense there": lambda rank, step: "sparse" if rank % 2 else "dense",
    "dense, later sparse": lambda rank, step: "sparse" if step > 5 else "dense",
    "sparse, later dense": lambda rank, step: "dense" if step > 5 else "sparse",
    "anything": lambda rank, step: ("sparse", "dense", "none")[(rank * step + step // 3) % 3],
    "unused from the middle on": lambda rank, step: "sparse" if step < 8 else "none",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_gradients_may_be_sparse_dense_or_missing(kind):
    def loss(model, inputs, targets, rank, step):
        return nn.functional.mse_loss(model(inputs, KINDS[kind](rank, step)), targets)

    def body(run: Run, step: int) -> None:
        (run.opt if step % 3 else run.model).zero_grad(set_to_none=step % 5 != 4)
        run.backward(step)
        run.opt.step()

    check_equal_runs(
        body,
        model=Words,
        loss=loss,
        by_rank=True,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    )


def test_sparse_gradients_are_summed_by_sum():
    def loss(model, inputs, targets, rank, step):
        return nn.functional.mse_loss(model(inputs, KINDS["anything"](rank, step)), targets)

    check_equal_runs(
        model=Words,
        loss=loss,
        by_rank=True,
        op=mpisgd.ReduceOp.SUM,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.02),
    )


# -- graphs -------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Recomputed in backward: everything, the middle only, or one block twice."""

    def __init__(self, what, reentrant):
        super().__init__()
        self.what, self.reentrant = what, reentrant
        self.first, self.block, self.last = nn.Linear(FEATURES, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, inputs):
        if self.what == "all":
            return self.recomputed(self.whole, inputs.requires_grad_())
        hidden = self.recomputed(self.middle, self.first(inputs))
        if self.what == "twice":
            hidden = self.recomputed(self.middle, hidden)
        return self.last(hidden)

    def middle(self, hidden):
        return torch.tanh(self.block(torch.tanh(hidden)))

    def whole(self, inputs):
        return self.last(self.middle(self.first(inputs)))

    def recomputed(self, function, value):
        return checkpoint(function, value, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("what", ["all", "middle", "twice"])
def test_checkpointing(reentrant, what):
    check_equal_runs(clipped_step, model=lambda: Checkpointed(what, reentrant), bucket_cap_bytes=100)


def test_compiled_models():
    check_equal_runs(clipped_step, prepare=lambda model: torch.compile(model, backend="aot_eager"), steps=5)


def test_a_copy_made_before_wrapping_trains_alike():
    check_equal_runs(prepare=copy.deepcopy)


class Refusal(Exception):
    pass


@pytest.mark.parametrize("reset", [True, False])
def test_a_backward_that_raises_in_the_middle_leaves_nothing_behind(reset):
    def body(run: Run, step: int) -> None:
        run.opt.zero_grad()
        if step % 3 == 1:
            _raise_in_backward(run, step)
            if reset:
                run.opt.zero_grad()
            else:
                run.model.zero_grad()
        run.backward(step)
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.opt.step()

    check_equal_runs(body)


def _raise_in_backward(run: Run, step: int) -> None:
    def refuse(grad):
        raise Refusal

    handle = run.model[0].weight.register_hook(refuse)
    with pytest.raises(Refusal):
        run.backward(step)
    handle.remove()


# -- several optimizers -------------------------------------------------------------------------------


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.make, self.judge = nn.Linear(FEATURES, 3), nn.Linear(3, 2)

    def forward(self, inputs):
        return self.judge(torch.tanh(self.make(inputs)))


@pytest.mark.parametrize("gan", [False, True], ids=["together", "in turn, each loss reaches both"])
def test_two_optimizers_over_one_model(gan):
    def two(run: Run):
        if "second" not in run.memory:
            second = torch.optim.Adam(run.model.judge.parameters(), lr=0.01)
            if run.distributed:
                second = mpisgd.DistributedOptimizer(second, named_parameters=run.model.named_parameters())
            run.memory["second"] = second
        return run.opt, run.memory["second"]

    def body(run: Run, step: int) -> None:
        for micro, opts in enumerate([[opt] for opt in two(run)] if gan else [two(run)]):
            for opt in opts:
                opt.zero_grad()
            run.backward(step, micro)
            for opt in opts:
                opt.step()

    check_equal_runs(
        body,
        model=Halves,
        optimizer=lambda m: torch.optim.SGD(m.make.parameters(), lr=0.1, momentum=0.9),
        tol=ADAM_DRIFT,
    )


@pytest.mark.parametrize("cycle", [False, True])
def test_a_second_optimizer_after_the_first_was_forgotten(cycle):
    """In a reference cycle, when it is collected is each rank's own affair; it must not reduce any more."""

    def body(run: Run, step: int) -> None:
        if step % 3 == 0:
            fresh = torch.optim.SGD(run.model.parameters(), lr=0.1)
            run.opt = mpisgd.DistributedOptimizer(fresh) if run.distributed else fresh
            run.memory["schedule"] = torch.optim.lr_scheduler.StepLR(run.opt, 2)
            run.opt.itself = run.opt if cycle else None
        if step % 3 == 1 and run.rank == 0 and run.distributed:
            gc.collect()
        plain_step(run, step)
        run.memory["schedule"].step()

    check_equal_runs(body, steps=9)


# -- copies and checkpoints ---------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))])
def test_a_copy_of_the_optimizer_is_a_plain_one(copied):
    _, ours = pair()
    plain_step(ours, 0)
    twin = copied(ours.opt)
    everyone(type(twin) is torch.optim.SGD)
    everyone(twin.param_groups[0]["lr"] == 0.1)
    states = zip(twin.state.values(), ours.opt.state.values(), strict=True)
    everyone(all(torch.equal(a["momentum_buffer"], b["momentum_buffer"]) for a, b in states))
    for param in twin.param_groups[0]["params"]:
        param.grad = torch.full_like(param, mpisgd.rank())
    twin.step()  # sends nothing


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad"])
def test_checkpoints_travel_between_plain_and_distributed(name):
    options = {"momentum": 0.9} if name == "SGD" else {}

    def make(model):
        return getattr(torch.optim, name)(model.parameters(), lr=0.05, **options)

    def body(run: Run, step: int) -> None:
        plain_step(run, step)
        if step % 4 == 3:  # every time into the other kind, at last back
            model, opt = copy.deepcopy(run.model), run.opt
            run.model = model
            fresh = make(model)
            if run.distributed and step % 8 == 3:
                saved = pickle.loads(pickle.dumps(opt.state_dict()))
                between = make(copy.deepcopy(model))
                between.load_state_dict(saved)
                saved = between.state_dict()
            else:
                saved = opt.state_dict()
            if run.distributed:
                fresh = mpisgd.DistributedOptimizer(fresh, named_parameters=model.named_parameters())
            fresh.load_state_dict(saved)
            run.opt = fresh

    check_equal_runs(body, optimizer=make, tol={"SGD": SGD_DRIFT, "Adam": ADAM_DRIFT}.get(name, 1e-7))


@pytest.mark.parametrize(
    ("kind", "before"),
    [
        ("StepLR", True),
        ("StepLR", False),
        ("OneCycleLR", True),
        ("ReduceLROnPlateau", False),
        ("LambdaLR", True),
    ],
)
def test_learning_rate_schedulers(kind, before):
    def schedule(opt):
        if kind == "OneCycleLR":
            return torch.optim.lr_scheduler.OneCycleLR(opt, 0.2, total_steps=40)
        if kind == "ReduceLROnPlateau":
            return torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=2)
        if kind == "LambdaLR":
            return torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 0.9**epoch)
        return torch.optim.lr_scheduler.StepLR(opt, 3, 0.5)

    early = {}

    def optimizer(model):
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if before:
            early[id(opt)] = schedule(opt)
        return opt

    def body(run: Run, step: int) -> None:
        if "schedule" not in run.memory:
            run.memory["schedule"] = early[id(run.opt)] if before else schedule(run.opt)
        plain_step(run, step)
        run.memory["schedule"].step(*([1.0] if kind == "ReduceLROnPlateau" else []))
        run.memory[step] = run.opt.param_groups[0]["lr"]

    plain, ours = check_equal_runs(body, optimizer=optimizer)
    everyone(all(plain.memory[step] == ours.memory[step] for step in range(STEPS)))


# -- mixed precision ----------------------------------------------------------------------------------


def overflowing(model, inputs, targets, rank, step):
    """A loss that is infinite on the last rank now and then."""
    value = mse(model, inputs, targets)
    return value * float("inf") if step % 5 == 2 and rank == mpisgd.size() - 1 else value


def test_grad_scaler_equals_one_process_and_skips_together():
    """An overflow on one rank only: as in one process, nobody steps and the scale halves."""

    def body(run: Run, step: int) -> None:
        scaler = run.memory.setdefault("scaler", torch.amp.GradScaler("cpu", 2.0**8, growth_interval=3))
        run.opt.zero_grad()
        scaler.scale(run.loss(step)).backward()
        if step % 2:
            scaler.unscale_(run.opt)
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        scaler.step(run.opt)
        scaler.update()
        run.memory[step] = scaler.get_scale()

    for options in ({}, {"fused": True}):
        plain, ours = check_equal_runs(
            body,
            loss=overflowing,
            by_rank=True,
            optimizer=lambda m, options=options: torch.optim.SGD(m.parameters(), 0.1, 0.9, **options),
        )
        everyone(all(plain.memory[step] == ours.memory[step] for step in range(STEPS)))
        everyone(len({ours.memory[step] for step in range(STEPS)}) > 1, "no overflow was seen")


class ScaledSGD(torch.optim.Optimizer):
    """An optimizer whose class says that it takes care of a scaler's steps itself."""

    _step_supports_amp_scaling = True

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"] if not self.found_inf else ():
                param.sub_(param.grad / self.grad_scale, alpha=group["lr"])


@pytest.mark.parametrize(
    ("kind", "before"),
    [("plain", ""), ("plain", "unscale, clip"), ("fused", ""), ("scaled", "")],
)
def test_a_grad_scaler_looks_at_gradients_of_all_ranks_where_the_last_window_is_not_full(kind, before):
    """They were reduced in `step()`, after the scaler had decided on each rank by itself."""

    def body(run: Run, step: int) -> None:
        scaler = run.memory.setdefault("scaler", torch.amp.GradScaler("cpu", 2.0**8, growth_interval=3))
        run.opt.zero_grad()
        for micro in range(2 if step % 2 else 1):
            scaler.scale(run.loss(step, micro)).backward()
        if before:
            scaler.unscale_(run.opt)
        if before == "unscale, clip":
            run.clip(0.1)
        scaler.step(run.opt)
        scaler.update()
        run.memory[step] = scaler.get_scale()

    def optimizer(model):
        if kind == "scaled":
            return ScaledSGD(model.parameters(), 0.1)
        return torch.optim.SGD(model.parameters(), 0.1, 0.9, fused=kind == "fused" or None)

    plain, ours = check_equal_runs(
        body, loss=overflowing, by_rank=True, optimizer=optimizer, backward_passes_per_step=2
    )
    everyone(all(plain.memory[step] == ours.memory[step] for step in range(STEPS)))
    everyone(len({ours.memory[step] for step in range(STEPS)}) > 1, "no overflow was seen")


@pytest.mark.mpi(min_size=2)
def test_gradients_that_were_unscaled_before_they_were_reduced_are_refused():
    """A rank whose window was full had reduced them in backward, with the scale: the mean was of both."""
    _, ours = pair(backward_passes_per_step=2)
    scaler = torch.amp.GradScaler("cpu", 2.0**8)
    scaler.scale(ours.loss(0)).backward()
    scaler.unscale_(ours.opt)
    with raises_everywhere(InvalidArgument) as caught:
        scaler.step(ours.opt)
    assert "Call optimizer.synchronize() before unscale_()" in caught.text
    ours.opt.zero_grad()
    scaler.update()
    scaler.scale(ours.loss(1)).backward()
    ours.opt.synchronize()
    scaler.unscale_(ours.opt)
    scaler.step(ours.opt)
    same_on_all_ranks(digest(ours.model.parameters()))


def test_autocast():
    """bfloat16 activations: rows are independent, so only the order of rounded sums differs."""

    def loss(model, inputs, targets, rank, step):
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.mse_loss(model(inputs.float()).float(), targets.float())

    check_equal_runs(loss=loss, double=False, tol=0.02, steps=10)


# -- compression --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize(("double", "cap"), [(False, 2**20), (True, 1)])
def test_compression_rounds_each_ranks_gradient_once_and_the_mean_once(name, double, cap):
    if mpisgd.size() == 1:
        pytest.skip("nothing travels")
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}[name]
    plain, ours = pair(compression=getattr(mpisgd.Compression, name), double=double, bucket_cap_bytes=cap)

    def loss(model, rank):
        inputs, targets = (tensor.chunk(ours.size)[rank] for tensor in batch(0))
        dtype = model[0].weight.dtype
        return nn.functional.mse_loss(model(inputs.to(dtype)), targets.to(dtype))

    loss(ours.model, ours.rank).backward()
    params = list(plain.model.parameters())
    each = [torch.autograd.grad(loss(plain.model, rank), params) for rank in range(ours.size)]
    for grads, param in zip(zip(*each, strict=True), ours.model.parameters(), strict=True):
        total = grads[0].to(half).float()
        for grad in grads[1:]:
            total = total + grad.to(half).float()
        expected = (total / ours.size).to(half).to(param.dtype)
        everyone(torch.equal(param.grad, expected), f"{param.grad} is not {expected}")
    same_on_all_ranks(digest(gradients(ours.model)))


def test_compressed_training_comes_close_to_one_process():
    for compression in (mpisgd.Compression.fp16, mpisgd.Compression.bf16):
        check_equal_runs(clipped_step, compression=compression, tol=0.02)


def test_an_overflow_in_fp16_makes_all_ranks_skip():
    if mpisgd.size() == 1:
        pytest.skip("nothing travels")
    _, ours = pair(compression=mpisgd.Compression.fp16)
    scaler = torch.amp.GradScaler("cpu", 2.0**10)
    before = digest(ours.model.parameters())
    loss = ours.loss(0)
    scaler.scale(loss * 1e6 if ours.rank == 0 else loss).backward()
    scaler.step(ours.opt)
    scaler.update()
    everyone(digest(ours.model.parameters()) == before)
    everyone(scaler.get_scale() == 2.0**9)


# -- groups -------------------------------------------------------------------------------------------


def test_a_group_trains_by_itself():
    """Even and odd ranks train models of their own, each on its share."""
    halves = [mpisgd.new_group(range(start, mpisgd.size(), 2)) for start in range(min(2, mpisgd.size()))]
    mine = next(group for group in halves if group.rank >= 0)
    plain = mlp().double()
    mpisgd.broadcast_parameters(plain, mine.ranks[0], group=mine)
    ours = copy.deepcopy(plain) if mine.rank == 0 else mlp().double()
    mpisgd.broadcast_parameters(ours, mine.ranks[0], group=mine)
    for model, size, rank in ((plain, 1, 0), (ours, mine.size, mine.rank)):
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if model is ours:
            opt = mpisgd.DistributedOptimizer(opt, group=mine)
        for step in range(20):
            opt.zero_grad()
            mse(model, *(share(tensor, rank, size) for tensor in batch(step, mine.ranks[0]))).backward()
            opt.step()
    off = max(drift(a, b) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))
    everyone(off < SGD_DRIFT, f"off by {off}")
