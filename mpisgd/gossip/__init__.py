"""Who exchanges with whom, and how much it counts: graphs, mixing matrices and the exchange itself.

    mpisgd.DistributedOptimizer(optimizer, strategy=mpisgd.Gossip(mpisgd.gossip.RandomPairs(seed=1)))
    mpisgd.gossip.Ring().spectral_gap(16)

Each graph is a small frozen description for any number of ranks, and plain data: `matrix(size)` is its mixing
matrix W. One step makes the tensor of rank i the sum of W[i, j] times that of rank j.
"""

from mpisgd.gossip.graph import Exchange, Graph
from mpisgd.gossip.graphs import (
    Complete,
    Exponential,
    Hypercube,
    OnePeerExponential,
    RandomPairs,
    Ring,
    Star,
    Torus,
)
from mpisgd.gossip.mixing_matrix import MixingMatrix

__all__ = [
    "Complete",
    "Exchange",
    "Exponential",
    "Graph",
    "Hypercube",
    "MixingMatrix",
    "OnePeerExponential",
    "RandomPairs",
    "Ring",
    "Star",
    "Torus",
]
