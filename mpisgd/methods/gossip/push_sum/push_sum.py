"""Stochastic gradient push: `Gossip` over directed graphs, where each rank knows only whom it sends to.

    x[i] <- sum over j of W[i, j] (x[j] - g grad f[j](z[j])),
    w[i] <- sum over j of W[i, j] w[j],   z[i] = x[i] / w[i]

with x[i] the parameters of rank i, f[i] its loss, W the mixing matrix of the topology, g the step size; the
optimizer may be any: g * gradient stands for what it does. z is what the model has and computes with. w, a
number per rank that is 1 at first, says how much of the ranks' parameters has come to this one: only the
columns of W have to sum to 1, so that a rank needs to know only whom it sends to.

Source: Assran and others 2019, "Stochastic gradient push for distributed deep learning" (SGP, push-sum).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpisgd.collectives.coalesced import all_reduce_coalesced
from mpisgd.dtypes import ReduceOp
from mpisgd.gossip.graph import Graph
from mpisgd.method_state import own
from mpisgd.methods.gossip.mixer import Mixer
from mpisgd.methods.strategy.training import Training

__all__ = ["PushSum"]


@dataclass
class _Weight:
    """What a rank keeps from step to step.

    Attributes:
        weight: w. The parameters alone are x with w = 1, on all ranks.
    """

    weight: float = own(1.0, lost="rebuild")


class PushSum(Mixer):
    """Has x and w, mixes both, and gives the model z = x / w.

    Between steps there are z and w only. The optimizer turns z into z', by which x becomes w z + (z' - z). Of
    buffers x is w z': so they take a mean of those of the ranks, and a variance stays positive.
    """

    doubly = False

    def __init__(self, training: Training, graph: Graph, every: int) -> None:
        super().__init__(training, graph, every)
        self.state = _Weight()
        self._before: list[Tensor] = []  # z, where it is needed: with w = 1, x is z'

    def before_step(self) -> None:
        """Keep what the parameters are."""
        super().before_step()
        self._before = [tensor.clone() for tensor in self.mixed] if self.state.weight != 1.0 else []

    def synchronize(self) -> None:
        """Mix parameters and weight. Collective."""
        tensors = self.mixed
        for tensor, before in zip(tensors, self._before, strict=bool(self._before)):
            tensor.add_(before, alpha=self.state.weight - 1.0)
        self._before, buffers = [], self.buffers if self.is_due(self.num_steps) else []
        if self.state.weight != 1.0 and buffers:
            torch._foreach_mul_(buffers, self.state.weight)
        weight = self._weight_like(tensors)
        self.mix_if_due([*tensors, weight], self.num_steps, buffers)
        self.state.weight = weight.item()
        if self.state.weight != 1.0:
            torch._foreach_div_([*tensors, *buffers], self.state.weight)

    def consensus(self) -> Sequence[Tensor]:
        """Return the sum of all x, divided by that of all w. Collective."""
        values = [tensor * self.state.weight for tensor in self.averaged]
        weight = self._weight_like(values)
        all_reduce_coalesced([*values, weight], ReduceOp.SUM, self.training.group)
        return [value.div_(weight.item()) for value in values]

    def consensus_of(
        self, replicas: Sequence[Mapping[str, Tensor]], entries: Sequence[Mapping[str, Any]]
    ) -> dict[str, Tensor]:
        """See `Synchronizer`: the sum of all x, divided by that of all w."""
        weights = [float((entry["own"] or {}).get("weight", 1.0)) for entry in entries]
        weighted = [torch._foreach_mul(list(r.values()), w) for r, w in zip(replicas, weights, strict=True)]
        sums = [torch.stack(same).sum(0) / sum(weights) for same in zip(*weighted, strict=True)]
        return dict(zip(replicas[0], sums, strict=True))

    def _weight_like(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return w where it can travel with `tensors`."""
        device = tensors[0].device if tensors else torch.device("cpu")
        return torch.full((1,), self.state.weight, dtype=torch.float64, device=device)
