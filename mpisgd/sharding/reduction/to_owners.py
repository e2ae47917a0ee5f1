"""`ToOwners`: the combined gradients of all ranks become those of the pieces that each rank owns.

Gradients come there on one of three routes, which depends on the plan alone:

    by piece    all ranks share a host: each combines the pieces it owns and nothing else, when backward has
                ended, or, for an optimizer that can update one piece after the other, in the step, while a
                piece is in the cache
    by bucket   a bucket goes to its owners when all of its gradients are complete; see `BucketRoute`
    to all      all are reduced for everyone, and each rank takes its pieces from these

What programs see as `p.grad` afterwards is a `ShardedGradient`, on every rank. See `GradientPlace`.
"""

import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor

from mpisgd.accelerator.runtime import on_device
from mpisgd.compress.compressor import wire_dtype_of
from mpisgd.errors import InvalidArgument
from mpisgd.gradients.bucket_plan import BucketPlan, BucketSlot
from mpisgd.gradients.bucketing import Bucket
from mpisgd.gradients.destination import Everyone
from mpisgd.gradients.fusion_buffer import flat_view
from mpisgd.gradients.gradient_flags import DENSE, SPARSE
from mpisgd.gradients.in_flight import InFlightReduction
from mpisgd.gradients.in_place_gradient import InPlaceGradient
from mpisgd.gradients.launcher import BucketLauncher
from mpisgd.sharding.divided_parameters import DividedParameters
from mpisgd.sharding.piece import Piece, Receiver
from mpisgd.sharding.piece_states import PieceStates
from mpisgd.sharding.places import GradientPlace
from mpisgd.sharding.reduction.bucket_route import BucketRoute
from mpisgd.sharding.reduction.coded_reduction import MakeShardCode
from mpisgd.sharding.reduction.piece_reduction import PieceReduction, Settle, goes_in_pieces
from mpisgd.sharding.reduction.sharded_gradient import ShardedGradient, Unscale

__all__ = ["ToOwners"]


