"""`measure_step`: a user's own program for a few steps on one rank, and what its step consists of.

The program runs as it is, in a process of its own, and ends after some steps of its optimizer; `recorder` is
what this process runs first.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mpisgd.errors import JobError
from mpisgd.tools.plan.files import read_step
from mpisgd.tools.plan.models.model import StepProfile

__all__ = ["measure_step"]

TAIL_LINES = 12
LIMIT_S = 300.0  # of the program


def measure_step(command: Sequence[str], *, batch: float, steps: int = 10, warmup: int = 3) -> StepProfile:
    """Return the step of a program.

    Args:
        command: a Python file and its arguments.
        batch: examples of a step, which nobody can know from outside.
        steps: that are measured.
        warmup: that come before.

    Raises:
        JobError: it cannot be started, or takes fewer steps.
    """
    if not Path(command[0]).is_file():
        raise JobError(f"no such file: {command[0]}")
    with tempfile.TemporaryDirectory(prefix="mpisgd-plan-") as folder:
        out = Path(folder) / "step.json"
        words = [str(out), str(batch), str(warmup), str(steps), *command]
        code, tail = _run([sys.executable, "-m", "mpisgd.tools.plan.recorder", *words])
        if out.exists():
            return read_step(out)
    lines = "\n  ".join(tail or ["it has printed nothing"])
    raise JobError(
        f"{command[0]} ended with exit code {code} before {warmup + steps} steps of an optimizer:\n  {lines}",
        1,
    )


def _run(words: Sequence[str]) -> tuple[int | None, list[str]]:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return None, [f"no end within {LIMIT_S:g} s"]
    return done.returncode, (done.stdout + done.stderr).splitlines()[-TAIL_LINES:]
