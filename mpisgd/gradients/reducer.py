"""`GradientReducer`: makes the gradients of a list of parameters the same on every rank.

What is combined becomes everyone's, or that of its owners: see `Destination`.

It looks at `p.grad` at the moment it is called, whatever the program did before: None, the place in the
fusion buffer where the last reduction left it, a fresh tensor of autograd's or of the user's. Afterwards
every gradient that exists on some rank is reduced, and the others are None.

Between hosts buckets are sent while backward computes further gradients, in the order of the plan:

    backward        ... | c, d ready |      b ready      |   a ready    | reduce: send the rest, wait
    queue's thread      | [c d] .......... | [b] ............. | [a] ........... |
"""

import contextlib
import threading
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from mpisgd.collectives.all_reduce import all_reduce
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.owner import current_owner, owned_by
from mpisgd.core.work import Work
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import CollectiveMismatch, InvalidArgument, MpisgdError
from mpisgd.gradients.attempts import Attempts
from mpisgd.gradients.compression_state import CompressionState
from mpisgd.gradients.current_plan import CurrentPlan
from mpisgd.gradients.destination import Destination, Everyone
from mpisgd.gradients.finite import are_finite, mark_late, raise_for
from mpisgd.gradients.gradient_flags import (
    ALL_DENSE,
    IN_BACKWARD,
    IN_STEP,
    NONFINITE,
    SPARSE,
    FlagsExchange,
    join_rest,
)
from mpisgd.gradients.gradient_sync import GradientSync
from mpisgd.gradients.in_flight import InFlightReduction
from mpisgd.gradients.last_reduction import LastReduction
from mpisgd.gradients.launcher import BucketLauncher
from mpisgd.gradients.options import ReductionOptions
from mpisgd.gradients.sparse import SparseGradients
from mpisgd.gradients.weight import Count, weight_of

__all__ = ["GradientReducer"]


