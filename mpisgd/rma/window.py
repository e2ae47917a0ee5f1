"""`Window`: memory of each rank that the others read, write and combine without its doing anything."""

import contextlib
import os
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from mpisgd.arguments import ranks_text, shown
from mpisgd.collectives.tensor_arguments import check_output, check_tensor
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp, check_op, dtype_name
from mpisgd.errors import CollectiveTimeout, InvalidArgument, ShapeMismatch, UnsupportedOp, UnsupportedTensor
from mpisgd.job.lifecycle import group_or_world
from mpisgd.rma.memory import WindowMemory
from mpisgd.rma.patience import wait_patiently
from mpisgd.rma.remote_memory import open_remote_memory
from mpisgd.rma.shared_memory import open_shared_memory
from mpisgd.threads.wait_registry import WaitReason

__all__ = ["Window"]


class Window:
    """Memory of each rank of a group for one-sided calls. Collective: all ranks of `group` make it.

    On one host it is shared memory: a call is a copy, which is complete when the call returns, and the other
    rank takes no part. Between hosts it is MPI's one-sided communication with a passive target. If the
    network has no hardware for it, MPI needs the processor of the target; while a window is open, each rank
    has a thread for that. Below the thread level MPI_THREAD_MULTIPLE there is no such thread, and a call
    completes when the target is in some operation.

    `put` and `get` are not atomic. `accumulate`, `fetch_and_op` and `compare_and_swap` are atomic for each
    element with regard to each other; on one host each call is atomic as a whole. `lock` excludes only ranks
    that take the lock, too. `fence`, `lock` and messages order the program's own loads and stores of `tensor`
    with the calls of other ranks.

    On one host, the memory and the locks of a rank that is killed are freed, and the window keeps working for
    the others. Between hosts the loss of a rank ends it.

    Args:
        tensor: gives the shape, the dtype and the first values of this rank's memory; on the CPU. Shapes may
            differ between ranks, the dtype is the same. `put` and `get` take any dtype; arithmetic takes
            those that can be reduced, between hosts float32, float64, complex, int32 and int64.
        group: the ranks, all of the job by default.

    Attributes:
        tensor: this rank's memory.
        shapes: the shape of each rank's memory, in the order of the group.
        group: as given.

    Raises:
        UnsupportedTensor: the tensor is not a dense one on the CPU; before anything is sent.
        CollectiveMismatch: another rank gives another dtype; on all ranks.
        MemoryError: there is not enough memory; raised on all ranks.

    Source: MPI standard, chapter on one-sided communications.
    """

    def __init__(self, tensor: Tensor, group: Group | None = None) -> None:
        given = check_tensor("Window", tensor)
        if not given.is_cpu:
            raise UnsupportedTensor(f"Window: tensor is on {given.device}; a window is memory of the host")
        self.group = group_or_world(group)
        self._dtype = given.dtype
        self._pid = os.getpid()
        self._memory: WindowMemory | None = None
        self.shapes: tuple[tuple[int, ...], ...] = ()
        with torch.no_grad():
            self.group.queue.run(
                Operation("Window", dtype=dtype_name(given.dtype)), lambda: self._open(given.detach())
            )
        if self._memory is None:
            raise MemoryError("Window: there is no memory for it on some rank")
        self.tensor: Tensor = self._memory.mine.view(given.shape)
        _free_at_shutdown(self)

    def _open(self, given: Tensor) -> None:
        """Make the memory and fill this rank's. Collective, in the queue."""
        communicator = self.group.queue.communicator
        self.shapes = tuple(communicator.all_gather_object(tuple(given.shape)))
        self._numels = [torch.Size(shape).numel() for shape in self.shapes]
        if self.group.shared_memory is not None or self.group.size == 1:
            timeout_s = self.group.queue.consistency.timeout_s
            self._memory = open_shared_memory(communicator, self._numels, self._dtype, timeout_s)
        else:
            threads_allowed = self.group.queue.threads_allowed
            self._memory = open_remote_memory(
                communicator, self._numels, self._dtype, threads_allowed=threads_allowed
            )
        if self._memory is not None:
            self._memory.mine.copy_(given.reshape(-1))
            self._memory.sync()
        communicator.all_gather_object(None)  # everyone's memory has its first values

    # -- one-sided calls ----------------------------------------------------------------------------

    @torch.no_grad()
    def put(self, tensor: Tensor, dst: int, offset: int = 0) -> None:
        """Write `tensor` into the memory of rank `dst`.

        Between hosts the write is complete after `flush`, `unlock` or `fence`.

        Args:
            tensor: of the window's dtype; may be used again when this returns.
            dst: global rank.
            offset: where to begin, in elements.

        Raises:
            UnsupportedTensor, ShapeMismatch, InvalidRank: before anything is written.
        """
        memory, rank = self._target("Window.put", "dst", dst)
        memory.put(self._source("Window.put", tensor, rank, offset), rank, offset)

    @torch.no_grad()
    def get(self, out: Tensor, src: int, offset: int = 0) -> Tensor:
        """Read from the memory of rank `src` into `out`; return it.

        Args:
            out: of the window's dtype; overwritten.
            src: global rank.
            offset: where to begin, in elements.

        Raises:
            UnsupportedTensor, ShapeMismatch, InvalidRank: before anything is read.
        """
        memory, rank = self._target("Window.get", "src", src)
        self._check("Window.get", check_output("Window.get", out, "out"), "out", rank, offset)
        flat = out.view(-1) if out.is_contiguous() else torch.empty(out.numel(), dtype=out.dtype)
        memory.get(flat, rank, offset)
        if not out.is_contiguous():
            out.copy_(flat.view(out.shape))
        return out

    @torch.no_grad()
    def accumulate(
        self, tensor: Tensor, dst: int, op: ReduceOp | str = ReduceOp.SUM, offset: int = 0
    ) -> None:
        """Combine `tensor` into the memory of rank `dst`, each element atomically.

        Args:
            tensor: of the window's dtype; may be used again when this returns.
            dst: global rank.
            op: any but AVG.
            offset: where to begin, in elements.

        Raises:
            UnsupportedTensor, UnsupportedOp, ShapeMismatch, InvalidRank: before anything is written.
        """
        memory, rank = self._target("Window.accumulate", "dst", dst)
        op = self._check_op("Window.accumulate", memory, op)
        memory.accumulate(self._source("Window.accumulate", tensor, rank, offset), op, rank, offset)

    @torch.no_grad()
    def fetch_and_op(
        self, tensor: Tensor, dst: int, op: ReduceOp | str = ReduceOp.SUM, offset: int = 0
    ) -> Tensor:
        """Combine as `accumulate` does, and return what was there before, in the shape of `tensor`.

        Raises:
            UnsupportedTensor, UnsupportedOp, ShapeMismatch, InvalidRank: before anything is written.
        """
        memory, rank = self._target("Window.fetch_and_op", "dst", dst)
        op = self._check_op("Window.fetch_and_op", memory, op)
        flat = self._source("Window.fetch_and_op", tensor, rank, offset)
        return memory.fetch_and_op(flat, op, rank, offset).view(tensor.shape)

    @torch.no_grad()
    def compare_and_swap(self, expected: Tensor, desired: Tensor, dst: int, offset: int = 0) -> Tensor:
        """Write the elements of `desired` where the memory has those of `expected`; return what it had.

        Bits are compared: 0.0 is not -0.0, and a NaN is the same NaN. Elements have at most 8 bytes.

        Args:
            expected: of the window's dtype.
            desired: of the same shape.
            dst: global rank.
            offset: where to begin, in elements.

        Raises:
            UnsupportedTensor, UnsupportedOp, ShapeMismatch, InvalidRank: before anything is written.
        """
        name = "Window.compare_and_swap"
        memory, rank = self._target(name, "dst", dst)
        memory.check(name, None)
        old = self._source(name, expected, rank, offset, "expected")
        new = self._source(name, desired, rank, offset, "desired")
        if old.numel() != new.numel():
            raise ShapeMismatch(
                f"{name}: expected has {old.numel()} elements, desired {new.numel()}; they must be as many"
            )
        return memory.compare_and_swap(old, new, rank, offset).view(expected.shape)

    # -- order --------------------------------------------------------------------------------------

    def lock(self, rank: int, timeout_s: float | None = None) -> int:
        """Wait until this thread alone has the lock of the memory of `rank`.

        Args:
            rank: global rank.
            timeout_s: how long to wait, instead of the group's timeout.

        Returns:
            -1. On one host, if a rank was lost while it held the lock, that rank: what the lock protects may
            then be half written.

        Raises:
            CollectiveTimeout: another rank has not given it back; says which.
            PeerLost: between hosts, a rank was lost.
        """
        memory, place = self._target("Window.lock", "rank", rank)
        if not memory.try_lock(place):
            limit_s = timeout_s or self.group.queue.consistency.timeout_s
            if not wait_patiently(
                lambda: memory.try_lock(place),
                limit_s,
                lambda: self._awaited(place),
                ends_with_rank=memory.ends_with_rank,
                own_limit=timeout_s is not None,
            ):
                who = ranks_text(self._awaited(place).awaited)
                raise CollectiveTimeout(
                    f"Window.lock: waited {limit_s:.1f} s for {who} to unlock rank {rank}"
                )
        lost = memory.lost_holder(place)
        return lost if lost < 0 else self.group.ranks[lost]

    def unlock(self, rank: int) -> None:
        """Release the lock; what this rank has written is complete then."""
        memory, place = self._target("Window.unlock", "rank", rank)
        memory.unlock(place)

    @contextlib.contextmanager
    def locked(self, rank: int) -> Iterator[None]:
        """Hold the lock of the memory of `rank` within this context."""
        self.lock(rank)
        try:
            yield
        finally:
            self.unlock(rank)

    def flush(self, rank: int | None = None) -> None:
        """Wait until all writes of this rank to `rank` (None: to all ranks) are complete."""
        memory = self._usable("Window.flush")
        memory.flush(None if rank is None else self._target("Window.flush", "rank", rank)[1])

    def fence(self) -> None:
        """Wait until all previous writes of all ranks are complete and visible. Collective."""
        memory = self._usable("Window.fence")
        memory.flush(None)
        self.group.queue.run(Operation("Window.fence"), memory.sync)

    def sync(self) -> None:
        """Order this rank's loads and stores of `tensor` with what others read and write."""
        self._usable("Window.sync").sync()

    # -- what it is ---------------------------------------------------------------------------------

    def local(self, rank: int) -> Tensor | None:
        """Return the memory of `rank` as a flat tensor if it is on this host; None if MPI is needed."""
        memory, place = self._target("Window.local", "rank", rank)
        return memory.local(place)

    def is_alive(self, rank: int) -> bool:
        """Return whether the process of `rank` still runs; always True for a window between hosts."""
        memory, place = self._target("Window.is_alive", "rank", rank)
        return memory.is_alive(place)

    @property
    def ends_with_rank(self) -> bool:
        """Whether the loss of a rank ends the window for the others, as it does between hosts."""
        return self._usable("Window").ends_with_rank

    def free(self) -> None:
        """Give the window back before the end of the job. Collective. `tensor` stays valid."""
        memory = self._usable("Window.free")
        self.group.queue.run(Operation("Window.free"), memory.free)
        self._memory = None

    # -- checks -------------------------------------------------------------------------------------

    def _usable(self, name: str) -> WindowMemory:
        if self._memory is None:
            raise InvalidArgument(f"{name}: this window was freed")
        if os.getpid() != self._pid:
            raise InvalidArgument(f"{name}: this process was forked from the rank that made the window")
        return self._memory

    def _target(self, name: str, what: str, rank: int) -> tuple[WindowMemory, int]:
        return self._usable(name), self.group.group_rank(name, what, rank)

    def _source(self, name: str, tensor: Tensor, rank: int, offset: int, what: str = "tensor") -> Tensor:
        return self._check(name, check_tensor(name, tensor, what), what, rank, offset).reshape(-1)

    def _check(self, name: str, tensor: Tensor, what: str, rank: int, offset: int) -> Tensor:
        if tensor.dtype != self._dtype or not tensor.is_cpu:
            raise UnsupportedTensor(
                f"{name}: {what} is {tensor.dtype} on {tensor.device}; "
                f"expected {self._dtype} on the CPU, as the window has"
            )
        if not isinstance(offset, int) or offset < 0 or offset + tensor.numel() > self._numels[rank]:
            raise ShapeMismatch(
                f"{name}: {what} has {tensor.numel()} elements, offset={shown(offset)}; the memory of rank "
                f"{self.group.ranks[rank]} has {self._numels[rank]}"
            )
        return tensor.detach()

    def _check_op(self, name: str, memory: WindowMemory, op: object) -> ReduceOp:
        ours = check_op(name, op, self._dtype)
        if ours is ReduceOp.AVG:
            raise UnsupportedOp(f"{name}: op=AVG; how many there will be is not known, so take SUM")
        memory.check(name, ours)
        return ours

    def _awaited(self, place: int) -> WaitReason:
        holder = -1 if self._memory is None else self._memory.holder(place)
        awaited = (self.group.ranks[holder],) if holder >= 0 and holder != self.group.rank else ()
        rank = self.group.ranks[place]
        return WaitReason(f"Window.lock of rank {rank}", self.group.name, awaited)


def _free_at_shutdown(window: Window) -> None:
    """Free a window at the end of the job, unless the program has done so: MPI must not end with one open."""
    known = weakref.ref(window)
    # What MPI knows is not forgotten before: ranks would free windows in another order.
    kept = window if window.group.shared_memory is None and window.group.size > 1 else None

    def free() -> None:
        found = kept or known()
        if found is not None and found._memory is not None and found.group.broken is None:
            found._memory.free()
            found._memory = None

    window.group.job.at_end.append(free)
