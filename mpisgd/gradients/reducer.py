"""`GradientReducer`: makes the gradients of a list of parameters the same on every rank.

It looks at `p.grad` at the moment it is called, whatever the program did before: None, the place in the
fusion buffer where the last reduction left it, a fresh tensor of autograd's or of the user's. Afterwards
every gradient that exists on some rank is reduced, and the others are None.

Between hosts the buckets set out while backward is still at work on others, in the order of the plan:

    backward      ... | c, d ready |      b ready      |   a ready    | reduce: send the rest, wait
    queue's thread     | [c d] .......... | [b] ............. | [a] ........... |
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd import tracing
from mpisgd.accelerator.runtime import on_device
from mpisgd.collectives.common import device_word, direct_of, run
from mpisgd.core.buffers import dtype_name
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.errors import CollectiveMismatch, InvalidArgument
from mpisgd.gradients.combiner import Combiner
from mpisgd.gradients.finite import are_finite, marked, raise_for
from mpisgd.gradients.in_flight import InFlightReduction
from mpisgd.gradients.kinds import ALL_DENSE, DENSE, NONFINITE, SPARSE
from mpisgd.gradients.options import ReductionOptions
from mpisgd.gradients.plan import BucketSlot, Plan, agree_on_plan
from mpisgd.gradients.presence import join_kinds
from mpisgd.gradients.sparse import reduce_sparse
from mpisgd.gradients.trace_contents import contents
from mpisgd.gradients.unbucketed import not_twice
from mpisgd.sharding.shared_parameters import SharedParameters
from mpisgd.transport.device.selection import NCCL

__all__ = ["GradientReducer"]


class GradientReducer:
    """Follows the plan for a list of parameters, and makes a new one when it no longer fits.

    Args:
        named: all parameters that may ever have a gradient, with names; the list may grow at its end.
        group: the ranks that take part.
        recipe: how to reduce.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]],
        group: Group,
        recipe: ReductionOptions,
        shared: SharedParameters | None = None,
    ) -> None:
        self._shared = shared
        self.named = named
        self.params = [param for _, param in named]
        self.group = group
        self.recipe = recipe
        self._combiner = Combiner(group, recipe)
        self._plan: Plan | None = None
        self._known_sparse: frozenset[int] = frozenset()
        self._marks: dict[int, int] = {}
        self._flight = InFlightReduction()

    def cover(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Take over another list of parameters; the next reduction makes a new plan."""
        self.named = named
        self.params = [param for _, param in named]
        self._plan = None
        self._known_sparse = frozenset()

    # -- while backward is at work ------------------------------------------------------------------

    def begin(self, when: str) -> bool:
        """Get ready to send buckets during the backward that begins; return whether any will be.

        Args:
            when: as for `reduce`, which must follow at its end.
        """
        self.abandon()
        plan = self._plan
        if plan is None or not self._overlaps() or not self._still_holds(plan):
            return False
        self._flight = InFlightReduction(plan, when, in_background=True)
        return True

    def _overlaps(self) -> bool:
        if self.group.size == 1 or not self.group.queue.threads_allowed:
            return False
        if self.recipe.overlap is not None:
            return self.recipe.overlap
        return self.group.internode is not None or self._gpu_sends()

    def _gpu_sends(self) -> bool:
        """Return whether gradients travel while the GPU computes, with nothing to do for the host."""
        plane = self.group.device
        return plane is not None and plane.verdict.way == NCCL and any(map(on_device, self.params))

    @torch.no_grad()
    def ready(self, index: int) -> None:
        """Note that the gradient of a parameter is complete; send what now can be sent.

        Raises:
            InvalidArgument: it had been taken for complete before, and has been sent.
        """
        flight = self._flight
        if flight.has_left(index):
            raise InvalidArgument(
                f"DistributedOptimizer: parameter {index} got a second gradient in one backward (reentrant "
                "checkpointing does that) when its first was already on its way; pass overlap=False"
            )
        flight.complete(index)
        while (carrier := flight.next_complete()) is not None:
            self._launch(flight, carrier)

    def abandon(self) -> None:
        """Forget a backward that was left by an exception; return when what it had sent has arrived."""
        flight, self._flight = self._flight, InFlightReduction()
        flight.wait()

    def hold(self) -> None:
        """Send nothing more before `reduce`: gradients may become ready more than once from now on."""
        self._flight.held = True

    # -- when all gradients are there ---------------------------------------------------------------

    @torch.no_grad()
    def reduce(self, when: str, observed: Sequence[int] = ()) -> None:
        """Combine every gradient over the ranks. Collective.

        Args:
            when: which reduction of the program this is; ranks that are at different ones are told so.
            observed: the order in which gradients became ready, for the next plan.

        Raises:
            CollectiveMismatch: ranks have different sets of trainable parameters, or are at different
                steps; raised on every rank, gradients are unreduced.
            NonFiniteGradients: where that is looked for; raised on every rank, gradients are reduced.
        """
        if self.group.size == 1:
            return
        if not self._flight.launched:
            plan = self._plan
            if plan is None or not self._still_holds(plan):
                plan = self._new_plan(observed, when)
            self._flight = InFlightReduction(plan, when, in_background=False)
        flight, self._flight = self._flight, InFlightReduction()
        try:
            self._launch_and_wait(flight)
        except CollectiveMismatch:
            self._undo_division(flight)
            raise
        places = self._settle(flight)
        if places is not None:
            raise_for(places, observed, self.named, self.group, when)

    def _still_holds(self, plan: Plan) -> bool:
        return plan.covered == self._coverable() and plan.fits(self.params)

    def _coverable(self) -> tuple[int, ...]:
        return tuple(i for i, p in enumerate(self.params) if p.requires_grad or p.grad is not None)

    def _new_plan(self, observed: Sequence[int], when: str) -> Plan:
        self._plan = agree_on_plan(
            self.params,
            self._coverable(),
            self._known_sparse,
            observed,
            group=self.group,
            compression=self.recipe.compression,
            cap_bytes=self.recipe.bucket_cap_bytes,
            when=when,
            owners=self._owners(),
        )
        self._known_sparse = self._plan.sparse
        return self._plan

    def _owners(self) -> Sequence[int] | None:
        """Return who wants each gradient, where it can be brought to one rank alone."""
        if self._shared is None or not self._shared.one_host or self.recipe.compression.dtype is not None:
            return None
        return self._shared.owners

    def _params_of(self, carrier: BucketSlot) -> list[Tensor]:
        return [self.params[index] for index in carrier.bucket.indices]

    def _launch_and_wait(self, flight: InFlightReduction) -> None:
        try:
            self._launch_rest(flight)
        finally:
            flight.wait()

    def _launch_rest(self, flight: InFlightReduction) -> None:
        """Send what has not left; where nothing leaves before, the ranks need to meet only once for it.

        Which of both must not depend on this rank's backward: another one may have had none.
        """
        rest = flight.left_behind()
        if self._overlaps() or any(on_device(self._params_of(carrier)[0]) for carrier in rest):
            for carrier in rest:
                self._launch(flight, carrier)
        elif rest:
            flats = [self._load(flight, carrier) for carrier in rest]
            numel, what = sum(flat.numel() for flat in flats), f"{len(rest)} bucket(s)"
            operation = self._operation(flight, what, dtype_name(flats[0].dtype), numel, "")
            self.group.queue.run(
                operation,
                lambda: self._combiner.combine_all(rest, flats, self._contents),
                way="bucket by bucket",
            )
            flight.launched.extend([None] * len(rest))

    def _launch(self, flight: InFlightReduction, carrier: BucketSlot) -> None:
        """Load a carrier and send it: by the queue's thread during backward, by this one at its end."""
        flat = self._load(flight, carrier)
        what, dtype = f"bucket {len(flight.launched)}", dtype_name(flat.dtype)
        operation = self._operation(flight, what, dtype, flat.numel(), device_word(flat))
        with tracing.holding(self._contents(carrier)):
            work = self._send_direct(operation, flat) or self._send(operation, flat, carrier, flight)
        flight.launched.append(work)

    def _load(self, flight: InFlightReduction, carrier: BucketSlot) -> Tensor:
        """Bring this rank's gradients to where they travel."""
        grads = [p.grad for p in self._params_of(carrier)]
        kinds = carrier.load.absorb(not_twice(carrier.load, grads, flight.addresses))
        flat = carrier.load.flat
        flight.kinds += marked(kinds, grads, flat) if self.recipe.error_if_nonfinite else kinds
        if (factor := self.recipe.predivide_factor) != 1.0:
            flat.div_(factor)  # before the others may look at it
        flight.loaded.append(flat)
        return flat

    def _undo_division(self, flight: InFlightReduction) -> None:
        """Give gradients back as they were, where the ranks have found out that nothing is to be reduced."""
        if (factor := self.recipe.predivide_factor) != 1.0:
            for flat in flight.unreduced():
                flat.mul_(factor)

    def _operation(
        self, flight: InFlightReduction, what: str, dtype: str, numel: int, device: str
    ) -> Operation:
        """Say what all ranks must agree on; plans that differ have other names."""
        assert flight.plan is not None
        extra = f"{what} of plan {flight.plan.name}, {flight.when}"
        return Operation("gradients", self.recipe.op.name, dtype, (numel,), extra=extra, device=device)

    def _contents(self, *carriers: BucketSlot) -> Callable[[], Mapping[str, Any]]:
        return lambda: contents(self.named[i] for carrier in carriers for i in carrier.bucket.indices)

    def _send_direct(self, operation: Operation, flat: Tensor) -> Work | None:
        """Begin to all-reduce from where it lies on a device; None where that cannot be.

        The host goes on to the next one in any case.
        """
        compression = self.recipe.compression
        dtype = compression.dtype if compression.changes(flat.dtype) else flat.dtype
        direct = direct_of(self.group, operation, flat, op=self._combiner.op, dtypes=[dtype or flat.dtype])
        if direct is None:
            return None
        wire = compression.compress(flat)

        def arrived() -> None:
            compression.decompress(wire, flat)
            self._combiner.undo_predivision(flat)

        return direct.all_reduce(operation, wire, self._combiner.op, async_op=True, then=arrived)

    def _send(
        self, operation: Operation, flat: Tensor, carrier: BucketSlot, flight: InFlightReduction
    ) -> Work | None:
        return run(
            self.group,
            operation,
            lambda: self._combiner.combine(flat, carrier),
            tensors=None,
            async_op=flight.in_background,
            like=flat,
            after=flight.latest,
            way=self._combiner.way(carrier),
        )

    def _settle(self, flight: InFlightReduction) -> list[int] | None:
        """Give every parameter what came out.

        Returns:
            Where this rank's gradients are not finite, None where those of all ranks are or nobody looks.
        """
        assert flight.plan is not None
        sparse = sorted(flight.plan.sparse)
        mine = flight.kinds + self._marks_of(sparse)
        kinds = join_kinds(mine, self.group)
        late: dict[int, Tensor | None] = {}
        start = 0
        for carrier in flight.plan.carriers:
            indices = carrier.bucket.indices
            here = kinds[start : start + len(indices)]
            start += len(indices)
            if here.strip(ALL_DENSE):
                late |= {i: self.params[i].grad for i, k in zip(indices, here, strict=True) if k & SPARSE}
            carrier.load.settle(self._params_of(carrier), [bool(kind & DENSE) for kind in here])
        if sparse or late:
            self._reduce_apart(sparse, late)
        if self._shared is not None:
            self._shared.give_away()
        if not self.recipe.error_if_nonfinite or not any(kind & NONFINITE for kind in kinds):
            return None
        order = [i for c in flight.plan.carriers for i in c.bucket.indices] + sparse
        return [index for index, kind in zip(order, mine, strict=True) if kind & NONFINITE]

    def _marks_of(self, sparse: Sequence[int]) -> bytes:
        """Return a byte for each of the gradients that travel apart, if somebody looks."""
        if not self.recipe.error_if_nonfinite:
            return b""
        grads = [self.params[index].grad for index in sparse]
        return bytes(NONFINITE * (grad is not None and not are_finite(grad)) for grad in grads)

    # -- the others ---------------------------------------------------------------------------------

    def _reduce_apart(self, sparse: Sequence[int], late: Mapping[int, Tensor | None]) -> None:
        """Reduce what is sparse on some rank.

        The `late` ones were planned as dense: their dense parts are reduced already, and only the sparse
        parts, given here, are missing. The next plan knows them as sparse.
        """
        indices = sorted({*sparse, *late})
        grads = [_sparse_or_none(late[i]) if i in late else self.params[i].grad for i in indices]
        params = [self.params[i] for i in indices]
        reduced = reduce_sparse(params, grads, self.recipe.op, self.group)
        for index, param, total in zip(indices, params, reduced, strict=True):
            if index in late and param.grad is not None:
                param.grad = param.grad if total is None else param.grad.add_(total)
            else:
                param.grad = total
        if late:
            self._known_sparse = self._known_sparse.union(late)
            self._plan = None

    # -- what the last reduction left ---------------------------------------------------------------

    def _left(self) -> dict[int, Tensor]:
        """Return the tensors that still hold, or held, the gradients of the last reduction."""
        carriers = () if self._plan is None else self._plan.carriers
        return {
            index: tensor
            for carrier in carriers
            for place, index in enumerate(carrier.bucket.indices)
            if (tensor := carrier.load.left(place)) is not None
        }

    def has_given(self) -> bool:
        """Return whether reduced gradients are with the ranks that own them, and were not reset since."""
        return self._shared is not None and self._shared.has_given(self.holds_reduced)

    def holds_reduced(self) -> bool:
        """Return whether some gradient is still the one that the last reduction left, or adds to it."""
        return any(self.params[index].grad is tensor for index, tensor in self._left().items())

    def mark(self) -> None:
        """Remember the state of the gradients for `kept_since_mark`."""
        self._marks = {index: tensor._version for index, tensor in self._left().items()}

    def kept_since_mark(self, num_added: Mapping[int, int]) -> bool:
        """Return whether some gradient has been kept since `mark()`: not replaced, not set to zero.

        Args:
            num_added: how often backward has added to the gradient of each parameter since. Whatever else
                was done to it counts as a reset.
        """
        return any(
            self.params[index].grad is tensor
            and tensor._version - self._marks.get(index, -1) == num_added.get(index, 0)
            for index, tensor in self._left().items()
        )


def _sparse_or_none(grad: Tensor | None) -> Tensor | None:
    return grad if grad is not None and grad.is_sparse else None
