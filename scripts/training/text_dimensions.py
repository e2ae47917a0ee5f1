"""`--layout "batch:dp; hidden:tp"`: the model's tensors divided by the names of their dimensions.

The names below are all that `mpisgd.layout` must know of the model. A rule names one of them:

    batch     sequences             heads     columns of attention's projections
    length    positions             hidden    columns between the two feed-forward layers
    model     the residual stream   vocab     the 256 bytes
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import mpisgd
from training.text_model import GPT, mean_loss
from training.training_pass import Pass

__all__ = ["LaidOut", "read_mesh_layout"]

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
