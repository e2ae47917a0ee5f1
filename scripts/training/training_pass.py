"""Forward and backward of a batch in micro-batches: sequential, in a pipeline, or over divided tensors.

Both of torch's accumulate the gradients of the mean loss of the micro-batches and return the sum of their
losses. mpisgd's own divide the model in ways that torch has not:

`--pipeline`: the layers in stages that `mpisgd.pipeline` trains, by a schedule.

    gpipe, 1f1b       the gradients of no pipeline: all ranks wait for the end of a step
    pipedream, 2bw    nobody waits, and gradients are those of older weights: a curve of its own

Where steps overlap, a checkpoint holds the weights of a pipeline that has been emptied before.

`--layout "batch:dp; hidden:tp"`: the model's tensors divided by the names of their dimensions. NAMES is all
that `mpisgd.layout` must know of the model. A rule names one of them:

    batch     sequences             heads     columns of attention's projections
    length    positions             hidden    columns between the two feed-forward layers
    model     the residual stream   vocab     the 256 bytes
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor

import mpisgd
from mpisgd.pipeline import Pipeline
from training.layout import Layout
from training.parallelize import keep_stage, reduces_gradients
from training.text_model import GPT, mean_loss


class Pass:
    """What a step does with a batch.

    Attributes:
        updates: whether `backward` updates the parameters, too.
        logits_rank: the rank that has what `logits` returns.
    """

    updates = False
    logits_rank = -1  # the last

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Forward and backward; the mean loss, None on ranks that do not see it."""
        raise NotImplementedError

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Forward alone, of [1, context] bytes."""
        raise NotImplementedError

    def flush(self) -> None:
        """Let no part of a step be left to do. Collective."""

    def close(self) -> None:
        """Let go of what is no use any more. Collective."""


class Whole(Pass):
    """Every rank has all layers (or a part of each); micro-batches bound the memory of activations."""

    def __init__(self, model: nn.Module, num_micro_batches: int) -> None:
        self.model = model
        self.num_micro_batches = num_micro_batches

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward; the mean loss."""
        total = torch.zeros(())
        micro_batches = zip(
            inputs.chunk(self.num_micro_batches), targets.chunk(self.num_micro_batches), strict=True
        )
        for number, (micro_batch, expected) in enumerate(micro_batches, start=1):
            wanted = number == self.num_micro_batches
            with reduces_gradients(self.model, wanted), self.sharing(micro_batch, expected):
                loss = mean_loss(self.model(micro_batch), expected) / self.num_micro_batches
                loss.backward()
            total += loss.detach()
        return total

    def sharing(self, inputs: Tensor, targets: Tensor) -> AbstractContextManager[None]:
        """Inside, these are what this rank has of a micro-batch."""
        return nullcontext()

    def logits(self, tokens: Tensor) -> Tensor:
        """Forward alone, of [1, context] bytes."""
        return self.model(tokens)


class InParts(Whole):
    """The same, of a part of each sequence; other ranks have the other parts.

    Args:
        model: what computes.
        num_micro_batches: of this rank's sequences.
        whole: the model whose parameters those of `model` are.
        mesh: the ranks that share sequences.
    """

    def __init__(self, model: nn.Module, num_micro_batches: int, whole: GPT, mesh: DeviceMesh) -> None:
        super().__init__(model, num_micro_batches)
        self.mesh = mesh
        self.places = whole.number_places()

    def sharing(self, inputs: Tensor, targets: Tensor) -> AbstractContextManager[None]:
        """Inside, these are this rank's part, and attention goes over the parts of all ranks."""
        buffers = [inputs, targets, self.places]
        return mpisgd.context_parallel(self.mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0])


class Pipelined(Pass):
    """This rank has some of the layers; micro-batches follow each other, so that every stage has work."""

    def __init__(self, model: nn.Module, num_micro_batches: int, group: ProcessGroup) -> None:
        self.num_micro_batches = num_micro_batches
        self.stage = self._stage(model, group)
        # Each micro-batch's loss is its part of the mean, so there is nothing left to scale.
        self.schedule = Schedule1F1B(
            self.stage,
            num_micro_batches,
            loss_fn=lambda output, target: mean_loss(output, target) / num_micro_batches,
            scale_grads=False,
        )
        self.forward_only = ScheduleGPipe(self._stage(model, group), 1)

    @staticmethod
    def _stage(model: nn.Module, group: ProcessGroup) -> PipelineStage:
        return PipelineStage(model, group.rank(), group.size(), torch.device("cpu"), group=group)

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Forward and backward; the mean loss on the last stage, None on the others."""
        losses: list[Tensor] = []
        if self.stage.is_last:
            self.schedule.step(target=targets, losses=losses, return_outputs=False)
            return torch.stack(losses).sum().detach()
        self.schedule.step(*([inputs] if self.stage.is_first else []))
        return None

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Forward alone, of [1, context] bytes; on the last stage, None on the others."""
        return self.forward_only.eval(*([tokens] if self.stage.is_first else []))


