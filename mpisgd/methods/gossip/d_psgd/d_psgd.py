"""The styles of `Gossip` in which all ranks mix parameters: when a step is updated, and when mixed.

x[i] is the parameters of rank i, f[i] its loss, W the mixing matrix of the topology, g the step size; the
optimizer may be any: g * gradient stands for what it does.

    adapt_then_combine   x[i] <- sum over j of W[i, j] (x[j] - g grad f[j](x[j]))
    combine_then_adapt   x[i] <- sum over j of W[i, j] x[j]  -  g grad f[i](x[i])

Sources: Sayed 2014, "Adaptation, learning, and optimization over networks" (adapt then combine); Lian and
others 2017, "Can decentralized algorithms outperform centralized algorithms?" (D-PSGD, combine then adapt).
"""

from collections.abc import Callable
from typing import Any

import torch

from mpisgd.gossip.graph import Graph
from mpisgd.methods.gossip.mixer import Mixer
from mpisgd.methods.strategy.training import Training

__all__ = ["AdaptThenCombine", "CombineThenAdapt"]


class AdaptThenCombine(Mixer):
    """Updates, then mixes: x[i] <- sum of W[i, j] (x[j] - g grad f[j](x[j]))."""

    def synchronize(self) -> None:
        """Mix. Collective."""
        self.mix_if_due(self.mixed, self.num_steps, self.buffers)


class CombineThenAdapt(Mixer):
    """Mixes, then updates by the gradient from before: x[i] <- sum of W[i, j] x[j] - g grad f[i](x[i]).

    An optimizer with a closure mixes once it has the first gradient.
    """

    def __init__(self, training: Training, graph: Graph, every: int) -> None:
        super().__init__(training, graph, every)
        self._has_closure = self._is_mixed = False

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Mix after the first evaluation."""
        self._has_closure = True

        def then_mix() -> Any:
            loss = closure()
            self._mix_once()
            return loss

        return then_mix

    def before_step(self) -> None:
        """Mix, unless a closure is to compute the gradient before. Collective."""
        has_closure, self._has_closure, self._is_mixed = self._has_closure, False, False
        super().before_step()
        if not has_closure:
            self._mix_once()

    @torch.no_grad()
    def _mix_once(self) -> None:
        if not self._is_mixed:
            self.mix_if_due(self.mixed, self.num_steps + 1, self.buffers)
        self._is_mixed = True

    def after_step(self, num_steps: int) -> None:
        """Mix, if the optimizer has not called its closure."""
        self._mix_once()
        super().after_step(num_steps)

    def synchronize(self) -> None:
        """Nothing is left to do."""
