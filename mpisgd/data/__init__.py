"""Data for many ranks, where torch's own samplers do not serve."""

from mpisgd.data.partition import partition
from mpisgd.data.scatter import ItemDataset, scatter_dataset

__all__ = ["ItemDataset", "partition", "scatter_dataset"]
