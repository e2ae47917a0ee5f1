"""`Sharded`: each rank updates its shard with its part of the state, and the training is the same."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from harness import (
    ADAM_DRIFT,
    FEATURES,
    RMSPROP_DRIFT,
    STEPS,
    Run,
    adam,
    check_equal_runs,
    check_scaler,
    digest,
    drift,
    let_some_travel_alone,
    mlp,
    pair,
    plain_step,
)
from test_models import Tied
from test_optimizers import OPTIMIZERS, Bag
from test_shared_parameters import Branches, branched
from torch import nn
from verdicts import everyone, raises_everywhere, referee, same_on_all_ranks

import mpisgd
from mpisgd.gradients.in_place_gradient import InPlaceGradient
from mpisgd.sharding.owners import Owners
from mpisgd.sharding.reduction.sharded_gradient import ShardedGradient
from mpisgd.transport import staging_layout

STAGES = (1, 2)
WAYS = ("fused", "cut", "overlapped")


@pytest.fixture(params=["cut"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How gradients travel: as those of a small model do, or as those of a large one: cut, and some alone."""
    if request.param != "fused":
        let_some_travel_alone(monkeypatch)
        monkeypatch.setattr(staging_layout, "BUFFER_BYTES", 64 * mpisgd.size())
    if request.param == "overlapped":
        monkeypatch.setitem(mpisgd.DistributedOptimizer.__init__.__kwdefaults__, "overlap", True)
    return str(request.param)


SOME = ("sgd momentum", "adam fused", "rmsprop centered", "several groups")
ELEMENTWISE = [
    pytest.param(name, marks=() if name in SOME else pytest.mark.long)
    for name in OPTIMIZERS
    if name != "a user's"
]


def both(stage: int, **how) -> list[Run]:
    """The run of `Synchronous` and that of `Sharded`, equal at the start."""
    return [pair(strategy=s, **how)[1] for s in (mpisgd.Synchronous(), mpisgd.Sharded(stage))]


def check_same_bits(body, stage: int, steps: int = STEPS, **how) -> tuple[Run, Run]:
    """Run `body` both ways; all parameters and all state must have the same bits."""
    runs = both(stage, **how)
    bits = []
    for step in range(steps):
        for run in runs:
            body(run, step)
        bits.append([digest(run.model.parameters()) for run in runs])
    states = [run.opt.state_dict()["state"] for run in runs]
    entries = [[e[key] for i in sorted(s) for e in [s[i]] for key in sorted(e)] for s in states]
    bits.append([digest([torch.as_tensor(v) for v in of_one]) for of_one in entries])
    wrong = [step for step, (a, b) in enumerate(bits) if a != b]
    everyone(not wrong, f"other bits from step {wrong[:1]} of {len(bits)} on")
    same_on_all_ranks(bits)
    return runs[0], runs[1]


# -- the same training --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_bits_are_those_of_synchronous(name, stage):
    check_same_bits(plain_step, stage, optimizer=OPTIMIZERS[name][1])


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_are_those_of_synchronous_in_other_dtypes(dtype, stage):
    def loss(model, inputs, targets, rank, step):
        return nn.functional.mse_loss(model(inputs.to(dtype)).float(), targets.float())

    check_same_bits(
        plain_step,
        stage,
        steps=5,
        model=lambda: mlp().to(dtype),
        loss=loss,
        double=False,
        optimizer=OPTIMIZERS["adam fused"][1],
    )


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_may_have_several_dtypes(stage):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(FEATURES, 7).float(), nn.Linear(7, 2).double()

        def forward(self, inputs):
            return self.b(self.a(inputs.float()).double())

    check_same_bits(plain_step, stage, steps=5, model=Mixed, double=False, optimizer=adam)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", [name for name in ("a user's", "muon and adamw") if name in OPTIMIZERS])
def test_an_optimizer_that_is_not_elementwise_updates_whole_parameters(name, stage):
    tol, optimizer = OPTIMIZERS[name]
    check_equal_runs(optimizer=optimizer, tol=tol, strategy=mpisgd.Sharded(stage))


