"""The count of a program's training steps: by it others see how the program goes on.

torch calls the hook after each step of any optimizer. It writes three words, which may lie in memory that
other processes see: then nobody has to ask this one, and they see them also while it hangs.
"""

import functools
import os
import time
import weakref
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook

from mpisgd import tracing

__all__ = ["StepCounter", "counter", "start_counting"]

MEAN_OVER = 8  # steps: each counts for an eighth, and those before it by so much less
MAX_OPTIMIZERS = 16  # a program that makes new ones all the time does not fill the memory


class _Steps:
    """The steps of one optimizer: how many, when the last one ended, how long one takes, who recorded it."""

    __slots__ = ("last_ns", "mean_ns", "number", "of", "sink", "track")

    def __init__(self, optimizer: torch.optim.Optimizer, track: tracing.Track) -> None:
        self.number = self.last_ns = self.mean_ns = 0
        self.of = weakref.ref(optimizer)
        self.sink: tracing.Sink | None = None
        self.track = track

    def record(self, now_ns: int) -> None:
        """Note a step that ends now in the timeline, which has seen the end of the one before."""
        if tracing.sink is not None and self.sink is tracing.sink:
            name, args = f"step {self.number}", {"number": self.number}
            self.sink.span(self.track, name, self.last_ns, now_ns, "step", args)
        self.sink = tracing.sink


class StepCounter:
    """The steps of all optimizers of this process; called after each of them.

    A step lasts since the one before; what precedes the first one is none.

    Attributes:
        words: of the optimizer that made the last step, how many it has made; when the last one ended, by
            `time.monotonic_ns`; how many nanoseconds one takes, as a mean over the last few.
    """

    def __init__(self) -> None:
        self.words: list[int] | memoryview = [0, 0, 0]
        self._num_optimizers = 0
        self._steps: dict[int, _Steps] = {}  # by the optimizer's id

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step. Every step pays for this, so it calls next to nothing."""
        if is_compiling():  # a traced step is no step, and the clock would end the graph
            return
        steps = self._steps.get(id(optimizer))
        if steps is None or steps.of() is not optimizer:  # one that is gone had this id
            steps = self._begin(optimizer)
        now_ns, words = time.monotonic_ns(), self.words
        steps.number += 1
        if tracing.sink is not steps.sink or steps.sink is not None:
            steps.record(now_ns)
        if steps.number > 1:
            took_ns = now_ns - steps.last_ns
            steps.mean_ns += (took_ns - steps.mean_ns) // (MEAN_OVER if steps.mean_ns else 1)
        words[0], words[1], words[2] = steps.number, now_ns, steps.mean_ns
        steps.last_ns = now_ns

    def _begin(self, optimizer: torch.optim.Optimizer) -> _Steps:
        """Return the count of an optimizer that makes its first step."""
        self._num_optimizers += 1
        number = self._num_optimizers
        if len(self._steps) == MAX_OPTIMIZERS:
            del self._steps[next(iter(self._steps))]
        steps = _Steps(optimizer, tracing.Track("steps" if number == 1 else f"steps of optimizer {number}"))
        self._steps[id(optimizer)] = steps
        return steps

    def move_to(self, words: list[int] | memoryview) -> None:
        """Write into other words from now on."""
        words[0], words[1], words[2] = self.words
        self.words = words

    def detach(self) -> None:
        """Write into memory of this process alone: it is a copy of the one whose steps are seen."""
        self.words = list(self.words)


counter = StepCounter()


@functools.cache  # once, however often the job begins anew
def start_counting() -> None:
    """Count the steps of this process from now on."""
    register_optimizer_step_post_hook(counter)
    os.register_at_fork(after_in_child=counter.detach)
