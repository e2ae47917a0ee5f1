"""The styles of `Gossip` in which all ranks mix in the same step.

x[i] is the parameters of rank i, f[i] its loss, W the mixing matrix of the topology, g the step size; the
optimizer may be any: g * gradient stands for what it does.

    adapt_then_combine   x[i] <- sum over j of W[i, j] (x[j] - g grad f[j](x[j]))
    combine_then_adapt   x[i] <- sum over j of W[i, j] x[j]  -  g grad f[i](x[i])
    push_sum             x[i] <- sum over j of W[i, j] (x[j] - g grad f[j](z[j])),
                         w[i] <- sum over j of W[i, j] w[j],   z[i] = x[i] / w[i]

In the last, z is what the model has and computes with. w, a number per rank that is 1 at first, says how much
of the ranks' parameters has come to this one: only the columns of W have to sum to 1, so that a rank needs to
know only whom it sends to.

Sources: Sayed 2014, "Adaptation, learning, and optimization over networks" (adapt then combine); Lian and
others 2017, "Can decentralized algorithms outperform centralized algorithms?" (D-PSGD, combine then adapt);
Assran and others 2019, "Stochastic gradient push for distributed deep learning" (SGP, push-sum).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.core.group import Group
from mpisgd.gossip.graph import Graph
from mpisgd.gossip.neighbor_all_reduce import mix
from mpisgd.strategies.local_scaling import LocalScaling
from mpisgd.strategies.strategy import Synchronizer, Training

__all__ = ["NAME", "AdaptThenCombine", "CombineThenAdapt", "Mixer", "PushSum"]

NAME = "Gossip"
STATE = "gossip"  # the entry of a state_dict


class Mixer(Synchronizer):
    """What the styles have in common: when and what to mix, and what is saved of it.

    Args:
        training: what it works on.
        graph: whom each rank exchanges with.
        every: the ranks mix in every so manieth step.
    """

    doubly = True  # whether the matrix must be doubly stochastic

    def __init__(self, training: Training, graph: Graph, every: int) -> None:
        super().__init__(training)
        self._graph, self._every = graph, every
        self._scaling = LocalScaling(training.optimizer)
        self._num_steps = 0

    def before_step(self) -> None:
        """Have a step that a GradScaler would leave out change nothing."""
        self._scaling.before_step(self.training.optimizer)

    def after_step(self, num_steps: int) -> None:
        """Count the step."""
        self._scaling.after_step()
        self._num_steps += 1

    @property
    def _is_due(self) -> bool:
        """Whether the ranks mix in this step."""
        return (self._num_steps + 1) % self._every == 0

    def _params(self) -> list[Tensor]:
        """What is mixed: the parameters that are trained."""
        return [param for _, param in self.training.named if param.requires_grad]

    def _mix(self, tensors: Sequence[Tensor]) -> None:
        """Mix tensors, those of each device apart. Collective."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for tensor in tensors:
            by_device.setdefault(tensor.device, []).append(tensor)
        options, number = self.training.options, self._num_steps // self._every
        for alike in by_device.values() or [[]]:
            mix(
                alike,
                self._graph,
                self.training.group,
                number,
                wire_dtype=options.compression.wire_dtype,
            )

    def state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the optimizer's state, and how many steps there have been: graphs may change with them."""
        return {**make(), STATE: self._state()}

    def _state(self) -> dict[str, Any]:
        return {"num_steps": self._num_steps}

    def loaded(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the state was saved; one of another strategy begins anew."""
        self._load(state_dict.get(STATE, {}))

    def _load(self, state: Mapping[str, Any]) -> None:
        self._num_steps = int(state.get("num_steps", 0))

    def move_to(self, group: Group) -> None:
        """Begin anew with other ranks.

        Raises:
            InvalidArgument: there is no such graph of so many ranks; on all of them.
        """
        self._graph.check_mixing(NAME, group.size, doubly=self.doubly)
        super().move_to(group)
        self._load({})


class AdaptThenCombine(Mixer):
    """Updates, then mixes: x[i] <- sum of W[i, j] (x[j] - g grad f[j](x[j]))."""

    @torch.no_grad()
    def after_step(self, num_steps: int) -> None:
        """Mix. Collective."""
        if self._is_due:
            self._mix(self._params())
        super().after_step(num_steps)


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
        super().before_step()
        has_closure, self._has_closure, self._is_mixed = self._has_closure, False, False
        if not has_closure:
            self._mix_once()

    @torch.no_grad()
    def _mix_once(self) -> None:
        if self._is_due and not self._is_mixed:
            self._mix(self._params())
        self._is_mixed = True

    def after_step(self, num_steps: int) -> None:
        """Mix, if the optimizer has not called its closure."""
        self._mix_once()
        super().after_step(num_steps)


class PushSum(Mixer):
    """Has x and w, mixes both, and gives the model z = x / w.

    Between steps there are z and w only. The optimizer turns z into z', by which x becomes w z + (z' - z).
    """

    doubly = False

    def __init__(self, training: Training, graph: Graph, every: int) -> None:
        super().__init__(training, graph, every)
        self._weight = 1.0
        self._before: list[Tensor] = []  # z, where it is needed: with w = 1, x is z'

    @torch.no_grad()
    def before_step(self) -> None:
        """Keep what the parameters are."""
        super().before_step()
        biased = self._weight != 1.0
        self._before = [param.detach().clone() for param in self._params()] if biased else []

    @torch.no_grad()
    def after_step(self, num_steps: int) -> None:
        """Mix parameters and weight. Collective."""
        params = self._params()
        for param, before in zip(params, self._before, strict=bool(self._before)):
            param.add_(before, alpha=self._weight - 1.0)
        self._before = []
        if self._is_due:
            weight = torch.full((1,), self._weight, dtype=torch.float64, device=_device_of(params))
            self._mix([*params, weight])
            self._weight = weight.item()
        if self._weight != 1.0:
            for param in params:
                param.div_(self._weight)
        super().after_step(num_steps)

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "weight": self._weight}

    def _load(self, state: Mapping[str, Any]) -> None:
        super()._load(state)
        self._weight = float(state.get("weight", 1.0))


def _device_of(tensors: Sequence[Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")
