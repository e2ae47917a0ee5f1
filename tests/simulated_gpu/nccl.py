"""`SimulatedNccl`: torch's ProcessGroupNCCL, as far as mpisgd calls it, on a simulated GPU.

A collective is a kernel on a stream of NCCL's own, behind what the current stream had to do. It begins when
the stream comes to it, ends when those of all other ranks have come, and never if one does not come. The host
learns nothing of that but by events. gloo carries the data, or meeting.py where ranks are threads. What
follows torch: `wait()` lets the current stream wait, a future is complete at the launch and carries NCCL's
stream, tensors are kept until `wait()`, and the watchdog ends what has lasted too long as
TORCH_NCCL_ASYNC_ERROR_HANDLING says, by default with the process.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ErrorType

from mpisgd.threads import scheduling
from simulated_gpu.device import KIND, Device
from simulated_gpu.meeting import Member, ranks_are_threads
from simulated_gpu.memory import host_alias
from simulated_gpu.stream import Event

__all__ = ["NcclConfig", "NcclOptions", "SimulatedNccl", "end_those_of_threads"]

NO_HANDLING, TEAR_DOWN, CLEAN_UP_ONLY, SKIP_CLEAN_UP = range(4)
WATCHDOG_S = 0.05
CONNECT = datetime.timedelta(seconds=60)
POLL_S = 0.0002
UNDEFINED = -(2**31)


_of_threads: weakref.WeakSet[SimulatedNccl] = weakref.WeakSet()


def end_those_of_threads() -> None:
    """End all that ranks have opened that were threads, as their processes would have by their own end."""
    for nccl in list(_of_threads):
        nccl.abort()


class Aborted(Exception):
    """The communicator was ended meanwhile."""


class NcclConfig:
    """ncclConfig_t."""

    def __init__(self) -> None:
        self.blocking = self.cga_cluster_size = self.min_ctas = self.max_ctas = UNDEFINED
        self.net_name: str | None = None


class NcclOptions:
    """ProcessGroupNCCL.Options."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = NcclConfig()
        self.split_from: SimulatedNccl | None = None
        self.split_color = -2
        self._timeout = datetime.timedelta(minutes=10)


class Communicator:
    """Of one device of each rank: torch opens one for each device that its tensors lie on.

    Attributes:
        kernels: what its thread has to do.
        inner: what carries the data.
    """

    def __init__(self, nccl: SimulatedNccl, store: Any, rank: int, size: int) -> None:
        """Meet the others, as ncclCommInitRank: the host waits."""
        self._nccl = nccl
        self.kernels: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.inner: Any = (
            Member(store, rank, size)
            if ranks_are_threads()
            else dist.ProcessGroupGloo(store, rank, size, CONNECT)
        )
        threading.Thread(target=self._carry_out, name="simulated NCCL", daemon=True).start()

    def _carry_out(self) -> None:
        while self._nccl.aborted is None:
            try:
                self.kernels.get()()
            except Aborted:
                return
            except RuntimeError as exc:  # the others are gone: what has begun never ends
                print(f"simulated NCCL: {exc}", file=sys.stderr)
                self._nccl.error = ErrorType.COMM_ERROR
                return


class Collective:
    """The kernel: a task of NCCL's stream."""

    def __init__(self, nccl: SimulatedNccl, communicator: Communicator, run: Callable[[], object]) -> None:
        self._nccl, self._communicator, self._run = nccl, communicator, run
        self._begun = False
        self._ended = threading.Event()

    def poll(self) -> bool:
        if not self._begun:
            self._begun = True
            self._communicator.kernels.put(self.carry_out)
        return self._ended.is_set() or self._nccl.aborted is not None

    def carry_out(self) -> None:
        """In the communicator's thread: meet the others."""
        self._run()
        self._ended.set()


