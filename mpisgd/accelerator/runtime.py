"""All that mpisgd asks of torch.cuda, behind a small interface.

Most machines that test mpisgd have no GPU. So whatever can be wrong without one is elsewhere, and runs in the
tests on a stand-in that executes streams as late as it may.
"""

import contextlib
import datetime
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Cuda", "Event", "Runtime", "Stream", "on_device", "runtime", "set_runtime"]


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Let this thread wait until the stream has come there."""


class Stream(Protocol):
    """Work of a device that is done in order."""

    def record_event(self) -> Any:
        """Return the point that the stream has reached when all work so far is done."""

    def wait_event(self, event: Any) -> None:
        """Let all later work of this stream wait for a point in another."""


class Runtime(Protocol):
    """What drives the devices."""

    @property
    def kind(self) -> str:
        """What torch calls such devices: the first part of `cuda:0`."""

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies on such a device."""

    def take_device(self, local_rank: int) -> None:
        """Make a device the current one, each rank of a host another, unless the program has chosen."""

    def identity(self, device: torch.device) -> str:
        """Return what tells a device from all others of its host."""

    def current_stream(self, device: torch.device) -> Stream:
        """Return the stream that this thread's work on `device` goes to."""

    def new_stream(self, device: torch.device) -> Stream:
        """Return a stream beside those of the program."""

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Let this thread's work go to `stream` inside."""

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return [numel] uninitialized elements of host memory that a device reads and writes by itself.

        It may be freed while copies that were started with it are in flight.
        """

    def copy(self, out: Tensor, source: Tensor) -> None:
        """Begin to copy between host and device on the current stream, both of one shape and dtype."""

    def has_nccl(self) -> bool:
        """Return whether this torch has NCCL."""

    def open_nccl(self, store: Any, rank: int, size: int, timeout_s: float) -> Any:
        """Return NCCL's process group over ranks that share `store`."""


class Cuda:
    """NVIDIA's GPUs, and AMD's, which torch calls by the same name."""

    kind = "cuda"

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies on a GPU."""
        return tensor.is_cuda

    def take_device(self, local_rank: int) -> None:
        """Take GPU number `local_rank`, counted round, unless the program has used CUDA already.

        That is what torch can tell: `torch.cuda.set_device` counts as a use, and so does any tensor on a
        GPU. GPU 0 is the current one by itself; not to touch it spares programs for the CPU its context.
        """
        if torch.cuda.is_available() and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            number = local_rank % torch.cuda.device_count()
            if number > 0:
                torch.cuda.set_device(number)

    def identity(self, device: torch.device) -> str:
        """Return the GPU's own number: the index differs by process where CUDA_VISIBLE_DEVICES does."""
        properties = torch.cuda.get_device_properties(device)
        return str(getattr(properties, "uuid", None) or f"{properties.name} {device.index}")

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream that this thread's kernels go to."""
        return torch.cuda.current_stream(device)

    def new_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return one of torch's pool."""
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def on(self, stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[Any]:
        """Make `stream`, and its device, the current one inside."""
        return torch.cuda.stream(stream)

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return page-locked memory. torch keeps what is let go of for the next time.

        It also knows which copies are in flight, and does not reuse it before they are done.
        """
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def copy(self, out: Tensor, source: Tensor) -> None:
        """Begin to copy; what is strided is copied on the device first."""
        out.copy_(source, non_blocking=True)

    def has_nccl(self) -> bool:
        """Return whether this torch was built with NCCL."""
        return dist.is_available() and dist.is_nccl_available()

    def open_nccl(self, store: Any, rank: int, size: int, timeout_s: float) -> Any:
        """Return torch's own process group, which finds the others through `store` at its first use."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = datetime.timedelta(seconds=timeout_s)
        return dist.ProcessGroupNCCL(store, rank, size, options)


_CUDA = Cuda()
_stand_in: Runtime | None = None


def runtime() -> Runtime:
    """Return what drives the devices here."""
    return _stand_in or _CUDA


def set_runtime(stand_in: Runtime | None) -> None:
    """Put a stand-in in the place of CUDA, for tests; None: CUDA again."""
    global _stand_in
    _stand_in = stand_in


def on_device(tensor: Tensor) -> bool:
    """Return whether a tensor lies on a device. Every operation asks this of its tensors."""
    return tensor.is_cuda if _stand_in is None else _stand_in.holds(tensor)