class ScheduleName(str, Enum):
    """What --pipeline takes."""

    gpipe = "gpipe"
    one_forward_one_backward = "1f1b"
    pipedream = "pipedream"
    double_buffered = "2bw"


# What mpisgd calls otherwise.
OTHERWISE_NAMED = {ScheduleName.double_buffered: "pipedream-2bw"}


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
                schedule=OTHERWISE_NAMED.get(schedule, schedule.value),
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


TOKENS = ("batch", "length")
STATES = (*TOKENS, "model")
NAMES = {
    "embedding.byte.weight": ("vocab", "model"),
    "embedding.position.weight": ("length", "model"),
    "blocks.*.*_norm.*": ("model",),
    "blocks.*.attention.out.weight": ("model", "heads"),
    "blocks.*.attention.*.weight": ("heads", "model"),
    "blocks.*.feed_forward.up.weight": ("hidden", "model"),
    "blocks.*.feed_forward.down.weight": ("model", "hidden"),
    "head.0.*": ("model",),
    "head.1.weight": ("vocab", "model"),
    "embedding": STATES,
    "blocks.*.attention": STATES,
    "blocks.*.feed_forward.up": (*TOKENS, "hidden"),
    "blocks.*.feed_forward": STATES,
}
IO: dict[str, Any] = {"inputs": TOKENS, "outputs": (*TOKENS, "vocab")}


def read_mesh_layout(rules: str | None, mesh: str | None) -> mpisgd.MeshLayout | None:
    """The layout of --layout and --mesh, None without them.

    Raises:
        JobError: one of them is missing or misspelt, or the mesh is not that of the job.
    """
    if rules is None and mesh is None:
        return None
    if rules is None or mesh is None:
        raise mpisgd.JobError("--layout 'batch:dp; hidden:tp' and --mesh 'dp:2, tp:2' go together")
    try:
        layout = mpisgd.layout(rules, mesh=mesh)
        layout.check_ranks(mpisgd.size())
    except mpisgd.InvalidArgument as error:
        raise mpisgd.JobError(f"--layout {rules}: {error}") from error
    return layout


class LaidOut(Pass):
    """All ranks take the whole batch and compute their parts of every tensor.

    Args:
        model: the whole one, which is divided in place.
        layout: how.
        num_micro_batches: of the whole batch.
        batch_size: sequences of the whole batch.
    """

    def __init__(
        self, model: GPT, layout: mpisgd.MeshLayout, num_micro_batches: int, batch_size: int
    ) -> None:
        axis = dict(layout.rules).get("batch")
        self._num_rows = 1 if axis is None else layout.lengths[axis]
        self._layout, self._num_micro_batches = layout, num_micro_batches
        if batch_size % (num_micro_batches * self._num_rows):
            raise mpisgd.JobError(
                f"--batch-size {batch_size} must divide by {num_micro_batches} micro-batch(es) x "
                f"{self._num_rows} parts of batch:{axis}"
            )
        try:
            self.model = layout.distribute(model, NAMES, **IO)
        except mpisgd.InvalidArgument as error:  # alike on all ranks
            raise mpisgd.JobError(f"--layout {layout.rules_text}: {error}") from error

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward; the mean loss."""
        total = torch.zeros(())
        parts = (tensor.chunk(self._num_micro_batches) for tensor in (inputs, targets))
        for micro_batch, expected in zip(*parts, strict=True):
            loss = mean_loss(self.model(micro_batch), self._layout.shard(expected, TOKENS))
            (loss / self._num_micro_batches).backward()
            total += _whole(loss.detach()) / self._num_micro_batches
        return total

    def logits(self, tokens: Tensor) -> Tensor:
        """Forward alone, of [1, context] bytes; as many copies as the batch has parts."""
        return _whole(self.model(tokens.repeat(self._num_rows, 1)))[:1]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