@pytest.mark.parametrize("stage", STAGES)
def test_passes_are_accumulated(stage):
    def body(run: Run, step: int) -> None:
        run.opt.zero_grad()
        with run.no_sync():
            run.backward(step, 0)
        run.backward(step, 1)
        run.opt.step()

    check_same_bits(body, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_a_partial_last_window_is_reduced_by_the_step(stage):
    def body(run: Run, step: int) -> None:
        run.opt.zero_grad()
        for micro in range(1 if step % 3 == 2 else 2):
            run.backward(step, micro)
        run.opt.step()

    check_same_bits(body, stage, backward_passes_per_step=2)


@pytest.mark.parametrize("stage", STAGES)
def test_tied_parameters(stage):
    check_same_bits(plain_step, stage, model=Tied, optimizer=adam)


@pytest.mark.parametrize("stage", STAGES)
def test_unused_and_frozen_parameters_stay_as_they_are(stage):
    check_same_bits(plain_step, stage, model=Branches, loss=branched, by_rank=True, optimizer=adam)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_may_be_frozen_later(stage):
    """The buckets are others then, and so is who owns what."""

    def body(run: Run, step: int) -> None:
        run.model[0].requires_grad_(step % 3 != 1)
        plain_step(run, step)

    check_same_bits(body, stage, optimizer=adam)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_may_be_added(stage):
    def body(run: Run, step: int) -> None:
        if step == 2:
            run.model.zero_grad()
            run.opt.add_param_group({"params": list(run.model[4:].parameters()), "lr": 0.02})
        plain_step(run, step)

    def optimizer(model):
        return torch.optim.Adam(model[:4].parameters(), lr=0.01)

    check_same_bits(body, stage, steps=6, optimizer=optimizer, named_parameters=None)


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_by_the_norm_of_all_gradients(stage):
    def body(run: Run, step: int) -> None:
        run.opt.zero_grad()
        run.backward(step)
        norm = run.clip(0.1)
        run.memory.setdefault("norms", []).append(float(norm))
        run.opt.step()

    plain, ours = check_equal_runs(body, optimizer=adam, tol=ADAM_DRIFT, strategy=mpisgd.Sharded(stage))
    pairs = zip(plain.memory["norms"], ours.memory["norms"], strict=True)
    everyone(all(abs(a - b) <= 1e-9 for a, b in pairs), "the norms differ")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["adam", "a user's"])
def test_a_closure_makes_no_difference(name, stage):
    def body(run: Run, step: int) -> None:
        def closure():
            run.opt.zero_grad()
            return run.backward(step).detach()

        run.opt.step(closure)

    tol, optimizer = OPTIMIZERS[name]
    check_equal_runs(body, optimizer=optimizer, tol=tol, strategy=mpisgd.Sharded(stage))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own optimizers make such tensors
def test_sparse_gradients(stage):
    def optimizer(model):
        return torch.optim.SparseAdam(model.parameters(), lr=0.02)

    def body(run: Run, step: int) -> None:
        run.model.zero_grad()
        run.backward(step)
        run.opt.step()

    strategy = mpisgd.Sharded(stage)
    check_equal_runs(body, model=Bag, optimizer=optimizer, tol=ADAM_DRIFT, strategy=strategy)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "options", [{"op": mpisgd.ReduceOp.SUM}, {"gradient_predivide_factor": 3.0}], ids=str
)
def test_options_mean_what_they_mean(options, stage):
    check_same_bits(plain_step, stage, steps=5, **options)


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("stage", STAGES)
def test_casts_on_the_wire_round_as_those_of_synchronous(stage):
    check_same_bits(plain_step, stage, steps=5, optimizer=adam, compression=mpisgd.Compression.bf16)


@pytest.mark.parametrize("stage", STAGES)
def test_a_host_with_one_copy_casts_as_well(stage):
    how = {"optimizer": adam, "compression": mpisgd.Compression.fp16, "gradient_predivide_factor": 2.0}
    shared = pair(strategy=mpisgd.Sharded(stage), share_parameters=True, **how)[1]
    runs = [*both(stage, **how), shared]
    for step in range(5):
        for run in runs:
            plain_step(run, step)
        everyone(len({digest(run.model.parameters()) for run in runs}) == 1, f"step {step}")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("clips", [False, True])
def test_a_scaler_skips_the_same_steps_as_one_process(clips, stage):
    """Infinities on one rank, in a gradient that another one owns, are seen by all."""
    check_scaler(clips, optimizer=adam, tol=ADAM_DRIFT, strategy=mpisgd.Sharded(stage))


