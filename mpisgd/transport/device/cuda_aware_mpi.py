"""`CudaAwareMpi`: collectives by an MPI that takes addresses on a GPU.

It carries what MPI moves or adds as it is, on the queue's communicator and in its order; the rest goes
through host memory. MPI knows nothing of streams: the host waits for what the current stream has to do before
MPI may look at the memory, and what MPI returns is there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import cut_by
from mpisgd.accelerator.runtime import runtime
from mpisgd.core.consistency import Operation
from mpisgd.core.work import CompletableWork, Work
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import MpisgdError
from mpisgd.transport.device.backend import DeviceBackend
from mpisgd.transport.device.stream_guard import StreamGuard
from mpisgd.transport.messages.link import Link
from mpisgd.transport.torch_reduction import combine_in_rank_order, divide

__all__ = ["CudaAwareMpi"]

# What every MPI adds rightly without help (see `mpisgd.transport.mpi_reduction`).
ADDED = (torch.float32, torch.float64, torch.int32, torch.int64)
OPS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT)


class CudaAwareMpi(DeviceBackend):
    """See `DeviceBackend`."""

    def takes(self, op: ReduceOp | None, dtype: torch.dtype) -> bool:
        """Return whether MPI can add that; it moves everything."""
        return op is None or (op in OPS and dtype in ADDED)

    def close(self) -> None:
        """Nothing is held."""

    def abandon(self, error: MpisgdError) -> None:
        """Nothing is in flight that the queue does not know of."""

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
        """Run the operation in the queue, between what produced the tensors and what uses them."""

        def action() -> None:
            runtime().current_stream(device).record_event().synchronize()
            launch()
            finish()

        guard = StreamGuard(device, self.group.streams.get("copies", device), waits=async_op)
        action_to_end = guard.to_its_end(action)
        work = self.group.queue.run(operation, action_to_end, tensors=list(tensors), async_op=async_op)
        if work is None:
            guard.join()
        else:
            assert isinstance(work, CompletableWork)
            work.stream = guard.stream
        return work

    def all_reduce(self, flat: Tensor, op: ReduceOp) -> None:
        """Combine `flat` in place."""
        self.group.queue.communicator.all_reduce(flat, _sum_or(op))
        self._average(flat, op)

    def reduce(self, flat: Tensor, root: int, op: ReduceOp) -> None:
        """Combine `flat` into root's."""
        self.group.queue.communicator.reduce(flat, _sum_or(op), root)
        if self.rank == root:
            self._average(flat, op)

    def broadcast(self, flat: Tensor, root: int) -> None:
        """Copy root's `flat` into everyone's."""
        self.group.queue.communicator.broadcast(flat, root)

    def all_gather(self, out: Tensor, flat: Tensor) -> None:
        """Copy everyone's `flat` into `out`."""
        in_place = flat.data_ptr() == out.data_ptr() + self.rank * flat.nbytes
        self.group.queue.communicator.all_gather(out, None if in_place else flat)

    def reduce_scatter(self, out: Tensor, flat: Tensor, op: ReduceOp) -> None:
        """Exchange the parts and combine this rank's own: MPI would add in an order of its own."""
        pieces = flat.new_empty(flat.numel())
        self.all_to_all(pieces, flat, *[[out.numel()] * self.size] * 2)
        combine_in_rank_order(pieces.chunk(self.size) if pieces.numel() else [out] * self.size, op, out=out)

    def all_to_all(self, out: Tensor, flat: Tensor, takes: Sequence[int], gives: Sequence[int]) -> None:
        """Exchange parts of any sizes by messages."""
        outputs, inputs = cut_by(out, takes), cut_by(flat, gives)
        outputs[self.rank].copy_(inputs[self.rank])
        queue, name = self.group.queue, f"all_to_all (group '{self.group.name}')"
        others = [rank for rank in range(self.size) if rank != self.rank]
        Link(queue.communicator, name, queue.consistency.timeout_s).transfer(
            sends=[(rank, inputs[rank]) for rank in others],
            receives=[(rank, outputs[rank]) for rank in others],
        )

    def _average(self, flat: Tensor, op: ReduceOp) -> None:
        if op is ReduceOp.AVG:
            divide(flat, self.size)


def _sum_or(op: ReduceOp) -> str:
    return "SUM" if op is ReduceOp.AVG else op.name
