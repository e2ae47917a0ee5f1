"""`Sharded` with a model on a GPU: the same training as without it, with and without an offload."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from gpu_under_test import DEVICE
from harness import FEATURES, Run, adam, batch, digest, let_some_travel_alone, mlp, pair, plain_step, share
from test_optimizers import OPTIMIZERS
from test_shared_parameters import Branches, branched
from torch import nn
from verdicts import everyone, raises_everywhere, referee, same_on_all_ranks

import mpisgd
from mpisgd.sharding import device_parts, divided_parameters

STAGES = (1, 2)
STEPS = 5
BY_NCCL = pytest.mark.parametrize("device", ["nccl"], indirect=True)
BY_HOST = pytest.mark.parametrize("device", ["staging"], indirect=True)


@pytest.fixture(params=["cut"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How gradients travel: some alone, the others in common; offloaded pieces are small."""
    let_some_travel_alone(monkeypatch)
    monkeypatch.setattr(divided_parameters, "OFFLOADED_BYTES", 64)
    return str(request.param)


def offload(kind: str, folder: Any) -> mpisgd.Offload | None:
    if kind == "files":
        return mpisgd.Offload(referee().bcast(str(folder)), block_bytes=4096, io="buffered")
    return mpisgd.Offload() if kind == "host" else None


def check_same_bits(body: Any, strategy: mpisgd.Strategy, tol: float = 0.0, **how: Any) -> list[Run]:
    """Run `body` with `Synchronous` and with `strategy`; parameters and state are the same."""
    runs = [pair(strategy=s, **how)[1] for s in (mpisgd.Synchronous(), strategy)]
    for step in range(STEPS):
        for run in runs:
            body(run, step)
        same_on_all_ranks(digest(runs[1].model.parameters()))
        everyone(*_are_close(*(list(run.model.parameters()) for run in runs), tol=tol))
    states = [run.opt.state_dict()["state"] for run in runs]
    everyone(states[0].keys() == states[1].keys())
    for index, entries in states[0].items():
        other = states[1][index]
        everyone(list(entries) == list(other), f"{list(entries)}, {list(other)}")
        tensors = [[torch.as_tensor(e[key]) for key in entries] for e in (entries, other)]
        everyone(*_are_close(*tensors, tol=tol))
    return runs


def _are_close(ours: Any, theirs: Any, *, tol: float) -> tuple[bool, str]:
    pairs = [(a.detach().cpu(), b.detach().cpu()) for a, b in zip(ours, theirs, strict=True)]
    off = max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)
    return off <= tol, f"off by {off}"


KINDS = ["device", "host", "files"]


# Each two of how gradients travel, the stage and where the state is meet once.
OF_EACH_PAIR = (
    *(("nccl", 1, "device"), ("nccl", 2, "host"), ("nccl", 1, "files")),
    *(("staging", 2, "device"), ("staging", 1, "host"), ("staging", 2, "files")),
)
TRAININGS = [
    pytest.param(*case, marks=() if case in OF_EACH_PAIR else pytest.mark.long)
    for case in itertools.product(("nccl", "staging"), STAGES, KINDS)
]


@pytest.mark.parametrize(("device", "stage", "kind"), TRAININGS, indirect=["device"])
def test_the_training_is_that_of_synchronous(device, stage, kind, tmp_path):
    strategy = mpisgd.Sharded(stage, offload=offload(kind, tmp_path))
    check_same_bits(plain_step, strategy, tol=1e-12, optimizer=adam)


def clipped(run: Run, step: int) -> None:
    run.opt.zero_grad()
    run.backward(step)
    run.opt.clip_grad_norm_(0.1)
    run.opt.step()


def accumulated(run: Run, step: int) -> None:
    run.opt.zero_grad()
    with run.no_sync():
        run.backward(step, 0)
    run.backward(step, 1)
    run.opt.step()


