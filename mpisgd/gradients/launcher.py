"""`BucketLauncher`: loads buckets with this rank's gradients and sends them through the group's queue."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd import tracing
from mpisgd.accelerator.buffers import overlap
from mpisgd.accelerator.runtime import on_device
from mpisgd.collectives.dispatch import device_backend, device_kind, run_in_queue, transport_for
from mpisgd.compress.compressor import wire_dtype_of
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.dtypes import dtype_name
from mpisgd.gradients.bucket_plan import BucketSlot
from mpisgd.gradients.compression_state import Untouched
from mpisgd.gradients.finite import LateMarks, mark_late, mark_nonfinite
from mpisgd.gradients.gradient_flags import ALL_DENSE, FlagsExchange
from mpisgd.gradients.in_flight import InFlightReduction
from mpisgd.gradients.options import ReductionOptions
from mpisgd.gradients.weight import Weight
from mpisgd.gradients.windows import windows_of
from mpisgd.transport.device.device_work import DeviceWork
from mpisgd.transport.device.selection import NCCL

__all__ = ["BucketLauncher", "trace_contents"]

MOST_NAMES = 5  # in a timeline


def trace_contents(named: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    """Describe gradients that are sent together for a timeline: the first few, and how many there are.

    Args:
        named: their parameters, with names, in the order in which they travel.
    """
    listed = list(named)
    shown = {name: param.nbytes for name, param in listed[:MOST_NAMES]}
    return {"parameters": shown, "num_parameters": len(listed)}


class BucketLauncher:
    """Sends the buckets of a plan: together at the end of backward, or one by one while it computes.

    Args:
        named: all parameters, with names.
        group: the ranks.
        options: how to reduce.

    Attributes:
        named: as given.
        params: the parameters alone.
        group: as given.
        options: as given.
        weight: what this rank's gradients count; None: as much as those of the others.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]], group: Group, options: ReductionOptions) -> None:
        self.weight: Weight | None = None
        self.named = named
        self.params = [param for _, param in named]
        self.group = group
        self.options = options
        self._op = options.element_op

    @property
    def overlaps(self) -> bool:
        """Whether buckets are on their way while backward goes on; the same on all ranks."""
        return self.may_launch_early and self.can_overlap

    @property
    def can_overlap(self) -> bool:
        """Whether they are where no backward reaches another optimizer; memory that was made for it stays."""
        if self.group.size == 1 or not self.group.queue.threads_allowed:
            return False
        if self.options.overlap is not None:
            return self.options.overlap
        device = self.group.device  # which may send while the GPU computes, with nothing to do for the host
        gpu_sends = device is not None and device.selection.name == NCCL and any(map(on_device, self.params))
        return self.group.spans_hosts or gpu_sends

    @property
    def may_launch_early(self) -> bool:
        """Whether all ranks send the same during backward; the same on all of them.

        Where a backward may reach several optimizers, it reaches each on some ranks only, maybe. Which, the
        ranks find out at its end.
        """
        return not windows_of(self.group).are_several

    def params_of(self, slot: BucketSlot) -> list[Tensor]:
        """Return the parameters of a bucket."""
        return [self.params[index] for index in slot.bucket.indices]

    def launch_together(
        self,
        in_flight: InFlightReduction,
        places: Sequence[int],
        then: Callable[[bytes], bool] = lambda flags: False,
        *,
        async_op: bool = False,
    ) -> None:
        """Reduce several buckets as one operation, which also tells which gradients exist.

        Args:
            in_flight: what they belong to.
            places: of the buckets in its plan.
            then: called with the flags of all these gradients; returns whether it takes care of the rest.
            async_op: leave it to the queue's thread.
        """
        slots = [in_flight.slots[place] for place in places]
        loaded = [self._load(in_flight, slot) for slot in slots]
        flats = [flat for flat, _, _ in loaded]
        flags = FlagsExchange(b"".join(flags for _, flags, _ in loaded), self.group, in_flight.note)
        numel, what = sum(flat.numel() for flat in flats), f"{len(slots)} bucket(s)"

        def reduce() -> None:
            flags.finish()
            assert flags.joined is not None
            if not then(flags.joined):
                self._reduce_all(slots, flats, flags.joined)

        operation = self._operation(in_flight, what, dtype_name(flats[0].dtype), numel, "")
        work = self.group.queue.run(
            operation,
            reduce,
            before=flags.before,
            async_op=async_op,
            after=in_flight.latest,
            transport="bucket by bucket",
        )
        in_flight.flags.append(flags)
        in_flight.launched.update(dict.fromkeys(places, work))

    def launch(self, in_flight: InFlightReduction, place: int) -> None:
        """Load a bucket and send it: by the queue's thread during backward, by this one at its end."""
        slot = in_flight.slots[place]
        flat, mine, marks = self._load(in_flight, slot, late=True)
        flags = FlagsExchange(mine, self.group, in_flight.note)
        late = [] if marks is None else [(flags, marks)]
        dtype = dtype_name(flat.dtype)
        operation = self._operation(in_flight, f"bucket {place}", dtype, flat.numel(), device_kind(flat))

        def reduce() -> None:
            flags.finish()
            assert flags.joined is not None
            self._reduce_one(slot, flat, flags.joined)

        with tracing.holding(self._contents(slot)):
            work = self._send_from_device(operation, flat)
            if work is not None:
                in_flight.late += late
            else:
                mark_late(late)
                work = run_in_queue(
                    self.group,
                    operation,
                    reduce,
                    tensors=None,
                    async_op=in_flight.in_background,
                    like=flat,
                    before=flags.before,
                    after=in_flight.latest,
                    transport=self._algorithm_name(slot),
                )
        in_flight.flags.append(flags)
        in_flight.launched[place] = work

    def launch_by(
        self, in_flight: InFlightReduction, place: int, begin: Callable[[Tensor, Operation], Work | None]
    ) -> None:
        """Load a bucket on a device and let `begin` send it; which gradients exist is found out at the end.

        Args:
            in_flight: what it belongs to.
            place: of the bucket in its plan.
            begin: called with its memory and with what the ranks must agree on.
        """
        slot = in_flight.slots[place]
        flat, mine, marks = self._load(in_flight, slot, late=True)
        what, dtype = f"shards of bucket {place}", dtype_name(flat.dtype)
        operation = self._operation(in_flight, what, dtype, flat.numel(), device_kind(flat))
        with tracing.holding(self._contents(slot)):
            in_flight.launched[place] = begin(flat, operation)
        flags = FlagsExchange(mine, self.group, in_flight.note)
        in_flight.flags.append(flags)
        if marks is not None:
            in_flight.late.append((flags, marks))

    def undo_division(self, in_flight: InFlightReduction) -> None:
        """Give gradients back as they were, where the ranks have found out that nothing is to be reduced."""
        for flat in in_flight.unreduced():
            if self.weight is not None:
                self.weight.undo(flat)
            if (factor := self.options.divisor) != 1.0:
                flat.mul_(factor)

    def forget_sent(self, in_flight: InFlightReduction) -> None:
        """Let no parameter keep a gradient in memory that a device has sent, and may have changed."""
        for place, work in in_flight.launched.items():
            flat = in_flight.slots[place].storage.flat
            for param in self.params_of(in_flight.slots[place]) if isinstance(work, DeviceWork) else ():
                if param.grad is not None and not param.grad.is_sparse and overlap(param.grad, flat):
                    param.grad = None

    def _load(
        self, in_flight: InFlightReduction, slot: BucketSlot, *, late: bool = False
    ) -> tuple[Tensor, bytes, LateMarks | None]:
        """Bring this rank's gradients to where they travel; return the memory, their flags, and late marks.

        Args:
            late: let a device look for infinities in its memory; the host does so at once otherwise.
        """
        grads = [p.grad for p in self.params_of(slot)]
        flags = slot.storage.load(grads, in_flight.addresses)
        flat = slot.storage.flat
        marks = None
        if self.options.error_if_nonfinite and late and on_device(flat):
            marks = LateMarks(grads)
        elif self.options.error_if_nonfinite:
            flags = mark_nonfinite(flags, grads, flat)
        if (factor := self.options.divisor) != 1.0:
            flat.div_(factor)  # before the others may look at it
        if self.weight is not None:
            self.weight.before(flat)
        in_flight.loaded.append(flat)
        return flat, flags, marks

    def _operation(
        self, in_flight: InFlightReduction, what: str, dtype: str, numel: int, device: str
    ) -> Operation:
        """Say what all ranks must agree on; plans that differ have other names."""
        assert in_flight.plan is not None
        extra, op = f"{what} of plan {in_flight.plan.name}", self.options.op.name
        return Operation("gradients", op, dtype, (numel,), extra=extra, device=device, when=in_flight.when)

    def _contents(self, slot: BucketSlot) -> Callable[[], Mapping[str, Any]]:
        return lambda: trace_contents(self.named[i] for i in slot.bucket.indices)

    def _algorithm_name(self, slot: BucketSlot) -> str:
        """Return the name of the algorithm that a bucket takes, for timelines."""
        dtype, nbytes = slot.storage.flat.dtype, slot.storage.flat.nbytes
        transport = transport_for(self.group, "all_reduce", dtype, nbytes)
        return transport.name if slot.in_shared_memory and transport is not None else "auto"

    def _send_from_device(self, operation: Operation, flat: Tensor) -> Work | None:
        """Begin to all-reduce from where it lies on a device; None where that cannot be.

        The host goes on to the next one in any case.
        """
        if not on_device(flat) or (dtype := wire_dtype_of(self.options.compression, flat.dtype)) is None:
            return None
        backend = device_backend(self.group, operation, flat, op=self._op, dtypes=[dtype])
        if backend is None:
            return None
        wire = flat.to(dtype)

        def arrived() -> None:
            torch.autograd.graph.increment_version(wire)
            if wire is not flat:
                flat.copy_(wire)
            self.undo_predivision(flat)

        return backend.run(
            operation,
            lambda: backend.all_reduce(wire, self._op),
            arrived,
            tensors=[wire],
            device=wire.device,
            async_op=True,
        )

    # -- inside the queue ---------------------------------------------------------------------------

    def _reduce_all(self, slots: Sequence[BucketSlot], flats: Sequence[Tensor], flags: bytes) -> None:
        """Reduce several buckets, one after the other; `flags`: of their gradients, on any rank."""
        start = 0
        for slot, flat in zip(slots, flats, strict=True):
            stop = start + len(slot.bucket.indices)
            with tracing.part(self.group.queue.track, "gradients", flat.nbytes, self._contents(slot)):
                self._reduce_one(slot, flat, flags[start:stop])
            start = stop

    def _reduce_one(self, slot: BucketSlot, flat: Tensor, flags: bytes) -> None:
        untouched = Untouched(slot, flags) if flags.strip(ALL_DENSE) else None
        slot.reducer.reduce(flat, self.group, self._op)
        if untouched is not None:
            untouched.put_back()
        self.undo_predivision(flat)

    def undo_predivision(self, flat: Tensor) -> None:
        """Turn a sum of what was divided or weighted before into the mean."""
        if (factor := self.options.divisor) != 1.0:  # by division, as for what travels apart
            flat.div_(self.group.size / factor)
        if self.weight is not None:
            self.weight.after(flat)
