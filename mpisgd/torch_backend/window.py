"""`BackendWindow`: torch's one-sided window (`dist._new_window`, from torch 2.14 on) on `mpisgd.Window`.

The memory of a window is not the memory that the program has allocated: on one host it is shared by the
ranks. So `tensor_register` moves the tensor there; afterwards the tensor *is* this rank's part of the window,
as torch has it. That must not tear views apart, so only a tensor that has its memory for itself is taken.

A signal is a number that only grows, one for each pair of ranks, in a second window.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpisgd.arguments import as_index, shown
from mpisgd.core.group import Group
from mpisgd.errors import (
    CollectiveTimeout,
    InvalidArgument,
    InvalidRank,
    NotInitialized,
    ShapeMismatch,
    UnsupportedOp,
    UnsupportedTensor,
)
from mpisgd.rma.window import Window
from mpisgd.threads.wait_registry import WaitReason
from mpisgd.threads.waiting import Backoff
from mpisgd.torch_backend import compat
from mpisgd.torch_backend.work import BackendWork

__all__ = ["BackendWindow"]


class BackendWindow:
    """Memory of each rank of a process group that the others write; made by `dist._new_window`.

    Ranks are those of the group. `put` and `signal` are complete when they return; with `async_op=True` they
    return a finished `Work`.

    Args:
        group: the ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._memory: Window | None = None
        self._signals: Window | None = None
        self._taken = [0] * group.size  # signals of each rank that were waited for
        self._tensor: Tensor | None = None

    def tensor_register(self, tensor: Tensor, owning: bool = True) -> None:
        """Let the others write into `tensor`. Collective over the group.

        The tensor's memory moves, values and all: its `data_ptr()` changes.

        Args:
            tensor: dense and contiguous, on the CPU, with its memory for itself: no view, and without views.
                Sizes may differ between ranks, the dtype is the same.
            owning: whether the window keeps the tensor; its memory lives until both are gone, either way.

        Raises:
            InvalidArgument: a tensor is registered already.
            UnsupportedTensor: no such tensor; before anything is sent.
            CollectiveMismatch: another rank gives another dtype; on all ranks.
        """
        if self._memory is not None:
            raise InvalidArgument(
                "tensor_register: double registration: this window has a tensor; call tensor_deregister() "
                "first"
            )
        _check_alone("tensor_register", tensor)
        memory = Window(tensor, self._group)
        self._signals = Window(torch.zeros(self._group.size, dtype=torch.int64), self._group)
        self._taken = [0] * self._group.size
        with torch.no_grad():
            tensor.set_(memory.tensor)  # type: ignore[call-overload]  # torch's stubs lack this form
        self._memory = memory
        self._tensor = tensor if owning else None

    def tensor_deregister(self) -> None:
        """Let the others write no more. Collective over the group; the tensor stays as it is."""
        memory, signals = self._registered("tensor_deregister")
        self._memory = self._signals = self._tensor = None
        memory.free()
        signals.free()

    def put(
        self, tensor: Tensor, dst_rank: int, target_offset_nelems: int, async_op: bool, opts: Any = None
    ) -> dist.Work:
        """Write `tensor` into the memory of a rank, from an element on; it may be used again at once.

        Raises:
            NotInitialized: no tensor is registered.
            UnsupportedTensor, InvalidRank: before anything is written.
            ShapeMismatch: the tensor exceeds the window; before anything is written.
        """
        memory, _ = self._registered("put")
        place = self._place("put", dst_rank)
        room = torch.Size(memory.shapes[place]).numel()
        start = _index("put", "target_offset_nelems", target_offset_nelems)
        if start < 0 or start + tensor.numel() > room:
            raise ShapeMismatch(
                f"put: {tensor.numel()} elements from {start} on: that exceeds the window size of rank "
                f"{dst_rank}, {room} elements"
            )
        dst = self._group.ranks[place]
        memory.put(tensor, dst, start)
        memory.flush(dst)
        return BackendWork([], [tensor])

    def map_remote_tensor(self, rank: int) -> Tensor:
        """Return the memory of a rank on this host as a tensor.

        Raises:
            NotInitialized: no tensor is registered.
            UnsupportedOp: that rank is on another host.
        """
        memory, _ = self._registered("map_remote_tensor")
        place = self._place("map_remote_tensor", rank)
        if place == self._group.rank:
            memory.sync()
            return memory.tensor
        mapped = memory.local(self._group.ranks[place])
        if mapped is None:
            raise UnsupportedOp(
                f"map_remote_tensor: the memory of rank {rank} is on another host; write it with put()"
            )
        memory.sync()
        return mapped.view(memory.shapes[place])

    def signal(self, peer_rank: int, async_op: bool, opts: Any = None) -> dist.Work:
        """Tell a rank that what this one has put there is complete."""
        memory, signals = self._registered("signal")
        dst = self._group.ranks[self._place("signal", peer_rank)]
        memory.flush(dst)
        signals.accumulate(torch.ones(1, dtype=torch.int64), dst, offset=self._group.rank)
        signals.flush(dst)
        return BackendWork([], [])

    def wait_signal(self, peer_rank: int, async_op: bool, opts: Any = None) -> dist.Work:
        """Wait for the next signal of a rank; with `async_op` the work's `wait()` does.

        Raises:
            CollectiveTimeout: there was none within the timeout of `opts`, else of the group. It can be
                waited for again.
        """
        memory, signals = self._registered("wait_signal")
        place = self._place("wait_signal", peer_rank)
        counts, taken = signals.tensor, self._taken

        def take() -> bool:
            signals.sync()
            if int(counts[place]) <= taken[place]:
                return False
            taken[place] += 1
            return True

        limit_s = _seconds(getattr(opts, "timeout", None)) or self._group.queue.consistency.timeout_s
        work = SignalWork(self._group, place, take, memory.sync, limit_s)
        if not async_op:
            work.wait()
        return work

    def get_attr(self, peer_rank: int) -> Any:
        """Return torch's WindowAttr: UNIFIED where the memory of a rank is mapped here, else SEPARATE."""
        memory, _ = self._registered("get_attr")
        mapped = memory.local(self._group.ranks[self._place("get_attr", peer_rank)])
        return compat.window_attr(unified=mapped is not None)

    def _registered(self, name: str) -> tuple[Window, Window]:
        if self._memory is None or self._signals is None:
            raise NotInitialized(
                f"{name}: a tensor is not registered with this window; call tensor_register() first"
            )
        return self._memory, self._signals

    def _place(self, name: str, rank: object) -> int:
        place = _index(name, "the rank", rank)
        if not 0 <= place < self._group.size:
            raise InvalidRank(f"{name}: rank {place} of a group of {self._group.size}")
        return place


