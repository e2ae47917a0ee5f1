"""`SyncBatchNorm` with Horovod's arguments: the ranks of a process set share mean and variance."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from mpisgd.arguments import shown
from mpisgd.horovod.ops.allgather import gather_to_reduce
from mpisgd.horovod.ops.allreduce import allreduce_
from mpisgd.horovod.ops.handles import synchronize
from mpisgd.horovod.ops.reduce_ops import Sum
from mpisgd.horovod.process_sets import ProcessSet, global_process_set
from mpisgd.nn import sync_batch_norm
from mpisgd.nn.batch_statistics import BatchStatistics, combine, local_row

__all__ = ["SyncBatchNorm"]

# Layers speak one after the other, so they can share a name: where they do not match, they meet and notice.
NAME = "sync_batch_norm"


class SyncBatchNorm(sync_batch_norm.SyncBatchNorm):
    """Batch normalization with the mean and variance of the joined batch of a process set's ranks.

    Works on CPUs, too. Its messages are negotiated like those of every operation of this module, so that
    ranks that have joined take part with an empty batch.

    Args:
        num_features: channels of the input, [batch, channels, ...].
        eps, momentum, affine, track_running_stats, device, dtype, bias: as in torch.nn.SyncBatchNorm.
        process_set: the ranks that share the statistics.

    Raises:
        InvalidArgument, ShapeMismatch: in forward, as `mpisgd.SyncBatchNorm`.
        HorovodInternalError: in forward, on all ranks: their layers differ in `num_features`.

    Cost: as `mpisgd.SyncBatchNorm`.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        *,
        device: Any = None,
        dtype: Any = None,
        bias: bool = True,
    ) -> None:
        if not isinstance(process_set, ProcessSet):
            raise ValueError(f"SyncBatchNorm: process_set={shown(process_set)}; expected an hvd.ProcessSet")
        like_torch: dict[str, Any] = {"device": device, "dtype": dtype, "bias": bias}
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **like_torch)
        self.process_set = process_set

    def _num_ranks(self) -> int:
        return self.process_set.size()

    def _statistics(self, input: Tensor) -> BatchStatistics:
        row = local_row(input.detach()).unsqueeze(0)
        rows: Tensor = synchronize(gather_to_reduce(row, NAME, Sum, self.process_set))
        return combine(rows)

    def _add_up(self) -> Callable[[Tensor], object]:
        return partial(allreduce_, name=NAME, op=Sum, process_set=self.process_set)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_set: ProcessSet = global_process_set
    ) -> nn.Module:
        """Replace every BatchNorm in `module` by one of this class; Horovod has no such helper.

        Parameters and buffers stay the same objects.

        Args:
            module: changed in place, unless it is a BatchNorm itself.
            process_set: of all new layers.

        Returns:
            `module`, or what has replaced it.

        Raises:
            InvalidArgument: a lazy BatchNorm does not know its channels.
        """
        return sync_batch_norm.converted(module, cls, process_set, {})
