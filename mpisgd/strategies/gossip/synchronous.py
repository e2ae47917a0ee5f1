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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpisgd.collectives.coalesced import all_reduce_coalesced
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.gossip.graph import Graph
from mpisgd.gossip.neighbor_all_reduce import WireDtype, mix
from mpisgd.method_state import own
from mpisgd.strategies.local_training import LocalSynchronizer
from mpisgd.strategies.training import Training

__all__ = ["NAME", "AdaptThenCombine", "CombineThenAdapt", "Mixer", "PushSum"]

NAME = "Gossip"


class Mixer(LocalSynchronizer):
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
        self._mix(params, step, compression.wire_dtype)
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

    def move_to(self, group: Group) -> None:
        """See `Synchronizer`.

        Raises:
            InvalidArgument: the graph is none for as many ranks as there are now; on all of them.
        """
        super().move_to(group)
        self._graph.check_mixing(NAME, self.training.group.size, doubly=self.doubly)


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
        super().before_step()
        has_closure, self._has_closure, self._is_mixed = self._has_closure, False, False
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
