"""`Gpu`: the device that is checked, CUDA's or the simulated one, and what the checks do on it."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mpisgd

__all__ = ["SLEEP_S", "Gpu", "end_simulation", "everyones"]

TESTS = Path(__file__).resolve().parents[2] / "tests"
SLEEP_S = 0.1  # of a stream: longer than a host takes for the calls that a check makes meanwhile
SIMULATED_CYCLES_PER_S = 2e9  # of torch.simgpu._sleep


class Gpu:
    """The GPU of this rank, once mpisgd has chosen it.

    Args:
        simulated: whether it is the device of tests/simulated_gpu, which is made known to torch and mpisgd.
        quick: whether the checks do less: fewer repetitions, smaller models.

    Attributes:
        kind: what torch calls the device.
        module: its functions: `torch.cuda`, or what has the same.
    """

    def __init__(self, *, simulated: bool, quick: bool) -> None:
        self.is_simulated, self.quick = simulated, quick
        if simulated:
            self._simulate()
        self.kind = "simgpu" if simulated else "cuda"
        self.module: Any = torch.get_device_module(self.kind)
        self._cycles_per_s = SIMULATED_CYCLES_PER_S if simulated else 0.0

    def _simulate(self) -> None:
        if str(TESTS) not in sys.path:
            sys.path.insert(0, str(TESTS))
        from simulated_gpu.runtime import SimulatedGpu

        from mpisgd.accelerator.runtime import runtime, set_runtime

        if not isinstance(runtime(), SimulatedGpu):
            set_runtime(SimulatedGpu())

    def nccl_backend(self) -> str:
        """What torch calls its own process groups on NCCL."""
        if not self.is_simulated:
            return "nccl"
        from simulated_gpu.process_group import register

        return register()

    @property
    def count(self) -> int:
        """How many GPUs this process sees."""
        return int(self.module.device_count())

    def stream(self) -> Any:
        """A stream beside the current one."""
        return self.module.Stream()

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Make a stream the current one inside."""
        context: contextlib.AbstractContextManager[Any] = self.module.stream(stream)
        return context

    def synchronize(self) -> None:
        """Let the host wait for all streams."""
        self.module.synchronize()

    def sleep(self, seconds: float = SLEEP_S) -> None:
        """Keep the current stream busy."""
        self._cycles_per_s = self._cycles_per_s or self._measure_cycles()
        self.module._sleep(int(seconds * self._cycles_per_s))

    def _measure_cycles(self) -> float:
        """How many cycles of `_sleep` are a second on this GPU."""
        cycles = 50_000_000
        self.module._sleep(1000)  # the first one loads the kernel
        begin, end = (self.module.Event(enable_timing=True) for _ in range(2))
        self.module.synchronize()
        begin.record()
        self.module._sleep(cycles)
        end.record()
        end.synchronize()
        return cycles / (float(begin.elapsed_time(end)) / 1e3)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor that is there, and holds zeros, before this returns."""
        tensor = torch.zeros(*shape, dtype=dtype, device=self.kind)
        self.synchronize()
        return tensor

    def fill_late(self, tensor: Tensor, value: float, stream: Any) -> None:
        """Begin to fill a tensor on a stream that has something else to do first."""
        with self.on(stream):
            self.sleep()
            tensor.fill_(value)

    def has_context(self, number: int) -> bool:
        """Whether this process holds memory of a GPU, or a context there."""
        if self.is_simulated:
            return number in self.module.device.used
        return bool(torch._C._cuda_hasPrimaryContext(number))

    def forget_ended_communicators(self) -> None:
        """Let go of what the simulated device remembers of NCCL for its tests."""
        if self.is_simulated:
            from mpisgd.accelerator.runtime import runtime

            opened = runtime().opened  # type: ignore[attr-defined]
            opened[:] = [each for each in opened if not each.ended]

    def memory_in_use(self) -> int:
        """Bytes of tensors of this process."""
        return int(self.module.memory_allocated())


def everyones(mine: bool) -> list[bool]:
    """What all ranks have seen. Collective."""
    seen = [mine] * mpisgd.size()
    mpisgd.all_gather_object(seen, mine)
    return seen


def end_simulation(code: int) -> None:
    """End this process where its GPU is simulated, with all that Python does at its end but for the last.

    The simulated device's threads may be inside torch, which Python ends there by SIGABRT.
    """
    from mpi4py import MPI

    atexit._run_exitfuncs()
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