class SimulatedWork:
    """WorkNCCL."""

    def __init__(
        self, nccl: SimulatedNccl, device: int, end: Event, outputs: list[Tensor], stash: Any
    ) -> None:
        self._nccl, self._device, self._end = nccl, device, end
        self._outputs, self._stash = outputs, stash
        self.launched = time.monotonic()
        self.error: Exception | None = None
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[f"{KIND}:{device}"])
        self._future.set_result(outputs)  # the current stream is NCCL's

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Let the current stream wait; with a timeout the host waits, and ends NCCL when it is over."""
        gpu = self._nccl.device
        gpu.streams.add(gpu.current_stream(self._device), self._end)
        self._stash = None
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while deadline is not None and not self.is_completed():
            if time.monotonic() > deadline:
                self.error = dist.DistBackendError("Work timed out in blocking wait.")
            time.sleep(0.001)
        if self.error is not None:
            self._nccl.abort()
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.error is not None or self.is_finished()

    def is_finished(self) -> bool:
        """Return whether the kernel is over."""
        return self._nccl.device.streams.asked(self._end)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future


class SimulatedNccl:
    """See the module.

    Attributes:
        aborted: why it has ended early.
        calls: names of the collectives, in order.
        ended: "shutdown" or "abort".
        options: as given.
        error: that NCCL reports.
        num_splits: of this communicator.
        mode: what the watchdog does with what lasts too long.
    """

    def __init__(self, device: Device, store: Any, rank: int, size: int, options: NcclOptions) -> None:
        self.device = device
        self.aborted: str | None = None
        self.calls: list[str] = []
        self.ended = ""
        self.options = options
        self.error = ErrorType.SUCCESS
        self.num_splits = 0
        self._store, self._rank, self._size = store, rank, size
        self._timeout_s = options._timeout.total_seconds()
        self.mode = int(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", SKIP_CLEAN_UP))
        self._communicators: dict[int, Communicator] = {}
        self._streams: dict[int, torch.Stream] = {}
        self._watched: list[tuple[float, Event, weakref.ref[SimulatedWork]]] = []  # without their tensors
        if ranks_are_threads():
            _of_threads.add(self)
        threading.Thread(target=self._watch, name="simulated NCCL's watchdog", daemon=True).start()

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Open the communicator of a device; otherwise its first collective does."""
        if device.index in self._communicators:
            return
        if not self._communicators:
            self._check_options()
            if self.options.split_from is not None:
                self.options.split_from.split()
        store = dist.PrefixStore(str(len(self._communicators)), self._store)
        self._communicators[device.index] = Communicator(self, store, self._rank, self._size)
        self._streams[device.index] = torch.Stream(device)

    supports_splitting = True

    def split(self) -> None:
        """ncclCommSplit: all ranks take part, and nothing is in flight, or NCCL may hang."""
        assert all(self.device.streams.query(end) for _, end, _ in list(self._watched)), (
            "a communicator that is in use was split"
        )
        self.num_splits += 1
        self._meet(next(iter(self._communicators.values())).inner.barrier())

    def perform_nocolor_split(self, device: torch.device) -> None:
        assert device.index in self._streams, "there is no communicator to split"
        self.split()

    def _check_options(self) -> None:
        """As NCCL does."""
        config = self.options.config
        if config.cga_cluster_size != UNDEFINED and not 0 <= config.cga_cluster_size <= 8:
            raise dist.DistBackendError(
                f"NCCL error: invalid argument, cgaClusterSize {config.cga_cluster_size}"
            )

    def _meet(self, work: Any) -> None:
        """Wait for gloo, which itself cannot be told to stop."""
        while not work.is_completed():
            if self.aborted is not None:
                raise Aborted
            scheduling.sleep(POLL_S)
        work.wait()

    def _launch(
        self,
        name: str,
        tensors: Sequence[Tensor],
        outputs: list[Tensor],
        run: Callable[[Any, list[Tensor]], object],
    ) -> SimulatedWork:
        if self.aborted is not None:
            raise dist.DistBackendError(f"NCCL communicator was aborted: {self.aborted}")
        assert all(self.device.holds(tensor) and tensor.is_contiguous() for tensor in tensors), (
            "tensors of NCCL"
        )
        self.calls.append(name)
        place = tensors[0].device
        self.eager_connect_single_device(place)
        ours = self._streams[place.index]
        stream = self.device.streams.get(place.index, ours.stream_id)
        self.device.wait(stream, self.device.current_stream(place.index))
        aliases = [host_alias(tensor) for tensor in tensors]
        self.device.used.add(place.index)
        communicator = self._communicators[place.index]
        kernel = Collective(self, communicator, lambda: run(communicator.inner, aliases))
        end = self.device.streams.add(stream, kernel)
        with ours:
            work = SimulatedWork(self, place.index, end, outputs, list(tensors))
        self._watched.append((time.monotonic(), end, weakref.ref(work)))
        return work

    # -- the collectives ------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], op: Any) -> SimulatedWork:
        op = getattr(op, "reduceOp", op)

        def run(inner: Any, aliases: list[Tensor]) -> None:
            aliases[0].copy_(self._reduced(inner, aliases[0], op))

        return self._launch("allreduce", tensors, tensors, run)

    def reduce(self, tensor: Tensor, root: int, op: Any) -> SimulatedWork:
        def run(inner: Any, aliases: list[Tensor]) -> None:
            result = self._reduced(inner, aliases[0], op)
            if self._rank == root:
                aliases[0].copy_(result)

        return self._launch("reduce", [tensor], [tensor], run)

    def _reduce_scatter_base(self, out: Tensor, tensor: Tensor, options: Any) -> SimulatedWork:
        op = options.reduceOp

        def run(inner: Any, aliases: list[Tensor]) -> None:
            aliases[0].copy_(self._reduced(inner, aliases[1], op).chunk(self._size)[self._rank])

        return self._launch("reduce_scatter", [out, tensor], [out], run)

    def broadcast(self, tensor: Tensor, root: int) -> SimulatedWork:
        return self._launch(
            "broadcast",
            [tensor],
            [tensor],
            lambda inner, aliases: self._meet(inner.broadcast(aliases[0], root)),
        )

    def _allgather_base(self, out: Tensor, tensor: Tensor) -> SimulatedWork:
        return self._launch(
            "all_gather",
            [out, tensor],
            [out],
            lambda inner, aliases: self._meet(inner._allgather_base(aliases[0], aliases[1].clone())),
        )

    def alltoall_base(self, out: Tensor, tensor: Tensor, takes: list[int], gives: list[int]) -> SimulatedWork:
        return self._launch(
            "all_to_all",
            [out, tensor],
            [out],
            lambda inner, aliases: self._meet(inner.alltoall_base(*aliases, takes, gives)),
        )

    def _reduced(self, inner: Any, tensor: Tensor, op: Any) -> Tensor:
        """NCCL has means, and this one adds 16-bit floats in float32."""
        result = tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.clone()
        self._meet(inner.allreduce([result], dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op))
        if op == dist.ReduceOp.AVG:
            result = result / self._size
        return result.to(tensor.dtype)

    # -- the end --------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Wait for what is in flight, and end."""
        for number, stream in self._streams.items():
            self.device.synchronize(self.device.streams.get(number, stream.stream_id))
        self._end("shutdown")

    def abort(self) -> None:
        """End what is in flight as it is."""
        self._end("abort")
        # Gloo's threads wait for the others: it must not be destroyed before the process ends.
        for communicator in self._communicators.values():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(communicator.inner))

    def _end(self, how: str) -> None:
        if self.aborted is None:
            self.aborted, self.ended = how, how
            for communicator in self._communicators.values():
                communicator.kernels.put(lambda: None)

    def get_error(self) -> ErrorType:
        return self.error

    def _watch(self) -> None:
        """The watchdog: looks for what has lasted too long since its launch."""
        while self.aborted is None:
            time.sleep(WATCHDOG_S)
            for each in list(self._watched):  # to which another thread may add
                if self.device.streams.query(each[1]):
                    self._watched.remove(each)
            for launched, _, reference in list(self._watched):
                if time.monotonic() - launched > self._timeout_s:
                    error = dist.DistBackendError("Watchdog caught collective operation timeout")
                    if (work := reference()) is not None:
                        work.error = work.error or error
                    self._handle(str(error))

    def _handle(self, what: str) -> None:
        if self.mode in (TEAR_DOWN, CLEAN_UP_ONLY):
            self._end("abort")
        if self.mode in (TEAR_DOWN, SKIP_CLEAN_UP):
            print(f"simulated NCCL: {what}. Taking the entire process down.", file=sys.stderr, flush=True)
            os.abort()
