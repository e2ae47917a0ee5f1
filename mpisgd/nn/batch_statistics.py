"""Mean and variance of each channel over the batches of all ranks.

Sums of x and x^2 would be one all-reduce, and their difference loses all digits where the mean is large. So
every rank reduces its own batch to (mean, variance, count), and all ranks combine these rows:

    mean = sum_r share_r mean_r                         share_r = count_r / sum of counts
    var  = sum_r share_r (var_r + (mean_r - mean)^2)

which only adds what is not negative. Ranks may have different counts, or none.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mpisgd.collectives.all_gather import all_gather_into_tensor
from mpisgd.core.group import Group

__all__ = ["BatchStatistics", "combine", "gather_statistics", "local_row", "statistics_dtype"]


@dataclass(frozen=True)
class BatchStatistics:
    """Mean and variance of each channel over all ranks.

    Attributes:
        mean, var: [channels], float64; the biased variance. Zeros if no rank has a value.
        count: of values per channel, [] of float64. On a GPU, to ask for its number is to wait.
    """

    mean: Tensor
    var: Tensor
    count: Tensor


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which statistics are computed: float32 for 16-bit floats, as in torch."""
    return torch.float64 if dtype is torch.float64 else torch.float32


@torch.no_grad()
def gather_statistics(values: Tensor, group: Group) -> BatchStatistics:
    """Return the statistics of all ranks' `values`, [batch, channels, ...], bit-identical on every rank.

    Collective: all ranks of `group` call it in the same order, with equally many channels.

    Raises:
        CollectiveMismatch: the numbers of channels differ; raised on every rank.

    Cost: one all-gather of 2 * channels + 1 float64 per rank, whatever the size of the batch.
    """
    row = local_row(values)
    rows = row.new_empty(group.size, row.numel())
    all_gather_into_tensor(rows, row, group)
    return combine(rows)


def local_row(values: Tensor) -> Tensor:
    """Return this rank's means, variances and count in one tensor: [2 * channels + 1], float64."""
    channels = values.size(1)
    if values.numel() == 0:
        return values.new_zeros(2 * channels + 1, dtype=torch.float64)
    # torch returns statistics in the dtype of the running ones it is given; momentum 0 leaves them alone.
    running = values.new_zeros(channels, dtype=statistics_dtype(values.dtype))
    mean, var = torch.batch_norm_update_stats(values, running, running, 0.0)
    count = mean.new_full((1,), values.numel() // channels, dtype=torch.float64)
    return torch.cat([mean.double(), var.double(), count])


def combine(rows: Tensor) -> BatchStatistics:
    """Combine what `local_row` returned on each rank: [ranks, 2 * channels + 1]."""
    channels = rows.size(1) // 2
    means, variances, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    total = counts.sum()
    shares = counts / total.clamp(min=1)
    mean = (shares * means).sum(0)
    return BatchStatistics(mean, (shares * (variances + (means - mean).square())).sum(0), total)
