"""`--pipeline`: the layers in stages that `mpisgd.pipeline` trains, by a schedule that torch has not.

    gpipe, 1f1b       the gradients of no pipeline: all ranks wait for the end of a step
    pipedream, 2bw    nobody waits, and gradients are those of older weights: a curve of its own

Where steps overlap, a checkpoint holds the weights of a pipeline that has been emptied before.
"""

import functools
from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

import mpisgd
from mpisgd.pipeline import Pipeline
from training.layout import Layout
from training.parallelize import keep_stage
from training.text_model import GPT, mean_loss
from training.training_pass import Pass

__all__ = ["ScheduleName", "Scheduled"]


class ScheduleName(str, Enum):
    """What --pipeline takes."""

    gpipe = "gpipe"
    one_forward_one_backward = "1f1b"
    pipedream = "pipedream"
    double_buffered = "2bw"


# What mpisgd calls otherwise.
NAMES = {ScheduleName.double_buffered: "pipedream-2bw"}


class Scheduled(Pass):
    """This rank has one stage; each of the dp ranks of a stage has some of the micro-batches.

    Args:
        whole: the model, of which this rank's stage is left.
        layout: ranks along pp and dp.
        schedule: what they do when.
        num_micro_batches: of each rank and step.
        make_optimizer: makes that of the parameters of a stage.
        recompute: whether activations are computed again in backward.

    Attributes:
        model: the stage.
        optimizer: of the stage.
    """

    updates = True

    def __init__(
        self,
        whole: GPT,
        layout: Layout,
        schedule: ScheduleName,
        num_micro_batches: int,
        make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        *,
        recompute: bool,
    ) -> None:
        try:
            self._pipeline = Pipeline(
                [functools.partial(stage_of, whole, stage, layout.pp) for stage in range(layout.pp)],
                schedule=NAMES.get(schedule, schedule.value),
                num_micro_batches=num_micro_batches * layout.dp,
                loss=mean_loss,
                optimizer=make_optimizer,
                replicas=layout.dp,
                checkpoint=recompute,
            )
        except mpisgd.InvalidArgument as error:  # alike on all ranks
            raise mpisgd.JobError(f"--pipeline {schedule.value}: {error}") from error
        (self.model,) = self._pipeline.stages.values()
        (self.optimizer,) = self._pipeline.optimizers.values()
        self.logits_rank = self._pipeline.shape.ranks[-1][0]

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Forward, backward and update, as far as the schedule is; the mean loss on the last stage."""
        loss = self._pipeline.step(inputs, targets)
        return None if loss is None else torch.tensor(loss)

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Forward alone, of [1, context] bytes; on `logits_rank`."""
        return self._pipeline.forward(tokens)

    def flush(self) -> None:
        """Do what is left of the last steps."""
        self._pipeline.flush()

    def close(self) -> None:
        """Free what the ranks communicate through."""
        self._pipeline.close()


def stage_of(whole: GPT, stage: int, num_stages: int) -> GPT:
    """Keep the layers of one stage, and return what is left."""
    keep_stage(whole, stage, num_stages)
    return whole
