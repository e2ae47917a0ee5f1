"""`PlannedJob`: what a step is planned of: a cluster, a step without communication, how gradients travel."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from mpisgd.compress.compressor import Compressor
from mpisgd.gradients.options import DEFAULT_BUCKET_CAP_BYTES
from mpisgd.methods.cast.cast import Compression
from mpisgd.methods.cost_kit import Bucket, Sizes, World
from mpisgd.methods.costs import wire_of
from mpisgd.methods.sizes import parameter, sizes_of
from mpisgd.tools.plan.cluster import Cluster
from mpisgd.tools.plan.models.model import OPTIMIZERS, StepProfile
from mpisgd.tools.plan.simulation.collectives import AUTO

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

    @cached_property
    def world(self) -> World:
        """The ranks, and what travels."""
        cluster = self.cluster
        return World(cluster.hosts, cluster.ranks_per_host, wire_of(self.compression), self.overlaps)

    @cached_property
    def sizes(self) -> Sizes:
        """The model, in the buckets that `DistributedOptimizer` plans in the order observed."""
        profile = self.profile
        state = OPTIMIZERS[profile.optimizer].state
        return sizes_of(
            [parameter(g.place, g.shape, g.itemsize, state * g.nbytes) for g in profile.gradients],
            self.bucket_cap_bytes,
            padded=all(self.world.wire.cast_itemsize(g.itemsize) is not None for g in profile.gradients),
            activation_bytes=profile.activation_bytes,
            layers=self._layers,
        )

    @property
    def _layers(self) -> tuple[Bucket, ...]:
        """The blocks of the model, whose parameters the optimizer has in their order."""
        places = itertools.count()
        itemsize = self.profile.gradients[0].itemsize
        return tuple(
            Bucket(number, tuple(parameter(next(places), shape, itemsize, 0) for shape in block.shapes))
            for number, block in enumerate(self.profile.blocks)
            if block.shapes
        )

    @cached_property
    def ready_s(self) -> dict[int, float]:
        """When each gradient is complete, in seconds since the step has begun, by the parameter's place."""
        return {gradient.place: gradient.ready_s for gradient in self.profile.gradients}

    def measured_s(self, compressor: object) -> float | None:
        """Return the seconds of a compressor per element, where that was measured."""
        names = (repr(compressor), type(compressor).__name__)
        return next((self.compression_s[name] for name in names if name in self.compression_s), None)

    def is_compressed(self) -> bool:
        """Return whether gradients travel as something else."""
        return any(self.world.wire.changes(each.itemsize) for each in self.profile.gradients)
