"""All that mpisgd asks of torch.cuda, behind a small interface.

Most machines that test mpisgd have no GPU. So whatever can be wrong without one is elsewhere, and runs in the
tests on simulated GPUs, whose streams do their work late.
"""

import contextlib
import ctypes
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Cuda", "on_device", "runtime", "set_runtime"]

RELAXED = 2  # cudaStreamCaptureModeRelaxed


class Cuda:
    """NVIDIA's GPUs, and AMD's, which torch calls by the same name. Simulated ones have the same methods.

    Attributes:
        kind: what torch calls such devices: the first part of `cuda:0`.
    """

    kind = "cuda"

    @property
    def module(self) -> Any:
        """`torch.cuda`."""
        return torch.cuda

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies on a GPU."""
        return tensor.is_cuda

    def is_available(self) -> bool:
        """Return whether there is a GPU here."""
        return bool(self.module.is_available())

    def take_device(self, local_rank: int) -> None:
        """Make GPU number `local_rank`, counted round, the current one, unless the program has used CUDA.

        That is what torch can tell: `torch.cuda.set_device` counts as a use, and so does any tensor on a
        GPU. GPU 0 is the current one by itself; not to touch it spares programs for the CPU its context.
        """
        if self.is_available() and not self.module.is_initialized():
            number = local_rank % self.module.device_count()
            if number > 0:
                self.module.set_device(number)

    def device_to_inherit(self) -> int:
        """Return the number of this thread's current GPU; 0 where the program has not used any."""
        return int(self.module.current_device()) if self.module.is_initialized() else 0

    def inherit_device(self, number: int) -> None:
        """Make a GPU that of a new thread, which begins with number 0 and would take memory there."""
        if number > 0:
            self.module.set_device(number)

    def memory_in_use(self) -> int:
        """Return the bytes of this process's tensors on all GPUs, in any thread; 0 where it has used none."""
        if not self.module.is_initialized():
            return 0
        return sum(self.module.memory_allocated(number) for number in range(self.module.device_count()))

    def is_capturing(self) -> bool:
        """Return whether this thread's current stream records a CUDA graph."""
        return bool(self.module.is_initialized() and self.module.is_current_stream_capturing())

    def identity(self, device: torch.device) -> str:
        """Return the GPU's own number, which tells it from all others of its host.

        Its index differs by process where CUDA_VISIBLE_DEVICES does.
        """
        properties = torch.cuda.get_device_properties(device)
        return str(getattr(properties, "uuid", None) or f"{properties.name} {device.index}")

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream that this thread's kernels go to."""
        stream: torch.cuda.Stream = self.module.current_stream(device)
        return stream

    def new_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return one beside those of the program, from torch's pool."""
        stream: torch.cuda.Stream = self.module.Stream(device)
        return stream

    def on(self, stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[Any]:
        """Make `stream`, and its device, the current one inside."""
        context: contextlib.AbstractContextManager[Any] = self.module.stream(stream)
        return context

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return [numel] uninitialized elements of page-locked memory, which a device accesses by itself.

        torch keeps what is let go of for the next time. It knows which copies are in flight, and does not
        reuse memory before they are done.
        """
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def copy(self, out: Tensor, source: Tensor) -> None:
        """Begin to copy between host and device on the current stream, both of one shape and dtype.

        What is strided is copied on the device first.
        """
        out.copy_(source, non_blocking=True)

    def has_nccl(self) -> bool:
        """Return whether this torch was built with NCCL."""
        return dist.is_available() and dist.is_nccl_available()

    def allow_captures_elsewhere(self) -> None:
        """Let this thread ask for events while another one captures a CUDA graph, as torch's watchdog does.

        Such a question would end the capture. The setting is the thread's own, and stays.
        """
        name = (
            "hipThreadExchangeStreamCaptureMode"
            if torch.version.hip
            else "cudaThreadExchangeStreamCaptureMode"
        )
        if (exchange := getattr(ctypes.CDLL(None), name, None)) is not None:
            exchange(ctypes.byref(ctypes.c_int(RELAXED)))

    def nccl_options(self) -> Any:
        """Return torch's options of a communicator of NCCL, as they are by default."""
        return dist.ProcessGroupNCCL.Options()

    def make_nccl(self, store: Any, rank: int, size: int, options: Any) -> Any:
        """Return torch's own process group, which finds the others through `store`."""
        return dist.ProcessGroupNCCL(store, rank, size, options)


_CUDA = Cuda()
_stand_in: Cuda | None = None


def runtime() -> Cuda:
    """Return the runtime of the devices here."""
    return _stand_in or _CUDA


def set_runtime(stand_in: Cuda | None) -> None:
    """Put simulated GPUs in the place of CUDA, for tests; None: CUDA again."""
    global _stand_in
    _stand_in = stand_in


def on_device(tensor: Tensor) -> bool:
    """Return whether a tensor lies on a device. Every operation asks this of its tensors."""
    return tensor.is_cuda if _stand_in is None else _stand_in.holds(tensor)
