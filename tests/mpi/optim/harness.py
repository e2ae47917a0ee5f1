"""The test of everything: a run on N ranks equals the run of one process on the joined batch.

Every rank computes both. A test describes one step as a function of a `Run`, which is called for the plain
model and optimizer with everyone's data and for the distributed ones with this rank's; after each step all
parameters are compared, and all ranks must have the same bits.

    body(plain, step)  body(ours, step)  compare      body(plain, step + 1) ...
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from verdicts import everyone, referee

import mpisgd
from mpisgd.gradients import bucket_plan
from mpisgd.sharding import divided_parameters

STEPS = 20 if "MPISGD_TEST_LONG" in os.environ else 10  # scripts/test --long sets it
BATCH = 12  # 1, 2, 3 and 4 ranks divide it
FEATURES = 4
DEVICE = "cpu"  # tests/gpu sets another one

# What mere order of summation makes of 20 steps in float64 (see DESIGN.md).
SGD_DRIFT, ADAM_DRIFT, RMSPROP_DRIFT, ADAGRAD_DRIFT, LBFGS_DRIFT = 1e-11, 1e-10, 1e-9, 1e-7, 1e-6

Loss = Callable[[nn.Module, Tensor, Tensor, int, int], Tensor | None]


def mlp() -> nn.Module:
    """A small smooth model."""
    return nn.Sequential(
        nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.Tanh(), nn.Linear(3, 2)
    )


def batch(step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    """The joined batch of one pass: differs by step and pass, by row and by element."""
    draw = torch.Generator().manual_seed(7919 * step + 104729 * micro + 1)
    inputs = torch.randn(BATCH, FEATURES, generator=draw, dtype=torch.float64)
    return inputs.to(DEVICE), torch.randn(BATCH, 2, generator=draw, dtype=torch.float64).to(DEVICE)


def share(tensor: Tensor, rank: int, size: int) -> Tensor:
    """The rows of one rank."""
    return tensor.chunk(size)[rank]


def mse(model: nn.Module, inputs: Tensor, targets: Tensor, rank: int = 0, step: int = 0) -> Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


class Run:
    """One of the two runs that are compared.

    Attributes:
        model, opt: the plain ones or the distributed ones.
        distributed: which of the two.
        rank, size: the share of the data that this run trains on: all of it, or that of one rank.
        memory: for whatever the body wants to keep.
    """

    def __init__(
        self, model: nn.Module, opt: torch.optim.Optimizer, loss: Loss, distributed: bool, by_rank: bool
    ) -> None:
        self.model, self.opt, self.distributed = model, opt, distributed
        self.rank, self.size = mpisgd.rank(), mpisgd.size()
        self.memory: dict[str, Any] = {}
        self.op_sum = False
        self._loss, self._by_rank = loss, by_rank

    def loss_of(self, rank: int, step: int, micro: int = 0) -> Tensor | None:
        """The loss of one rank's rows."""
        inputs, targets = (share(tensor, rank, self.size) for tensor in batch(step, micro))
        return self._loss(self.model, inputs, targets, rank, step)

    def loss(self, step: int, micro: int = 0) -> Tensor | None:
        """This rank's loss, or that of the joined batch."""
        if self.distributed:
            return self.loss_of(self.rank, step, micro)
        if not self._by_rank:
            return self._loss(self.model, *batch(step, micro), 0, step)
        losses = [self.loss_of(rank, step, micro) for rank in range(self.size)]
        exist = [loss for loss in losses if loss is not None]
        if not exist:
            return None
        return torch.stack(exist).sum() / (1 if self.op_sum else self.size)

    def backward(self, step: int, micro: int = 0) -> Tensor | None:
        loss = self.loss(step, micro)
        if loss is not None:
            loss.backward()
        return loss

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.opt.no_sync() if self.distributed else contextlib.nullcontext()

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients and return their norm; where they are divided, by the optimizer's own method."""
        if self.distributed:
            return self.opt.clip_grad_norm_(max_norm, norm_type)
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)

    def synchronize(self) -> None:
        if self.distributed:
            self.opt.synchronize()


Comparison = tuple[str, float, str]
Body = Callable[[Run, int], Any]


def plain_step(run: Run, step: int) -> None:
    run.opt.zero_grad()
    run.backward(step)
    run.opt.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.01)


