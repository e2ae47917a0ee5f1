"""`Nccl`: a group's collectives through NCCL, by torch's own process group.

NCCL's operations are work on the GPU: a call returns when the work is queued, and so does `wait()`, which
lets the current stream wait. Nothing here synchronizes with the other ranks: the GPU would run dry while the
host waits for them. The operation is written into the queue's history, so that the next one that does finds
out whether all ranks did the same; for a rank that waits for the GPU before that, NCCL has a timeout.
"""

import datetime
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpisgd.accelerator.runtime import runtime
from mpisgd.config import LONGEST_TIMEOUT_S
from mpisgd.core.consistency import Operation
from mpisgd.core.operation_queue import inference_mode_of
from mpisgd.core.work import Work
from mpisgd.dtypes import BOOL_OPS, COMPLEX, HALF_DTYPES, ReduceOp
from mpisgd.errors import NcclFailed
from mpisgd.transport.device.backend import DeviceBackend

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
    """

    def __init__(self, group: "Group", inner: Any) -> None:
        super().__init__(group)
        self._inner = inner
        self._order = threading.Lock()

    def takes(self, op: ReduceOp | None, dtype: torch.dtype) -> bool:
        """Return whether NCCL can add that; it moves everything."""
        if op is None:
            return True
        if dtype is torch.bool:
            return BOOL_OPS.get(op, op) in OPS
        if dtype in COMPLEX:
            return op in (ReduceOp.SUM, ReduceOp.AVG)  # as pairs of real numbers
        return dtype in ADDED and op in OPS

    def close(self) -> None:
        """End NCCL's communicator, when all that was queued is done."""
        self._inner.shutdown()

    def abandon(self) -> None:
        """Break off what is in flight."""
        self._inner.abort()

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
            try:
                begun = launch()
            except RuntimeError as exc:
                raise NcclFailed(f"{operation}: {exc}") from exc
        works = begun if isinstance(begun, list) else [begun]
        work = NcclWork(operation.kind, works, finish, tensors=tensors, device=device)
        if async_op:
            return work
        work.wait()
        return None

    def all_reduce(self, flat: Tensor, op: ReduceOp) -> Any:
        """Combine `flat` in place."""
        form, torch_op = _as_added(flat, op)
        return self._inner.allreduce([form], torch_op) if flat.numel() else None

    def reduce(self, flat: Tensor, root: int, op: ReduceOp) -> Any:
        """Combine `flat` into root's."""
        form, torch_op = _as_added(flat, op)
        return self._inner.reduce(form, root, torch_op) if flat.numel() else None

    def broadcast(self, flat: Tensor, root: int) -> Any:
        """Copy root's `flat` into everyone's, as bytes."""
        return self._inner.broadcast(_as_bytes(flat), root) if flat.numel() else None

    def all_gather(self, out: Tensor, flat: Tensor) -> Any:
        """Copy everyone's `flat` into `out`, as bytes."""
        return self._inner._allgather_base(_as_bytes(out), _as_bytes(flat)) if flat.numel() else None

    def reduce_scatter(self, out: Tensor, flat: Tensor, op: ReduceOp) -> Any:
        """Combine `flat` and leave this rank's part in `out`."""
        options = dist.ReduceScatterOptions()
        into, options.reduceOp = _as_added(out, op)
        source, _ = _as_added(flat, op)
        return self._inner._reduce_scatter_base(into, source, options) if flat.numel() else None

    def all_to_all(self, out: Tensor, flat: Tensor, takes: Sequence[int], gives: Sequence[int]) -> Any:
        """Exchange parts of any sizes, as bytes."""
        itemsize = flat.element_size()
        sizes = [[numel * itemsize for numel in side] for side in (takes, gives)]
        return self._inner.alltoall_base(_as_bytes(out), _as_bytes(flat), *sizes)


def _as_bytes(flat: Tensor) -> Tensor:
    """NCCL knows few dtypes, and moves bytes as fast as any."""
    return flat.view(torch.uint8)


def _as_added(flat: Tensor, op: ReduceOp) -> tuple[Tensor, Any]:
    """Return what NCCL adds, in the same memory, and torch's name for how."""
    if flat.dtype is torch.bool:
        flat, op = flat.view(torch.uint8), BOOL_OPS.get(op, op)
    elif flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat, getattr(dist.ReduceOp, op.name)


class NcclWork(Work):
    """Operations that are queued on the GPU; see `Work`.

    `wait()` does not wait for the GPU: it lets the current stream wait, as torch's own does.
    """

    def __init__(
        self,
        name: str,
        begun: Sequence[Any],
        finish: Callable[[], None],
        *,
        tensors: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        self.name = name
        self._begun = [work for work in begun if work is not None]
        self._finish = finish
        self._tensors = list(tensors)
        self._device = device
        self._finished: Any = None
        self._error: BaseException | None = None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Let what follows on the current stream come after the operation; with a limit the host waits."""
        limit = () if timeout_s is None else (datetime.timedelta(seconds=min(timeout_s, LONGEST_TIMEOUT_S)),)
        try:
            for work in self._begun:
                work.wait(*limit)
        except RuntimeError as exc:
            self._error = NcclFailed(f"{self.name}: {exc}")
            raise self._error from exc
        self._finish_once()
        return True

    def _finish_once(self) -> None:
        """Do the rest on the current stream, or let it wait for the stream that has done it."""
        stream = runtime().current_stream(self._device)
        if self._finished is None:
            with inference_mode_of(self._tensors):
                self._finish()
            self._finished = stream.record_event()
        else:
            stream.wait_event(self._finished)

    def is_completed(self) -> bool:
        """Return whether the GPU has done it."""
        return all(work.is_completed() for work in self._begun)

    @property
    def error(self) -> BaseException | None:
        """What went wrong, as far as `wait()` has seen."""
        return self._error

    def get_future(self) -> "torch.futures.Future[Any]":
        """Return a future whose callbacks run on streams that wait for the operation."""
        begun = [work.get_future() for work in self._begun]
        return torch.futures.collect_all(begun).then(self._settled)

    def _settled(self, begun: "torch.futures.Future[Any]") -> list[Tensor]:
        for future in begun.value():
            future.value()  # raises what went wrong
        self._finish_once()
        return self._tensors