class GradientReducer(GradientSync):
    """Follows the plan for a list of parameters, and makes a new one when it no longer fits.

    Args:
        named: all parameters that may ever have a gradient, with names; the list may grow at its end.
        group: the ranks that take part.
        options: how to reduce.
        destination: whose the combined gradients become; everyone's by default.
        kept: what the reducers of compressed buckets keep from step to step; nothing yet by default.

    Attributes:
        compression_state: as given for `kept`.
        owner: of the operations: that of what this thread begins when the reducer is made.
    """

    combines = True

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]],
        group: Group,
        options: ReductionOptions,
        destination: Destination | None = None,
        kept: CompressionState | None = None,
    ) -> None:
        self.group = group
        self.options = options
        self._destination: Destination = Everyone() if destination is None else destination
        self.owner = current_owner()
        self._last = LastReduction()
        self.compression_state = CompressionState() if kept is None else kept
        self._plan = CurrentPlan(group, self._destination, self.compression_state)
        self._in_flight = InFlightReduction()
        self._attempts = Attempts()
        self._sparse = SparseGradients()
        self.is_weighted = False
        self.cover(named)

    def cover(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Take over a list of parameters that has grown at its end; the next reduction makes a new plan."""
        self.named = named
        self.params = [param for _, param in named]
        self._launcher = BucketLauncher(named, self.group, self.options)
        # Autograd has a thread for each device; two may call `ready` at the same time.
        several = len({param.device for param in self.params}) > 1
        self._hooks_lock = threading.Lock() if several else None
        self._plan.cover(self.params)
        wants_plan = self._destination.cover(self._launcher) and self.group.size > 1
        if wants_plan and self._plan.ranks_cover_the_same():
            self._plan.renew(self.options, (), "before the first backward")

    def set_weighted(self, weighted: bool) -> None:
        """See `GradientSync`; the next reduction makes a new plan. What compresses takes means as before."""
        self.is_weighted = weighted and self.options.op is ReduceOp.AVG
        sums = self.is_weighted and not self._compresses
        self.options = self.options._replace(weighted=sums)
        self._launcher = BucketLauncher(self.named, self.group, self.options)
        self._destination.cover(self._launcher)
        self._plan.forget()

    @property
    def _compresses(self) -> bool:
        return any(self.options.compression.changes(param.dtype) for param in self.params)

    def weigh(self, counts: Sequence[Count]) -> None:
        """See `GradientSync`."""
        self._launcher.weight = weight_of(counts, self.group.rank, averages=self._compresses)

    def leave_out(self, indices: Collection[int]) -> None:
        """See `GradientSync`; the next reduction makes a new plan if these are others."""
        self._plan.leave_out(indices)

    @property
    def combined_by(self) -> str:
        """See `GradientSync`."""
        op = self.options.compression.traits.replaces_op or f"op={self.options.op.name}"
        return f"{op}{self._destination.how}"

    @property
    def contents(self) -> str:
        """Which parameters take part in the next reduction, in words."""
        return self._plan.contents

    @property
    def sparse_dims(self) -> Mapping[int, int]:
        """See `GradientSync`."""
        return self._sparse.dims

    # -- while backward is at work ------------------------------------------------------------------

    def begin(self, when: str) -> bool:
        """Prepare to send buckets during the backward that begins; return whether any will be sent.

        Args:
            when: as for `reduce`, which must follow at its end.
        """
        self.forget_backward()  # before the memory of what is on its way is given back
        self._destination.release()
        early = self._destination.launches_early or self._launcher.overlaps
        plan = self._plan.that_holds if early else None
        if plan is None:
            return False
        name = self._attempts.name(when)
        self._in_flight = InFlightReduction(plan, name, in_background=True, note=IN_BACKWARD)
        return True

    def ready(self, index: int) -> None:
        """Note that the gradient of a parameter is complete; send what now can be sent.

        Raises:
            InvalidArgument: it had been taken for complete before, and has been sent.
        """
        if (lock := self._hooks_lock) is not None:
            lock.acquire()
        try:
            in_flight = self._in_flight
            if in_flight.launched and in_flight.was_launched(index):
                raise InvalidArgument(
                    f"DistributedOptimizer: parameter {index} got a second gradient in one backward "
                    "(reentrant checkpointing does that) when its first was already on its way; "
                    "pass overlap=False"
                )
            in_flight.streams.note(self.params[index])
            if in_flight.complete(index) is not None:  # rarely so: there are hundreds of gradients
                with torch.no_grad(), owned_by(self.owner):
                    in_flight.streams.join()
                    self._launch_complete(in_flight)
        finally:
            if lock is not None:
                lock.release()

    def _launch_complete(self, in_flight: InFlightReduction) -> None:
        """Send what is complete, or nothing more where others are at another attempt; see `Attempts`."""
        try:
            self._destination.launch_complete(in_flight)
        except CollectiveMismatch as exc:
            with contextlib.suppress(MpisgdError):
                in_flight.wait()
            if not self._attempts.differ(exc):
                raise
            self._launcher.undo_division(in_flight)
            self._in_flight = InFlightReduction(when=in_flight.when)
            self._in_flight.is_given_up = True
            self._in_flight.failure = exc if in_flight.has_arrived else None

    def forget_backward(self) -> None:
        """Forget a backward that was left by an exception; return when what it had sent has arrived."""
        in_flight, self._in_flight = self._in_flight, InFlightReduction()
        if not in_flight.when:
            return
        name, is_known = self._attempts.note_left(in_flight.when), in_flight.is_given_up
        try:
            in_flight.wait()
        except CollectiveMismatch as exc:
            is_known = self._attempts.differ(exc)
            if not is_known:
                raise
        finally:
            self._launcher.undo_division(in_flight)
            if self._is_once:  # what lay where it was reduced is reduced now
                slots = [in_flight.slots[place] for place in in_flight.launched]
                indices = [index for slot in slots for index in slot.in_place(self.params)]
                self._last.reduced.note_further(self.params, indices)
        if not is_known:
            self._give_up(name)

    def _give_up(self, name: str) -> None:
        """Have all ranks know that a backward was left: some may have sent more of it. Collective."""
        if self.group.queue.broken is not None:
            return
        try:
            with owned_by(self.owner):
                self.group.queue.run(Operation("gradients", extra="none", when=name), lambda: None)
        except CollectiveMismatch as exc:
            if not self._attempts.differ(exc):
                raise

    @property
    def sent_last(self) -> Work | None:
        """See `GradientSync`."""
        return self._in_flight.latest

    def hold(self) -> None:
        """Send nothing more before `reduce`: gradients may become ready more than once from now on."""
        self._in_flight.held = True

    # -- when all gradients are there ---------------------------------------------------------------

    @torch.no_grad()
    def reduce(self, when: str, observed: Sequence[int] = (), *, in_step: bool = False) -> None:
        """Combine every gradient over the ranks. Collective.

        Args:
            when: which reduction of the program this is; ranks that are at different ones are told so.
            observed: the order in which gradients became ready, for the next plan.
            in_step: whether this rank cannot do anything to the gradients any more before they are used.

        Raises:
            CollectiveMismatch: ranks have different sets of trainable parameters, or are at different
                steps; raised on every rank. Gradients are unreduced; those that lay where NCCL had begun to
                reduce them are None.
            NonFiniteGradients: where that is looked for; raised on every rank, gradients are reduced.
        """
        if not self._in_flight.launched:
            self._destination.release()
        with owned_by(self.owner):
            self._reduce(when, observed, IN_STEP if in_step else IN_BACKWARD)

    def _reduce(self, when: str, observed: Sequence[int], note: int) -> None:
        if self.group.size == 1:
            if marked := [i for i, mark in enumerate(self._marks_of(range(len(self.params)))) if mark]:
                raise_for(marked, observed, self.named, self.group, when)
            self._weigh_alone()
            return
        if not self._in_flight.launched:
            if (failure := self._in_flight.failure) is not None:
                self._in_flight = InFlightReduction()
                raise failure
            plan = self._plan.that_holds or self._plan.renew(self.options, observed, when)
            self._in_flight = InFlightReduction(plan, self._attempts.name(when), in_background=False)
        in_flight, self._in_flight = self._in_flight, InFlightReduction()
        in_flight.note = note
        in_flight.streams.join()  # torch does not know of those in which buckets were packed
        try:
            try:
                self._destination.launch_rest(in_flight)
            finally:
                in_flight.wait()
        except CollectiveMismatch as exc:
            self._launcher.undo_division(in_flight)
            if self._attempts.differ(exc) and not in_flight.has_arrived:
                self._reduce(when, observed, note)
                return
            raise
        try:
            nonfinite = self._unload(in_flight)
        except CollectiveMismatch:  # found out only now where a device has sent by itself
            self._launcher.forget_sent(in_flight)
            raise
        assert in_flight.plan is not None
        self._last.note(self.params, in_flight.plan.covered, in_flight.flags, once=self._is_once)
        if nonfinite is not None:
            raise_for(nonfinite, observed, self.named, self.group, when)

    def _weigh_alone(self) -> None:
        """Weight the gradients of a single rank: its backward passes may have had unequal batches."""
        if (weight := self._launcher.weight) is None:
            return
        for param in self.params:
            if param.grad is not None:
                weight.before(param.grad)
                weight.after(param.grad)

    # -- when all have arrived ----------------------------------------------------------------------

    def _unload(self, in_flight: InFlightReduction) -> list[int] | None:
        """Give every parameter what came out.

        Returns:
            Where this rank's gradients are not finite, None where those of all ranks are or nobody looks.
        """
        assert in_flight.plan is not None
        sparse = sorted(in_flight.plan.sparse)
        flags = self._join_flags(in_flight, sparse)
        late: dict[int, Tensor | None] = {}
        start = 0
        for place, slot in enumerate(in_flight.plan.slots):
            indices = slot.bucket.indices
            here = flags[start : start + len(indices)]
            start += len(indices)
            if here.strip(ALL_DENSE):
                late |= {i: self.params[i].grad for i, k in zip(indices, here, strict=True) if k & SPARSE}
            self._destination.unload(in_flight, place, here)
        if sparse or late:
            self._sparse.reduce(sparse, late, self._launcher)
        if late:
            self.compression_state.note_sparse(late, rounds=self._plan.rounds(self.options))
        known = self.compression_state.sparse  # mostly nothing, and there are many parameters
        self._destination.arrived(in_flight, known.intersection(in_flight.plan.covered) if known else known)
        return self._nonfinite(in_flight, sparse, flags)

    def _join_flags(self, in_flight: InFlightReduction, sparse: Sequence[int]) -> bytes:
        """Return the flags of the gradients of all buckets and of the sparse ones. Collective."""
        mark_late(in_flight.late)
        note = 0 if in_flight.flags else in_flight.note  # somebody must tell it
        in_flight.flags.append(FlagsExchange(self._marks_of(sparse), self.group, note))
        return join_rest(in_flight.flags, self.group)

    def _nonfinite(
        self, in_flight: InFlightReduction, sparse: Sequence[int], flags: bytes
    ) -> list[int] | None:
        """Return which of this rank's gradients are not finite; None where all ranks' are or nobody looks."""
        if not self.options.error_if_nonfinite or not any(flag & NONFINITE for flag in flags):
            return None
        order = [*in_flight.indices, *sparse]
        mine = b"".join(exchange.mine for exchange in in_flight.flags)
        return [index for index, flag in zip(order, mine, strict=True) if flag & NONFINITE]

    def _marks_of(self, sparse: Sequence[int]) -> bytes:
        """Return a byte for each of the gradients that travel apart, if somebody looks."""
        if not self.options.error_if_nonfinite:
            return b""
        grads = [self.params[index].grad for index in sparse]
        return bytes(NONFINITE * (grad is not None and not are_finite(grad)) for grad in grads)

    def combine_loss(self, loss: Tensor) -> Tensor:
        """Return the loss of all ranks together, as a tensor of its own. Collective."""
        total = loss.clone()
        with owned_by(self.owner):
            all_reduce(total, self.options.op, self.group)
        return total

    # -- what the last reduction has left -----------------------------------------------------------

    @property
    def _is_once(self) -> bool:
        """Whether a gradient that is combined twice comes out wrong, as a sum does and a mean does not."""
        if self.group.size == 1:
            return False
        return self.options.op is ReduceOp.SUM or not self.options.compression.traits.is_additive

    def note_pass(self, first_ready: int) -> None:
        """See `GradientSync`."""
        self._last.reduced.forget_unless_they_remain(self.params, first_ready)

    def forget_reduced(self) -> None:
        """See `GradientSync`."""
        self._last.forget()

    def why_not_again(self) -> str:
        """See `GradientSync`."""
        if why := self._destination.why_not_again():
            return why
        if not self._last.reduced or not self._last.reduced.remain(self.params):
            return ""
        is_sum = self.options.op is ReduceOp.SUM
        return "that were summed" if is_sum else f"that were reduced by {self.options.compression}"

    def check_unchanged(self, when: str) -> None:
        """See `LastReduction`."""
        self._last.check_unchanged(self.params, self.group, self.owner, when)