def with_closure(run: Run, step: int) -> None:
    def closure() -> Any:
        run.opt.zero_grad()
        return run.backward(step).detach()

    run.opt.step(closure)


def scaled(run: Run, step: int) -> None:
    """One rank has infinities in one step, which all skip."""
    scaler = run.memory.setdefault("scaler", torch.amp.GradScaler(DEVICE, init_scale=8.0))
    run.opt.zero_grad()
    loss = run.loss(step)
    scaler.scale(loss * float("inf") if step == 2 and mpisgd.rank() == 0 else loss).backward()
    scaler.step(run.opt)
    scaler.update()


@BY_HOST
@pytest.mark.parametrize(
    ("body", "stage", "kind"),
    [
        # A closure's steps differ in who calls backward; test_training.py clips, too.
        pytest.param(clipped, 1, "device", marks=pytest.mark.long),
        (clipped, 2, "host"),
        (with_closure, 1, "device"),
        pytest.param(with_closure, 2, "host", marks=pytest.mark.long),
        (accumulated, 1, "device"),
        (accumulated, 2, "host"),
        (scaled, 1, "device"),
        (scaled, 2, "host"),
    ],
)
def test_steps_of_all_kinds(device, stage, kind, body):
    check_same_bits(body, mpisgd.Sharded(stage, offload=offload(kind, None)), tol=1e-12, optimizer=adam)


@BY_HOST
@pytest.mark.parametrize(("stage", "kind"), [(1, "host"), (2, "device")])
def test_missing_gradients_and_frozen_parameters(device, stage, kind):
    strategy = mpisgd.Sharded(stage, offload=offload(kind, None))
    check_same_bits(
        plain_step, strategy, tol=1e-12, model=Branches, loss=branched, by_rank=True, optimizer=adam
    )


class Table(nn.Module):
    """Sparse gradients and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(num, 2, sparse=True) for num in (10, 7))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        at = (inputs * 1e6).long()
        first, second = (table(at % table.num_embeddings).mean(1) for table in self.tables)
        return first * torch.tanh(second)


@BY_NCCL
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own optimizers make such tensors
def test_sparse_gradients(device, stage):
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(model.parameters(), lr=0.02)

    def body(run: Run, step: int) -> None:
        run.model.zero_grad()
        run.backward(step)
        run.opt.step()

    check_same_bits(body, mpisgd.Sharded(stage), tol=1e-12, model=Table, optimizer=optimizer)


@BY_NCCL
@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_of_whole_parameters(device, stage, monkeypatch):
    monkeypatch.setattr(device_parts, "SMALL", 0)  # what one rank has most of travels by itself
    check_same_bits(plain_step, mpisgd.Sharded(stage), tol=1e-10, optimizer=OPTIMIZERS["a user's"][1])


@pytest.mark.parametrize(
    ("device", "stage", "kind"),
    [
        ("nccl", 1, "device"),
        ("staging", 2, "host"),
        pytest.param("nccl", 2, "host", marks=pytest.mark.long),
        pytest.param("staging", 1, "device", marks=pytest.mark.long),
    ],
    indirect=["device"],
)
def test_parameters_arrive_during_the_next_forward(device, stage, kind):
    strategy = mpisgd.Sharded(stage, overlap_forward=True, offload=offload(kind, None))

    def body(run: Run, step: int) -> None:
        plain_step(run, step)
        run.opt.synchronizer.wait() if run.opt.strategy == strategy else None

    check_same_bits(body, strategy, tol=1e-12, optimizer=adam, bucket_cap_bytes=1)


class Mixed(nn.Module):
    """Two dtypes, of which gradients and parameters travel apart."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(FEATURES, 7).float(), nn.Linear(7, 2).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(inputs.float()).double())


@BY_HOST
@pytest.mark.parametrize(("stage", "kind"), [(1, "host"), (2, "device")])
def test_several_dtypes(device, stage, kind):
    strategy = mpisgd.Sharded(stage, offload=offload(kind, None))
    check_same_bits(plain_step, strategy, tol=1e-6, model=Mixed, double=False, optimizer=adam)


