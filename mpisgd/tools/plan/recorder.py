"""`StepRecorder`: notes what a training step consists of, in a program that knows nothing of it.

    | forward (and data)      | backward   g g  g     g | optimizer |
    ^ the optimizer has ended ^ backward() ^ hooks      ^ returns    ^ its hooks

As a program: `python -m mpisgd.tools.plan.recorder OUT BATCH WARMUP STEPS train.py ...` runs train.py as it
is, ends it after some steps of its optimizer, and writes the median of its steps into OUT. `measure_step`
starts that in a process of its own.
"""

import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mpisgd.errors import JobError
from mpisgd.tools.plan.files import read_step, write_step
from mpisgd.tools.plan.models.model import OPTIMIZERS, Gradient, StepProfile
from mpisgd.tools.plan.models.saved_bytes import SavedBytes

__all__ = ["RecordedStep", "StepRecorder", "main", "measure_step", "median_step"]

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


class RecordedStep(NamedTuple):
    """Times of one step, in seconds since the one before has ended.

    Attributes:
        backward_begins_s: the last backward pass, where there are several.
        optimizer_begins_s: after what the program does in between.
        optimizer_ends_s: the end of the step.
        ready_s: when the gradient of each parameter was complete, by its place in the optimizer's list.
    """

    backward_begins_s: float
    optimizer_begins_s: float
    optimizer_ends_s: float
    ready_s: dict[int, float]


class StepRecorder:
    """Notes the steps of the first optimizer that takes one.

    Args:
        when_done: called when there are enough.
        num_steps: how many are enough, the first one included, which has no beginning.

    Attributes:
        steps: so far.
        params: of the optimizer, in its order.
        optimizer: the first one that has taken a step.
        saved_bytes: what autograd has kept in the second step.
    """

    def __init__(self, num_steps: int, when_done: Callable[[], None]) -> None:
        self.steps: list[RecordedStep] = []
        self.params: list[Tensor] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self.saved_bytes = 0
        self._num_steps, self._when_done = num_steps, when_done
        self._start = self._backward_begins = self._optimizer_begins = 0.0
        self._ready: dict[int, float] = {}
        self._saved: SavedBytes | None = None
        self._backward = torch.autograd.backward
        self._hooks: list[Any] = []

    def __enter__(self) -> "StepRecorder":
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        torch.autograd.backward = self._noted_backward
        self._watch_gradients()
        self._ready, self._start = {}, time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        torch.autograd.backward = self._backward
        for hook in self._hooks:
            hook.remove()

    def _noted_backward(self, *args: Any, **options: Any) -> None:
        self._backward_begins = time.perf_counter()
        self._backward(*args, **options)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.optimizer in (None, optimizer):
            self._optimizer_begins = time.perf_counter()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        now = time.perf_counter()
        if self.optimizer is None:
            self._attach(optimizer)
        elif self.optimizer is optimizer:
            self._note_step(now)
        self._ready = {}
        self._start = time.perf_counter()

    def _attach(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.params = [param for group in optimizer.param_groups for param in group["params"]]
        self._watch_gradients()
        self._saved = SavedBytes().__enter__()

    def _watch_gradients(self) -> None:
        for index, param in enumerate(self.params):
            if param.requires_grad:
                hook = self._note(index)
                self._hooks.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _note(self, index: int) -> Callable[[Tensor], None]:
        def hook(param: Tensor) -> None:
            self._ready[index] = time.perf_counter() - self._start

        return hook

    def _note_step(self, now: float) -> None:
        if self._saved is not None:
            self._saved.__exit__()
            self.saved_bytes, self._saved = self._saved.total, None
        times = (self._backward_begins, self._optimizer_begins, now)
        begins, optimizer_begins, optimizer_ends = (each - self._start for each in times)
        self.steps.append(RecordedStep(begins, optimizer_begins, optimizer_ends, self._ready))
        if len(self.steps) + 1 >= self._num_steps:
            self._when_done()

    def profile(self, name: str, batch: float, warmup: int = 0) -> StepProfile:
        """Return the median of the steps after `warmup` ones."""
        kept = self.steps[warmup:] or self.steps
        found = median_step(name, batch, kept, self.params, kept_elements(self.optimizer, self.params))
        return StepProfile(**{**vars(found), "activation_bytes": float(self.saved_bytes)})


def median_step(
    name: str, batch: float, steps: Sequence[RecordedStep], params: Sequence[Tensor], optimizer: str
) -> StepProfile:
    """Return the median of each part of the steps; what is between backward and optimizer is backward's."""
    forward = statistics.median(step.backward_begins_s for step in steps)
    backward = statistics.median(step.optimizer_begins_s - step.backward_begins_s for step in steps)
    update = statistics.median(step.optimizer_ends_s - step.optimizer_begins_s for step in steps)
    ready = {
        index: statistics.median(
            step.ready_s[index] - step.backward_begins_s for step in steps if index in step.ready_s
        )
        for index in {index for step in steps for index in step.ready_s}
    }
    gradients = [
        Gradient(
            f"parameter {index}",
            index,
            tuple(params[index].shape),
            params[index].element_size(),
            forward + min(max(0.0, after), backward),
        )
        for index, after in sorted(ready.items(), key=lambda pair: pair[1])
    ]
    return StepProfile(name, batch, forward, backward, update, tuple(gradients), optimizer)


def kept_elements(optimizer: torch.optim.Optimizer | None, params: Sequence[Tensor]) -> str:
    """Return one of OPTIMIZERS that keeps about as much state for a parameter."""
    if optimizer is None:
        return "sgd"
    name = type(optimizer).__name__.removeprefix("Distributed").lower()
    values = [value for param in params for value in optimizer.state.get(param, {}).values()]
    kept = sum(value.numel() for value in values if isinstance(value, Tensor))
    ratio = round(kept / max(1, sum(param.numel() for param in params)))
    if name in OPTIMIZERS and OPTIMIZERS[name].state == ratio:
        return name
    return next((each for each, cost in OPTIMIZERS.items() if cost.state >= ratio), "adamw")


class _EnoughSteps(BaseException):
    """Ends the program; it is no error that it could handle."""


def main(words: Sequence[str]) -> None:
    """Run a program until it has taken its steps, and write what they were."""
    out, batch, warmup, steps, *command = words

    def enough() -> None:
        raise _EnoughSteps

    recorder = StepRecorder(2 + int(warmup) + int(steps), enough)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    try:
        with recorder:
            runpy.run_path(command[0], run_name="__main__")
    except _EnoughSteps:
        pass
    except SystemExit:
        if len(recorder.steps) <= int(warmup):
            raise
    if len(recorder.steps) > int(warmup):
        write_step(Path(out), recorder.profile(Path(command[0]).stem, float(batch), int(warmup)))
    else:
        found = len(recorder.steps) + (recorder.optimizer is not None)
        sys.exit(f"{command[0]}: {found} steps of a torch optimizer; expected more than {warmup}")


if __name__ == "__main__":
    main(sys.argv[1:])
