"""`PlannedJob`: what a step is planned of: a cluster, a step without communication, how gradients travel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mpisgd.accelerator.buffers import ALONE_BYTES
from mpisgd.compress.compressor import Compressor, wire_dtype_of
from mpisgd.gradients.bucketing import ALIGN_BYTES, Bucket, Item, plan_buckets
from mpisgd.gradients.options import DEFAULT_BUCKET_CAP_BYTES
from mpisgd.methods.cast.cast import Compression
from mpisgd.plan.cluster import Cluster
from mpisgd.plan.models.model import Gradient, StepProfile
from mpisgd.plan.simulation.collectives import AUTO
from mpisgd.plan.steps.graph import StepGraph
from mpisgd.plan.steps.wire import Wire, dtype_of, wire_of

__all__ = ["PlannedJob"]


@dataclass(frozen=True)
class PlannedJob:
    """What a step is planned of.

    Attributes:
        cluster: the ranks.
        profile: of a rank's step without communication.
        compression: what gradients, or changes of parameters, travel as.
        algorithm: of all-reduces.
        overlap: whether gradients are sent while backward computes others; None: between hosts.
        bucket_cap_bytes: most bytes of a bucket.
        compression_s: what compressors take for an element, by what they print as or their class.
    """

    cluster: Cluster
    profile: StepProfile
    compression: Compressor = Compression.none
    algorithm: str = AUTO
    overlap: bool | None = None
    bucket_cap_bytes: int = DEFAULT_BUCKET_CAP_BYTES
    compression_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def overlaps(self) -> bool:
        """Whether gradients are sent while backward computes others."""
        return self.cluster.size > 1 and (self.cluster.hosts > 1 if self.overlap is None else self.overlap)

    def graph(self, cluster: Cluster | None = None) -> StepGraph:
        """Return a graph without tasks."""
        return StepGraph(cluster or self.cluster, self.algorithm)

    def gradient_buckets(self) -> tuple[Bucket, ...]:
        """Return the buckets of gradients, as `DistributedOptimizer` plans them in the order observed."""
        padded = all(
            wire_dtype_of(self.compression, dtype_of(each.itemsize)) is not None
            for each in self.profile.gradients
        )
        return self._buckets(ALIGN_BYTES if padded else 1, ALONE_BYTES)

    def parameter_buckets(self) -> tuple[Bucket, ...]:
        """Return the buckets of parameters, or their changes, that are compressed."""
        return self._buckets(1, float("inf"))

    def _buckets(self, align_bytes: int, alone_bytes: float) -> tuple[Bucket, ...]:
        items = [Item(g.place, g.numel, g.itemsize, str(g.itemsize)) for g in self.profile.gradients]
        return plan_buckets(
            items,
            cap_bytes=self.bucket_cap_bytes,
            order=[gradient.place for gradient in self.profile.gradients],
            align_bytes=align_bytes,
            alone_bytes=alone_bytes,
        )

    def gradients_of(self, bucket: Bucket) -> list[Gradient]:
        """Return the gradients of a bucket."""
        by_index = {gradient.place: gradient for gradient in self.profile.gradients}
        return [by_index[index] for index in bucket.indices]

    def wire(self, gradients: Sequence[Gradient]) -> Wire:
        """Return what tensors of the shapes of these gradients are on the wire, together."""
        shapes, itemsize = [gradient.shape for gradient in gradients], gradients[0].itemsize
        return wire_of(self.cluster, self.compression, shapes, itemsize, self.compression_s)

    def is_compressed(self) -> bool:
        """Whether gradients travel as something else."""
        return any(self.compression.changes(dtype_of(each.itemsize)) for each in self.profile.gradients)

    def messages(self) -> list[float]:
        """Return the bytes of the messages of all parameters: large ones alone, the others together."""
        sizes = [float(gradient.nbytes) for gradient in self.profile.gradients]
        small = sum(size for size in sizes if size < ALONE_BYTES)
        return [*(size for size in sizes if size >= ALONE_BYTES), *([small] if small else [])]

    def small_bytes(self) -> float:
        """Return the bytes that are copied to travel together."""
        return sum(float(each.nbytes) for each in self.profile.gradients if each.nbytes < ALONE_BYTES)

    def is_alone(self, gradients: Sequence[Gradient]) -> bool:
        """Whether a bucket is one gradient that travels from where it lies."""
        return len(gradients) == 1 and gradients[0].nbytes >= ALONE_BYTES
