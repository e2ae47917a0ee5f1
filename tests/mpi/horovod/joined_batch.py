"""A run of `hvd.DistributedOptimizer` on N ranks equals the run of one process on the joined batch.

Every rank computes both. A test gives one step as a function of a `Run`, which is called for the plain model
with everyone's data and for the distributed one with this rank's; parameters are compared after every step.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from verdicts import everyone, same_on_all_ranks

import mpisgd.horovod as hvd

STEPS, BATCH, FEATURES = 4, 12, 4  # 1, 2, 3 and 4 ranks divide the batch
TOLERANCE = 1e-12


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.Tanh(), nn.Linear(3, 2)
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def inputs_of(step: int, micro: int = 0) -> Tensor:
    """The joined batch of one pass."""
    draw = torch.Generator().manual_seed(7919 * step + 104729 * micro + 1)
    return torch.randn(BATCH, FEATURES, generator=draw, dtype=torch.float64)


Loss = Callable[[nn.Module, Tensor, int, int], "Tensor | None"]


def square(model: nn.Module, inputs: Tensor, rank: int, step: int) -> Tensor:
    """The loss of one rank's rows."""
    return (model(inputs) - inputs[:, :2].sin()).square().mean()


class Run:
    """One of the two runs.

    Attributes:
        distributed: which.
        factor: what the plain run's loss is multiplied by: the number of ranks where gradients are summed.
        memory: for whatever a test wants to keep.
    """

    def __init__(self, model: nn.Module, opt: Any, distributed: bool, loss: Loss, factor: float) -> None:
        self.model, self.opt, self.distributed = model, opt, distributed
        self.factor, self.memory = factor, {}
        self._loss = loss

    def loss(self, step: int, micro: int = 0) -> Tensor | None:
        """This rank's loss, or the mean of all ranks'."""
        pieces = inputs_of(step, micro).chunk(hvd.size())
        if self.distributed:
            return self._loss(self.model, pieces[hvd.rank()], hvd.rank(), step)
        losses = [self._loss(self.model, piece, rank, step) for rank, piece in enumerate(pieces)]
        exist = [loss for loss in losses if loss is not None]
        return torch.stack(exist).sum() * (self.factor / hvd.size()) if exist else None

    def backward(self, step: int, micro: int = 0) -> None:
        if (loss := self.loss(step, micro)) is not None:
            loss.backward()


def plain_step(run: Run, step: int) -> None:
    run.opt.zero_grad()
    run.backward(step)
    run.opt.step()


def pair(
    *,
    model: Callable[[], nn.Module] = mlp,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    loss: Loss = square,
    factor: float = 1.0,
    arguments: Callable[[nn.Module], dict[str, Any]] = lambda model: {},
    **options: Any,
) -> tuple[Run, Run]:
    """Return (the run of one process, the distributed one), equal at the start.

    Args:
        model, optimizer, loss, factor: see `Run`.
        arguments: those of DistributedOptimizer that depend on the model.
        options: its others.
    """
    torch.manual_seed(5)
    plain = model().double()
    ours = copy.deepcopy(plain)
    options = {"named_parameters": ours.named_parameters(), **options, **arguments(ours)}
    wrapped = hvd.DistributedOptimizer(optimizer(ours), **options)
    return Run(plain, optimizer(plain), False, loss, factor), Run(ours, wrapped, True, loss, factor)


def check(body: Callable[[Run, int], None] = plain_step, *, tolerance: float = TOLERANCE, **how: Any) -> Run:
    """Run `body` both ways, compare after each step, and return the distributed run."""
    plain, ours = pair(**how)
    for step in range(STEPS):
        body(plain, step)
        body(ours, step)
        compare(plain, ours, f"step {step}", tolerance)
    return ours


def compare(plain: Run, ours: Run, when: str, tolerance: float = TOLERANCE) -> None:
    """Fail on all ranks unless the runs are near each other and all ranks have the same bits."""
    pairs = zip(plain.model.named_parameters(), ours.model.parameters(), strict=True)
    off = {name: (a - b).abs().max().item() if a.numel() else 0.0 for (name, a), b in pairs}
    worst = max(off, key=lambda name: off[name])
    everyone(off[worst] <= tolerance, f"{when}: {worst} is off by {off[worst]:.3g}")
    same_on_all_ranks(digest(ours.model.parameters()))


def digest(tensors: Iterable[Tensor]) -> str:
    """A hash of the bits of real tensors."""
    told = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        told.update(tensor.detach().contiguous().numpy().tobytes())
    return told.hexdigest()
