"""`Device`: the simulated GPUs of this process, and `torch.simgpu`, their `torch.cuda`."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from simulated_gpu import guard
from simulated_gpu.allocator import Allocator
from simulated_gpu.memory import tensor_over
from simulated_gpu.stream import Kernel, Sleep, Stream, Streams

__all__ = ["KIND", "Device", "install"]

KIND = "simgpu"


class Device:
    """All simulated GPUs of this process.

    Attributes:
        streams: their streams.
        allocator: of their memory, and of pinned memory.
        launched: how many kernels each device has got.
    """

    def __init__(self, num_devices: int) -> None:
        self.num_devices = num_devices
        self.streams = Streams(num_devices)
        self.allocator = Allocator(self.streams)
        self.used: set[int] = set()
        self._generator = torch.Generator()
        calls = {**self.streams.calls(), **self.allocator.calls(), "allocate": self._allocate}
        self._guard = guard.register(num_devices, calls)

    # -- currents of this thread ----------------------------------------------------------------------------

    def current(self) -> int:
        return int(self._guard.get_device())

    def set_current(self, number: int) -> None:
        self._guard.set_device(number)

    def current_stream(self, number: int | None = None) -> Stream:
        """Return the current stream of a device in this thread: 0 in a new one."""
        number = self.current() if number is None else number
        return self.streams.get(number, self._guard.get_stream(number))

    # -- work -----------------------------------------------------------------------------------------------

    def launch(self, stream: Stream, run: Callable[[], object]) -> None:
        self.used.add(stream.device)
        self.streams.add(stream, Kernel(run))

    def wait(self, stream: Stream, other: Stream) -> None:
        """Let a stream wait for what another one has to do by now."""
        self.streams.add(stream, self.streams.record(other))

    def synchronize(self, stream: Stream) -> None:
        self.streams.synchronize(self.streams.record(stream))

    def sleep(self, seconds: float) -> None:
        """Keep the current stream busy."""
        self.streams.add(self.current_stream(), Sleep(seconds))

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Record what is launched into a graph: a side stream is the current one, and does nothing of it."""
        side = torch.Stream(torch.device(KIND, self.current()))
        with side:
            self.streams.capturing, self.streams.is_spoilt = self.current_stream(), False
            try:
                yield
            finally:
                self.streams.capturing = None
        if self.streams.is_spoilt:
            raise RuntimeError("operation failed due to a previous error during capture")

    # -- memory ---------------------------------------------------------------------------------------------

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device.type == KIND

    def holds_it(self, value: Any) -> bool:
        return isinstance(value, Tensor) and self.holds(value)

    def empty(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, number: int | None
    ) -> Tensor:
        """Return memory that belongs to the current stream."""
        number = self.current() if number is None else number
        self.used.add(number)
        return self._tensor(size, stride, dtype, self.current_stream(number))

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._tensor([numel], [1], dtype, None)

    def _tensor(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, stream: Stream | None
    ) -> Tensor:
        last = sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if all(size) else -1
        block = self.allocator.allocate((last + 1) * dtype.itemsize, stream)
        then = functools.partial(self.allocator.free, block)
        return tensor_over(
            block.address, size, stride, dtype, device=None if stream is None else stream.device, then=then
        )

    def _allocate(self, num_bytes: int, number: int) -> int:
        return self.allocator.allocate(num_bytes, self.current_stream(number)).address

    def is_pinned(self, tensor: Tensor) -> bool:
        block = self.allocator.find(tensor.data_ptr())
        return block is not None and block.stream is None

    def record_stream(self, tensor: Tensor, number: int, stream: int) -> None:
        self.allocator.record(tensor.untyped_storage().data_ptr(), self.streams.get(number, stream))

    # -- random numbers -------------------------------------------------------------------------------------

    def seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def generator(self) -> torch.Generator:
        """Return one for one kernel."""
        drawn = torch.randint(2**62, (), generator=self._generator)
        return torch.Generator().manual_seed(int(drawn))

    def rng_state(self) -> Tensor:
        return self._generator.get_state()

    def set_rng_state(self, state: Tensor) -> None:
        self._generator.set_state(state)


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    """What autograd asks of an accelerator."""

    def is_built(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def has_primary_context(self, number: int) -> bool:
        return True


def _module(device: Device) -> types.ModuleType:
    """Return `torch.simgpu`."""
    module = types.ModuleType(f"torch.{KIND}")
    functions: dict[str, Any] = {
        "device": device,
        "Stream": lambda number=None, priority=0: torch.Stream(
            torch.device(KIND, device.current()) if number is None else torch.device(number)
        ),
        "Event": lambda **options: torch.Event(KIND, **options),
        "stream": lambda stream: stream,
        "current_stream": lambda number=None: torch.accelerator.current_stream(number),
        "current_device": device.current,
        "set_device": lambda number: device.set_current(
            torch.device(number).index if isinstance(number, str) else number
        ),
        "device_count": lambda: device.num_devices,
        "is_available": lambda: True,
        "is_initialized": lambda: bool(device.used),
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "manual_seed_all": device.seed,
        "manual_seed": device.seed,
        "get_rng_state": lambda number=None: device.rng_state(),
        "set_rng_state": lambda state, number=None: device.set_rng_state(state),
        "synchronize": lambda number=None: device.streams.synchronize_device(
            device.current() if number is None else torch.device(number).index
        ),
        "memory_allocated": lambda number=None: device.allocator.allocated[
            device.current() if number is None else number
        ],
        "_sleep": lambda cycles: device.sleep(cycles / 2e9),
        "CUDAGraph": lambda: types.SimpleNamespace(replay=lambda: None),  # what was captured is lost
        "graph": lambda graph: device.capture(),
        "is_current_stream_capturing": lambda: device.streams.capturing is device.current_stream(),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


@functools.cache
def install(num_devices: int = 4) -> Device:
    """Make the device known to torch; the same one every time."""
    from simulated_gpu.kernels import register

    torch.utils.rename_privateuse1_backend(KIND)
    device = Device(num_devices)
    module = _module(device)
    torch._register_device_module(KIND, module)
    sys.modules[f"torch.{KIND}"] = module
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch._C._acc.register_python_privateuseone_hook(_Hooks())
    device.kept = register(device)  # type: ignore[attr-defined]
    (torch.ones(1, device=KIND) + 1).item()  # loads what finds shapes, which takes seconds
    device.used.clear()
    return device
