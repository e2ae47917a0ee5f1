"""Clusters and steps that tests of the plan share."""

from __future__ import annotations

from mpisgd.tools.plan.cluster import Cluster, Link
from mpisgd.tools.plan.methods import planned_methods
from mpisgd.tools.plan.models.model import Gradient, StepProfile
from mpisgd.tools.plan.prediction import predict

ALPHA, RATE = 1e-4, 1e8
MEMORY = 1e15  # so fast that copies count nothing


def cluster(hosts=4, ranks_per_host=1, **options):
    fields = {"memory_bytes_per_s": MEMORY, **options}
    return Cluster(hosts, ranks_per_host, Link(ALPHA, RATE), Link(1e-9, MEMORY), **fields)


def profile(*sizes, forward_s=1.0, backward_s=2.0, optimizer_s=0.5, optimizer="sgd"):
    """Gradients of so many float32 elements, which become ready one after the other, in equal distances."""
    sizes = sizes or (10**6, 10**6)
    gradients = [
        Gradient(f"p{i}", len(sizes) - 1 - i, (n,), 4, forward_s + backward_s * (i + 1) / len(sizes))
        for i, n in enumerate(sizes)
    ]
    return StepProfile("example", 8, forward_s, backward_s, optimizer_s, tuple(gradients), optimizer)


def predicted(method, where=None, step=None):
    (found,) = planned_methods(method)
    return predict(where or cluster(), step or profile(), found)
