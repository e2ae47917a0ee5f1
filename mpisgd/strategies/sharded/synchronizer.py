"""`ShardedSynchronizer`: each rank updates its shard of the parameters, and sends it to all others."""

import hashlib
from collections.abc import Callable

import torch

from mpisgd.core.consistency import Operation
from mpisgd.sharding.divided_parameters import DividedParameters
from mpisgd.sharding.owners import Owners
from mpisgd.sharding.replicated_parameters import ReplicatedParameters
from mpisgd.sharding.scattering_reducer import ScatteringReducer
from mpisgd.sharding.shared_parameters import SharedParameters
from mpisgd.strategies.sharded.piecewise import Piecewise
from mpisgd.strategies.training import Training

__all__ = ["ShardedSynchronizer"]


class ShardedSynchronizer(Piecewise):
    """Brings gradients to their owners, and parameters to everyone.

    Args:
        training: what it works on.
        stage: see `Sharded`, as for `master_dtype`.
    """

    def __init__(self, training: Training, *, stage: int, master_dtype: torch.dtype | None) -> None:
        self._stage, self._master_dtype = stage, master_dtype
        self._updated: list[bool] = []
        super().__init__(training)

    def _make_parameters(self, training: Training, *, elementwise: bool) -> DividedParameters:
        kind = SharedParameters if training.share_parameters else ReplicatedParameters
        return kind(
            training.named,
            training.optimizer.param_groups,
            Owners(training.group, of_host=False),
            elementwise=elementwise,
            master_dtype=self._master_dtype,
        )

    def _make_reducer(self) -> ScatteringReducer:
        return ScatteringReducer(
            self.training.named,
            self.training.group,
            self.training.options,
            self._states,
            defers=self._is_known,
            unscale=self._unscale,
            stage=self._stage,
        )

    def _before_update(self, then: Callable[[], None] | None = None) -> None:
        if then is not None or self._parameters.one_copy:  # nobody else reads this rank's memory
            super()._before_update(then)

    def _show_pieces(self) -> None:
        self._updated = self._present
        super()._show_pieces()

    def _publish(self) -> None:
        updated, parameters, owners = self._updated, self._parameters, self._parameters.owners
        if self.training.group.size == 1:
            return
        which = hashlib.blake2b(bytes(updated), digest_size=8).hexdigest()
        rooms = [
            [parameters.part(m) for range_ in ranges for m in range_.members if updated[m.param]]
            for ranges in parameters.ranges
        ]
        self.training.group.queue.run(
            Operation("shards of parameters", extra=f"updated: {which}"),
            lambda: owners.exchange(rooms, one_copy=parameters.one_copy),
        )
