"""`bench offload`: what a step takes with the optimizer's state in files, beside the disk and the step alone.

    bound = max(time for the bytes of a step on this disk, time of the step with the state in memory)

The disk is measured in the same run, by all ranks at once, with files of the same size and blocks of the same
size, read and written at the same time; the fastest of several numbers of threads counts.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import mpisgd
from mpisgd.sharding.offload.block_cache import aligned_memory
from mpisgd.sharding.offload.description import Offload
from mpisgd.sharding.offload.private_file import PrivateFile, memory_of, rounded_up
from mpisgd.tools.bench.measure import slowest

__all__ = ["OffloadPlan", "run_offload"]

WARM_UP = 3  # rounds: the first step makes the state, the second learns its order
THREADS = (1, 2, 4)  # of the measurement of the disk
IN_MEMORY, IN_FILES, DISK = "state in memory", "state in files", "the disk alone"
DEPTH = 4
STATES = 2  # tensors that AdamW keeps for a parameter


@dataclass(frozen=True)
class OffloadPlan:
    """What to measure.

    Attributes:
        folder: on the disk.
        width: of the model: four layers of width x width.
        batch: examples of one rank.
        steps: that are timed.
        prefetch: see `Offload`.
        block_bytes: likewise.
        modes: of I/O: direct, buffered.
        checksum: see `Offload`.
    """

    folder: str
    width: int
    batch: int
    steps: int
    prefetch: int
    block_bytes: int
    modes: Sequence[str]
    checksum: str | None = None

    def offload(self, mode: str) -> Offload:
        """Return the description for one mode of I/O."""
        return Offload(
            self.folder, prefetch=self.prefetch, block_bytes=self.block_bytes, io=mode, checksum=self.checksum
        )

    @property
    def num_parameters(self) -> int:
        """Of the model."""
        return DEPTH * (self.width * self.width + self.width)


def run_offload(plan: OffloadPlan, peers: object, report: Callable[[str, Any], None]) -> dict[str, Any]:
    """Time steps and the disk, in turns; return a row for each. Collective."""
    name = f"{plan.num_parameters / 1e6:.4g} M parameters"
    nbytes = plan.num_parameters * STATES * 4 // mpisgd.size()  # of this rank, read and written in a step
    turns = {IN_MEMORY: _training(plan, None)}
    for mode in plan.modes:
        disks = [(f"{DISK}, {mode}, {n}", _disk(plan, nbytes, mode == "direct", n)) for n in THREADS]
        turns.update(disks)
        turns[f"{IN_FILES}, {mode}"] = _training(plan, plan.offload(mode))
    seconds = _timed(turns, plan.steps)
    rows = [_row(name, IN_MEMORY, seconds[IN_MEMORY], None, None)]
    for mode in plan.modes:
        disk = min((seconds[f"{DISK}, {mode}, {n}"] for n in THREADS), key=statistics.median)
        bound = max(statistics.median(disk), rows[0]["median_s"])
        rows.append(_row(name, f"{DISK}, {mode}", disk, nbytes, bound))
        rows.append(_row(name, f"{IN_FILES}, {mode}", seconds[f"{IN_FILES}, {mode}"], nbytes, bound))
    report(name, rows)
    notes = ["bound: the disk alone or the step with the state in memory, whichever takes longer"]
    return {"rows": rows, "notes": notes, "steps": plan.steps}


def _row(
    name: str, variant: str, seconds: Sequence[float], nbytes: int | None, bound: float | None
) -> dict[str, Any]:
    median = statistics.median(seconds)
    traffic = None if nbytes is None else 2 * nbytes * mpisgd.size()
    return {
        "model": name,
        "variant": variant,
        "median_s": median,
        "min_s": min(seconds),
        "max_s": max(seconds),
        "mib_moved": None if traffic is None else traffic / 2**20,
        "gb_s": None if traffic is None else traffic / median / 1e9,
        "ratio_to_bound": None if bound is None else median / bound,
    }


def _training(plan: OffloadPlan, offload: Offload | None) -> Callable[[], None]:
    """Return a training step."""
    torch.manual_seed(mpisgd.rank())
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(plan.width, plan.width), nn.ReLU())]
    model = nn.Sequential(*layers)
    mpisgd.broadcast_parameters(model)
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        named_parameters=model.named_parameters(),
        strategy=mpisgd.Sharded(offload=offload),
    )
    batch = torch.randn(plan.batch, plan.width)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def _disk(plan: OffloadPlan, nbytes: int, direct: bool, num_threads: int) -> Callable[[], None]:
    """Return a function that reads and writes `nbytes` in blocks of a file."""
    block = rounded_up(plan.block_bytes)
    file = PrivateFile(plan.folder, "the measurement of the disk", direct=direct)
    starts = range(0, rounded_up(nbytes), block)
    file.allocate(len(starts) * block)
    buffers = [memory_of(aligned_memory(block)) for _ in range(num_threads)]
    threads = ThreadPoolExecutor(num_threads)

    def read_and_write(thread: int) -> None:
        for start in starts[thread::num_threads]:
            file.read(buffers[thread], start)
            file.write(buffers[thread], start)

    def sweep() -> None:
        list(threads.map(read_and_write, range(num_threads)))

    return sweep


def _timed(turns: Mapping[str, Callable[[], None]], count: int) -> dict[str, list[float]]:
    """Return the seconds of each on the slowest rank: all have one turn in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(WARM_UP + count):
        for name, action in turns.items():
            mpisgd.barrier()
            started = time.perf_counter()
            action()
            seconds[name].append(slowest(time.perf_counter() - started))
    return {name: values[WARM_UP:] for name, values in seconds.items()}
