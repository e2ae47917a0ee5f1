"""`ScatteringReducer`: gradients of which every rank of the group keeps its shard, bucket by bucket.

Where all ranks share a host and the gradients may stay until the step (stage 1), they are combined there,
piece by piece, as for shared parameters. Otherwise each bucket is brought to its owners when all of its
gradients are complete, and with stage 2 they are freed after that:

    backward        ... | c, d complete | b complete         | a complete         | end
    buckets             | [c d] reduced | [b] reduced        | [a] reduced        |
    stage 2             |               | c and d are freed  | b is freed         | a is freed

Buckets on a device go by the group's collectives, from where they lie; only at the end of backward the host
learns of which parameters no rank has a gradient, and whether some were sparse.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mpisgd.accelerator.runtime import on_device
from mpisgd.compress.compressor import BucketLayout, wire_dtype_of
from mpisgd.core.consistency import Operation
from mpisgd.gradients.bucketing import ALIGN_BYTES, Bucket, join_buckets
from mpisgd.gradients.fusion_buffer import FusionBuffer, shape_in_memory, window
from mpisgd.gradients.in_flight import InFlightReduction
from mpisgd.gradients.kinds import SPARSE
from mpisgd.gradients.plan import BucketSlot, Plan, is_alone, plain_slot
from mpisgd.gradients.reducer import GradientReducer
from mpisgd.gradients.unbucketed import UnbucketedGradient
from mpisgd.sharding.device_parts import DeviceParts
from mpisgd.sharding.owners import Transfers
from mpisgd.sharding.piece import Piece
from mpisgd.sharding.reduction.bucket_shard import BucketShard
from mpisgd.sharding.reduction.piece_reduction import PieceReduction
from mpisgd.sharding.reduction.shard_reduction import DeviceShardReduction, Scratch, ShardReduction
from mpisgd.sharding.reduction.sharded_reducer import ShardedReducer

__all__ = ["ScatteringReducer"]


class ScatteringReducer(ShardedReducer):
    """Reduces gradients to the ranks that own them.

    Args:
        stage: 2: a gradient is freed when its bucket has been reduced; 1: with all others.
        arguments: see `ShardedReducer`.
    """

    def __init__(self, *arguments: Any, stage: int, **options: Any) -> None:
        self._frees = stage == 2
        # Of the buckets of the plan, where they go apart.
        self._reductions: list[ShardReduction | DeviceShardReduction] = []
        self._joined: list[tuple[int, ...]] = []  # the buckets that travel together
        self._scattered: set[int] = set()  # the buckets that have been brought to their owners
        self._with_sparse: set[int] = set()  # those of them in which some rank had a sparse gradient
        self._unfreed: list[tuple[int, ...]] = []
        self._scratch = Scratch()
        super().__init__(*arguments, **options)

    def cover(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """See `GradientReducer`. Gradients are to be freed from the first backward on."""
        super().cover(named)
        if self._frees and self.group.size > 1:
            self._new_plan((), "before the first backward")

    # -- the plan -----------------------------------------------------------------------------------

    @property
    def _keeps_until_step(self) -> bool:
        """Whether gradients stay until the step, in memory that all ranks see; the same on all of them."""
        stays = not self._frees and self.group.shared_memory is not None and not self._overlaps()
        return stays and not any(map(self._travels_otherwise, self.params))

    def _travels_otherwise(self, param: Tensor) -> bool:
        return on_device(param) or self._wire_dtype(param) != param.dtype

    def _wire_dtype(self, param: Tensor) -> torch.dtype:
        return wire_dtype_of(self.options.compression, param.dtype) or param.dtype

    def _launches_early(self) -> bool:
        frees = self._frees and self.group.size > 1 and self._may_launch_early
        # What travels together is complete when backward ends: nothing needs to watch it.
        return (frees and len(self._joined) > 1) or super()._launches_early()

    def _reduction_of(self, plan: Plan) -> PieceReduction | None:
        self._states.divide_by([slot.bucket.indices for slot in plan.slots])
        self._reductions = []
        if self._keeps_until_step:
            return super()._reduction_of(plan)
        self._joined = self._join([slot.bucket for slot in plan.slots])
        self._reductions = [self._shard_reduction(slot.bucket) for slot in plan.slots]
        return None

    def _shard_reduction(self, bucket: Bucket) -> ShardReduction | DeviceShardReduction:
        param, finish = self.params[bucket.indices[0]], self._launcher.undo_predivision
        owners, ranges, op = self._parameters.owners, self._parameters.ranges, self.options.element_op
        wire = self._wire_dtype(param)
        if on_device(param):
            return DeviceShardReduction(bucket, param.dtype, ranges, self.group, op, finish, wire)
        scratch, stays = self._scratch, not self._frees
        return ShardReduction(
            bucket, param.dtype, ranges, owners, op, finish, scratch, in_place=stays, wire=wire
        )

    def _join(self, buckets: Sequence[Bucket]) -> list[tuple[int, ...]]:
        return join_buckets([self._nbytes(bucket) for bucket in buckets], self.options.bucket_cap_bytes)

    def _nbytes(self, bucket: Bucket) -> int:
        return bucket.numel * self.params[bucket.indices[0]].element_size()

    def _make_slots(self, buckets: Sequence[Bucket]) -> list[BucketSlot]:
        if self._keeps_until_step:
            return super()._make_slots(buckets)
        if not self._frees:
            return [self._slot(bucket) for bucket in buckets]
        return self._slots_in_turn(buckets)

    def _slots_in_turn(self, buckets: Sequence[Bucket]) -> list[BucketSlot]:
        """Return buckets that are filled one after the other, in the same memory."""
        slots: list[BucketSlot] = []
        # Whether a GPU sends by itself is not known before the first time.
        in_flight = 2 if self._overlaps() or on_device(self.params[0]) else 1
        joined = self._join(buckets)
        sizes = [[self._room_bytes(buckets[place]) for place in places] for places in joined]
        most, device = max(map(sum, sizes), default=0), self.params[0].device
        memory = [torch.empty(most, dtype=torch.uint8, device=device) for _ in range(in_flight)]
        for number, (places, rooms) in enumerate(zip(joined, sizes, strict=True)):
            at = 0
            for place, room in zip(places, rooms, strict=True):
                bucket = buckets[place]
                dtype = self.params[bucket.indices[0]].dtype
                flat = memory[number % in_flight][at : at + room].view(dtype)[: bucket.numel]
                slots.append(self._slot(bucket, flat))
                at += room
        return slots

    def _slot(self, bucket: Bucket, flat: Tensor | None = None) -> BucketSlot:
        params = [self.params[i] for i in bucket.indices]
        slot, compression = plain_slot(bucket, params, flat), self.options.compression
        if not compression.changes(params[0].dtype):
            return slot
        layout = BucketLayout(tuple(map(shape_in_memory, params)), params[0].dtype, params[0].device)
        return slot._replace(reducer=compression.reducer(layout))

    def _room_bytes(self, bucket: Bucket) -> int:
        """Return the bytes that a bucket takes of the memory for buckets: 0 for what travels by itself."""
        if is_alone(bucket, [self.params[i] for i in bucket.indices]):
            return 0
        return -(-self._nbytes(bucket) // ALIGN_BYTES) * ALIGN_BYTES

    # -- a reduction --------------------------------------------------------------------------------

    def _launch_complete(self, in_flight: InFlightReduction) -> None:
        if not self._reductions:
            super()._launch_complete(in_flight)
            return
        for places in self._joined if in_flight.in_background else ():
            if places[0] in in_flight.launched:
                continue
            if not in_flight.are_complete(places):
                return
            self._launch(in_flight, places)

    def _launch_rest(self, in_flight: InFlightReduction) -> None:
        if not self._reductions:
            super()._launch_rest(in_flight)
            return
        self.is_deferred = self._is_in_pieces = False
        for places in self._joined:
            if places[0] not in in_flight.launched:
                self._launch(in_flight, places)

    def _launch(self, in_flight: InFlightReduction, places: tuple[int, ...]) -> None:
        """Send buckets to their owners; at most one more is under way then, if gradients are freed."""
        in_background = in_flight.in_background and self._overlaps()
        if self._frees:
            self._free(in_flight, leave=1 if in_background else 0)
        if any(isinstance(self._reductions[place], DeviceShardReduction) for place in places):
            self._launch_from_device(in_flight, places)
        else:
            self._launcher.launch_together(
                in_flight,
                places,
                lambda kinds: self._scatter(in_flight, places, kinds),
                async_op=in_background,
            )
        self._unfreed.append(places)
        if self._frees and not in_background:
            self._free(in_flight)

    def _launch_from_device(self, in_flight: InFlightReduction, places: Sequence[int]) -> None:
        for place in places:
            reduction = self._reductions[place]
            assert isinstance(reduction, DeviceShardReduction)
            self._launcher.launch_by(in_flight, place, reduction.begin)
            self._scattered.add(place)

    def _scatter(self, in_flight: InFlightReduction, places: Sequence[int], kinds: bytes) -> bool:
        """Bring buckets to their owners; return False where a gradient is sparse. Inside the queue."""
        if any(kind & SPARSE for kind in kinds):
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
                self._scattered.add(place)
        self._scratch.clear()
        return True

    def _free(self, in_flight: InFlightReduction, leave: int = 0) -> None:
        """Let go of gradients that have been brought to their owners, all but those launched last."""
        while len(self._unfreed) > leave:
            places = self._unfreed.pop(0)
            for place in places:
                if (work := in_flight.launched[place]) is not None:
                    work.wait()
            scattered, memories = self._scattered.intersection(places), []
            for place in set(places) - scattered:  # a gradient is sparse: all of them stay, and not here
                if isinstance(storage := in_flight.slots[place].storage, FusionBuffer):
                    storage.leave_memory()
            for place in scattered:
                self._release_slot(in_flight.slots[place])
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

    def _release_slot(self, slot: BucketSlot) -> None:
        if isinstance(slot.storage, UnbucketedGradient):
            slot.storage.release()

    # -- when all have arrived ----------------------------------------------------------------------

    def _unload(self, in_flight: InFlightReduction) -> list[int] | None:
        if not self._reductions:
            return super()._unload(in_flight)
        assert in_flight.plan is not None
        nonfinite = GradientReducer._unload(self, in_flight)
        if self._plan is None:  # a gradient is sparse that was not before
            for place in sorted(self._scattered):  # they are about to be divided anew
                self._bring_back(place, in_flight.slots[place])
            self._states.keep_whole(self._known_sparse)
        scattered = {i for place in self._scattered for i in in_flight.slots[place].bucket.indices}
        self._take_what_all_have([i for i in range(len(self.params)) if i not in scattered])
        for piece in self._parameters.pieces:
            if piece.members[0].param in scattered:
                exists, reduction = self._exists[piece.members[0].param], self._reduction_of_piece(piece)
                piece.grad = reduction.part(piece.members) if exists else None
        self._stand_in()
        self._unfreed.clear()
        return nonfinite

    def _join_kinds(self, in_flight: InFlightReduction, sparse: Sequence[int]) -> bytes:
        kinds, start = super()._join_kinds(in_flight, sparse), 0
        for place, slot in enumerate(in_flight.slots):
            here, start = kinds[start : start + len(slot.bucket.indices)], start + len(slot.bucket.indices)
            if place in self._scattered and any(kind & SPARSE for kind in here):
                self._with_sparse.add(place)
        return kinds

    def _unload_slot(self, place: int, slot: BucketSlot, exists: Sequence[bool]) -> None:
        if place not in self._scattered:
            super()._unload_slot(place, slot, exists)
            return
        for index, here in zip(slot.bucket.indices, exists, strict=True):
            self._exists[index] = here
        if place in self._with_sparse:  # what is sparse is added to the whole dense gradient
            self._bring_back(place, slot)

    def _reduction_of_piece(self, piece: Piece) -> BucketShard:
        """Return what has brought the gradient of a piece, all of which was in one bucket."""
        return next(r for r in self._reductions if r.covers(piece.members[0].param))

    def _bring_back(self, place: int, slot: BucketSlot) -> None:
        """Give every rank the whole gradients of a bucket of which it has a shard."""
        reduction, params = self._reductions[place], self._launcher.params_of(slot)
        flat = torch.zeros(slot.bucket.numel, dtype=params[0].dtype, device=params[0].device)
        reduction.put_back(flat)
        self._exchange(reduction.everyones(flat))
        for index, offset in zip(slot.bucket.indices, slot.bucket.offsets, strict=True):
            view = window(flat, offset, self._parameters.layouts[index])
            self.params[index].grad = view if self._exists[index] else None
        self._release_slot(slot)
        self._scattered.discard(place)

    def _exchange(self, rooms: Sequence[Sequence[Tensor]]) -> None:
        what = "shards of a bucket"
        if any(on_device(room) for of_one in rooms for room in of_one):
            DeviceParts(rooms, self.group).all_gather(what).wait()
            return
        owners = self._parameters.owners
        self.group.queue.run(Operation("gradients", extra=what), lambda: owners.exchange(rooms))

    def abandon(self) -> None:
        """See `GradientReducer`. What was on its way has noted, meanwhile, which buckets it had brought."""
        super().abandon()
        self._scattered.clear()
        self._unfreed.clear()

    def release(self) -> None:
        """See `ShardedReducer`."""
        super().release()
        self._exists = [False] * len(self.params)
        self._scattered.clear()
        self._with_sparse.clear()
        self._unfreed.clear()
        for reduction in self._reductions:
            reduction.release()


def _memories(grads: Sequence[Tensor | None]) -> list[tuple[int, StorageWeakRef]]:
    """Return where dense gradients lie, and what tells when their memory is freed."""
    return [
        (g.data_ptr(), StorageWeakRef(g.untyped_storage()))  # type: ignore[no-untyped-call]
        for g in grads
        if g is not None
    ]