class ToOwners:
    """A `Destination`: each rank gets the gradients of its pieces.

    Args:
        parameters: which rank owns what.
        states: what the optimizer keeps for the pieces.
        defers: whether pieces are reduced when somebody asks for them, and not at the end of backward.
        unscale: see `ShardedGradient`.
        synchronize: returns when nobody reads this rank's gradients of the step before any more.
        stage: 2: a gradient is freed when its bucket has been reduced; 1: with all others; 0: as with 1, and
            what cannot go by piece goes to all, and not by bucket.
        make_code: see `BucketRoute`.
        rounds: see `Destination`.

    Attributes:
        where: the present gradients are.
    """

    how = ", divided among the ranks"
    _launcher: BucketLauncher

    def __init__(
        self,
        parameters: DividedParameters,
        states: PieceStates,
        *,
        defers: bool,
        unscale: Unscale,
        synchronize: Callable[[], None],
        stage: int,
        make_code: MakeShardCode | None = None,
        rounds: bool = False,
    ) -> None:
        self._make_code, self.rounds = make_code, rounds
        self._parameters, self._states, self._defers = parameters, states, defers
        self._unscale, self._stage = weakref.WeakMethod(unscale), stage
        self._synchronize = weakref.WeakMethod(synchronize)
        self._sharded: list[Tensor] = []
        self._exists: list[bool] = []  # whether some rank has a gradient, for each parameter
        self._slots: Sequence[BucketSlot] = ()  # of the plan
        self._everyone = Everyone()
        self._by_piece: PieceReduction | None = None  # of the plan, if it takes this route
        self._by_bucket: BucketRoute | None = None  # likewise
        self._settle = Settle()
        self.where = GradientPlace.LOCAL

    def cover(self, launcher: BucketLauncher) -> bool:
        """See `Destination`. Gradients are to be freed from the first backward on."""
        self._launcher, named = launcher, launcher.named
        self._sharded += [ShardedGradient(p, name, self._unscale) for name, p in named[len(self._sharded) :]]
        self._everyone.cover(launcher)
        if not self.is_deferred:
            self._slots, self._by_piece = (), None
        return self._stage == 2

    # -- the plan -----------------------------------------------------------------------------------

    @property
    def packing_order(self) -> Sequence[int]:
        """About the order of backward, the same in every run: it decides who owns what."""
        return range(len(self._sharded) - 1, -1, -1)

    @property
    def storage_order(self) -> Sequence[int] | None:
        """The order of the parameters in memory, so that what is in a piece is found in one place."""
        return self._parameters.order

    @property
    def _goes_by_bucket(self) -> bool:
        """Whether gradients do, and do not stay where all ranks see them; the same on all ranks."""
        if self._stage != 1:
            return self._stage == 2
        launcher = self._launcher
        stays = launcher.group.shared_memory is not None and not launcher.overlaps
        return not stays or any(map(self._travels_otherwise, launcher.params))

    def _travels_otherwise(self, param: Tensor) -> bool:
        wire = wire_dtype_of(self._launcher.options.compression, param.dtype)
        return on_device(param) or wire not in (None, param.dtype)

    def make_slots(self, buckets: Sequence[Bucket]) -> list[BucketSlot]:
        """See `Destination`."""
        self._by_bucket = None
        if self._goes_by_bucket:
            self._by_bucket = BucketRoute(
                self._launcher, self._parameters, frees=self._stage == 2, make_code=self._make_code
            )
        return self._route.make_slots(buckets)

    def follow(self, plan: BucketPlan) -> None:
        """See `Destination`; pieces may be others then."""
        self._slots = plan.slots
        self._keep_whole(plan.sparse)
        buckets, parameters = [slot.bucket.indices for slot in plan.slots], self._parameters
        if self._stage and not parameters.is_divided_by(buckets):
            self._states.take_along(lambda: parameters.divide_by(buckets))
        if self._by_bucket is not None:
            self._by_bucket.follow(plan)
        self._by_piece = self._piece_reduction(plan) if self._by_bucket is None else None

    def _keep_whole(self, indices: Collection[int]) -> None:
        """Let one rank own all of each of these parameters, if that is new. Collective."""
        if self._parameters.may_keep_whole(indices):
            self._states.take_along(lambda: self._parameters.keep_whole(indices))

    def divide_for_step(self) -> None:
        """Keep whole what has a sparse gradient on a rank that is alone: no reduction has seen it."""
        if self._launcher.group.size == 1:
            grads = [param.grad for param in self._launcher.params]
            self._keep_whole([i for i, grad in enumerate(grads) if grad is not None and grad.is_sparse])

    def _piece_reduction(self, plan: BucketPlan) -> PieceReduction | None:
        """Return the reduction of all gradients to pieces at once, None where there can be none."""
        launcher, memory = self._launcher, self._launcher.group.shared_memory
        compressed = any(launcher.options.compression.changes(param.dtype) for param in launcher.params)
        if memory is None or compressed or launcher.overlaps or not goes_in_pieces(plan):
            return None
        op, finish = launcher.options.element_op, launcher.undo_predivision
        return PieceReduction(plan, self._parameters, memory, op, finish)

    @property
    def _route(self) -> Everyone | BucketRoute:
        """What buckets take that do not go by piece."""
        return self._everyone if self._by_bucket is None else self._by_bucket

    @property
    def launches_early(self) -> bool:
        """See `Destination`."""
        return self._route.launches_early

    # -- a reduction --------------------------------------------------------------------------------

    def launch_complete(self, in_flight: InFlightReduction) -> None:
        """See `Destination`."""
        self._route.launch_complete(in_flight)

    def launch_rest(self, in_flight: InFlightReduction) -> None:
        """See `Destination`."""
        if self._by_piece is None:
            self._route.launch_rest(in_flight)
        elif rest := in_flight.not_launched():
            if (synchronize := self._synchronize()) is not None:
                synchronize()
            self._launcher.launch_together(
                in_flight, rest, lambda flags: self._reduce_pieces(in_flight, flags)
            )

    def _reduce_pieces(self, in_flight: InFlightReduction, flags: bytes) -> bool:
        """Reduce all gradients into the pieces, or leave that for later; return False where one is sparse."""
        if any(flag & SPARSE for flag in flags):
            return False
        for index, flag in zip(in_flight.indices, flags, strict=True):
            self._exists[index] = bool(flag & DENSE)
        self._states.split(self._exists)
        in_flight.at_owners.update(range(len(in_flight.slots)))
        if not self._defers:
            self.run(self._settle)
        return True

    def unload(self, in_flight: InFlightReduction, place: int, flags: bytes) -> None:
        """See `Destination`."""
        if self._by_piece is not None and place in in_flight.at_owners:
            return
        for index, flag in zip(in_flight.slots[place].bucket.indices, flags, strict=True):
            self._exists[index] = bool(flag & DENSE)
        self._route.unload(in_flight, place, flags)

    def arrived(self, in_flight: InFlightReduction, sparse: Collection[int]) -> None:
        """See `Destination`; parameters have sharded gradients then, or None."""
        assert in_flight.plan is not None
        if not in_flight.plan.sparse.issuperset(sparse):  # some are sparse that were not before
            self._bring_all_back(in_flight)
        self._keep_whole(sparse)
        if self._by_piece is not None and in_flight.at_owners:
            self._take_what_all_have(sparse)
            self._stand_in(in_flight.plan.covered, deferred=self._defers)
            return
        with_owners = {i for place in in_flight.at_owners for i in in_flight.slots[place].bucket.indices}
        self._take_what_all_have([i for i in in_flight.plan.covered if i not in with_owners])
        if self._by_bucket is not None:
            self._take_from_buckets(self._by_bucket, with_owners)
        self._stand_in(in_flight.plan.covered, deferred=False)

    def _bring_all_back(self, in_flight: InFlightReduction) -> None:
        """Give everyone all gradients, since the parameters are about to be divided anew."""
        self._slots = ()  # the plan is out of date
        if self._by_bucket is not None:
            for place in sorted(in_flight.at_owners):
                exists = [self._exists[index] for index in in_flight.slots[place].bucket.indices]
                self._by_bucket.bring_back(in_flight, place, exists)

    def _take_from_buckets(self, route: BucketRoute, params: Collection[int]) -> None:
        """Take the gradients of pieces from the buckets of these parameters."""
        for piece in self._parameters.pieces:
            if (index := piece.members[0].param) in params:
                piece.grad = route.grad_of(piece) if self._exists[index] else None

    def _take_what_all_have(self, indices: Collection[int]) -> None:
        """Take the pieces' gradients from those that every rank has."""
        for index in indices:
            self._exists[index] = self._launcher.params[index].grad is not None
        self._states.split(self._exists)
        for piece in self._parameters.pieces:
            if piece.members[0].param in indices:
                piece.grad = self._piece_of(
                    [self._launcher.params[m.param].grad for m in piece.members], piece
                )

    def _stand_in(self, covered: Iterable[int], *, deferred: bool) -> None:
        """Put stand-ins in the place of the gradients that were reduced; others are another optimizer's."""
        if any(self._exists):
            self.where = self.where.to(GradientPlace.DEFERRED if deferred else GradientPlace.OWNED)
        for index in covered:
            param = self._launcher.params[index]
            if self._exists[index]:
                param.grad = self._sharded[index]
            elif param.grad is not None:
                param.grad = None

    # -- what the step finds ------------------------------------------------------------------------

    def settle(self) -> None:
        """Reduce what was left for later. Inside the queue, by all ranks."""
        self.run(self._settle)
        self.where = self.where.to(GradientPlace.OWNED)

    def run(self, receiver: Receiver) -> None:
        """Reduce what was left for later, and hand it over. Inside the queue, by all ranks."""
        assert self._by_piece is not None
        self._by_piece.run(self._exists, receiver)

    @property
    def is_deferred(self) -> bool:
        """Whether gradients were left for later, and the program has not reset them since."""
        return self.where is GradientPlace.DEFERRED and self.stands_in()

    def used(self) -> None:
        """Note that a step has freed the gradients of the pieces, one after the other."""
        if self.where is GradientPlace.OWNED:
            self.where = self.where.to(GradientPlace.USED)

    def check_there(self) -> None:
        """Raise where what the reduced gradients were is used up.

        Raises:
            InvalidArgument: on every rank.
        """
        if self.where is GradientPlace.USED and self.stands_in():
            raise InvalidArgument(
                "DistributedOptimizer: with Offload a step frees the gradients that it has used. Compute new "
                "ones, by zero_grad() and backward(), before another step or clip_grad_norm_()"
            )

    def check_own(self) -> None:
        """Raise where a gradient is with the pieces of another optimizer.

        Raises:
            InvalidArgument: on every rank, whatever it owns.
        """
        for param, sharded in zip(self._launcher.params, self._sharded, strict=True):
            if isinstance(param.grad, ShardedGradient) and param.grad is not sharded:
                raise InvalidArgument(
                    f"DistributedOptimizer: {param.grad.param_name} is updated by two optimizers, and with "
                    "Sharded the pieces of its gradient go to one of them; give it to one optimizer"
                )

    def is_untouched(self) -> bool:
        """Return whether all gradients are still what the last reduction has left."""
        if self.where is GradientPlace.LOCAL or len(self._exists) != len(self._sharded):
            return False
        left = [s if exists else None for s, exists in zip(self._sharded, self._exists, strict=True)]
        return all(map(operator.is_, [param.grad for param in self._launcher.params], left))

    def grad_of(self, piece: Piece) -> Tensor | None:
        """Return the gradient of a piece: what was reduced, or what the program has put in its place.

        All members have one, or none has.
        """
        grads = [self._launcher.params[m.param].grad for m in piece.members]
        if all(grad is self._sharded[m.param] for grad, m in zip(grads, piece.members, strict=True)):
            return piece.grad
        return self._piece_of(grads, piece)

    def sources(self) -> list[Tensor]:
        """Return the sources of the pieces' gradients: those reduced here, and those of the program."""
        params, pieces = self._launcher.params, self._parameters.pieces
        stands = [param.grad is sharded for param, sharded in zip(params, self._sharded, strict=True)]
        reduced = [p.grad for p in pieces if p.grad is not None and any(stands[m.param] for m in p.members)]
        own = [p.grad for p, stand in zip(params, stands, strict=True) if p.grad is not None and not stand]
        return [*reduced, *own]

    def _piece_of(self, grads: Sequence[Tensor | None], piece: Piece) -> Tensor | None:
        """Return the gradient of a piece, from those of the parameters in it."""
        if grads[0] is None or grads[0].is_sparse:
            return grads[0]
        if len(grads) == 1 and piece.tensor.numel() == piece.members[0].numel:
            return self._part_of(grads[0], 0, piece)
        buffer = torch.zeros(piece.tensor.numel(), dtype=piece.dtype, device=grads[0].device)
        for k, (grad, member) in enumerate(zip(grads, piece.members, strict=True)):
            if grad is not None:
                buffer[member.at : member.at + member.numel] = self._part_of(grad, k, piece)
        return buffer

    def _part_of(self, grad: Tensor, k: int, piece: Piece) -> Tensor:
        """Return the part of a parameter's gradient that lies in a piece, as its k-th member."""
        member = piece.members[k]
        if grad is self._sharded[member.param]:
            assert piece.grad is not None
            return piece.grad[member.at : member.at + member.numel]
        flat = flat_view(grad, self._parameters.layouts[member.param])
        return flat[member.first : member.first + member.numel]

    # -- new gradients ------------------------------------------------------------------------------

    def release(self) -> None:
        """See `Destination`."""
        self.where = self.where.to(GradientPlace.LOCAL)
        self._exists = [False] * len(self._sharded)
        for piece in self._parameters.pieces:
            piece.grad = None
        for slot in self._slots:
            if isinstance(slot.storage, InPlaceGradient):
                slot.storage.release()
        if self._by_bucket is not None:
            self._by_bucket.release()

    def reset(self) -> None:
        """Take away what stands for the gradients, and forget these."""
        if self.where is not GradientPlace.LOCAL:
            for param, sharded in zip(self._launcher.params, self._sharded, strict=True):
                if param.grad is sharded:
                    param.grad = None
        self.release()

    def stand_in_again(self) -> None:
        """Hide the gradients of this rank's whole parameters, which the optimizer has seen."""
        for piece in self._parameters.pieces:
            index = piece.members[0].param
            if piece.layout is None or piece.target is not None:
                piece.tensor.grad = None
            elif self.where is not GradientPlace.LOCAL and index < len(self._exists) and self._exists[index]:
                piece.tensor.grad = self._sharded[index]

    def stands_in(self) -> bool:
        """Return whether parameters have sharded gradients; the same on every rank."""
        if self.where is not GradientPlace.LOCAL:  # every backward asks
            pairs = zip(self._launcher.params, self._sharded, strict=True)
            if not any(param.grad is sharded for param, sharded in pairs):
                self.where = self.where.to(GradientPlace.LOCAL)
        return self.where is not GradientPlace.LOCAL

    def why_not_again(self) -> str:
        """See `GradientSync`: reduced gradients are with their owners, and were not reset since."""
        return "that are divided among the ranks" if self.stands_in() else ""
