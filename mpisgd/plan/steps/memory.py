"""What a rank keeps: parameters, gradients, optimizer state, and what its strategy and its compressor add.

Source of the formulas of stages: ZeRO, Rajbhandari, Rasley, Ruwase and He 2020, section 3 and figure 1. For
Psi parameters on N ranks with 16-bit parameters and gradients, and an optimizer of K bytes for each of them:

    none  (2 + 2 + K) Psi     P_os  (2 + 2) Psi + K Psi / N     P_os+g  2 Psi + (2 + K) Psi / N
    P_os+g+p  (2 + 2 + K) Psi / N
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from mpisgd.arguments import check_positive
from mpisgd.compress.compressor import BucketLayout
from mpisgd.errors import InvalidArgument
from mpisgd.methods.per_host.per_host import PerHost
from mpisgd.plan.steps.gossip import rounds_of_graph
from mpisgd.plan.steps.job import PlannedJob
from mpisgd.plan.steps.layout import divide
from mpisgd.plan.steps.parallel import Parallel
from mpisgd.plan.steps.wire import dtype_of

__all__ = ["Memory", "memory_of", "zero_bytes"]


def zero_bytes(
    parameters: float, ranks: int, stage: int, *, optimizer_bytes: float = 12.0, itemsize: float = 2.0
) -> float:
    """Return the bytes of a rank's model states by the formulas above.

    Args:
        parameters: Psi.
        ranks: N.
        stage: 0 for none, 1 for P_os, 2 for P_os+g, 3 for P_os+g+p.
        optimizer_bytes: K; 12 for Adam on 16-bit parameters: a copy and two moments in float32.
        itemsize: of a parameter and of its gradient.
    """
    if stage not in (0, 1, 2, 3):
        raise InvalidArgument(f"zero_bytes: stage={stage!r}; expected 0, 1, 2 or 3")
    check_positive("zero_bytes", "ranks", ranks, whole=True)
    kept = [itemsize, itemsize, optimizer_bytes]
    divided = [stage >= 3, stage >= 2, stage >= 1]
    return parameters * sum(each / (ranks if cut else 1) for each, cut in zip(kept, divided, strict=True))


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the moment at which it has most.

    Attributes:
        parameters: of the model.
        gradients: of all of them, or of this rank's share.
        optimizer: its state.
        strategy: copies that the strategy keeps, and what it needs while it communicates.
        compression: what compressors keep from step to step.
        buffers: gradients side by side.
        activations: what backward needs.
    """

    parameters: float
    gradients: float
    optimizer: float
    strategy: float = 0.0
    compression: float = 0.0
    buffers: float = 0.0
    activations: float = 0.0

    @property
    def total(self) -> float:
        """All together."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


def memory_of(job: PlannedJob, strategy: Any) -> Memory:
    """Return what a rank of a job keeps."""
    travels = job.cluster.size > 1
    compression = _compression_bytes(job) if travels and job.is_compressed() else 0.0
    rest = {"compression": compression, "activations": job.profile.activation_bytes}
    return Memory(**{**rest, **_kept(job, strategy)})


def _kept(job: PlannedJob, strategy: Any) -> dict[str, float]:
    """Return the parts that depend on the strategy."""
    profile, size = job.profile, float(job.cluster.size)
    parts = {
        "parameters": float(profile.nbytes),
        "gradients": float(profile.nbytes),
        "optimizer": profile.state_bytes,
    }
    if size == 1:
        return parts
    kind = type(strategy).__name__
    return {**parts, **PARTS[kind](job, strategy)} if kind in PARTS else parts


def _largest_bucket(job: PlannedJob) -> float:
    buckets = (job.gradients_of(bucket) for bucket in job.gradient_buckets())
    return max(float(sum(gradient.nbytes for gradient in each)) for each in buckets)


def _synchronous(job: PlannedJob, strategy: Any) -> dict[str, float]:
    return {"buffers": job.small_bytes()}


def _local_sgd(job: PlannedJob, strategy: Any) -> dict[str, float]:
    # The mean before, and the changes since.
    return {"strategy": 2.0 * job.profile.nbytes if job.is_compressed() else job.small_bytes()}


def _diloco(job: PlannedJob, strategy: Any) -> dict[str, float]:
    options = strategy.outer_options
    momentum = options is None or options.get("momentum", 0) > 0
    changes = job.profile.nbytes / strategy.fragments
    return {"strategy": (1.0 + momentum) * job.profile.nbytes + changes}


def _elastic_averaging(job: PlannedJob, strategy: Any) -> dict[str, float]:
    return {"strategy": 2.0 * job.profile.nbytes}


def _gossip(job: PlannedJob, strategy: Any) -> dict[str, float]:
    if strategy.style == "asynchronous":
        return {"strategy": 5.0 * job.profile.nbytes}
    rounds = rounds_of_graph(strategy.graph, job.cluster.size)
    received = max(1.0, sum(share for share, _ in rounds))
    return {"strategy": received * sum(job.messages())}


def _sharded(job: PlannedJob, strategy: Any) -> dict[str, float]:
    size, profile = job.cluster.size, job.profile
    parts = {"optimizer": profile.state_bytes / size, "buffers": job.small_bytes()}
    if strategy.stage == 2:
        parts |= {"gradients": profile.nbytes / size, "buffers": _largest_bucket(job)}
    return parts


def _fully_sharded(job: PlannedJob, strategy: Any) -> dict[str, float]:
    size, profile = job.cluster.size, job.profile
    # While a layer computes, the next one is gathered.
    gathered = 2 * _largest_bucket(job) if strategy.reshard_after_forward else float(profile.nbytes)
    return {
        "parameters": profile.nbytes / size,
        "gradients": profile.nbytes / size,
        "optimizer": profile.state_bytes / size,
        "buffers": gathered + _largest_bucket(job),
    }


def _parameter_server(job: PlannedJob, strategy: Any) -> dict[str, float]:
    size, profile = job.cluster.size, job.profile
    if strategy.mode == "sync":
        share = 1 / job.cluster.ranks_per_host
        return {"parameters": profile.nbytes * share, "optimizer": profile.state_bytes * share}
    version = profile.nbytes + profile.state_bytes
    return {"strategy": 2 * version / size + version / size}


def _parallel(job: PlannedJob, layout: Parallel) -> dict[str, float]:
    """What the rank keeps that has most: the first of a pipeline has the most activations, as a rule."""
    model, itemsize = divide(job, layout), job.profile.nbytes / job.profile.numel
    state = job.profile.state_bytes / job.profile.numel
    ranks = [
        {
            "parameters": model.numel_of(place) * itemsize,
            "gradients": model.numel_of(place) * itemsize,
            "optimizer": model.numel_of(place) * state,
            "activations": model.kept_bytes(place),
        }
        for place in range(model.grid.pp)
    ]
    return max(ranks, key=lambda parts: sum(parts.values()))


PARTS: dict[str, Callable[[PlannedJob, Any], dict[str, float]]] = {
    "Synchronous": _synchronous,
    "Overlap": _synchronous,
    "LocalSGD": _local_sgd,
    "DiLoCo": _diloco,
    "ElasticAveraging": _elastic_averaging,
    "Gossip": _gossip,
    "ParameterServer": _parameter_server,
    "Sharded": _sharded,
    "FullyShard": _fully_sharded,
    "Parallel": _parallel,
}


def _compression_bytes(job: PlannedJob) -> float:
    """Return what the compressor keeps of all buckets, by its own `state_dict`, on the meta device."""
    choice = job.compression.compressor if isinstance(job.compression, PerHost) else job.compression
    total = 0.0
    for bucket in job.gradient_buckets():
        gradients = job.gradients_of(bucket)
        dtype = dtype_of(gradients[0].itemsize)
        shapes = tuple(torch.Size(gradient.shape) for gradient in gradients)
        state = choice.reducer(BucketLayout(shapes, dtype, torch.device("meta"))).state_dict()
        total += sum(map(_nbytes, state.values()))
    return total


def _nbytes(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return float(value.nbytes)
    return sum(map(_nbytes, value)) if isinstance(value, (list, tuple)) else 0.0
