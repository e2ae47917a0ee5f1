"""Checkpoints of `train.py`: written in the background, loadable at any step and number of ranks."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

import mpisgd
from mpisgd import checkpoint
from training.ranks import or_job_error
from training.records import Epoch, check_identity


class Training(Protocol):
    """What is trained, and how it went so far."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    batches: DataLoader[Any]
    step: int
    history: list[Epoch]
    total_and_count: Tensor


class Checkpointer:
    """Writes checkpoints in the background, and one more at a preemption.

    Args:
        folder: of the last three checkpoints.
        every: steps between them, besides those at the end of each epoch; 0: none.
        identity: of the run.
        training: to save.
    """

    def __init__(self, folder: Path, every: int, identity: dict[str, Any], training: Training) -> None:
        with or_job_error():
            self.writer = checkpoint.Writer(folder, keep_last=3)
        self.preemption = checkpoint.on_preemption()
        self.every, self.identity, self.training = every, identity, training

    def save(self) -> None:
        """Write all that `resume_from` needs."""
        so_far = self.training.total_and_count.clone()
        mpisgd.all_reduce(so_far)
        with or_job_error():
            self.writer.save(
                self.training.step,
                **objects_of(self.training),
                identity=self.identity,
                history=[asdict(epoch) for epoch in self.training.history],
                so_far=so_far,
            )

    def after_step(self) -> None:
        """Save if a checkpoint is due; save and end at a preemption."""
        if self.preemption.agreed():
            self.save()
            self.finish()
            self.preemption.exit()
        if self.every and self.training.step % self.every == 0:
            self.save()

    def finish(self) -> None:
        """Return when all is on the disk."""
        with or_job_error():
            self.writer.wait()


def objects_of(training: Training) -> dict[str, Any]:
    """What has a state of its own."""
    return {
        "model": training.model,
        "optimizer": training.optimizer,
        "scheduler": training.scheduler,
        "order": training.batches.sampler,
    }


def resume_from(folder: Path, training: Training, identity: dict[str, Any]) -> bool:
    """Go on from the newest checkpoint, of any number of ranks; whether there is one."""
    with or_job_error():
        newest = checkpoint.latest(folder)
        if newest is None:
            return False
        saved = checkpoint.load(newest, rng=False)
        check_identity(newest, saved.get("identity"), identity)
        checkpoint.load(newest, **objects_of(training))
    training.step = saved.step
    training.history = [Epoch(**epoch) for epoch in saved["history"]]
    if mpisgd.rank() == 0:  # the sum over all ranks, which one of them goes on with
        training.total_and_count += saved["so_far"]
    return True
