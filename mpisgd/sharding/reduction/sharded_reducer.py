"""`ShardedReducer`: makes the gradients of all ranks those of the pieces that each rank owns.

Where all ranks share one host, each combines the pieces it owns and nothing else: when backward has ended,
or, for an optimizer that can update one piece after the other, in the step, while a piece is in the cache.
Between hosts, and where gradients are compressed, all are reduced for everyone, and each rank takes its
pieces from these.

What programs see as `p.grad` afterwards is a `ShardedGradient`, on every rank.
"""

import operator
import weakref
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from mpisgd.core.group import Group
from mpisgd.gradients.in_flight import InFlightReduction
from mpisgd.gradients.kinds import DENSE, SPARSE
from mpisgd.gradients.options import ReductionOptions
from mpisgd.gradients.plan import Plan
from mpisgd.gradients.reducer import GradientReducer
from mpisgd.gradients.unbucketed import UnbucketedGradient
from mpisgd.sharding.piece import Piece, flat_view
from mpisgd.sharding.piece_states import PieceStates
from mpisgd.sharding.reduction.piece_reduction import PieceReduction, Receiver, Settle, goes_in_pieces
from mpisgd.sharding.reduction.sharded_gradient import ShardedGradient, Unscale

__all__ = ["ShardedReducer"]


