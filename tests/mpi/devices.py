"""Stand-ins for CUDA: the CPU's tensors play those of a GPU, so that all but the driver runs in the tests.

`EagerDevice` does everything at once. `LateDevice` does the work of a stream as late as it may: when somebody
waits for it. What forgets to wait then reads what is not there yet.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mpisgd

GARBAGE = 0x5A


class EagerEvent:
    def synchronize(self) -> None:
        """Nothing is ever late."""


class EagerStream:
    def record_event(self) -> EagerEvent:
        return EagerEvent()

    def wait_event(self, event: EagerEvent) -> None:
        """Nothing is ever late."""


class EagerDevice:
    """A GPU whose work is done when it is begun.

    Args:
        nccl: whether there is NCCL, played by gloo.
        shared: whether all ranks have the same GPU.
    """

    kind = "cpu"

    def __init__(self, *, nccl: bool = False, shared: bool = False) -> None:
        self._nccl = nccl
        self._shared = shared
        self.opened: list[GlooAsNccl] = []
        self.num_copies = 0

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_cpu

    def take_device(self, local_rank: int) -> None:
        """There is but one."""

    def memory_in_use(self) -> int:
        return 0

    def identity(self, device: torch.device) -> str:
        return "GPU 0" if self._shared else f"GPU {mpisgd.rank()}"

    def current_stream(self, device: torch.device) -> Any:
        return EagerStream()

    def new_stream(self, device: torch.device) -> Any:
        return EagerStream()

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.full((numel * dtype.itemsize,), GARBAGE, dtype=torch.uint8).view(dtype)

    def copy(self, out: Tensor, source: Tensor) -> None:
        self.num_copies += 1
        out.copy_(source)

    def has_nccl(self) -> bool:
        return self._nccl

    def open_nccl(self, store: Any, rank: int, size: int, timeout_s: float) -> GlooAsNccl:
        self.opened.append(GlooAsNccl(store, rank, size, timeout_s))
        return self.opened[-1]


class GlooAsNccl:
    """torch's gloo group with NCCL's abilities: it has means, and adds 16-bit floats in float32."""

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self._inner = dist.ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=timeout_s))
        self._size = size
        self.calls: list[str] = []
        self.ended = ""

    def _reduced(self, name: str, tensor: Tensor, op: Any, call: Callable[[Tensor, Any], Any]) -> Any:
        self.calls.append(name)
        work = tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.clone()
        result = call(work, dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op)
        if op == dist.ReduceOp.AVG:
            result = result / self._size
        return result.to(tensor.dtype)

    def allreduce(self, tensors: list[Tensor], op: Any) -> DoneWork:
        def call(work: Tensor, op: Any) -> Tensor:
            self._inner.allreduce([work], op).wait()
            return work

        return DoneWork(tensors[0].copy_(self._reduced("allreduce", tensors[0], op, call)))

    def reduce(self, tensor: Tensor, root: int, op: Any) -> DoneWork:
        def call(work: Tensor, op: Any) -> Tensor:
            self._inner.reduce(work, root, op).wait()
            return work

        result = self._reduced("reduce", tensor, op, call)
        return DoneWork(tensor.copy_(result) if self._inner.rank() == root else tensor)

    def _reduce_scatter_base(self, out: Tensor, tensor: Tensor, options: Any) -> DoneWork:
        def call(work: Tensor, op: Any) -> Tensor:
            self._inner.allreduce([work], op).wait()
            return work.chunk(self._size)[self._inner.rank()]

        return DoneWork(out.copy_(self._reduced("reduce_scatter", tensor, options.reduceOp, call)))

    def broadcast(self, tensor: Tensor, root: int) -> Any:
        self.calls.append("broadcast")
        return self._inner.broadcast(tensor, root)

    def _allgather_base(self, out: Tensor, tensor: Tensor) -> Any:
        self.calls.append("all_gather")
        return self._inner._allgather_base(out, tensor.clone())

    def alltoall_base(self, out: Tensor, tensor: Tensor, takes: list[int], gives: list[int]) -> Any:
        self.calls.append("all_to_all")
        return self._inner.alltoall_base(out, tensor, takes, gives)

    def shutdown(self) -> None:
        self.ended = "shutdown"
        del self._inner  # gloo's threads must not live when Python ends

    def abort(self) -> None:
        self.ended = "abort"
        del self._inner


class DoneWork:
    """torch's Work, of something that is done."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([self._tensor])
        return future


class LateEvent:
    """All that a stream had to do up to some point."""

    def __init__(self, stream: LateStream, place: int) -> None:
        self._stream = stream
        self._place = place

    def synchronize(self) -> None:
        with self._stream.lock:
            self._stream.run_to(self._place)


class LateStream:
    """Work in order, done when somebody waits for it."""

    def __init__(self, lock: threading.RLock) -> None:
        self.lock = lock
        self._work: list[Callable[[], Any]] = []
        self._done = 0

    def add(self, work: Callable[[], Any]) -> None:
        with self.lock:
            self._work.append(work)

    def record_event(self) -> LateEvent:
        return LateEvent(self, len(self._work))

    def wait_event(self, event: LateEvent) -> None:
        self.add(event.synchronize)

    def run_to(self, place: int) -> None:
        while self._done < place:
            self._done += 1
            self._work[self._done - 1]()

    def synchronize(self) -> None:
        self.record_event().synchronize()


class LateDevice(EagerDevice):
    """A GPU that is slower than any host."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()
        self._default = self.new_stream()
        self._current = threading.local()  # as on a GPU, every thread has a current stream of its own

    def new_stream(self, device: torch.device | None = None) -> LateStream:
        return LateStream(self._lock)

    def current_stream(self, device: torch.device | None = None) -> LateStream:
        return getattr(self._current, "stream", self._default)

    @contextlib.contextmanager
    def on(self, stream: LateStream) -> Iterator[None]:
        before, self._current.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._current.stream = before

    def copy(self, out: Tensor, source: Tensor) -> None:
        self.num_copies += 1
        self.kernel(lambda: out.copy_(source))

    def kernel(self, work: Callable[[], Any]) -> None:
        """Let the current stream do something."""
        self.current_stream().add(work)


class MetaDevice(EagerDevice):
    """A GPU played by torch's device "meta": it has no values, and what mixes it with the host fails."""

    kind = "meta"

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_meta

    def copy(self, out: Tensor, source: Tensor) -> None:
        self.num_copies += 1
        assert out.is_meta != source.is_meta, "a copy between host and device"
        assert (out.shape, out.dtype) == (source.shape, source.dtype)
        if not out.is_meta:
            out.fill_(1)