class SignalWork(BackendWork):
    """The wait for one signal: the first that no other wait has taken when this one asks."""

    def __init__(
        self,
        group: Group,
        place: int,
        take: Callable[[], bool],
        sync: Callable[[], None],
        limit_s: float,
    ) -> None:
        super().__init__([], [])
        self._about = WaitReason(f"a signal of rank {place}", group.name, (group.ranks[place],))
        self._take = take
        self._sync = sync
        self._limit_s = limit_s
        self._has_come = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the signal has come, and what was put before it is visible."""
        limit_s = _seconds(timeout) or self._limit_s
        if not Backoff(limit_s, own_limit=True).wait_for(self.is_completed, about=lambda: self._about):
            raise CollectiveTimeout(f"wait_signal: waited {limit_s:.1f} s for {self._about.what}")
        self._sync()
        return super().wait()

    def is_completed(self) -> bool:
        """Return whether the signal has come."""
        self._has_come = self._has_come or self._take()
        return self._has_come


def _check_alone(name: str, tensor: object) -> None:
    """Raise UnsupportedTensor unless a tensor's memory can move without tearing views apart."""
    if not isinstance(tensor, Tensor):
        raise UnsupportedTensor(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if not tensor.is_cpu or tensor.layout != torch.strided:
        raise UnsupportedTensor(
            f"{name}: tensor is {tensor.layout} on {tensor.device}; a window is dense memory of the host"
        )
    bytes_in_all = tensor.untyped_storage().nbytes()
    is_whole = tensor.is_contiguous() and tensor.numel() * tensor.element_size() == bytes_in_all
    if not is_whole or compat.has_views(tensor):
        raise UnsupportedTensor(
            f"{name}: tensor shares its memory with another tensor, or is not contiguous; its memory moves "
            "into the window, so give one that has its memory for itself, such as a clone()"
        )


def _index(name: str, what: str, value: object) -> int:
    try:
        return as_index(value)
    except TypeError:
        raise InvalidArgument(f"{name}: {what} is {shown(value)}; expected an integer") from None


def _seconds(timeout: timedelta | None) -> float | None:
    """Return a positive timeout in seconds; None for torch's "not given", which is negative or zero."""
    seconds = None if timeout is None else timeout.total_seconds()
    return seconds if seconds is not None and seconds > 0 else None
