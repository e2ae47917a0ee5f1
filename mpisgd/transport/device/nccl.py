"""`Nccl`: a group's collectives through NCCL, by torch's own process group.

NCCL's operations are work on the GPU: a call returns when the work is queued, and so does `wait()`, which
lets the current stream wait. Nothing here synchronizes with the other ranks: the GPU would run dry while the
host waits for them. The operation is written into the queue's history, so that the next one that does finds
out whether all ranks did the same; for a rank that waits for the GPU before that, NCCL has a timeout.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from mpisgd.core.consistency import Operation
from mpisgd.core.submission import inference_mode_of
from mpisgd.core.work import Work
from mpisgd.dtypes import BOOL_OPS, COMPLEX, HALF_DTYPES, ReduceOp
from mpisgd.errors import CollectiveTimeout, MpisgdError, NcclFailed, afresh
from mpisgd.threads.wait_registry import WaitReason
from mpisgd.threads.waiting import Backoff
from mpisgd.transport.device.backend import DeviceBackend
from mpisgd.transport.device.device_work import DeviceWork
from mpisgd.transport.device.nccl_watch import InFlight, Launched, watch

if TYPE_CHECKING:
    from mpisgd.core.group import Group

__all__ = ["Nccl", "NcclWork"]

ADDED = (*HALF_DTYPES, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)
OPS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)


class Nccl(DeviceBackend):
    """See `DeviceBackend`.

    Args:
        group: its members.
        inner: torch's process group over them, ProcessGroupNCCL or one like it.
        device: that the ranks are connected for.
        store: by which they have found each other.

    Attributes:
        inner: see above, as for `device` and `store`.
    """

    def __init__(self, group: "Group", inner: Any, device: torch.device, store: Any) -> None:
        super().__init__(group)
        self.inner = inner
        self.device = device
        self.store = store
        self._num_splits = 0
        self._in_flight = InFlight(group, inner)
        self._order = threading.Lock()
        self._given: list[Tensor] = []  # what the operation that is being launched uses

    def watch(self) -> None:
        """Let `NcclWatch` look at what is in flight, until `close` or `abandon`."""
        watch(self._in_flight)

    def takes(self, op: ReduceOp | None, dtype: torch.dtype) -> bool:
        """Return whether NCCL can add that; it moves everything."""
        if op is None:
            return True
        if dtype is torch.bool:
            return BOOL_OPS.get(op, op) in OPS
        if dtype in COMPLEX:
            return op in (ReduceOp.SUM, ReduceOp.AVG)  # as pairs of real numbers
        return dtype in ADDED and op in OPS

    def store_of_split(self) -> Any:
        """Return a store for the next communicator that is split from this one; the same on all ranks."""
        self._num_splits += 1
        return PrefixStore(f"split {self._num_splits}", self.store)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Have nothing in flight, and let nothing be launched meanwhile.

        Raises:
            CollectiveTimeout: the GPU has not done what it has to do in time.
        """
        limit_s = self.group.queue.consistency.timeout_s
        reason = WaitReason("the GPU, before a communicator of NCCL is split", is_local=True)
        with self._order:
            if not Backoff(limit_s).wait_for(lambda: self._in_flight.first() is None, about=lambda: reason):
                raise CollectiveTimeout(f"group '{self.group.name}': the GPU was busy for {limit_s:g} s")
            yield

    def close(self) -> None:
        """End NCCL's communicator, when all that was queued is done."""
        watch(self._in_flight, end=True)
        if self._in_flight.error is None:
            self.inner.shutdown()

    def abandon(self, error: MpisgdError) -> None:
        """Break off what is in flight, which raises `error` from now on."""
        watch(self._in_flight, end=True)
        self._in_flight.end(error)

    def run(
        self,
        operation: Operation,
        launch: Callable[[], Any],
        finish: Callable[[], None],
        *,
        tensors: Sequence[Tensor],
        device: torch.device,
        async_op: bool,
    ) -> Work | None:
        """Queue the operation behind what the current stream has to do.

        Threads launch in the order in which their operations were noted, as NCCL wants it on all ranks.
        """
        with self._order, inference_mode_of(tensors):
            self.group.queue.note(operation)
            memory: list[Tensor] = []
            self._given = memory
            try:
                begun = launch()
            except RuntimeError as exc:
                raise self._in_flight.or_its_error(NcclFailed(f"{operation}: {exc}")) from exc
            finally:
                self._given = []
            works = [each for each in (begun if isinstance(begun, list) else [begun]) if each is not None]
            launched = self._in_flight.add(operation, works)
        work = NcclWork(
            launched, works, finish, self._in_flight, tensors=tensors, memory=memory, device=device
        )
        if async_op:
            return work
        work.wait()
        return None

    def all_reduce(self, flat: Tensor, op: ReduceOp) -> Any:
        """Combine `flat` in place."""
        self._given += [flat]
        form, torch_op = _as_added(flat, op)
        return self.inner.allreduce([form], torch_op) if flat.numel() else None

    def reduce(self, flat: Tensor, root: int, op: ReduceOp) -> Any:
        """Combine `flat` into root's."""
        self._given += [flat]
        form, torch_op = _as_added(flat, op)
        return self.inner.reduce(form, root, torch_op) if flat.numel() else None

    def broadcast(self, flat: Tensor, root: int) -> Any:
        """Copy root's `flat` into everyone's, as bytes."""
        self._given += [flat]
        return self.inner.broadcast(_as_bytes(flat), root) if flat.numel() else None

    def all_gather(self, out: Tensor, flat: Tensor) -> Any:
        """Copy everyone's `flat` into `out`, as bytes."""
        self._given += [out, flat]
        return self.inner._allgather_base(_as_bytes(out), _as_bytes(flat)) if flat.numel() else None

    def reduce_scatter(self, out: Tensor, flat: Tensor, op: ReduceOp) -> Any:
        """Combine `flat` and leave this rank's part in `out`."""
        self._given += [out, flat]
        options = dist.ReduceScatterOptions()
        into, options.reduceOp = _as_added(out, op)
        source, _ = _as_added(flat, op)
        return self.inner._reduce_scatter_base(into, source, options) if flat.numel() else None

    def all_to_all(self, out: Tensor, flat: Tensor, takes: Sequence[int], gives: Sequence[int]) -> Any:
        """Exchange parts of any sizes, as bytes."""
        self._given += [out, flat]
        itemsize = flat.element_size()
        sizes = [[numel * itemsize for numel in side] for side in (takes, gives)]
        return self.inner.alltoall_base(_as_bytes(out), _as_bytes(flat), *sizes)


