"""What a check works with: the device, CUDA's or the simulated one, and what it has found there."""

import atexit
import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mpisgd

HOLDS, FAILS, LEFT_OUT = "holds", "FAILS", "left out"


class LeftOut(Exception):
    """A check cannot show anything here; the text says why. Raised on every rank or on none."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        verdict: HOLDS, FAILS or LEFT_OUT.
        expected: what holds on every rank.
        seen: what was there; for LEFT_OUT, the reason.
        figures: what was measured, by name with its unit.
    """

    verdict: str
    expected: str = ""
    seen: str = ""
    figures: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, holds: bool, expected: str, seen: str, **figures: float) -> "Finding":
        """The finding of a check that could be done."""
        return cls(HOLDS if holds else FAILS, expected, seen, figures)


def joined(findings: Sequence[Finding]) -> Finding:
    """The finding of all ranks: of the first that failed, else of the first; largest figures."""
    failed = [rank for rank, each in enumerate(findings) if each.verdict == FAILS]
    first = findings[failed[0]] if failed else findings[0]
    names = list(dict.fromkeys(name for each in findings for name in each.figures))
    figures = {name: max(each.figures[name] for each in findings if name in each.figures) for name in names}
    where = f"rank {failed[0]}: " if failed and len(findings) > 1 else ""
    return Finding(first.verdict, first.expected, where + first.seen, figures)


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
