"""`Publication`: after a step every rank gets the parameters that others have updated."""

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mpisgd.accelerator.runtime import on_device
from mpisgd.core.consistency import Operation
from mpisgd.core.work import Work
from mpisgd.gradients.bucketing import join_buckets
from mpisgd.methods.sharded.forward_overlap import ForwardOverlap
from mpisgd.sharding.device_parts import DeviceParts, PartsWork
from mpisgd.sharding.divided_parameters import DividedParameters
from mpisgd.sharding.owners import Pack

__all__ = ["Publication"]

MAX_KNOWN = 64  # sets of parameters that were updated together
PART_BYTES = 4 * 2**20  # of parameters, which travel between hosts while others go round the host


class Publication:
    """Brings updated parameters from their owners to everyone.

    Where each host updates everything, its ranks wait for each other, and nothing is sent.

    Args:
        parameters: which rank owns what.
        cap_bytes: most bytes of a part that travels while something else is done.
        overlap: what waits for parameters that arrive while the next forward computes; None: nothing does.
    """

    def __init__(
        self, parameters: DividedParameters, cap_bytes: int, overlap: ForwardOverlap | None = None
    ) -> None:
        self._parameters, self._cap_bytes, self._overlap = parameters, cap_bytes, overlap
        self._group = parameters.owners.group
        self._updated: Sequence[bool] = ()
        self._parts: dict[Any, list[Sequence[int]]] = {}
        self._buffers: dict[Any, list[list[list[Tensor]]]] = {}
        self._known_ranges: Any = None  # those of `_parts` and `_buffers`

    _pack: Pack | None = None  # of what travels between hosts

    def publish(self, updated: Sequence[bool], *, in_background: bool = False) -> None:
        """Return when all ranks have all parameters as their owners have updated them. Collective.

        Args:
            updated: which of the parameters were; the same on all ranks.
            in_background: return at once where that can be; `overlap` sees to it that they are there when
                they are read.
        """
        owners, self._updated = self._parameters.owners, updated
        if owners.of_host:
            self._parameters.barrier("updated")
        elif in_background and self._overlap is not None and self._can_overlap:
            for number, indices in enumerate(self._in_order_of_forward(self._cap_bytes)):
                work = self._send_in_background(indices, f"part {number}")
                self._overlap.expect([self._parameters.named[i][1] for i in indices], work)
        elif self._group.size > 1 and self._is_on_device:
            self._publish_from_device()
        elif self._group.size > 1:
            parts = self._in_order_of_forward(PART_BYTES if len(owners.nodes) > 1 else sys.maxsize)
            self._send(parts, "all", async_op=False)

    def _publish_from_device(self) -> None:
        """Send one part after the other, of which two have memory at a time."""
        before: Work | None = None
        for number, part in enumerate(self._in_order_of_forward(self._cap_bytes)):
            work = self._send_from_device(part, f"part {number}")
            if before is not None:
                before.wait()
            before = work
        if before is not None:
            before.wait()

    @property
    def _is_on_device(self) -> bool:
        """Whether the parameters are on a device: all of them, or none."""
        return any(on_device(param) for _, param in self._parameters.named[:1])

    @property
    def _can_overlap(self) -> bool:
        """Whether parameters are sent at all, and a thread may do that; the same on all ranks."""
        stays = self._parameters.one_copy and len(self._parameters.owners.nodes) == 1
        return self._group.size > 1 and not stays and self._group.queue.threads_allowed

    def _in_order_of_forward(self, cap_bytes: int) -> list[Sequence[int]]:
        """Return the updated parameters in parts of so many bytes, those first that backward reaches last."""
        self._forget_if_divided_anew()
        key = (cap_bytes, bytes(self._updated))
        if key not in self._parts:
            self._parts[key] = self._find_parts(cap_bytes)
        return self._parts[key]

    def _find_parts(self, cap_bytes: int) -> list[Sequence[int]]:
        parts = self._by_bucket()
        sizes = [sum(self._parameters.named[i][1].nbytes for i in part) for part in parts]
        joined = join_buckets(sizes, cap_bytes)
        together = [tuple(index for place in places for index in parts[place]) for places in joined]
        return [part for part in together if part]

    def _by_bucket(self) -> list[list[int]]:
        """Return the updated parameters that are in no bucket, then those of each, in forward's order."""
        buckets = self._parameters.buckets
        inside = {index for bucket in buckets for index in bucket}
        rest = [index for index in range(len(self._updated)) if index not in inside]
        return [[i for i in bucket if self._updated[i]] for bucket in (rest, *reversed(buckets))]

    def _forget_if_divided_anew(self) -> None:
        known = max(len(self._parts), len(self._buffers))
        if self._known_ranges is not self._parameters.ranges or known > MAX_KNOWN:
            self._parts.clear()
            self._buffers.clear()
            self._known_ranges = self._parameters.ranges

    def _send_in_background(self, part: Sequence[int], what: str) -> Work:
        if self._is_on_device:
            return self._send_from_device(part, what)
        work = self._send([part], what, async_op=True)
        assert work is not None
        return work

    def _send(self, parts: Sequence[Sequence[int]], what: str, *, async_op: bool) -> Work | None:
        """Bring updated parameters from their owners to everyone, part by part. Collective."""
        owners, one_copy = self._parameters.owners, self._parameters.one_copy
        buffers = self._buffers_of(parts)
        return self._group.queue.run(
            Operation("shards of parameters", extra=f"{what} of updated {self._which}"),
            lambda: owners.exchange_in_turn(buffers, one_copy=one_copy, pack=self._pack),
            async_op=async_op,
        )

    def _send_from_device(self, part: Sequence[int], what: str) -> Work:
        """Begin to bring updated parameters from their owners' devices to everyone's. Collective."""
        named, what = self._parameters.named, f"{what} of updated {self._which}"
        dtypes = sorted({named[i][1].dtype for i in part}, key=str)
        alike = [[i for i in part if named[i][1].dtype is dtype] for dtype in dtypes]
        works = [DeviceParts(buffers, self._group).all_gather(what) for buffers in self._buffers_of(alike)]
        return PartsWork(works, lambda: None, [], named[part[0]][1], self._group)

    @property
    def _which(self) -> str:
        """A hash of which parameters were updated."""
        return hashlib.blake2b(bytes(self._updated), digest_size=8).hexdigest()

    def _buffers_of(self, parts: Sequence[Sequence[int]]) -> list[list[list[Tensor]]]:
        """Return for each part what each owner has of it, in this rank's memory; known from step to step."""
        self._forget_if_divided_anew()
        key = tuple(map(tuple, parts))
        if key not in self._buffers:
            self._buffers[key] = self._find_buffers(parts)
        return self._buffers[key]

    def _find_buffers(self, parts: Sequence[Sequence[int]]) -> list[list[list[Tensor]]]:
        ranges, wanted = self._parameters.ranges, [frozenset(part) for part in parts]
        return [
            [
                [buffer for range_ in of_one for buffer in self._parameters.tensors_in(range_, part)]
                for of_one in ranges
            ]
            for part in wanted
        ]
