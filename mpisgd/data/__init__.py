"""Data sets and random numbers for many ranks, beyond torch's samplers."""

from mpisgd.data.partition import partition
from mpisgd.data.scatter import ItemDataset, scatter_dataset

__all__ = ["ItemDataset", "partition", "scatter_dataset"]
