"""`bench memory`: the host's peak memory of a training with mpisgd, beside the same training without.

This process is no rank. It starts each training as a job of its own, looks at the memory of all ranks while
they run, and adds what they saw themselves at the points where it is largest. The peak is the most that all
ranks took together, over the whole run: imports, MPI's start and the first step count.
"""

import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from mpisgd.errors import JobError
from mpisgd.tools.bench.jobs import run_job
from mpisgd.tools.bench.memory.process_memory import ProcessMemory, estimate, read_memory, together
from mpisgd.tools.bench.report.rows import OURS, SHARED

__all__ = [
    "NONE",
    "OPTIMIZERS",
    "STARTED",
    "VARIANTS",
    "MemoryPlan",
    "MemorySampler",
    "highest",
    "memory_rows",
    "run_memory",
]

GRAIN = 2**20  # growth that is worth a closer look
OPTIMIZERS = {"SGD": "sgd", "SGD with momentum": "momentum", "AdamW": "adamw"}  # those of `StepTask`
TOTAL = attrgetter("total")

NONE, STARTED = "none", "none, MPI started"
VARIANTS = (NONE, STARTED, OURS, SHARED)

# What a training with mpisgd may take: this much of the one without, and this much more for each rank.
ALLOWED_FACTOR, ALLOWED_PER_RANK = 1.05, 16 * 2**20
NOTES = (
    "none: the same processes under the same launcher, without mpisgd, MPI or mpi4py",
    f"bound: {STARTED}; for shared parameters less all but one copy of parameters and the optimizer's state",
    f"allowed: {ALLOWED_FACTOR} x none + {ALLOWED_PER_RANK // 2**20} MiB per rank",
)


@dataclass(frozen=True)
class MemoryPlan:
    """What to measure.

    Attributes:
        models: some of BATCHES.
        optimizers: some of OPTIMIZERS.
        ranks: how many, all on this host.
        threads: of torch on each rank.
        steps: of each training.
        repeats: of everything.
        small: miniatures of the models.
        limit_s: for each job.
    """

    models: Sequence[str]
    optimizers: Sequence[str]
    ranks: int
    threads: int
    steps: int
    repeats: int
    small: bool
    limit_s: float


class MemorySampler:
    """Samples the memory of a running job's ranks from outside.

    Args:
        folder: where the ranks leave their process numbers.
        ranks: how many there are.

    Attributes:
        peak: the most that all ranks together took so far.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self._files = [folder / f"rank-{rank}.pid" for rank in range(ranks)]
        self._pids: list[str] = []
        self._highest_estimate = 0
        self.peak = ProcessMemory()

    def sample(self) -> None:
        """Sample once: counters, which cost nothing, and where they have grown the pages themselves."""
        self._pids = self._pids or _texts(self._files)
        estimates = [estimate(pid, len(self._files)) for pid in self._pids]
        if sum(estimates) > self._highest_estimate + GRAIN:
            self._highest_estimate = sum(estimates)
            shares = [read_memory(pid) for pid in self._pids]
            there = together(share for share in shares if share is not None)
            self.peak = max(self.peak, there, key=TOTAL)


def _texts(files: Iterable[Path]) -> list[str]:
    """Return the contents of the files; nothing unless all of them have some."""
    texts = [file.read_text() if file.exists() else "" for file in files]
    return texts if all(texts) else []


def highest(samples: Sequence[Mapping[str, ProcessMemory]]) -> ProcessMemory:
    """Return the most that the ranks together took at one point of the training."""
    return max((together(points[point] for points in samples) for point in samples[0]), key=TOTAL)


def memory_rows(
    training: str, peaks: Mapping[str, Sequence[ProcessMemory]], ranks: int, sharable: int
) -> list[dict[str, Any]]:
    """Return one row for each variant of one training; all are compared with the first.

    Args:
        training: its name.
        peaks: of the host, one for each repeat.
        ranks: on the host.
        sharable: bytes of the parameters and of the optimizer's state.
    """
    totals = {name: [share.total for share in shares] for name, shares in peaks.items()}
    base = statistics.median(next(iter(totals.values())))
    bounds = {}
    if STARTED in totals:
        least = statistics.median(totals[STARTED])
        bounds = {OURS: least, SHARED: least - (ranks - 1) * sharable}
    rows = []
    for name, values in totals.items():
        median = statistics.median(values)
        middle = min(peaks[name], key=lambda share: abs(share.total - median))
        rows.append(
            {
                "training": training,
                "variant": name,
                "median_bytes": median,
                "min_bytes": min(values),
                "max_bytes": max(values),
                "repeats": len(values),
                **{f"{part}_bytes": value for part, value in vars(middle).items()},
                "ratio_to_none": median / base,
                "extra_bytes_per_rank": (median - base) / ranks,
                "ratio_to_bound": median / bounds[name] if name in bounds else None,
                "ratio_to_allowed": median / (ALLOWED_FACTOR * base + ALLOWED_PER_RANK * ranks),
            }
        )
    return rows


def run_memory(
    plan: MemoryPlan, launcher: Sequence[str], report: Callable[[str, list[dict[str, Any]]], None]
) -> dict[str, Any]:
    """Measure the trainings of `plan`; return rows and the MPI library's name.

    Args:
        plan: what to measure.
        launcher: words of mpirun.
        report: called with the rows of each training.
    """
    rows: list[dict[str, Any]] = []
    library = ""
    for model, optimizer in itertools.product(plan.models, plan.optimizers):
        peaks: dict[str, list[ProcessMemory]] = {variant: [] for variant in VARIANTS}
        sharable = 0
        for variant in VARIANTS * plan.repeats:
            peak, said = _run(variant, model, OPTIMIZERS[optimizer], plan, launcher)
            peaks[variant].append(peak)
            library, sharable = said["library"] or library, said["sharable_bytes"] or sharable
        new = memory_rows(f"{model}, {optimizer}", peaks, plan.ranks, sharable)
        report(f"{model}, {optimizer}", new)
        rows += new
    return {"rows": rows, "library": library, "notes": list(NOTES)}


def _run(
    variant: str, model: str, optimizer: str, plan: MemoryPlan, launcher: Sequence[str]
) -> tuple[ProcessMemory, dict[str, Any]]:
    """Return the peak of one training, and what its first rank left."""
    task = {"variant": variant, "model": model, "small": plan.small}
    options = {**task, "optimizer": optimizer, "steps": plan.steps, "threads": plan.threads}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sampler = MemorySampler(folder, plan.ranks)
        module = ["mpisgd.tools.bench.memory.trainer", str(folder), json.dumps(options)]
        run_job(launcher, plan.ranks, module, plan.limit_s, watch=sampler.sample, every_s=0.005)
        files = _texts([folder / f"rank-{rank}.json" for rank in range(plan.ranks)])
    if not files:
        raise JobError("bench memory: not all ranks left a result; they must all be on this host", 1)
    results = [json.loads(text) for text in files]
    equal = len({result["checksum"] for result in results}) == 1
    if plan.ranks > 1 and equal != (variant in (OURS, SHARED)):  # they trained together, and only there
        state = "equal" if equal else "different"
        raise JobError(f"{variant}, {model}: the ranks ended with {state} parameters", 1)
    samples = [
        {point: ProcessMemory(**share) for point, share in result["points"].items()} for result in results
    ]
    return max(sampler.peak, highest(samples), key=TOTAL), results[0]
