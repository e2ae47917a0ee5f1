"""Forward and backward of a batch in micro-batches: sequential, or in a pipeline.

Both accumulate the gradients of the mean loss of the micro-batches and return the sum of their losses. Those
of mpisgd's own divided models are in text_pipeline.py and text_dimensions.py.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import mpisgd
from training.parallelize import reduces_gradients
from training.text_model import GPT, mean_loss

__all__ = ["InParts", "Pass", "Pipelined", "Whole"]


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