def let_some_travel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have gradients of more than five numbers travel alone, as those of a large model do."""
    for module in (bucket_plan, divided_parameters):
        monkeypatch.setattr(module, "ALONE_BYTES", 5 * torch.float64.itemsize)


def pair(
    *,
    model: Callable[[], nn.Module] = mlp,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    loss: Loss = mse,
    by_rank: bool = False,
    double: bool = True,
    prepare: Callable[[nn.Module], nn.Module] | None = None,
    **options: Any,
) -> tuple[Run, Run]:
    """Return (the run of one process, the distributed one), equal at the start.

    Args:
        model, optimizer: make them; the models of the ranks begin differently and are made equal.
        loss: of one rank's rows, None where the rank has none.
        by_rank: the ranks do different things, so the joined loss is the mean of theirs.
        double: turn the models into float64.
        prepare: what is done to the model before the optimizer is made, compiling for instance.
        options: of DistributedOptimizer.
    """
    runs = []
    for distributed in (False, True):
        # torch.manual_seed would write down the stack for each kind of GPU, too.
        torch.default_generator.manual_seed(100 + (mpisgd.rank() if distributed else 0))
        net = model().to(DEVICE)
        net = net.double() if double else net
        net = net if prepare is None else prepare(net)
        opt = optimizer(net)
        if distributed:
            mpisgd.broadcast_parameters(net)
            options.setdefault("named_parameters", net.named_parameters())
            opt = mpisgd.DistributedOptimizer(opt, **options)
        runs.append(Run(net, opt, loss, distributed, by_rank))
        runs[-1].op_sum = options.get("op") is mpisgd.ReduceOp.SUM
    return runs[0], runs[1]


def shared_pair(**how: Any) -> tuple[Run, Run]:
    """As `pair`; the ranks of a host have one copy of the parameters."""
    return pair(share_parameters=True, **how)


def check_equal_runs(
    body: Body = plain_step, *, tol: float = SGD_DRIFT, steps: int = STEPS, **how: Any
) -> tuple[Run, Run]:
    """Run `body` both ways and compare after each step; `how`: see `pair`. Return both runs."""
    plain, ours = pair(**how)
    seen = []
    for step in range(steps):
        body(plain, step)
        body(ours, step)
        seen.append(compare(plain, ours))
    judge(seen, tol)
    return plain, ours


def check_scaler(clips: bool, **how: Any) -> None:
    """Compare runs with a GradScaler, where one rank has infinities at some steps; `how`: see `pair`."""

    def body(run: Run, step: int) -> None:
        scaler = run.memory.setdefault(
            "scaler", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        )
        run.opt.zero_grad()
        loss = run.loss(step)
        if step % 4 == 2 and (not run.distributed or mpisgd.rank() == mpisgd.size() - 1):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(run.opt)
            run.clip(0.1)
        scaler.step(run.opt)
        scaler.update()
        run.memory.setdefault("scales", []).append(scaler.get_scale())

    plain, ours = check_equal_runs(body, **how)
    everyone(ours.memory["scales"] == plain.memory["scales"], f"{ours.memory['scales']}")
    everyone(len(set(ours.memory["scales"])) > 1, "no step was skipped")


def compare(plain: Run, ours: Run) -> Comparison:
    """Return (the bits of this rank's parameters, the largest difference to the plain ones, whose it is)."""
    off, name = max(
        (drift(a, b), name)
        for (name, a), b in zip(plain.model.named_parameters(), ours.model.parameters(), strict=True)
    )
    return digest(ours.model.parameters()), off, name


def judge(seen: list[Comparison], tol: float) -> None:
    """Fail on all ranks unless at every step the runs were equal and all ranks had the same bits."""
    for step, views in enumerate(zip(*referee().allgather(seen), strict=True)):
        if len({bits for bits, _, _ in views}) > 1:
            pytest.fail(f"step {step}: the ranks have different bits")
        _, off, name = max(views, key=lambda view: view[1])
        if off > tol:
            pytest.fail(f"step {step}: {name} is off by {off:.3g}, tolerated {tol:.3g}")


def drift(a: Tensor, b: Tensor) -> float:
    """The largest difference; inf where one of them is not finite."""
    if a.numel() == 0:
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    difference = (a.detach().to(wide) - b.detach().to(wide)).abs().max().item()
    return difference if difference == difference else float("inf")


def digest(tensors: Iterable[Tensor | None]) -> str:
    """A hash of the bits of tensors, None and sparse ones included."""
    told = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        if tensor is None:
            told.update(b"none")
            continue
        parts = [tensor.detach()]
        if tensor.is_sparse:
            parts = [tensor.coalesce().indices(), tensor.coalesce().values()]
        for part in parts:
            told.update(f"{part.dtype}{list(part.shape)}".encode())
            told.update(part.contiguous().view(-1).view(torch.uint8).cpu().numpy())
    return told.hexdigest()


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [param.grad for param in model.parameters()]
