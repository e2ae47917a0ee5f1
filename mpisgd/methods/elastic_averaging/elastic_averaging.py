"""`ElasticAveraging`: ranks train by themselves, each bound to a common centre by an elastic force.

With x_i the parameters of rank i of p and z the centre, which all ranks have alike (Zhang, Choromanska and
LeCun 2015, EASGD with a communication period), every `every` steps

    d_i <- x_i - z
    x_i <- x_i - alpha d_i
    z   <- z + alpha (d_1 + ... + d_p)

With momentum in the wrapped optimizer (Nesterov's in the paper) this is EAMSGD.

A compressor with error feedback cannot carry the d_i: what it has not sent is in its residual, and is still
in d_i at the next exchange, so it would count twice. What travels then is the change of x_i since the last
exchange, when it was l_i. Every rank adds up what arrives, so that m is the mean of the x_i as far as that:

    m <- m + mean of C(x_i - l_i)
    z <- z + p alpha (m - z)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mpisgd.arguments import check_positive
from mpisgd.collectives.coalesced import all_reduce_coalesced
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument
from mpisgd.gradients.compression_state import CompressionState
from mpisgd.method_state import COPY, REBUILD, alike, own, part
from mpisgd.methods.elastic_averaging import paper
from mpisgd.methods.paper_kit import Paper
from mpisgd.methods.strategy.goes_with import (
    Compressions,
    GoesWith,
    needs_all_in_time,
    needs_magnitudes,
    no_momentum,
    yes,
)
from mpisgd.methods.strategy.kept_tensors import follow
from mpisgd.methods.strategy.local_training import LOCAL_STEPS, LocalSynchronizer
from mpisgd.methods.strategy.strategy import Strategy
from mpisgd.methods.strategy.tensor_mean import TensorMean
from mpisgd.methods.strategy.training import Training

__all__ = ["ElasticAveraging"]

BETA = 0.9  # p * alpha, as in the paper's experiments


@dataclass(frozen=True)
class ElasticAveraging(Strategy):
    """Ranks train independently; an elastic force pulls their parameters and a common centre together.

    The centre is the result of the training: inside `optimizer.consensus()` it replaces the parameters. All
    ranks exchange at the same steps, so every rank keeps a copy of the centre, and no server is needed.
    Module buffers (`named_buffers`) have no centre: they are averaged at each exchange.

    The force is computed from the updated parameters, as in torch-distlearn. In the paper, force and gradient
    are both computed from the parameters before the update.

    A compressor with error feedback needs two further copies of the parameters. One without it must not add
    more noise than the force removes: with E |C(d) - d|^2 = w |d|^2, the centre diverges from all ranks
    unless p alpha < 2 / (1 + w). With `RandomK(ratio, error_feedback=False)` that is 2 ratio.

    Args:
        alpha: the strength of the elastic force; by default 0.9 / number of ranks. More than 1 / number of
            ranks does not converge, and raises an error.
        every: steps from one exchange to the next.
    """

    alpha: float | None = None
    every: int = 1

    @classmethod
    def examples(cls) -> Sequence["ElasticAveraging"]:
        """See `Strategy`."""
        return (cls(every=2), cls(every=3, alpha=0.125))

    def __post_init__(self) -> None:
        check_positive("ElasticAveraging", "every", self.every, whole=True)
        if self.alpha is not None:
            check_positive("ElasticAveraging", "alpha", self.alpha)

    @property
    def goes_with(self) -> GoesWith:
        """See `GoesWith`."""
        return replace(
            LOCAL_STEPS,
            compression=Compressions("of differences", (no_momentum, needs_magnitudes, needs_all_in_time)),
            elastic=yes("survivors go on from their own models, with the centre"),
        )

    def check_ranks(self, training: Training) -> None:
        """Raise if `alpha` is so large that the centre diverges."""
        size = training.group.size
        if self.alpha is not None and self.alpha * size > 1:
            raise InvalidArgument(
                f"ElasticAveraging: alpha={self.alpha} with {size} ranks; expected at most 1 / {size}"
            )

    def synchronizer(self, training: Training) -> "ElasticAveragingSynchronizer":
        """Return the working part, which moves the parameters and the centre."""
        return ElasticAveragingSynchronizer(training, self)

    def paper(self, size: int, lengths: Sequence[tuple[str, int]] = ()) -> Paper[Any]:
        """See `Strategy`."""
        beta = {} if self.alpha is None else {"beta": self.alpha * size}
        return paper.ElasticAveraging(tau=self.every, **beta)


@dataclass
class _State:
    """What is kept from step to step.

    Attributes:
        centre: z, by tensor, which stays where ranks begin anew.
        arrived: m, by tensor, where the compressor has a residual.
        last: x_i at the last exchange, by tensor of these. m is the mean of what the ranks have there less
            their residuals, so all ranks begin anew where one has lost its own.
        compression: what compressors keep of what travels.
    """

    centre: dict[str, Tensor] = alike(default_factory=dict, begin=COPY)
    arrived: dict[str, Tensor] = alike(default_factory=dict)
    last: dict[str, Tensor] = own(default_factory=dict, lost=REBUILD)
    compression: CompressionState = part(CompressionState)


class ElasticAveragingSynchronizer(LocalSynchronizer):
    """Exchanges differences from the centre after the steps that `ElasticAveraging` names."""

    def __init__(self, training: Training, strategy: ElasticAveraging) -> None:
        super().__init__(training)
        self._strategy = strategy
        self.state = _State()

    def derive(self) -> None:
        """See `Synchronizer`."""
        group = self.training.group
        compression = self.state.compression
        compression.move_to([])
        if not self.state.last:
            compression.forget_own()  # what it has not sent was of changes from what is no more
        self._mean = TensorMean(self.tensors(), group, self.training.options, compression)
        self._beta = BETA if self._strategy.alpha is None else self._strategy.alpha * group.size
        self._note_last()

    def _note_last(self) -> None:
        """Let changes count from the centre, which all ranks have, where nothing was sent yet."""
        state, keys = self.state, self._mean.with_residual
        for kept in (state.last, state.arrived):
            for key in kept.keys() - keys:
                del kept[key]
        for key in self.tensors():  # in an order that all ranks have, as a checkpoint asks for it
            if key in keys and key not in state.last:
                state.last[key], state.arrived[key] = (state.centre[key].clone() for _ in range(2))

    def synchronize(self) -> None:
        """Exchange, if it is time to. Collective then."""
        if self.num_steps % self._strategy.every:
            return
        tensors, group = self.tensors(), self.training.group
        centre = [self.state.centre[key] for key in tensors]
        params = list(tensors.values())
        follow(centre, params, "ElasticAveraging")
        differences = list(torch._foreach_sub(params, centre))
        travels = [*differences]
        for place, key in enumerate(tensors):
            if key in self.state.last:
                travels[place] = self._change(key, tensors[key])
        torch._foreach_add_(params, differences, alpha=-self._beta / group.size)
        self._mean.start(travels)
        for place, key in enumerate(tensors):
            if key in self.state.arrived:
                arrived = self.state.arrived[key].add_(travels[place])
                travels[place] = arrived - centre[place]
        torch._foreach_add_(centre, travels, alpha=self._beta)
        all_reduce_coalesced(self.buffers, ReduceOp.AVG, group)

    def _change(self, key: str, param: Tensor) -> Tensor:
        """Return the change of a parameter since the last exchange, and begin the next one here."""
        last, arrived = self.state.last[key], self.state.arrived[key]
        follow([last, arrived], [param, param], "ElasticAveraging")
        change: Tensor = param - last
        last.copy_(param)
        return change

    def consensus_of(
        self, replicas: Sequence[Mapping[str, Tensor]], entries: Sequence[Mapping[str, Any]]
    ) -> dict[str, Tensor]:
        """See `Synchronizer`: the centre, and the mean of the buffers."""
        return {**super().consensus_of(replicas, entries), **entries[0]["alike"]["centre"]}

    def consensus(self) -> list[Tensor]:
        """Return the centre, and the mean of the buffers. Collective."""
        buffers = [tensor.clone() for tensor in self.buffers]
        all_reduce_coalesced(buffers, ReduceOp.AVG, self.training.group)
        return [*self.completed(self.state.centre), *buffers]
