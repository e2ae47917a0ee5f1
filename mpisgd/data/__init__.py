"""Data for many ranks, where torch's own samplers do not serve."""

from mpisgd.data.partition import partition

__all__ = ["partition"]
