"""`CurrentPlan`: the plan of buckets as long as it fits the parameters, and then a new one."""

import hashlib
from collections.abc import Collection, Sequence

from torch import Tensor

from mpisgd.collectives.objects import all_gather_object
from mpisgd.compress.compressor import wire_dtype_of
from mpisgd.core.group import Group
from mpisgd.gradients.bucket_plan import BucketPlan, agree_on_plan, describe_covered
from mpisgd.gradients.compression_state import CompressionState
from mpisgd.gradients.destination import Destination
from mpisgd.gradients.options import ReductionOptions
from mpisgd.gradients.parameter_guard import ParameterGuard

__all__ = ["CurrentPlan"]


class CurrentPlan:
    """Which parameters take part in reductions, and how they travel.

    Args:
        group: the ranks that take part.
        destination: whose the combined gradients become; it lays out the buckets.
        state: what the reducers of compressed buckets keep, in the order of one plan. Where another one is
            loaded into it, there is a new plan.

    Attributes:
        state: as given.
    """

    def __init__(self, group: Group, destination: Destination, state: CompressionState) -> None:
        self._group = group
        self._destination = destination
        self.state = state
        self._params: Sequence[Tensor] = ()
        self._left_out: frozenset[int] = frozenset()
        self._plan: BucketPlan | None = None
        self._guard: ParameterGuard | None = None  # of the parameters as they were when the plan was made
        self._planned_for: tuple[Sequence[int], Collection[int]] = ((), ())  # `_known` then

    def cover(self, params: Sequence[Tensor]) -> None:
        """Take over another list of parameters, which has no plan yet."""
        self._params = params
        self._plan = self._guard = None

    def forget(self) -> None:
        """Let the next reduction make a new plan."""
        self._plan = None

    def leave_out(self, indices: Collection[int]) -> None:
        """Plan without some parameters from now on."""
        self._guard = self._guard if self._left_out == frozenset(indices) else None
        self._left_out = frozenset(indices)

    @property
    def that_holds(self) -> BucketPlan | None:
        """The plan, None where there is none that fits the parameters as they are."""
        plan = self._plan
        if plan is None or self._known != self._planned_for:
            return None  # a state was loaded since, or gradients have become sparse
        if self._guard is not None and self._guard.holds(self._params):
            return plan
        return plan if plan.covered == self.coverable() and plan.fits(self._params) else None

    @property
    def _known(self) -> tuple[Sequence[int], Collection[int]]:
        """The order of packing that is kept, and what has had sparse gradients."""
        return self.state.order, self.state.sparse

    @property
    def contents(self) -> str:
        """Which parameters take part in the next reduction, in words."""
        return describe_covered(self.coverable(), len(self._params))

    def coverable(self) -> tuple[int, ...]:
        """Return the parameters that can take part."""
        exist = [i for i, p in enumerate(self._params) if p.requires_grad or p.grad is not None]
        return tuple(i for i in exist if i not in self._left_out) if self._left_out else tuple(exist)

    def ranks_cover_the_same(self) -> bool:
        """Return whether the same parameters can take part on all ranks now. Collective.

        Where a rank was lost, some have frozen already what others have not: until they are where they were
        when the state was committed, there is no plan.
        """
        everyones = [b""] * self._group.size
        here = hashlib.blake2b(repr(self.coverable()).encode(), digest_size=16).digest()
        all_gather_object(everyones, here, self._group)
        return all(each == here for each in everyones)

    def rounds(self, options: ReductionOptions) -> bool:
        """Return whether dense gradients are rounded on their way, or parameters are."""
        compresses = any(options.compression.changes(param.dtype) for param in self._params)
        return compresses or self._destination.rounds

    def renew(self, options: ReductionOptions, observed: Sequence[int], when: str) -> BucketPlan:
        """Make a new plan. Collective.

        Args:
            options: how to reduce.
            observed: the order in which gradients became ready.
            when: which reduction of the program comes next.
        """
        covered, state = self.coverable(), self.state
        order = self._destination.packing_order
        is_known = set(state.order) == set(covered)
        self._plan = plan = agree_on_plan(
            self._params,
            covered,
            state.sparse,
            state.order if is_known else observed,
            is_known=is_known,
            group=self._group,
            options=options,
            when=when,
            order=order,
            storage_order=self._destination.storage_order,
            make_slots=self._destination.make_slots,
        )
        state.move_to(plan.slots)
        state.note_sparse(plan.sparse, rounds=self.rounds(options))  # others may be frozen now
        of_buckets = any(wire_dtype_of(options.compression, p.dtype) is None for p in self._params)
        if (order is None and of_buckets) or self._destination.rounds:
            state.order = plan.order  # what comes out of a bucket as a whole depends on it
        self._planned_for = self._known
        self._guard = ParameterGuard(self._params)
        self._destination.follow(plan)
        return plan
