"""Training on a GPU equals one process on the joined batch, computed on the same GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpu_under_test import DEVICE
from torch import Tensor, nn
from verdicts import referee

import mpisgd
from mpisgd import Compression

STEPS = 8
BATCH = 12


def mlp() -> nn.Module:
    torch.manual_seed(5)
    layers = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 2))
    return layers.double().to(DEVICE)


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 4, generator=draw, dtype=torch.float64)
    return inputs.to(DEVICE), torch.randn(BATCH, 2, generator=draw, dtype=torch.float64).to(DEVICE)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, share: Callable[[Tensor], Tensor]) -> None:
    for step in range(STEPS):
        inputs, targets = map(share, batch(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def mine(tensor: Tensor) -> Tensor:
    return tensor.chunk(mpisgd.size())[mpisgd.rank()]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def assert_equal_models(model: nn.Module, alone: nn.Module, tol: float = 1e-11) -> None:
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def one_process() -> nn.Module:
    model = mlp()
    train(model, sgd(model), lambda tensor: tensor)
    return model


@pytest.mark.parametrize(
    ("overlap", "cap"),
    [
        (False, 2**20),
        (True, 2**20),
        (True, 2**10),
        (None, 2**10),
        pytest.param(False, 2**10, marks=pytest.mark.long),
        pytest.param(None, 2**20, marks=pytest.mark.long),
    ],
)
def test_distributed_optimizer(overlap, cap):
    model = mlp()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(mpisgd.rank())
    mpisgd.broadcast_parameters(model)
    optimizer = mpisgd.DistributedOptimizer(sgd(model), overlap=overlap, bucket_cap_bytes=cap)
    train(model, optimizer, mine)
    assert_equal_models(model, one_process())


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        # The others are trained in test_sharded_gpu.py.
        (1, "device"),
        (2, "host"),
        (2, "files"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in [(2, "device"), (1, "host"), (1, "files")]),
    ],
)
def test_sharded(stage, kind, tmp_path_factory):
    """With its state on the device, in host memory, in files; clipped, and through a state_dict."""
    folder = Path(referee().bcast(str(tmp_path_factory.mktemp("state"))))
    offload = {"device": None, "host": mpisgd.Offload(), "files": mpisgd.Offload(folder)}[kind]
    model, alone = mlp(), one_process()
    strategy = mpisgd.Sharded(stage, offload=offload)
    optimizer = mpisgd.DistributedOptimizer(sgd(model), strategy=strategy, bucket_cap_bytes=2**18)
    train(model, optimizer, mine)
    assert_equal_models(model, alone)
    state = optimizer.state_dict()
    assert not any(
        entries["momentum_buffer"].device.type == DEVICE for entries in state["state"].values() if offload
    )
    optimizer.load_state_dict(state)
    optimizer.zero_grad()
    model(mine(batch(0)[0])).sum().backward()
    assert optimizer.clip_grad_norm_(0.1) > 0
    optimizer.step()


def test_compression():
    model = mlp()
    optimizer = mpisgd.DistributedOptimizer(sgd(model), compression=Compression.bf16)
    train(model, optimizer, mine)
    assert_equal_models(model, one_process(), tol=0.05)


def test_reentrant_checkpoints():
    """Backward inside backward, on a thread of the engine's: it must be noticed there, too."""
    from torch.utils.checkpoint import checkpoint

    model = mlp()
    optimizer = mpisgd.DistributedOptimizer(sgd(model))
    for step in range(STEPS):
        inputs, targets = map(mine, batch(step))
        optimizer.zero_grad()
        hidden = model[:2](inputs)
        hidden = checkpoint(model[2:4], hidden, use_reentrant=True)
        nn.functional.mse_loss(model[4](hidden), targets).backward()
        optimizer.step()
    assert_equal_models(model, one_process())


def test_gradients_averaged_by_hand():
    model = mlp()
    optimizer = sgd(model)
    for step in range(STEPS):
        inputs, targets = map(mine, batch(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        mpisgd.average_gradients(model)
        optimizer.step()
    assert_equal_models(model, one_process())


def test_optimizer_state():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    if mpisgd.rank() == 0:
        model(batch(0)[0]).sum().backward()
        optimizer.step()
    mpisgd.broadcast_optimizer_state(optimizer)
    momenta = [state["exp_avg"] for state in optimizer.state.values()]
    assert len(momenta) == 6
    for momentum in momenta:
        everyones = torch.empty(mpisgd.size(), *momentum.shape, dtype=momentum.dtype, device=DEVICE)
        mpisgd.all_gather_into_tensor(everyones, momentum)
        assert (everyones == everyones[0]).all()


def test_sync_batch_norm():
    torch.manual_seed(7)
    inputs = torch.randn(BATCH, 3, 5, 5).to(DEVICE)
    alone, ours = nn.BatchNorm2d(3).to(DEVICE), mpisgd.SyncBatchNorm(3).to(DEVICE)
    wanted = alone(inputs)
    torch.testing.assert_close(ours(mine(inputs)), mine(wanted), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.running_var, alone.running_var, rtol=1e-5, atol=1e-5)


def test_ddp():
    """torch's own data parallel training, on our backend."""
    dist.init_process_group("mpisgd")
    try:
        model = mlp()
        parallel = nn.parallel.DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.001)
        train(parallel, sgd(parallel), mine)
        assert_equal_models(parallel.module, one_process())
    finally:
        dist.destroy_process_group()
