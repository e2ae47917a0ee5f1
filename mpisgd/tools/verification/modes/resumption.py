"""Training that goes on elsewhere: from what was saved, in memory or in files, and with other ranks."""

import copy
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mpisgd
from mpisgd import checkpoint
from mpisgd.core.group import Group
from mpisgd.tools.verification.mode import Mode
from mpisgd.tools.verification.modes.synchronous import adam, distributed, equal_to_one_process, sgd
from mpisgd.tools.verification.problem import flat_parameters
from mpisgd.tools.verification.sabotage import Sabotage
from mpisgd.tools.verification.trainer import Trainer
from mpisgd.tools.verification.trajectories import MakeOptimizer

__all__ = ["RESUMPTION"]

FAMILY = "saved, and with other ranks"


def resumed(trainer: Trainer) -> Tensor:
    """Train the first half, save, and train the rest with a new model and optimizer from what was saved."""
    half = _half(trainer)
    model, optimizer = distributed(trainer, adam)
    rows = trainer.train(model, optimizer, last=half)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model, optimizer = distributed(trainer, adam)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return torch.stack([*rows, *trainer.train(model, optimizer, first=half)])


def fewer_ranks(trainer: Trainer) -> Tensor:
    """Train the second half without the last rank, as after its loss; it watches."""
    half, others = _half(trainer), trainer.smaller_group()
    model, optimizer = distributed(trainer, sgd)
    rows = trainer.train(model, optimizer, last=half)
    if others is not None:
        optimizer.rebuild(others)
    return torch.stack([*rows, *_train_without_last(trainer, model, optimizer, others, half, None)])


def from_files(*, fewer: bool) -> Callable[[Trainer], Tensor]:
    """Return the training that is saved in files, and loaded by a rank fewer, or by a rank more."""

    def train(trainer: Trainer) -> Tensor:
        half, everyone, others = _half(trainer), trainer.group(), trainer.smaller_group()
        folder = Path(mpisgd.broadcast_object(tempfile.mkdtemp() if mpisgd.rank() == 0 else ""))
        rows = []
        for begin, end, without_last in ((0, half, not fewer), (half, None, fewer)):
            group = others if without_last else everyone
            model = trainer.problem.model()
            made = adam(list(model.parameters()))
            takes_part = group is not None or not without_last
            optimizer = mpisgd.DistributedOptimizer(made, group=group) if takes_part else made
            if begin and takes_part:
                checkpoint.load(folder, group=group, model=model, optimizer=optimizer)
            if without_last:
                rows += _train_without_last(trainer, model, optimizer, group, begin, end)
            else:
                rows += trainer.train(model, optimizer, first=begin, last=end)
            if not begin and takes_part and (group is None or 0 in group.ranks):
                checkpoint.save(folder, half, group=group, model=model, optimizer=optimizer)
            mpisgd.barrier()
        if mpisgd.rank() == 0:
            shutil.rmtree(folder)
        return torch.stack(rows)

    return train


def _half(trainer: Trainer) -> int:
    return max(1, trainer.problem.steps // 2)


def _train_without_last(
    trainer: Trainer,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    others: Group | None,
    first: int,
    last: int | None,
) -> list[Tensor]:
    """Train some steps by all ranks but the last, which sees what rank 0 has; return the parameters."""
    rows = []
    for step in range(first, trainer.problem.steps if last is None else last):
        if others is not None:
            trainer.step(step, model, optimizer, size=trainer.problem.size - 1)
        mine = flat_parameters(model)
        seen = mine.clone()
        mpisgd.broadcast(seen, 0)
        rows.append(seen if others is None else mine)
    return rows


def after_a_loss(trainer: Trainer) -> Tensor:
    """Train with `mpisgd.elastic`; the last rank is killed in the middle, between forward and backward."""
    problem, model = trainer.problem, trainer.problem.model()
    rows: list[Tensor] = []
    alone = trainer.sabotage is Sabotage.NO_COMMUNICATION
    made = sgd(list(model.parameters()))
    optimizer = made if alone else mpisgd.DistributedOptimizer(made, model.named_parameters())

    @mpisgd.elastic.run
    def train(state: mpisgd.elastic.State) -> None:
        while state.step < problem.steps:
            is_last = mpisgd.rank() == problem.size - 1
            if is_last and state.step == _half(trainer):
                os.kill(os.getpid(), signal.SIGKILL)
            trainer.step(state.step, model, optimizer, rank=mpisgd.rank(), size=mpisgd.size())
            rows[state.step :] = [flat_parameters(model)]
            state.step += 1
            state.commit()

    train(mpisgd.elastic.State(model=model, optimizer=optimizer, step=0))
    return torch.stack(rows)


def _mode(
    name: str, train: Callable[[Trainer], Tensor], make: MakeOptimizer, *, least: int = 2, **options: Any
) -> Mode:
    return Mode(name, FAMILY, train, equal_to_one_process(make), sizes=(least, 2**31), **options)


RESUMPTION = (
    _mode("saved and resumed in memory", resumed, adam, least=1, quick=False),
    _mode("checkpoint, resumed by one rank fewer", from_files(fewer=True), adam),
    _mode("checkpoint, resumed by one rank more", from_files(fewer=False), adam),
    _mode("one rank fewer from the middle on", fewer_ranks, sgd),
    _mode("elastic.run, a rank is killed", after_a_loss, sgd, loses_rank=True),
)