@pytest.mark.parametrize("stage", STAGES)
def test_a_host_may_have_one_copy(stage):
    runs = both(stage, optimizer=adam)
    shared = pair(strategy=mpisgd.Sharded(stage), share_parameters=True, optimizer=adam)[1]
    for step in range(STEPS):
        for run in (*runs, shared):
            plain_step(run, step)
        everyone(digest(runs[0].model.parameters()) == digest(shared.model.parameters()), f"step {step}")


# -- a copy in a higher precision -----------------------------------------------------------------------


def simulate_master(model, optimizer_class, options, steps, size):
    """Mixed precision by hand: gradients of every rank averaged in bfloat16, float32 copies updated."""
    params = list(model.parameters())
    copies = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = optimizer_class(copies, **options)
    for step in range(steps):
        everyones = []
        for rank in range(size):
            inputs, targets = half_batch(step, rank)
            loss = nn.functional.mse_loss(model(inputs).float(), targets)
            everyones.append(torch.autograd.grad(loss, params))
        for copy_, grads in zip(copies, zip(*everyones, strict=True), strict=True):
            total = grads[0].float()
            for grad in grads[1:]:
                total = total + grad.float()
            copy_.grad = (total / size).to(torch.bfloat16).float()
        optimizer.step()
        with torch.no_grad():
            for param, copy_ in zip(params, copies, strict=True):
                param.copy_(copy_)
    return copies


def half_batch(step: int, rank: int):
    draw = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(3, FEATURES, generator=draw).to(torch.bfloat16)
    return inputs, torch.randn(3, 2, generator=draw)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.AdamW, {"lr": 1e-3}), (torch.optim.SGD, {"lr": 1e-2}), (torch.optim.Muon, {"lr": 1e-2})]
    if hasattr(torch.optim, "Muon")
    else [(torch.optim.AdamW, {"lr": 1e-3}), (torch.optim.SGD, {"lr": 1e-2})],
)
def test_a_model_in_bfloat16_is_updated_in_float32(kind, options, stage):
    """Steps too small for bfloat16 add up in the copy, and that is what is saved and loaded."""
    torch.manual_seed(7)
    bias = kind.__name__ != "Muon"  # which takes matrices only
    model = nn.Sequential(nn.Linear(FEATURES, 6, bias=bias), nn.Tanh(), nn.Linear(6, 2, bias=bias))
    model = model.to(torch.bfloat16)
    alone, plain = copy.deepcopy(model), copy.deepcopy(model)
    copies = simulate_master(alone, kind, options, 12, mpisgd.size())
    strategy = mpisgd.Sharded(stage, master_dtype=torch.float32)
    opt = mpisgd.DistributedOptimizer(kind(model.parameters(), **options), strategy=strategy)
    for step in range(12):
        if step == 6:  # all of it goes through a state_dict
            state = copy.deepcopy(opt.state_dict())
            model_state = copy.deepcopy(model.state_dict())
            model = copy.deepcopy(plain)
            model.load_state_dict(model_state)
            opt = mpisgd.DistributedOptimizer(kind(model.parameters(), **options), strategy=strategy)
            opt.load_state_dict(state)
        opt.zero_grad()
        inputs, targets = half_batch(step, mpisgd.rank())
        nn.functional.mse_loss(model(inputs).float(), targets).backward()
        opt.step()
    exact = kind is not torch.optim.Muon
    off = max(drift(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))
    everyone(off == 0 if exact else off < 1e-2, f"{off}")
    masters = [entries["master"] for entries in opt.state_dict()["state"].values()]
    off = max(drift(a, b) for a, b in zip(masters, copies, strict=True))
    everyone(off == 0 if exact else off < 1e-2, f"masters: {off}")


def test_written_parameters_reach_the_copy():
    torch.manual_seed(7)
    model = nn.Linear(FEATURES, 2).to(torch.bfloat16)
    strategy = mpisgd.Sharded(2, master_dtype=torch.float32)
    opt = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), strategy=strategy)
    for step in range(2):
        opt.zero_grad()
        model(torch.ones(1, FEATURES, dtype=torch.bfloat16)).sum().backward()
        opt.step()
        everyone(step == 0 or bool((model.weight == 3).all()), f"{model.weight}")
        with torch.no_grad():
            model.weight.fill_(3)


