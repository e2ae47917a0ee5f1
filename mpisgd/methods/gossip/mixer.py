"""`Mixer`: what the styles of `Gossip` have in common, when and what a rank mixes with its neighbours."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from mpisgd.compress.compressor import wire_dtype_of
from mpisgd.gossip.graph import Graph
from mpisgd.gossip.neighbor_all_reduce import WireDtype, mix
from mpisgd.methods.strategy.local_training import LocalSynchronizer
from mpisgd.methods.strategy.training import Training

__all__ = ["NAME", "Mixer"]

NAME = "Gossip"


class Mixer(LocalSynchronizer):
    """What the styles have in common: when and what to mix, and what is saved of it.

    Args:
        training: what it works on.
        graph: whom each rank exchanges with.
        every: steps from one exchange with the neighbours to the next.
    """

    doubly = True  # whether the matrix must be doubly stochastic

    def __init__(self, training: Training, graph: Graph, every: int) -> None:
        super().__init__(training)
        self._graph, self._every = graph, every
        self._trained: list[bool] = []

    @property
    def method(self) -> str:
        """See `Synchronizer`."""
        return f"{NAME}, {type(self).__name__}"

    def tensors(self) -> dict[str, Tensor]:
        """Return the memory of the parameters that are trained, as it is now, by key."""
        named = self.training.named
        return {key: t for key, t in self.parameters_by_key().items() if named[int(key)][1].requires_grad}

    @property
    def mixed(self) -> list[Tensor]:
        """The memory of the parameters that are trained, as it is now."""
        return list(self.tensors().values())

    def has_changed(self) -> bool:
        """Return whether parameters were frozen, or are no longer so."""
        trained = [param.requires_grad for _, param in self.training.named]
        before, self._trained = self._trained, trained
        return before != trained

    def mix_if_due(self, params: Sequence[Tensor], step: int, whole: Sequence[Tensor] = ()) -> None:
        """Mix tensors if step number `step`, counted from 1, is one for it. Collective then.

        Args:
            params: travel as the compression has it.
            step: see above.
            whole: travel as they are, as buffers do: the variance in one may be beyond the range of a cast.
        """
        if not self.is_due(step):
            return
        compression = self.training.options.compression
        if not any(compression.changes(tensor.dtype) for tensor in [*params, *whole]):
            self.mix_whole([*params, *whole], step)
            return
        self._mix(params, step, partial(wire_dtype_of, compression))
        if whole:
            self.mix_whole(whole, step)

    def is_due(self, step: int) -> bool:
        """Return whether the ranks mix in step number `step`, counted from 1."""
        return step % self._every == 0

    def mix_whole(self, tensors: Sequence[Tensor], step: int) -> None:
        """Mix tensors that travel as they are. Collective."""
        self._mix(tensors, step, None)

    def _mix(self, tensors: Sequence[Tensor], step: int, wire_dtype: WireDtype | None) -> None:
        by_device: dict[torch.device, list[Tensor]] = {}
        for tensor in tensors:
            by_device.setdefault(tensor.device, []).append(tensor)
        number = step // self._every - 1
        for alike in by_device.values() or [[]]:
            mix(alike, self._graph, self.training.group, number, wire_dtype=wire_dtype)
