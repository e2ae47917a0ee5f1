"""One start of the program: its steps, as `mpisgd.job.step_log` notes them, or why there are too few."""

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mpisgd.config import THREAD_VARIABLES
from mpisgd.errors import JobError
from mpisgd.tools.bench.jobs import Job, job_environment
from mpisgd.tools.bench.layout.plan import LayoutPlan, ProcessLayout
from mpisgd.tools.bench.report.rows import as_number

__all__ = ["Steps", "TooFewSteps", "complaint", "read_steps", "run_program", "without_boxes"]

# What takes so many times the median is no step: an evaluation or a checkpoint lies before it.
PAUSE = 10.0
TAIL_LINES = 12


class TooFewSteps(JobError):
    """The program cannot be measured in a layout.

    Attributes:
        reason: in one line; the text also has the end of the program's output.
    """

    def __init__(self, layout: ProcessLayout, reason: str, tail: Sequence[str]) -> None:
        self.reason = reason
        head = f"{layout}: {reason}. The end of its output:"
        super().__init__("\n  ".join([head, *(tail or ["it has printed nothing"])]), exit_code=1)


class Steps(NamedTuple):
    """What the program's log tells.

    Attributes:
        ranks: of the job, 0 where nobody has called `mpisgd.init()`.
        times_s: at which the optimizer that has stepped most often had finished each of its steps.
        threads: of torch, at the last step.
    """

    ranks: int
    times_s: Sequence[float]
    threads: int

    def seconds_per_step(self, warmup: int) -> float:
        """Return the mean after `warmup` steps. Waiting for data counts, longer pauses do not."""
        last = self.times_s[warmup - 1 :]
        taken = [after - before for before, after in itertools.pairwise(last)]
        limit_s = PAUSE * statistics.median(taken)
        return statistics.fmean(seconds for seconds in taken if seconds <= limit_s)


def read_steps(text: str) -> Steps:
    """Read the times of steps from a log; its last line may be incomplete."""
    ranks, threads = 0, 0
    times_s: dict[str, list[float]] = {}
    for line in text[: text.rfind("\n") + 1].splitlines():
        kind, *values = line.split()
        if kind == "ranks":
            ranks = int(values[0])
        else:
            times_s.setdefault(values[0], []).append(float(values[1]))
            threads = int(values[2])
    return Steps(ranks, max(times_s.values(), key=len, default=[]), threads)


def run_program(plan: LayoutPlan, layout: ProcessLayout) -> Steps:
    """Run the program until it has taken all steps of the plan; return them.

    Raises:
        TooFewSteps: it has not.
        JobError: it cannot be started.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "steps"
        job = _start(plan, layout, log)
        deadline = time.monotonic() + plan.limit_s
        try:
            while job.poll() is None and time.monotonic() < deadline and not _is_complete(plan, log):
                time.sleep(0.05)
            code = job.poll()
        finally:
            job.end()
        steps = _read(log)
    if len(steps.times_s) < plan.needed_steps:
        tail = without_boxes(job.lines())[-TAIL_LINES:]
        raise TooFewSteps(layout, complaint(steps, plan, code), tail)
    return steps


def _start(plan: LayoutPlan, layout: ProcessLayout, log: Path) -> Job:
    number = str(layout.threads)
    set_by_user = {name: number for name in THREAD_VARIABLES if name in os.environ}
    env = {
        **job_environment(layout.ranks),
        **set_by_user,
        "OMP_NUM_THREADS": number,
        "MPISGD_STEP_LOG": str(log),
        "MPISGD_STEP_LIMIT": str(plan.needed_steps),
    }
    command = plan.command(layout)
    try:
        return Job(command, env, all_output=True)
    except OSError as exc:
        raise JobError(f"cannot start {command[0]}: {exc.strerror or exc}", 127) from exc


def _read(log: Path) -> Steps:
    return read_steps(log.read_text() if log.exists() else "")


def _is_complete(plan: LayoutPlan, log: Path) -> bool:
    return len(_read(log).times_s) >= plan.needed_steps


def without_boxes(lines: Sequence[str]) -> Sequence[str]:
    """Return the program's own output, without what Open MPI tells of the end of a job between two rules."""
    own, in_box = [], False
    for line in lines:
        if set(line.strip()) == {"-"}:
            in_box = not in_box
        elif not in_box:
            own.append(line)
    return own or lines


def complaint(steps: Steps, plan: LayoutPlan, code: int | None) -> str:
    """Return why there are too few steps.

    Args:
        steps: those that there are.
        plan: of the measurement.
        code: the program's exit code, None where it did not end.
    """
    ended = (
        f"was ended after {plan.limit_s:g} s (--time-limit)"
        if code is None
        else f"ended with exit code {code}"
    )
    if not steps.ranks:
        return f"the program {ended} and has not called mpisgd.init()"
    if not steps.times_s:
        return f"the program {ended} before any torch optimizer has taken a step"
    return (
        f"the program {ended} after {as_number(len(steps.times_s), 'step')}, too early: --warmup and --steps "
        f"ask for {plan.needed_steps}"
    )
