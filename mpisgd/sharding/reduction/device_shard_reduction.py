"""`DeviceShardReduction`: brings one bucket on a device to the ranks that own its parts."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.dtypes import ReduceOp
from mpisgd.gradients.bucketing import Bucket
from mpisgd.sharding.device_parts import DeviceParts
from mpisgd.sharding.division import PieceRange
from mpisgd.sharding.reduction.bucket_shard import BucketShard

__all__ = ["DeviceShardReduction"]


class DeviceShardReduction(BucketShard):
    """Combines one bucket again in every step, by the group's own collectives; see `DeviceParts`.

    Args:
        bucket: what travels.
        dtype: of the gradients.
        ranges: what each rank has of all parameters.
        group: the ranks.
        op: AVG or SUM.
        finish: what is done to the combined parts.
        wire: the dtype in which gradients travel.
    """

    def __init__(
        self,
        bucket: Bucket,
        dtype: torch.dtype,
        ranges: Sequence[Sequence[PieceRange]],
        group: Group,
        op: ReduceOp,
        finish: Callable[[Tensor], None],
        wire: torch.dtype,
    ) -> None:
        super().__init__(bucket, dtype, ranges, group.rank, finish)
        self._group, self._op, self._wire = group, op, wire

    def begin(self, flat: Tensor, operation: Operation) -> Work | None:
        """Begin to combine what all ranks have; the shard is complete when somebody has waited.

        Args:
            flat: of this rank.
            operation: what the ranks must agree on.
        """
        if not flat.numel():
            self._take(flat)
            return None
        return DeviceParts(self.everyones(flat), self._group).reduce_scatter(
            self._op, operation, self._wire, self._take
        )

    def release(self) -> None:
        """Forget the shard."""
        self._shard = None
