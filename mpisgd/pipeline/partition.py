"""`partition`: the layers of a model in stages, and ranks for each, so that the slowest stage is fast.

The dynamic programme of PipeDream (Narayanan et al. 2019, section 3.1), for ranks with links of one kind:

    T(i, j, m) = 1/m max( sum of t_l, 2 (m - 1) sum of w_l / B )    layers i to j on m replicas
    A(j, m)    = min( T(0, j, m),                                    the first j layers on m ranks:
                      min over i < j, k < m of                       layers i to j on the last k of them
                          max( A(i, m - k), 2 a_i / B, T(i, j, k) ) )

with t_l the time of a forward and a backward of layer l, w_l the bytes of its parameters, a_i the bytes of
the activations that go from one stage to the next (and come back as gradients), B the bandwidth in bytes per
second, and A the time that the slowest part of the pipeline takes per micro-batch.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from torch import nn

from mpisgd.arguments import check_positive
from mpisgd.errors import InvalidArgument
from mpisgd.pipeline.layer_costs import LayerCost
from mpisgd.pipeline.model_parts import split

__all__ = ["Partition", "PlannedStage", "partition"]


@dataclass(frozen=True)
class PlannedStage:
    """A stage: consecutive layers, on one or more ranks.

    Attributes:
        layers: names of the layers.
        replicas: number of ranks that have it.
        time_s: time per micro-batch.
        parameter_bytes: bytes of its parameters.
    """

    layers: tuple[str, ...]
    replicas: int
    time_s: float
    parameter_bytes: int


@dataclass(frozen=True)
class Partition:
    """The stages of a model; prints as a table.

    Attributes:
        stages: the stages in order.
        time_s: time of the slowest stage or message, per micro-batch.
        one_rank_s: time of a rank with all layers, per micro-batch.
    """

    stages: tuple[PlannedStage, ...]
    time_s: float
    one_rank_s: float

    @property
    def replicas(self) -> tuple[int, ...]:
        """The number of ranks of each stage, for `replicas=` of a Pipeline."""
        return tuple(stage.replicas for stage in self.stages)

    def split(self, module: nn.Sequential) -> list[nn.Sequential]:
        """Return the stages of the model that was measured."""
        return split(module, [len(stage.layers) for stage in self.stages])

    def __str__(self) -> str:
        lines = ["stage  ranks  layers                    ms per micro-batch  MB of parameters"]
        for number, stage in enumerate(self.stages):
            layers = stage.layers[0] + (f" to {stage.layers[-1]}" if len(stage.layers) > 1 else "")
            lines.append(
                f"{number:5}  {stage.replicas:5}  {layers:24.24}  {1e3 * stage.time_s:18.3f}  "
                f"{stage.parameter_bytes / 1e6:16.2f}"
            )
        faster = self.one_rank_s / self.time_s if self.time_s else 1.0
        lines.append(
            f"slowest stage or message: {1e3 * self.time_s:.3f} ms; one rank: {1e3 * self.one_rank_s:.3f} ms"
            f", {faster:.2f} times as long"
        )
        return "\n".join(lines)


def partition(
    layers: Sequence[LayerCost], num_ranks: int, *, bandwidth: float | None = None, replicate: bool = True
) -> Partition:
    """Divide layers into stages such that the slowest stage is as fast as possible.

    Args:
        layers: as `measure_layers` returns them; the same on all ranks.
        num_ranks: number of ranks; every rank gets a stage.
        bandwidth: bytes per second between two ranks; None: messages take no time.
        replicate: whether a stage may have several ranks; otherwise each rank has one stage.

    Raises:
        InvalidArgument: fewer layers than stages, or a number that is not positive.
    """
    check_positive("partition", "num_ranks", num_ranks, whole=True)
    if bandwidth is not None:
        check_positive("partition", "bandwidth", bandwidth)
    if not layers or (not replicate and len(layers) < num_ranks):
        raise InvalidArgument(f"partition: {len(layers)} layers for {num_ranks} ranks; have a layer for each")
    programme = _Programme(layers, bandwidth, replicate)
    found = programme.best(len(layers), num_ranks)
    stages = []
    end, ranks = len(layers), num_ranks
    while end:
        begin, replicas = programme.best(end, ranks).last
        stages.append(_planned(layers[begin:end], replicas, programme.stage_time(begin, end, replicas)))
        end, ranks = begin, ranks - replicas
    return Partition(tuple(stages[::-1]), found.time_s, sum(layer.time_s for layer in layers))


def _planned(layers: Sequence[LayerCost], replicas: int, time_s: float) -> PlannedStage:
    nbytes = sum(layer.parameter_bytes for layer in layers)
    return PlannedStage(tuple(layer.name for layer in layers), replicas, time_s, nbytes)


class _Best(NamedTuple):
    """The best division of some layers: its time, and the begin and the replicas of its last stage."""

    time_s: float
    last: tuple[int, int]


class _Programme:
    """The functions T and A of the module's text."""

    def __init__(self, layers: Sequence[LayerCost], bandwidth: float | None, replicate: bool) -> None:
        self.layers = layers
        self.replicate = replicate
        self.times = [0.0, *itertools.accumulate(layer.time_s for layer in layers)]
        self.weights = [0, *itertools.accumulate(layer.parameter_bytes for layer in layers)]
        self.s_per_byte = 0.0 if bandwidth is None else 1.0 / bandwidth
        self.best = lru_cache(maxsize=None)(self._best)

    def stage_time(self, begin: int, end: int, replicas: int) -> float:
        """Return T: the time per micro-batch of the layers from `begin` to before `end`."""
        weights = self.weights[end] - self.weights[begin]
        exchange_s = 2 * (replicas - 1) * weights * self.s_per_byte
        return max(self.times[end] - self.times[begin], exchange_s) / replicas

    def _best(self, end: int, ranks: int) -> _Best:
        """Return A of the layers before `end`."""
        candidates = []
        if ranks == 1 or self.replicate:
            candidates.append(_Best(self.stage_time(0, end, ranks), (0, ranks)))
        for begin in range(1, end):
            message_s = 2 * self.layers[begin - 1].activation_bytes * self.s_per_byte
            for replicas in range(1, ranks) if self.replicate else [1][: ranks - 1]:
                before = self.best(begin, ranks - replicas).time_s
                time_s = max(before, message_s, self.stage_time(begin, end, replicas))
                candidates.append(_Best(time_s, (begin, replicas)))
        # Fewer stages where times are equal: fewer versions of the weights, and a smaller bubble.
        return min(candidates, key=lambda each: each.time_s, default=_Best(float("inf"), (0, ranks)))
