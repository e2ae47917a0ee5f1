"""`DeviceBackend`: what moves and reduces flat tensors of a device where they lie, NCCL or CUDA-aware MPI."""

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpisgd.core.consistency import Operation
from mpisgd.core.work import Work
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import MpisgdError

if TYPE_CHECKING:
    from mpisgd.core.group import Group

__all__ = ["DeviceBackend"]


class DeviceBackend(abc.ABC):
    """The primitives of one group on device tensors, as the transport table calls them."""

    def __init__(self, group: "Group") -> None:
        self.group = group
        self.rank = group.rank
        self.size = group.size

    @abc.abstractmethod
    def takes(self, op: ReduceOp | None, dtype: torch.dtype) -> bool:
        """Return whether it can reduce so, or move that (`op` None); the same on all ranks."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what it holds. Collective."""

    @abc.abstractmethod
    def abandon(self, error: MpisgdError) -> None:
        """End what the others have never joined, or never will; it raises `error` then. From any thread."""

    @abc.abstractmethod
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
        """Have `launch` begin the operation on `device`, and `finish` bring its result into `tensors`.

        Args:
            operation: what the ranks must agree on.
            launch: calls the methods below, once or several times, and returns what they return.
            finish: copies on the current stream.
            tensors: what the Work's future holds.
            device: where they lie.
            async_op: return at once with the Work.
        """

    # On contiguous [n] tensors of the device; roots are ranks of the group. They return what `run` waits for.

    @abc.abstractmethod
    def all_reduce(self, flat: Tensor, op: ReduceOp) -> Any:
        """Combine `flat` over the ranks, in place."""

    @abc.abstractmethod
    def reduce(self, flat: Tensor, root: int, op: ReduceOp) -> Any:
        """Combine `flat` over the ranks into root's."""

    @abc.abstractmethod
    def broadcast(self, flat: Tensor, root: int) -> Any:
        """Copy root's `flat` into everyone's."""

    @abc.abstractmethod
    def all_gather(self, out: Tensor, flat: Tensor) -> Any:
        """Copy everyone's `flat` into `out`, in rank order; it may lie in its place there already."""

    @abc.abstractmethod
    def reduce_scatter(self, out: Tensor, flat: Tensor, op: ReduceOp) -> Any:
        """Combine `flat` [size * n] over the ranks; `out` [n] is this rank's part of the result."""

    @abc.abstractmethod
    def all_to_all(self, out: Tensor, flat: Tensor, takes: Sequence[int], gives: Sequence[int]) -> Any:
        """Send consecutive parts of `flat`, of `gives[rank]` elements, and receive those of `out`."""
