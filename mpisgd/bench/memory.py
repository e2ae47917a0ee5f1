"""`bench memory`: the host's peak memory of a training with mpisgd, beside the same training without.

This process is no rank. It starts each training as a job of its own, looks at the memory of all ranks while
they run, and adds what they saw themselves at the points where it is largest. The peak is the most that all
ranks took together, over the whole run: imports, MPI's start and the first step count.
"""

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpisgd.bench.jobs import run_job
from mpisgd.bench.pss import Share, estimate, read_share, together
from mpisgd.bench.summary import ALLOWED_FACTOR, ALLOWED_PER_RANK, memory_rows
from mpisgd.bench.trial import OURS, SHARED, VARIANTS, Trial
from mpisgd.errors import JobError

__all__ = ["OPTIMIZERS", "MemoryPlan", "Watch", "highest", "run_memory"]

GRAIN = 2**20  # growth that is worth a closer look
OPTIMIZERS = {"SGD": False, "SGD with momentum": True}


NOTES = (
    "none: the same processes under the same launcher, without mpisgd, MPI or mpi4py",
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


class Watch:
    """Looks at the ranks of a running job from outside.

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
        self.peak = Share()

    def look(self) -> None:
        """Look once: at counters, which cost nothing, and where they have grown at the pages themselves."""
        self._pids = self._pids or _texts(self._files)
        estimates = [estimate(pid, len(self._files)) for pid in self._pids]
        if sum(estimates) > self._highest_estimate + GRAIN:
            self._highest_estimate = sum(estimates)
            shares = [read_share(pid) for pid in self._pids]
            there = together(share for share in shares if share is not None)
            self.peak = max(self.peak, there, key=_total)


def _texts(files: Iterable[Path]) -> list[str]:
    """Return what the files hold; nothing unless all of them hold something."""
    texts = [file.read_text() if file.exists() else "" for file in files]
    return texts if all(texts) else []


def _total(share: Share) -> int:
    return share.total


def highest(diaries: Sequence[Mapping[str, Share]]) -> Share:
    """Return the most that the ranks together took at one point of the training."""
    return max((together(diary[point] for diary in diaries) for point in diaries[0]), key=_total)


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
    for model in plan.models:
        for optimizer in plan.optimizers:
            peaks: dict[str, list[Share]] = {variant: [] for variant in VARIANTS}
            for variant in VARIANTS * plan.repeats:
                trial = Trial(variant, model, OPTIMIZERS[optimizer], plan.steps, plan.threads, plan.small)
                peak, said = _run(trial, plan, launcher)
                peaks[variant].append(peak)
                library = said or library
            new = memory_rows(f"{model}, {optimizer}", peaks, plan.ranks)
            report(f"{model}, {optimizer}", new)
            rows += new
    return {"rows": rows, "library": library, "notes": list(NOTES)}


def _run(trial: Trial, plan: MemoryPlan, launcher: Sequence[str]) -> tuple[Share, str]:
    """Return the peak of one training, and the MPI library's name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        watch = Watch(folder, plan.ranks)
        module = ["mpisgd.bench.trainee", str(folder), json.dumps(dataclasses.asdict(trial))]
        run_job(launcher, plan.ranks, module, plan.limit_s, watch=watch.look)
        files = _texts([folder / f"rank-{rank}.json" for rank in range(plan.ranks)])
    if not files:
        raise JobError("bench memory: not all ranks left a result; they must all be on this host", 1)
    results = [json.loads(text) for text in files]
    _check_checksums(trial, [result["checksum"] for result in results])
    diaries = [{point: Share(**share) for point, share in result["points"].items()} for result in results]
    return max(watch.peak, highest(diaries), key=_total), results[0]["library"]


def _check_checksums(trial: Trial, checksums: Sequence[float]) -> None:
    """Raise unless the ranks' parameters are equal where they trained together, and only there."""
    equal = len(set(checksums)) == 1
    if len(checksums) > 1 and equal != (trial.variant in (OURS, SHARED)):
        state = "equal" if equal else "different"
        raise JobError(f"{trial.variant}, {trial.model}: the ranks ended with {state} parameters", 1)