class ShardedReducer(GradientReducer):
    """Reduces gradients to the pieces of the ranks that own them.

    Args:
        named: see `GradientReducer`.
        group: likewise.
        options: likewise.
        states: the pieces, which rank owns what, and what the optimizer keeps.
        defers: whether pieces are reduced when somebody asks for them, and not at the end of backward.
        unscale: see `ShardedGradient`.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]],
        group: Group,
        options: ReductionOptions,
        states: PieceStates,
        *,
        defers: bool,
        unscale: Unscale,
    ) -> None:
        self._states, self._parameters, self._defers = states, states.parameters, defers
        self._unscale = weakref.WeakMethod(unscale)
        self._sharded: list[Tensor] = []
        self._exists: list[bool] = []  # whether some rank has a gradient, for each parameter
        self._in_pieces: PieceReduction | None = None  # of the plan, where it can be
        self._settle = Settle()
        self._stands_in = False  # whether parameters have sharded gradients
        self.is_deferred = self._is_in_pieces = False  # of the present gradients
        super().__init__(named, group, options)

    def cover(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """See `GradientReducer`."""
        super().cover(named)
        self._sharded += [ShardedGradient(p, name, self._unscale) for name, p in named[len(self._sharded) :]]
        self._in_pieces = None

    # -- the plan -----------------------------------------------------------------------------------

    def _packing_order(self) -> Sequence[int]:
        """Return about the order of backward, the same in every run: it decides who owns what."""
        return range(len(self.params) - 1, -1, -1)

    def _storage_order(self) -> Sequence[int] | None:
        """Return the order of the parameters in memory, so that what is in a piece is found in one place."""
        return self._parameters.order

    def _new_plan(self, observed: Sequence[int], when: str) -> Plan:
        plan = super()._new_plan(observed, when)
        self._states.keep_whole(self._known_sparse)
        self._in_pieces = self._reduction_of(plan)
        return plan

    def _reduction_of(self, plan: Plan) -> PieceReduction | None:
        """Return what brings all gradients to the pieces at once, None where that cannot be."""
        memory = self.group.shared_memory
        compressed = any(self.options.compression.changes(param.dtype) for param in self.params)
        if memory is None or compressed or self._overlaps() or not goes_in_pieces(plan):
            return None
        op, finish = self.options.element_op, self._launcher.undo_predivision
        return PieceReduction(plan, self._parameters, memory, op, finish)

    # -- a reduction --------------------------------------------------------------------------------

    def begin(self, when: str) -> bool:
        """See `GradientReducer`."""
        self.abandon()  # before the memory of what is on its way is given back
        if not self.stands_in():
            self.release()
        return super().begin(when)

    @property
    def combined_by(self) -> str:
        """See `GradientSync`."""
        return f"{super().combined_by}, divided among the ranks"

    def reduce(self, when: str, observed: Sequence[int] = (), *, in_step: bool = False) -> None:
        """See `GradientReducer`; parameters have sharded gradients then, or None."""
        if not self._in_flight.launched:
            self.release()
        super().reduce(when, observed, in_step=in_step)

    def _launch_rest(self, in_flight: InFlightReduction) -> None:
        self.is_deferred = self._is_in_pieces = self._in_pieces is not None
        self._exists = [False] * len(self.params)
        rest = in_flight.not_launched()
        if not self._is_in_pieces:
            super()._launch_rest(in_flight)
        elif rest:
            self._launcher.launch_together(
                in_flight, rest, lambda kinds: self._reduce_pieces(in_flight, kinds)
            )

    def _reduce_pieces(self, in_flight: InFlightReduction, kinds: bytes) -> bool:
        """Reduce all gradients into the pieces, or leave that for later; return False where one is sparse."""
        if any(kind & SPARSE for kind in kinds):
            self.is_deferred = self._is_in_pieces = False
            return False
        for index, kind in zip(in_flight.indices, kinds, strict=True):
            self._exists[index] = bool(kind & DENSE)
        self._states.split(self._exists)
        if not self._defers:
            self.settle()
        return True

    def _unload(self, in_flight: InFlightReduction) -> list[int] | None:
        assert in_flight.plan is not None
        sparse = sorted(in_flight.plan.sparse)
        if self._is_in_pieces:
            kinds = self._join_kinds(in_flight, sparse)
            if sparse:
                self._reduce_apart(sparse, {})
            nonfinite = self._nonfinite(in_flight, sparse, kinds)
        else:
            nonfinite = super()._unload(in_flight)
        self._states.keep_whole(self._known_sparse)
        self._take_what_all_have(sparse if self._is_in_pieces else range(len(self.params)))
        self._stand_in()
        return nonfinite

    def _take_what_all_have(self, indices: Collection[int]) -> None:
        """Take the pieces' gradients from those that every rank has."""
        for index in indices:
            self._exists[index] = self.params[index].grad is not None
        self._states.split(self._exists)
        for piece in self._parameters.pieces:
            if piece.members[0].param in indices:
                piece.grad = self._piece_of([self.params[m.param].grad for m in piece.members], piece)

    def _stand_in(self) -> None:
        self._stands_in = any(self._exists)
        for param, sharded, exists in zip(self.params, self._sharded, self._exists, strict=True):
            if exists:
                param.grad = sharded
            elif param.grad is not None:
                param.grad = None

    # -- what the step finds ------------------------------------------------------------------------

    def settle(self) -> None:
        """Reduce what was left for later. Inside the queue, by all ranks."""
        self.run(self._settle)

    def run(self, receiver: Receiver) -> None:
        """Reduce what was left for later, and hand it over. Inside the queue, by all ranks."""
        assert self._in_pieces is not None
        self._in_pieces.run(self._exists, receiver)
        self.is_deferred = self.is_deferred and receiver is not self._settle

    def is_untouched(self) -> bool:
        """Return whether all gradients are still what the last reduction has left."""
        if not self._stands_in or len(self._exists) != len(self._sharded):
            return False
        left = [s if exists else None for s, exists in zip(self._sharded, self._exists, strict=True)]
        return all(map(operator.is_, [param.grad for param in self.params], left))

    def grad_of(self, piece: Piece) -> Tensor | None:
        """Return the gradient of a piece: what was reduced, or what the program has put in its place.

        All members have one, or none has.
        """
        grads = [self.params[m.param].grad for m in piece.members]
        if all(grad is self._sharded[m.param] for grad, m in zip(grads, piece.members, strict=True)):
            return piece.grad
        return self._piece_of(grads, piece)

    def _piece_of(self, grads: Sequence[Tensor | None], piece: Piece) -> Tensor | None:
        """Return the gradient of a piece, from those of the parameters in it."""
        if grads[0] is None or grads[0].is_sparse:
            return grads[0]
        if len(grads) == 1 and piece.tensor.numel() == piece.members[0].numel:
            return self._part_of(grads[0], 0, piece)
        room = torch.zeros(piece.tensor.numel(), dtype=piece.dtype, device=grads[0].device)
        for k, (grad, member) in enumerate(zip(grads, piece.members, strict=True)):
            if grad is not None:
                room[member.at : member.at + member.numel] = self._part_of(grad, k, piece)
        return room

    def _part_of(self, grad: Tensor, k: int, piece: Piece) -> Tensor:
        """Return the part of a parameter's gradient that lies in a piece, as its k-th member."""
        member = piece.members[k]
        if grad is self._sharded[member.param]:
            assert piece.grad is not None
            return piece.grad[member.at : member.at + member.numel]
        flat = flat_view(grad, self._parameters.layouts[member.param])
        return flat[member.first : member.first + member.numel]

    def release(self) -> None:
        """Forget the gradients: they were reset, or are made anew."""
        self.is_deferred = self._stands_in = False
        for piece in self._parameters.pieces:
            piece.grad = None
        for slot in () if self._plan is None else self._plan.slots:
            if isinstance(slot.storage, UnbucketedGradient):
                slot.storage.release()

    def reset(self) -> None:
        """Take away what stands for the gradients, and forget these."""
        self.abandon()
        if self._stands_in:
            for param, sharded in zip(self.params, self._sharded, strict=True):
                if param.grad is sharded:
                    param.grad = None
        self.release()

    def stand_in_again(self) -> None:
        """Hide the gradients of this rank's whole parameters, which the optimizer has seen."""
        for piece in self._parameters.pieces:
            index = piece.members[0].param
            if piece.layout is None or piece.target is not None:
                piece.tensor.grad = None
            elif self._stands_in and index < len(self._exists) and self._exists[index]:
                piece.tensor.grad = self._sharded[index]

    def stands_in(self) -> bool:
        """Return whether parameters have sharded gradients; the same on every rank."""
        if self._stands_in:  # every backward asks
            pairs = zip(self.params, self._sharded, strict=True)
            self._stands_in = any(param.grad is sharded for param, sharded in pairs)
        return self._stands_in

    def why_not_again(self) -> str:
        """See `GradientSync`: reduced gradients are with their owners, and were not reset since."""
        return "that are divided among the ranks" if self.stands_in() else super().why_not_again()
