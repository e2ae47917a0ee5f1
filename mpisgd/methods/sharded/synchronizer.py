"""`ShardedSynchronizer`: each rank updates its shard of the parameters, and sends it to all others."""

import functools
import hashlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.accelerator.runtime import on_device
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.gradients.bucketing import join_buckets
from mpisgd.methods.sharded.forward_overlap import ForwardOverlap
from mpisgd.methods.sharded.piecewise import Piecewise
from mpisgd.methods.strategy.training import Training
from mpisgd.sharding.device_parts import DeviceParts, PartsWork
from mpisgd.sharding.divided_parameters import DividedParameters
from mpisgd.sharding.offload.description import Offload
from mpisgd.sharding.owners import Owners
from mpisgd.sharding.reduction.scattering_reducer import ScatteringReducer
from mpisgd.sharding.reduction.sharded_reducer import ShardedReducer
from mpisgd.sharding.replicated_parameters import ReplicatedParameters
from mpisgd.sharding.shared_parameters import SharedParameters

__all__ = ["ShardedSynchronizer"]

MAX_KNOWN = 64  # sets of parameters that were updated together
PART_BYTES = 4 * 2**20  # of parameters, which travel between hosts while others go round the host


class ShardedSynchronizer(Piecewise):
    """Brings gradients to their owners, and parameters to everyone.

    Args:
        training: what it works on.
        stage: see `Sharded`, as for `master_dtype`, `overlap_forward` and `offload`.
    """

    commits_shards = True

    def __init__(
        self,
        training: Training,
        *,
        stage: int,
        master_dtype: torch.dtype | None,
        overlap_forward: bool,
        offload: Offload | None,
    ) -> None:
        self._stage, self._master_dtype = stage, master_dtype
        self._updated: list[bool] = []
        self._parts: dict[Any, list[Sequence[int]]] = {}
        self._rooms: dict[Any, list[list[list[Tensor]]]] = {}
        self._known_ranges: Any = None  # those of `_parts` and `_rooms`
        self._overlap = ForwardOverlap(training.named) if overlap_forward else None
        super().__init__(training, offload)

    def _make_parameters(self, training: Training, *, elementwise: bool) -> DividedParameters:
        kind = SharedParameters if training.share_parameters else ReplicatedParameters
        owners = Owners(training.group, of_host=False)
        return kind(
            training.named,
            training.optimizer.param_groups,
            owners,
            elementwise=elementwise,
            joins=self._joins(owners, one_copy=kind.one_copy),
            master_dtype=self._master_dtype,
            cuts_alone=self._offload is not None,
            masters_on_host=self._offload is not None and _is_on_device(training),
        )

    def _joins(self, owners: Owners, *, one_copy: bool) -> bool:
        """Whether small parameters share pieces. In a copy per host all have to be there on every host."""
        if one_copy:
            return self._stage == 1 and len(owners.nodes) == 1 < owners.size
        return owners.size > 1

    def _make_reducer(self, kind: Callable[..., ShardedReducer] = ScatteringReducer) -> ShardedReducer:
        return super()._make_reducer(functools.partial(kind, stage=self._stage))

    def _before_update(self, then: Callable[[], None] | None = None) -> None:
        if then is not None or self._parameters.one_copy:  # nobody else reads this rank's memory
            super()._before_update(then)

    def before_step(self) -> None:
        """Wait for what is still arriving."""
        if self._overlap is not None:
            self._overlap.check_used()
        self.wait()
        super().before_step()

    def _show_pieces(self) -> None:
        self._updated = self._present
        super()._show_pieces()

    # -- everyone gets the parameters ---------------------------------------------------------------

    def wait(self) -> None:
        """Return when all parameters have arrived that are on their way with `overlap_forward`."""
        if self._overlap is not None:
            self._overlap.wait()

    def consensus(self) -> Sequence[Tensor]:
        """Return the parameters as they are, all of them."""
        self.wait()
        return super().consensus()

    def state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """See `Piecewise`. Who saves the state saves the parameters, too, which are there then."""
        self.wait()
        return super().state_dict(make)

    def shard_state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """See `Piecewise`; likewise."""
        self.wait()
        return super().shard_state_dict(make)

    def extend(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Share further parameters, too."""
        self.wait()
        super().extend(named)
        if self._overlap is not None:
            self._overlap.cover(named)

    def move_to(self, group: Group) -> None:
        """See `Piecewise`; what ranks were sending that are lost does not arrive any more."""
        if self._overlap is not None:
            self._overlap.forget()
        super().move_to(group)

    def _publish(self) -> None:
        if self.training.group.size == 1:
            return
        if _is_on_device(self.training):
            self._publish_from_device()
            return
        between_hosts = len(self._parameters.owners.nodes) > 1
        parts = self._in_order_of_forward(PART_BYTES if between_hosts else sys.maxsize)
        self._send(parts, "all", async_op=False)

    def _publish_from_device(self) -> None:
        """Send one part after the other, of which two have memory at a time."""
        parts, before = self._in_order_of_forward(self.training.options.bucket_cap_bytes), None
        for number, part in enumerate(parts):
            work = self._send_from_device(part, f"part {number}")
            if before is not None:
                before.wait()
            before = work
        if before is not None:
            before.wait()

    def _publish_after_step(self, num_steps: int) -> None:
        period = self.training.check_in_sync_every
        if self._overlap is None or not self._can_overlap or (period and num_steps % period == 0):
            self._publish()
            return
        cap_bytes = self.training.options.bucket_cap_bytes
        for number, indices in enumerate(self._in_order_of_forward(cap_bytes)):
            work = self._send_in_background(indices, f"part {number}")
            self._overlap.expect([self.training.named[i][1] for i in indices], work)

    @property
    def _can_overlap(self) -> bool:
        """Whether parameters are sent at all, and a thread may do that; the same on all ranks."""
        group, owners = self.training.group, self._parameters.owners
        sends = group.size > 1 and not (self._parameters.one_copy and len(owners.nodes) == 1)
        return sends and group.queue.threads_allowed

    def _in_order_of_forward(self, cap_bytes: int) -> list[Sequence[int]]:
        """Return the updated parameters in parts of so many bytes, those first that backward reaches last."""
        self._forget_if_divided_anew()
        key = (cap_bytes, bytes(self._updated))
        if key not in self._parts:
            self._parts[key] = self._find_parts(cap_bytes)
        return self._parts[key]

    def _find_parts(self, cap_bytes: int) -> list[Sequence[int]]:
        buckets = self._parameters.buckets
        inside = {index for bucket in buckets for index in bucket}
        rest = [index for index in range(len(self._updated)) if index not in inside]
        parts = [[i for i in bucket if self._updated[i]] for bucket in (rest, *reversed(buckets))]
        sizes = [sum(self.training.named[i][1].nbytes for i in part) for part in parts]
        joined = join_buckets(sizes, cap_bytes)
        together = [tuple(index for place in places for index in parts[place]) for places in joined]
        return [part for part in together if part]

    def _forget_if_divided_anew(self) -> None:
        known = max(len(self._parts), len(self._rooms))
        if self._known_ranges is not self._parameters.ranges or known > MAX_KNOWN:
            self._parts.clear()
            self._rooms.clear()
            self._known_ranges = self._parameters.ranges

    def _send_in_background(self, part: Sequence[int], what: str) -> Work:
        if _is_on_device(self.training):
            return self._send_from_device(part, what)
        work = self._send([part], what, async_op=True)
        assert work is not None
        return work

    def _send(self, parts: Sequence[Sequence[int]], what: str, *, async_op: bool) -> Work | None:
        """Bring updated parameters from their owners to everyone, part by part. Collective."""
        owners, one_copy = self._parameters.owners, self._parameters.one_copy
        rooms = self._rooms_of(parts)
        return self.training.group.queue.run(
            Operation("shards of parameters", extra=f"{what} of updated {self._which}"),
            lambda: owners.exchange_in_turn(rooms, one_copy=one_copy),
            async_op=async_op,
        )

    def _send_from_device(self, part: Sequence[int], what: str) -> Work:
        """Begin to bring updated parameters from their owners' devices to everyone's. Collective."""
        dtypes = sorted({self.training.named[i][1].dtype for i in part}, key=str)
        alike = [[i for i in part if self.training.named[i][1].dtype is dtype] for dtype in dtypes]
        group, what = self.training.group, f"{what} of updated {self._which}"
        works = [DeviceParts(rooms, group).all_gather(what) for rooms in self._rooms_of(alike)]
        return PartsWork(works, lambda: None, [], self.training.named[part[0]][1], group)

    @property
    def _which(self) -> str:
        """A hash of which parameters were updated."""
        return hashlib.blake2b(bytes(self._updated), digest_size=8).hexdigest()

    def _rooms_of(self, parts: Sequence[Sequence[int]]) -> list[list[list[Tensor]]]:
        """Return for each part what each owner has of it, in this rank's memory; known from step to step."""
        self._forget_if_divided_anew()
        key = tuple(map(tuple, parts))
        if key not in self._rooms:
            self._rooms[key] = self._find_rooms(parts)
        return self._rooms[key]

    def _find_rooms(self, parts: Sequence[Sequence[int]]) -> list[list[list[Tensor]]]:
        ranges, wanted = self._parameters.ranges, [frozenset(part) for part in parts]
        return [
            [
                [room for range_ in of_one for room in self._parameters.rooms(range_, part)]
                for of_one in ranges
            ]
            for part in wanted
        ]


def _is_on_device(training: Training) -> bool:
    """Return whether the parameters are on a device: all of them, or none."""
    return any(on_device(param) for _, param in training.named[:1])
