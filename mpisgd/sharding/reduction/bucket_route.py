"""`BucketRoute`: gradients of which every rank of the group gets its shard, bucket by bucket.

Each bucket is brought to its owners when all of its gradients are complete; with stage 2 they are freed then:

    backward        ... | c, d complete | b complete         | a complete         | end
    buckets             | [c d] reduced | [b] reduced        | [a] reduced        |
    stage 2             |               | c and d are freed  | b is freed         | a is freed

Buckets on a device go by the group's collectives, from where they lie; only at the end of backward the host
learns of which parameters no rank has a gradient, and whether some were sparse.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mpisgd.accelerator.runtime import on_device
from mpisgd.compress.compressor import BucketLayout, wire_dtype_of
from mpisgd.core.consistency import Operation
from mpisgd.gradients.bucket_plan import BucketPlan, BucketSlot, is_alone, plain_slot
from mpisgd.gradients.bucketing import ALIGN_BYTES, Bucket, join_buckets
from mpisgd.gradients.fusion_buffer import FusionBuffer, shape_in_memory, window
from mpisgd.gradients.gradient_flags import DENSE, SPARSE
from mpisgd.gradients.in_flight import InFlightReduction
from mpisgd.gradients.in_place_gradient import InPlaceGradient
from mpisgd.gradients.launcher import BucketLauncher
from mpisgd.sharding.device_parts import DeviceParts
from mpisgd.sharding.divided_parameters import DividedParameters
from mpisgd.sharding.owners import Transfers
from mpisgd.sharding.piece import Piece
from mpisgd.sharding.reduction.coded_reduction import CodedShardReduction, MakeShardCode
from mpisgd.sharding.reduction.shard_reduction import DeviceShardReduction, Scratch, ShardReduction

__all__ = ["BucketRoute"]


class BucketRoute:
    """What brings the parts of each bucket to the ranks that own them, for `ToOwners`.

    A bucket in which some rank has a sparse gradient becomes everyone's instead.

    Args:
        launcher: of the parameters.
        parameters: which rank owns what.
        frees: whether a gradient is freed when its bucket has been reduced, and not with all others.
        make_code: makes the codes in which sums of hosts travel; None: they travel as they are.
    """

    def __init__(
        self,
        launcher: BucketLauncher,
        parameters: DividedParameters,
        *,
        frees: bool,
        make_code: MakeShardCode | None = None,
    ) -> None:
        self._launcher, self._parameters, self._frees = launcher, parameters, frees
        self._make_code = make_code
        self._reductions: list[ShardReduction | DeviceShardReduction] = []  # of the buckets of the plan
        self._joined: list[tuple[int, ...]] = []  # the buckets that travel together
        self._scratch = Scratch()

    @property
    def launches_early(self) -> bool:
        """See `Destination`; what travels together at the end of backward needs nobody to watch it."""
        frees = self._frees and self._launcher.group.size > 1 and self._launcher.may_launch_early
        return frees and len(self._joined) > 1

    def follow(self, plan: BucketPlan) -> None:
        """Take over a new plan, whose buckets are divided by themselves."""
        self._joined = self._join([slot.bucket for slot in plan.slots])
        self._reductions = [self._reduction(slot.bucket) for slot in plan.slots]

    def _reduction(self, bucket: Bucket) -> ShardReduction | DeviceShardReduction:
        launcher = self._launcher
        param, finish, op = (
            launcher.params[bucket.indices[0]],
            launcher.undo_predivision,
            launcher.options.element_op,
        )
        owners, ranges = self._parameters.owners, self._parameters.ranges
        wire = wire_dtype_of(launcher.options.compression, param.dtype) or param.dtype
        if on_device(param):
            return DeviceShardReduction(bucket, param.dtype, ranges, launcher.group, op, finish, wire)
        scratch, stays = self._scratch, not self._frees
        kind: Callable[..., ShardReduction] = ShardReduction
        if self._make_code is not None:
            kind = partial(CodedShardReduction, make_code=self._make_code)
        return kind(
            bucket=bucket,
            dtype=param.dtype,
            ranges=ranges,
            owners=owners,
            op=op,
            finish=finish,
            scratch=scratch,
            in_place=stays,
            wire=wire,
        )

    def _join(self, buckets: Sequence[Bucket]) -> list[tuple[int, ...]]:
        cap_bytes = self._launcher.options.bucket_cap_bytes
        return join_buckets([self._nbytes(bucket) for bucket in buckets], cap_bytes)

    def _nbytes(self, bucket: Bucket) -> int:
        return bucket.numel * self._launcher.params[bucket.indices[0]].element_size()

    # -- the memory ---------------------------------------------------------------------------------

    def make_slots(self, buckets: Sequence[Bucket]) -> list[BucketSlot]:
        """See `Destination`; where gradients are freed, one memory is filled by bucket after bucket."""
        if not self._frees:
            return [self._slot(bucket) for bucket in buckets]
        slots: list[BucketSlot] = []
        device = self._launcher.params[0].device
        # Whether a GPU sends by itself is not known before the first time.
        in_flight = 2 if self._launcher.can_overlap or on_device(self._launcher.params[0]) else 1
        joined = self._join(buckets)
        sizes = [[self._buffer_bytes(buckets[place]) for place in places] for places in joined]
        most = max(map(sum, sizes), default=0)
        memory = [torch.empty(most, dtype=torch.uint8, device=device) for _ in range(in_flight)]
        for number, (places, lengths) in enumerate(zip(joined, sizes, strict=True)):
            at = 0
            for place, nbytes in zip(places, lengths, strict=True):
                bucket = buckets[place]
                dtype = self._launcher.params[bucket.indices[0]].dtype
                flat = memory[number % in_flight][at : at + nbytes].view(dtype)[: bucket.numel]
                slots.append(self._slot(bucket, flat))
                at += nbytes
        return slots

    def _slot(self, bucket: Bucket, flat: Tensor | None = None) -> BucketSlot:
        params = [self._launcher.params[i] for i in bucket.indices]
        slot, compression = plain_slot(bucket, params, flat), self._launcher.options.compression
        if not compression.changes(params[0].dtype):
            return slot
        layout = BucketLayout(tuple(map(shape_in_memory, params)), params[0].dtype, params[0].device)
        return slot._replace(reducer=compression.reducer(layout))

    def _buffer_bytes(self, bucket: Bucket) -> int:
        """Return the bytes that a bucket takes of the memory for buckets: 0 for what travels by itself."""
        if is_alone(bucket, [self._launcher.params[i] for i in bucket.indices]):
            return 0
        return -(-self._nbytes(bucket) // ALIGN_BYTES) * ALIGN_BYTES

    # -- on the way ---------------------------------------------------------------------------------

    def launch_complete(self, in_flight: InFlightReduction) -> None:
        """See `Destination`."""
        for places in self._joined:
            if places[0] in in_flight.launched:
                continue
            if not in_flight.are_complete(places):
                return
            self._launch(in_flight, places)

    def launch_rest(self, in_flight: InFlightReduction) -> None:
        """See `Destination`."""
        for places in self._joined:
            if places[0] not in in_flight.launched:
                self._launch(in_flight, places)

    def _launch(self, in_flight: InFlightReduction, places: tuple[int, ...]) -> None:
        """Send buckets to their owners; at most one more is under way then, if gradients are freed."""
        in_background = in_flight.in_background and self._launcher.overlaps
        if self._frees:
            self._free(in_flight, leave=1 if in_background else 0)
        if any(isinstance(self._reductions[place], DeviceShardReduction) for place in places):
            self._launch_from_device(in_flight, places)
        else:
            self._launcher.launch_together(
                in_flight,
                places,
                lambda flags: self._scatter(in_flight, places, flags),
                async_op=in_background,
            )
        in_flight.unfreed.append(places)
        if self._frees and not in_background:
            self._free(in_flight)

    def _launch_from_device(self, in_flight: InFlightReduction, places: Sequence[int]) -> None:
        for place in places:
            reduction = self._reductions[place]
            assert isinstance(reduction, DeviceShardReduction)
            self._launcher.launch_by(in_flight, place, reduction.begin)
            in_flight.at_owners.add(place)

    def _scatter(self, in_flight: InFlightReduction, places: Sequence[int], flags: bytes) -> bool:
        """Bring buckets to their owners; return False where a gradient is sparse. Inside the queue."""
        if any(flag & SPARSE for flag in flags):
            return False
        with Transfers() as transfers:
            begun = []
            for place in places:
                reduction, flat = self._reductions[place], in_flight.slots[place].storage.flat
                assert isinstance(reduction, ShardReduction)
                reduction.begin(flat, transfers)
                begun.append((place, reduction))
            for place, reduction in begun:
                reduction.finish()
                in_flight.at_owners.add(place)
        self._scratch.clear()
        return True

    def _free(self, in_flight: InFlightReduction, leave: int = 0) -> None:
        """Let go of gradients that have been brought to their owners, all but those launched last."""
        while len(in_flight.unfreed) > leave:
            places = in_flight.unfreed.pop(0)
            for place in places:
                if (work := in_flight.launched[place]) is not None:
                    work.wait()
            scattered, memories = in_flight.at_owners.intersection(places), []
            for place in set(places) - scattered:  # a gradient is sparse: all of them stay, and not here
                if isinstance(storage := in_flight.slots[place].storage, FusionBuffer):
                    storage.leave_memory()
            for place in scattered:
                _release_slot(in_flight.slots[place])
                params = self._launcher.params_of(in_flight.slots[place])
                if isinstance(self._reductions[place], DeviceShardReduction):
                    params = [p for p in params if p.grad is not None and not p.grad.is_sparse]
                memories += _memories([param.grad for param in params])
                for param in params:  # sparse gradients have not travelled
                    param.grad = None
            in_flight.forget(scattered)
            # Where one lay, backward may put the next one, which is nobody else's.
            in_flight.addresses.difference_update(
                at
                for at, memory in memories
                if memory.expired()  # type: ignore[no-untyped-call]
            )

    # -- when all have arrived ----------------------------------------------------------------------

    def unload(self, in_flight: InFlightReduction, place: int, flags: bytes) -> None:
        """See `Destination`; what is sparse is added to whole dense gradients, which everyone gets then."""
        slot = in_flight.slots[place]
        exists = [bool(flag & DENSE) for flag in flags]
        if place not in in_flight.at_owners:
            slot.storage.unload(self._launcher.params_of(slot), exists)
        elif any(flag & SPARSE for flag in flags):
            self.bring_back(in_flight, place, exists)

    def grad_of(self, piece: Piece) -> Tensor:
        """Return the gradient of a piece, all of which was in one bucket that its owners have."""
        reduction = next(r for r in self._reductions if r.covers(piece.members[0].param))
        return reduction.part(piece.members)

    def bring_back(self, in_flight: InFlightReduction, place: int, exists: Sequence[bool]) -> None:
        """Give every rank the whole gradients of a bucket of which it has a shard. Collective.

        Args:
            exists: whether some rank has a gradient, for each parameter of the bucket.
        """
        slot = in_flight.slots[place]
        reduction, params = self._reductions[place], self._launcher.params_of(slot)
        flat = torch.zeros(slot.bucket.numel, dtype=params[0].dtype, device=params[0].device)
        reduction.put_back(flat)
        self._exchange(reduction.everyones(flat))
        places = zip(params, slot.bucket.offsets, slot.layouts, exists, strict=True)
        for param, offset, layout, here in places:
            param.grad = window(flat, offset, layout) if here else None
        _release_slot(slot)
        in_flight.at_owners.discard(place)

    def _exchange(self, buffers: Sequence[Sequence[Tensor]]) -> None:
        what, group, owners = "shards of a bucket", self._launcher.group, self._parameters.owners
        if any(on_device(buffer) for of_one in buffers for buffer in of_one):
            DeviceParts(buffers, group).all_gather(what).wait()
        else:
            group.queue.run(Operation("gradients", extra=what), lambda: owners.exchange(buffers))

    def release(self) -> None:
        """Forget the shards that lie in gradients."""
        for reduction in self._reductions:
            reduction.release()


def _release_slot(slot: BucketSlot) -> None:
    if isinstance(slot.storage, InPlaceGradient):
        slot.storage.release()


def _memories(grads: Sequence[Tensor | None]) -> list[tuple[int, StorageWeakRef]]:
    """Return where dense gradients lie, and what tells when their memory is freed."""
    return [
        (g.data_ptr(), StorageWeakRef(g.untyped_storage()))  # type: ignore[no-untyped-call]
        for g in grads
        if g is not None
    ]
