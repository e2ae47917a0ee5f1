"""`ElasticAveraging`: ranks train by themselves, each bound to a common centre by an elastic force.

With x_i the parameters of rank i of p and z the centre, which all ranks have alike (Zhang, Choromanska and
LeCun 2015, EASGD with a communication period), every `every` steps

    d_i <- x_i - z
    x_i <- x_i - alpha d_i
    z   <- z + alpha (d_1 + ... + d_p)

With momentum in the wrapped optimizer (Nesterov's in the paper) this is EAMSGD.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mpisgd.arguments import check_positive
from mpisgd.collectives.coalesced import all_reduce_coalesced
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument
from mpisgd.strategies.compatibility import LOCAL_STEPS, refuse_momentum, refuse_signs
from mpisgd.strategies.kept_tensors import follow
from mpisgd.strategies.local_training import LocalSynchronizer
from mpisgd.strategies.strategy import Strategy
from mpisgd.strategies.tensor_mean import TensorMean
from mpisgd.strategies.training import Training

__all__ = ["ElasticAveraging"]

BETA = 0.9  # p * alpha, as in the paper's experiments


@dataclass(frozen=True)
class ElasticAveraging(Strategy):
    """Ranks train by themselves and are drawn to a common centre, which is drawn to them.

    The centre is the result of the training: `optimizer.consensus()` puts it in place of the parameters. All
    ranks exchange at the same steps, so every rank keeps the same centre, and no server is needed. Module
    buffers (`named_buffers`) have no centre: they take their mean at each exchange.

    Args:
        alpha: the elastic force; by default 0.9 / number of ranks. More than 1 / number of ranks does not
            converge, and is refused.
        every: steps from one exchange to the next.
    """

    alpha: float | None = None
    every: int = 1

    excludes: ClassVar[frozenset[str]] = LOCAL_STEPS

    def __post_init__(self) -> None:
        check_positive("ElasticAveraging", "every", self.every, whole=True)
        if self.alpha is not None:
            check_positive("ElasticAveraging", "alpha", self.alpha)

    def check(self, training: Training) -> None:
        """See `Strategy.check`.

        Raises:
            InvalidArgument: also where the centre would overshoot.
        """
        super().check(training)
        refuse_momentum(self, training)
        refuse_signs(self, training)
        size = training.group.size
        if self.alpha is not None and self.alpha * size > 1:
            raise InvalidArgument(
                f"ElasticAveraging: alpha={self.alpha} with {size} ranks; expected at most 1 / {size}"
            )

    def synchronizer(self, training: Training) -> "ElasticAveragingSynchronizer":
        """Return what draws the parameters and the centre together."""
        return ElasticAveragingSynchronizer(training, self)


class ElasticAveragingSynchronizer(LocalSynchronizer):
    """Exchanges differences from the centre after the steps that `ElasticAveraging` names."""

    def __init__(self, training: Training, strategy: ElasticAveraging) -> None:
        super().__init__(training)
        self._strategy = strategy
        self._centre: list[Tensor] = []
        self.reopen()

    def reopen(self) -> None:
        """See `LocalSynchronizer`."""
        self._mean = TensorMean(self.trainable, self.training.group, self.training.options)
        self._beta = BETA
        if self._strategy.alpha is not None:
            self._beta = self._strategy.alpha * self.training.group.size

    def begin(self) -> None:
        """See `LocalSynchronizer`: the centre is where all ranks begin."""
        self._centre = [param.clone() for param in self.trainable]

    def synchronize(self) -> None:
        """Exchange, if it is time to. Collective then."""
        if self.steps % self._strategy.every:
            return
        params, group = self.trainable, self.training.group
        follow(self._centre, params, "ElasticAveraging")
        differences = list(torch._foreach_sub(params, self._centre))
        torch._foreach_add_(params, differences, alpha=-self._beta / group.size)
        self._mean.start(differences)
        torch._foreach_add_(self._centre, differences, alpha=self._beta)
        all_reduce_coalesced(self.buffers, ReduceOp.AVG, group)

    def consensus(self) -> list[Tensor]:
        """Return the centre, and the mean of the buffers. Collective."""
        buffers = [tensor.clone() for tensor in self.buffers]
        all_reduce_coalesced(buffers, ReduceOp.AVG, self.training.group)
        return [*(tensor.clone() for tensor in self._centre or self.trainable), *buffers]

    def own_state(self) -> dict[str, Any]:
        """Return the centre, and what compressors keep."""
        return {"centre": self._centre, "compression": self._mean.state_dict()}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `own_state` has returned."""
        self._centre = [tensor.clone() for tensor in state["centre"]]
        self._mean.load_state_dict(state["compression"])