# -- parameters that arrive during the next forward ------------------------------------------------------


class Attention(nn.Module):
    """torch's attention uses the weight of a module inside it without calling that."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, 2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.calls_last = True

    def forward(self, inputs):
        hidden = torch.tanh(self.first(inputs))[None]
        hidden = self.attention(hidden, hidden, hidden)[0][0]
        return self.last(hidden) if self.calls_last else hidden @ self.last.weight.T


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters take their time: whoever does not wait for them reads old ones."""
    exchange = Owners.exchange

    def exchange_slowly(self, *args, **options):
        time.sleep(0.003)
        return exchange(self, *args, **options)

    monkeypatch.setattr(Owners, "exchange", exchange_slowly)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("stage", STAGES)
def test_each_layer_waits_for_its_parameters(stage):
    strategies = (mpisgd.Synchronous(), mpisgd.Sharded(stage, overlap_forward=True))
    runs = [pair(strategy=s, model=Attention, optimizer=adam, bucket_cap_bytes=1)[1] for s in strategies]
    for step in range(5):
        for run in runs:
            plain_step(run, step)
        losses = [run.loss(30).item() for run in runs]  # an evaluation without a step
        everyone(losses[0] == losses[1], f"step {step}: {losses}")
    for run in runs:
        plain_step(run, 6)
    saved = [digest(run.model.state_dict().values()) for run in runs]
    everyone(saved[0] == saved[1], "parameters were saved before they had arrived")
    for run in runs:
        plain_step(run, 7)
    runs[1].opt.synchronizer.wait()
    everyone(digest(runs[0].model.parameters()) == digest(runs[1].model.parameters()), "other bits")


@pytest.mark.mpi(min_size=2)
def test_a_parameter_that_nobody_waits_for_is_an_error_and_no_old_value():
    strategy = mpisgd.Sharded(1, overlap_forward=True)
    ours = pair(strategy=strategy, model=Attention, optimizer=adam, bucket_cap_bytes=1)[1]
    for step in range(3):
        plain_step(ours, step)
    ours.model.calls_last = False
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        plain_step(ours, 3)
    everyone("last.weight" in caught.text, caught.text)


# -- what each rank has --------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_each_rank_has_its_part_of_the_state(stage):
    """K P / n bytes, padding aside: two moments in float64."""
    _, ours = pair(model=lambda: nn.Linear(40, 50), strategy=mpisgd.Sharded(stage), optimizer=adam, loss=wide)
    seen = []

    def count(opt, *_):
        seen.append(sum(v.nbytes for e in opt.state.values() for v in e.values() if v.dim()))

    torch.optim.Optimizer.register_step_pre_hook(
        ours.opt, count
    )  # after mpisgd's own, other than a program's
    for step in range(2):
        ours.opt.zero_grad()
        ours.backward(step)
        ours.opt.step()
    total = sum(p.nbytes for p in ours.model.parameters())
    everyone(abs(seen[-1] - 2 * total / mpisgd.size()) <= 2 * 4 * 64, f"{seen} of {total}")
    everyone(not ours.opt.state, "state of all parameters between steps")


def wide(model, inputs, targets, rank, step):
    return model(inputs.repeat(1, 10)).square().mean()


def num_gradients(model: nn.Module) -> int:
    return sum(param.grad is not None for param in model.parameters())


@pytest.mark.mpi(min_size=2)
def test_gradients_are_freed_while_backward_computes():
    """With stage 2 a gradient is gone when the next buckets are complete; with stage 1 it is not."""
    layers = [nn.Linear(FEATURES, FEATURES) for _ in range(6)]
    for stage in STAGES:
        model = nn.Sequential(*copy.deepcopy(layers)).double()
        mpisgd.broadcast_parameters(model)
        opt = mpisgd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            strategy=mpisgd.Sharded(stage),
            bucket_cap_bytes=1,
            overlap=None,
        )
        held: list[int] = []
        model[0].weight.register_hook(lambda g, model=model, held=held: held.append(num_gradients(model)))
        for _ in range(2):
            opt.zero_grad()
            model(torch.ones(2, FEATURES, dtype=torch.float64)).sum().backward()
            opt.step()
        del opt  # beside another one, nothing is sent before the end of backward
        everyone(max(held) <= 1 if stage == 2 else min(held) >= 10, f"stage {stage}: {held}")