def _as_bytes(flat: Tensor) -> Tensor:
    """NCCL knows few dtypes, and moves bytes as fast as any."""
    return flat.view(torch.uint8)


def _as_added(flat: Tensor, op: ReduceOp) -> tuple[Tensor, Any]:
    """Return a view of a dtype that NCCL adds, in the same memory, and torch's operation for it."""
    if flat.dtype is torch.bool:
        flat, op = flat.view(torch.uint8), BOOL_OPS.get(op, op)
    elif flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat, getattr(dist.ReduceOp, op.name)


class NcclWork(DeviceWork):
    """Operations that are queued on the GPU; see `DeviceWork`.

    Args:
        launched: as they are watched.
        works: torch's.
        finish: see `DeviceWork`, as for the rest.
        in_flight: of their communicator.
    """

    def __init__(
        self,
        launched: Launched,
        works: Sequence[Any],
        finish: Callable[[], None],
        in_flight: InFlight,
        *,
        tensors: Sequence[Tensor],
        memory: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        super().__init__(finish, group=in_flight.group, tensors=list(tensors), memory=memory, device=device)
        self.name = launched.operation.kind
        self._launched = launched
        self._in_flight = in_flight
        self._works = works
        self._error: BaseException | None = None

    def follow(self, timeout_s: float | None = None) -> None:
        """See `DeviceWork`. torch's own limit would end NCCL's communicator, so the host looks by itself."""
        if timeout_s is not None:
            self._wait_on_host(timeout_s)
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as exc:
            self._error = self._in_flight.or_its_error(NcclFailed(f"{self.name}: {exc}"))
            raise self._error from exc
        if self._in_flight.error is not None:  # to torch what was ended is done
            self._error = afresh(self._in_flight.error)
            raise self._error

    def finish_once(self) -> None:
        """See `DeviceWork`."""
        super().finish_once()
        self._launched.wait_for(self.finished)

    def _wait_on_host(self, timeout_s: float) -> None:
        reason = WaitReason(f"{self.name} (NCCL)", is_local=True)
        if not Backoff(timeout_s, own_limit=True).wait_for(self.is_completed, about=lambda: reason):
            raise CollectiveTimeout(f"{self.name}: not done after {timeout_s} s")

    def is_completed(self) -> bool:
        """Return whether the GPU has done it, or never will."""
        return self._in_flight.error is not None or all(work.is_completed() for work in self._works)

    @property
    def error(self) -> BaseException | None:
        """What went wrong, as far as `wait()` has seen."""
        return self._error
