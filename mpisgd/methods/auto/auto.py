"""`Auto`: the compressor that pays on this link, if there is one."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mpisgd.arguments import check_ratio, shown
from mpisgd.compress.compressor import BucketLayout, BucketReducer, Choosing, Compressor, Traits
from mpisgd.errors import InvalidArgument
from mpisgd.methods.cast.cast import Compression
from mpisgd.methods.per_host.per_host import PerHost
from mpisgd.methods.power_sgd.power_sgd import PowerSGD

__all__ = ["Auto"]


@dataclass(frozen=True)
class Auto(Compressor):
    """Measure some compressors on gradients of the model's shapes, and choose one.

    `DistributedOptimizer(compression="auto")` measures when it is made; one rank prints the times and the
    choice. Only reductions are measured, not what overlaps with backward: `python -m mpisgd bench
    compression` measures whole steps.

    Attributes:
        candidates: in order, the one that changes gradients least first. With the default ones small models
            kept their accuracy within a percentage point; see docs/concepts/compression.md.
        max_time_ratio: a candidate is preferred to those before it if its time is at most this share of
            theirs.

    Raises:
        InvalidArgument: at construction.

    Cost: a few reductions of at most 2 MiB for each candidate, half a second at most unless the link is slow.
    """

    candidates: tuple[Compressor, ...] = (Compression.none, Compression.bf16, PerHost(PowerSGD(rank=4)))
    max_time_ratio: float = 0.7

    @classmethod
    def examples(cls) -> Sequence["Auto"]:
        """See `Compressor`."""
        return ()

    def __post_init__(self) -> None:
        given = self.candidates
        if not isinstance(given, tuple) or not given or not all(map(_is_candidate, given)):
            raise InvalidArgument(f"Auto: candidates={shown(given)}; expected a tuple of compressors")
        check_ratio("Auto", "max_time_ratio", self.max_time_ratio)

    @cached_property
    def traits(self) -> Traits:
        """The traits that hold for every candidate."""
        each = [candidate.traits for candidate in self.candidates]
        return Traits(
            dtypes=frozenset().union(*(traits.dtypes for traits in each)),
            has_magnitudes=all(traits.has_magnitudes for traits in each),
            is_homogeneous=all(traits.is_homogeneous for traits in each),
            is_additive=all(traits.is_additive for traits in each),
            has_error_feedback=any(traits.has_error_feedback for traits in each),
            fades=any(traits.fades for traits in each),
        )

    def reducer(self, layout: BucketLayout) -> BucketReducer:
        """Raise: the chosen candidate makes the reducers.

        Raises:
            InvalidArgument: always.
        """
        raise InvalidArgument("Auto: only DistributedOptimizer(compression=...) chooses a compressor")


def _is_candidate(given: object) -> bool:
    return isinstance(given, Compressor) and not isinstance(given, Choosing)
