"""Gradients of mean losses of divided tensors, which torch computes wrongly.

DTensor knows nothing of some losses and takes torch's decomposition of them. For the gradient of a mean it
divides by the number of elements, which is then that of a rank's part: in torch 2.13 such a gradient is too
large by the number of parts. Here these gradients are told to DTensor: where the loss is a mean, they are
computed of whole tensors, which costs an all-gather of the outputs and one of the targets.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

__all__ = ["correct_mean_losses"]

aten = torch.ops.aten
BACKWARD = (
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.soft_margin_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
)
ELEMENTWISE, MEAN = 0, 1  # values of torch's argument `reduction`

Placements = list[Placement | None]


@functools.cache
def correct_mean_losses() -> None:
    """Let this process compute the gradients of these losses as on whole tensors."""
    for op in BACKWARD:
        register_sharding(op)(functools.partial(_placements, op))


def _placements(op: Any, *args: Any) -> Sequence[tuple[Placements, Placements]]:
    """Return how outputs may be laid out for a layout of the inputs, along one axis of the mesh."""
    place, argument = next((i, arg) for i, arg in enumerate(op._schema.arguments) if arg.name == "reduction")
    reduction = args[place] if place < len(args) else argument.default_value
    tensors = [hasattr(arg, "placements") for arg in args]

    def alike(placement: Placement, grad_output: Placement) -> tuple[Placements, Placements]:
        inputs: Placements = [placement if is_tensor else None for is_tensor in tensors]
        inputs[0] = grad_output
        return [placement], inputs

    choices = [alike(Replicate(), Replicate())]
    if reduction != MEAN:
        for dim in range(args[1].ndim):
            where = Shard(dim)
            choices.append(alike(where, where if reduction == ELEMENTWISE else Replicate()))
    return choices