@pytest.mark.processes
@pytest.mark.mpi(min_size=2)
def test_large_gradients_travel_from_where_they_lie_although_others_lay_there_before(monkeypatch):
    """Of equal layers backward puts one gradient where it has just freed another; none has to be copied."""
    lay, load = [], InPlaceGradient.load

    def noting(self, grads, used):
        flags = load(self, grads, used)
        lay.append(self._grad is grads[0])
        return flags

    monkeypatch.setattr(InPlaceGradient, "load", noting)
    monkeypatch.setattr(staging_layout, "BUFFER_BYTES", 2**18)  # small pieces would be 100,000 barriers
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6)))
    mpisgd.broadcast_parameters(model)
    opt = mpisgd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=mpisgd.Sharded(2),
        bucket_cap_bytes=1,
        overlap=None,
    )
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(64, 512)).square().sum().backward()
        opt.step()
    everyone(len(lay) == 18 and all(lay), lay)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.mpi(min_size=2)
def test_gradients_are_sharded_and_not_none(stage):
    _, ours = pair(strategy=mpisgd.Sharded(stage))
    ours.backward(0)
    everyone(all(isinstance(p.grad, ShardedGradient) for p in ours.model.parameters()), "other gradients")
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        ours.backward(1)
    everyone("zero_grad()" in caught.text, caught.text)
    ours.opt.zero_grad()
    plain_step(ours, 2)