def half_step(run: Run, step: int) -> None:
    run.opt.zero_grad()
    inputs, targets = (share(t, run.rank, run.size).to(torch.bfloat16) for t in batch(step))
    nn.functional.mse_loss(run.model(inputs).float(), targets.float()).backward()
    run.opt.step()


@BY_HOST
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_in_bfloat16_has_a_float32_master_on_the_host(device, stage):
    """The state is that of the same training with its masters where the parameters are."""
    how = {"model": lambda: mlp().to(torch.bfloat16), "double": False, "optimizer": adam}
    kinds = [mpisgd.Sharded(stage, master_dtype=torch.float32, offload=o) for o in (None, mpisgd.Offload())]
    runs = [pair(strategy=strategy, **how)[1] for strategy in kinds]
    for step in range(STEPS):
        for run in runs:
            half_step(run, step)
    everyone(digest(runs[0].model.parameters()) == digest(runs[1].model.parameters()))
    states = [run.opt.state_dict()["state"] for run in runs]
    everyone(
        "master" in states[1][0] and torch.equal(states[0][0]["master"].cpu(), states[1][0]["master"].cpu())
    )


@BY_HOST
@pytest.mark.parametrize("kind", KINDS)
def test_the_state_goes_to_another_run_and_back(device, kind, tmp_path):
    """From steps with an offload to some without it, and back to an offload."""
    strategies = [mpisgd.Sharded(2, offload=offload(kind, tmp_path)), mpisgd.Synchronous()]
    runs = [pair(strategy=strategies[0], optimizer=adam)[1], pair(strategy=strategies[1], optimizer=adam)[1]]
    for step in range(6):
        if step % 2:
            runs.reverse()
            runs[0].model.load_state_dict(copy.deepcopy(runs[1].model.state_dict()))
            runs[0].opt.load_state_dict(copy.deepcopy(runs[1].opt.state_dict()))
        plain_step(runs[0], step)
    plain = pair(strategy=mpisgd.Synchronous(), optimizer=adam)[1]
    for step in range(6):
        plain_step(plain, step)
    everyone(*_are_close(list(runs[0].model.parameters()), list(plain.model.parameters()), tol=1e-12))


@BY_HOST
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_on_the_host_is_never_mixed_with_what_is_on_the_device(device, stage, kind, tmp_path):
    model = mlp().double().to(DEVICE)
    mpisgd.broadcast_parameters(model)
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.Adam(model.parameters()),
        strategy=mpisgd.Sharded(stage, offload=offload(kind, tmp_path)),
    )
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)[0]).sum().backward()
        if step == 1:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        states = optimizer.state_dict()["state"]
        gathered = kind != "device" or mpisgd.size() > 1
        everyone(not (gathered and any(t.device.type == DEVICE for e in states.values() for t in e.values())))
        if step == 1:
            optimizer.load_shard_state_dicts(referee().allgather(optimizer.shard_state_dict()))
    kept = [piece.tensor.device.type == DEVICE for piece in optimizer.synchronizer._parameters.pieces]
    everyone(set(kept) <= {kind == "device"}, f"{kept}")


# -- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "strategy", "named"),
    [
        (mlp, mpisgd.Sharded(offload=mpisgd.Offload()), "host memory"),
        (lambda: mlp().to(DEVICE), mpisgd.Sharded(offload=mpisgd.Offload()), "capturable"),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device=DEVICE)),
            mpisgd.Sharded(),
            "one device",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(device, make, strategy, named):
    options = {"capturable": True} if named == "capturable" else {}
    with raises_everywhere(mpisgd.MpisgdError) as caught:
        optimizer = torch.optim.Adam(make().parameters(), **options)
        mpisgd.DistributedOptimizer(optimizer, strategy=strategy)
    everyone(named in caught.text, caught.text)