# -- the state -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_the_state_goes_to_a_run_without_mpisgd_and_back(stage):
    plain, ours = pair(strategy=mpisgd.Sharded(stage), optimizer=adam)
    for step in range(3):
        plain_step(plain, step)
        plain_step(ours, step)
    wanted, got = plain.opt.state_dict(), ours.opt.state_dict()
    everyone(got["param_groups"] == wanted["param_groups"], "other groups")
    for index, entries in wanted["state"].items():
        for key, value in entries.items():
            everyone(torch.allclose(got["state"][index][key], value, rtol=0, atol=1e-12), f"{index} {key}")
    ours.opt.load_state_dict(copy.deepcopy(wanted))
    plain.opt.load_state_dict(copy.deepcopy(got))
    for step in range(3, 6):
        plain_step(plain, step)
        plain_step(ours, step)
        off = max(map(drift, plain.model.parameters(), ours.model.parameters()))
        everyone(off < ADAM_DRIFT, f"step {step}: {off}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_state_is_loaded_at_another_number_of_ranks(stage):
    """Saved by all, loaded by the first half; the other half trains with another stage from there."""
    _, ours = pair(strategy=mpisgd.Sharded(stage), optimizer=adam)
    for step in range(3):
        plain_step(ours, step)
    state, weights = copy.deepcopy(ours.opt.state_dict()), copy.deepcopy(ours.model.state_dict())
    half = mpisgd.size() // 2
    groups = [mpisgd.new_group(range(half)), mpisgd.new_group(range(half, mpisgd.size()))]
    group = groups[mpisgd.rank() >= half]
    one, other = mlp().double(), mlp().double()
    opts = [adam(one), adam(other)]
    opts[0] = mpisgd.DistributedOptimizer(
        opts[0], strategy=mpisgd.Sharded(stage if mpisgd.rank() < half else 3 - stage), group=group
    )
    for model, opt in zip((one, other), opts, strict=True):
        model.load_state_dict(weights)
        opt.load_state_dict(copy.deepcopy(state))
    for step in range(3, 6):
        for model, opt in zip((one, other), opts, strict=True):
            opt.zero_grad()
            model(torch.full((2, FEATURES), 0.1 * step, dtype=torch.float64)).square().sum().backward()
            opt.step()
    off = max(map(drift, one.parameters(), other.parameters()))
    everyone(off < RMSPROP_DRIFT, f"{off}")


@pytest.mark.parametrize("master", [None, torch.float32])
def test_shards_are_loaded_at_another_number_of_ranks(master):
    """Each rank has saved its part; one rank alone, and all of them, go on from these."""
    dtype = torch.float64 if master is None else torch.bfloat16
    inputs = torch.linspace(-1, 1, 3 * FEATURES).view(3, FEATURES).to(dtype)

    alone = [mpisgd.new_group([rank]) for rank in range(mpisgd.size())][mpisgd.rank()]

    def made(size, weights=None):
        torch.manual_seed(3)
        model = mlp().to(dtype)
        if weights is not None:
            model.load_state_dict(weights)
        group = alone if size == 1 else None
        strategy = mpisgd.Sharded(2, master_dtype=master)
        return model, mpisgd.DistributedOptimizer(adam(model), strategy=strategy, group=group)

    def train(model, opt, steps):
        for _ in range(steps):
            opt.zero_grad()
            model(inputs).square().mean().backward()
            opt.step()

    model, opt = made(mpisgd.size())
    train(model, opt, 3)
    shards = referee().allgather(copy.deepcopy(opt.shard_state_dict()))
    weights = copy.deepcopy(model.state_dict())
    train(model, opt, 3)
    for size in (1, mpisgd.size()):
        other, again = made(size, weights)
        again.load_shard_state_dicts(copy.deepcopy(shards))
        train(other, again, 3)
        off = max(map(drift, other.parameters(), model.parameters()))
        everyone(off < ADAM_DRIFT, f"on {size} ranks: {off}")
    if mpisgd.size() > 1:
        with raises_everywhere(mpisgd.InvalidArgument) as caught:
            again.load_shard_state_dicts(shards[:1])
        everyone("all ranks" in caught.text, caught.text)


def test_an_optimizer_without_shards_says_so():
    _, ours = pair()
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        ours.opt.shard_state_dict()
    everyone("state_dict()" in caught.text, caught.text)


@pytest.mark.parametrize("assigned", [False, True])
def test_elastic_training_goes_on_from_the_replicas_of_shards(assigned):
    # Of an optimizer that was assigned later there were no replicas: its momentum was gone.
    plain, ours = pair(strategy=mpisgd.Sharded(2), optimizer=adam)
    _, first = pair(strategy=mpisgd.Sharded(2), optimizer=adam) if assigned else (plain, ours)
    kept = mpisgd.elastic.State(model=first.model, optimizer=first.opt)
    kept.model, kept.optimizer = ours.model, ours.opt
    for step in range(3):
        plain_step(plain, step)
        plain_step(ours, step)
    kept.commit()
    plain_step(ours, 17)  # astray
    if assigned:  # and not committed
        kept.model, kept.optimizer = first.model, first.opt
    kept.resume(joiners=False)
    everyone(kept.optimizer is ours.opt and kept.model is ours.model, "not what was committed")
    for step in range(3, 6):
        plain_step(plain, step)
        plain_step(ours, step)
        off = max(map(drift, plain.model.parameters(), ours.model.parameters()))
        everyone(off < ADAM_DRIFT, f"step {step}: {off}")
    saved = next(iter(kept._commits.values()))["optimizer"]
    everyone(not any("exp_avg" in str(entry) for entry in saved), "the whole state")


# -- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"stage": 3},
        {"stage": True},
        {"stage": "2"},
        {"master_dtype": "float32"},
        {"master_dtype": torch.int32},
    ],
)
def test_fields_that_make_no_sense_are_refused(wrong):
    with pytest.raises(mpisgd.InvalidArgument) as caught:
        mpisgd.Sharded(**wrong)
    assert next(iter(wrong)) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"compression": mpisgd.compress.TopK(ratio=0.1)}, "compression"),
        ({"op": mpisgd.Adasum}, "Adasum"),
        ({"optimizer": lambda m: torch.optim.LBFGS(m.parameters())}, "LBFGS"),
    ],
)
def test_what_does_not_go_together_is_refused(options, named):
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        pair(strategy=mpisgd.Sharded(2), **options)
    everyone(named in caught.text, caught.text)


def test_parameters_with_gaps_are_refused():
    view = nn.Parameter(torch.zeros(4, 8)[:, :4])
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        mpisgd.DistributedOptimizer(torch.optim.SGD([view], lr=0.1), strategy=mpisgd.Sharded(1))
    everyone("gaps" in caught.text, caught.text)


def test_ranks_that_choose_another_stage_are_told():
    if mpisgd.size() == 1:
        pytest.skip("one rank agrees with itself")
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        pair(strategy=mpisgd.Sharded(1 if mpisgd.rank() else 2))
    everyone("stage" in caught.text, caught.text)
    referee().barrier()
