"""`AccumulationWindow`: when gradients are reduced.

A window is what lies between two steps: backward passes, some of them muted, and one reduction, at the end of
the pass that fills it or in `step()` if none did.

    backward   backward   (k = 2)     backward                (a partial last window)
    local      reduce                 local
                          step()                  step()
                          as it is                reduce
"""

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.errors import InvalidArgument
from mpisgd.gradients.backward_hooks import BackwardHooks

__all__ = ["AccumulationWindow", "GradientSync"]


class GradientSync:
    """Combines the gradients of the ranks when a window asks for it. This one leaves them on their rank.

    Attributes:
        params: the parameters whose gradients it combines; backward passes over others count for nothing.
        sums: whether a gradient that is combined twice comes out wrong, as a sum does and a mean does not.
    """

    params: Sequence[Tensor] = ()
    sums = False

    def cover(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Take over another list of parameters."""

    def begin(self, when: str) -> bool:
        """Get ready for a backward; return whether `ready` is to be called for each gradient."""
        return False

    def ready(self, index: int) -> None:
        """Note that the gradient of a parameter is complete."""

    def hold(self) -> None:
        """Send nothing more before `reduce`."""

    def abandon(self) -> None:
        """Forget a backward that was left by an exception."""

    def reduce(self, when: str, observed: Sequence[int] = ()) -> None:
        """Combine every gradient over the ranks."""

    def combine_loss(self, loss: Tensor) -> Tensor:
        """Return the loss of all ranks together."""
        return loss

    def mark(self) -> None:
        """Remember the state of the gradients for `would_reduce_twice`."""

    def would_reduce_twice(self, num_added: Mapping[int, int] | None) -> bool:
        """Return whether something that may be reduced only once would be reduced once more.

        The mean of means that all ranks have is the same again; a sum, or what only its owner has, is not.

        Args:
            num_added: how often backward has added to the gradient of each parameter since `mark()`. Whatever
                else was done to it counts as a reset. None: gradients were reduced since then.
        """
        return False


class AccumulationWindow:
    """Counts backward passes over parameters and has their gradients reduced at the right moment.

    Args:
        gradients: reduces them.
        passes_per_step: how many backward passes fill a window.

    Attributes:
        gradients: as given; replaced by `use`.
        steps: how many there have been.
    """

    def __init__(self, gradients: GradientSync, passes_per_step: int) -> None:
        self.gradients = gradients
        self._passes_per_step = passes_per_step
        self._hooks = BackwardHooks(self._touched, self._became_ready, self._backward_ended)
        self._hooks.watch(gradients.params)
        self._num_ready: collections.Counter[int] = collections.Counter()
        self.steps = 0
        self._reductions = 0  # since the last step or zero_grad
        self._passes = 0  # since the last reduction
        self._pending = False  # something was accumulated and not reduced
        self._muted = 0
        self._skipping = 0

    def cover(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Take over a longer list of parameters."""
        self.gradients.cover(named)
        self._hooks.watch(self.gradients.params)

    def use(self, gradients: GradientSync) -> None:
        """Have gradients combined by something else from the next window on."""
        if gradients is not self.gradients:
            self.gradients = gradients
            self._hooks.watch(gradients.params)

    def move_to(self, gradients: GradientSync) -> None:
        """Begin anew with other ranks; there are no gradients. What was on its way has failed."""
        self.use(gradients)
        self.steps = self._reductions = self._passes = 0
        self._pending = False

    # -- what backward tells ------------------------------------------------------------------------

    def _touched(self, nested: bool) -> None:
        """A backward has reached its first gradient."""
        self._pending = True
        if nested:
            self.gradients.hold()
            return
        reduces = not self._muted and self._passes + 1 >= self._passes_per_step
        overlaps = reduces and not self._would_reduce_twice() and self.gradients.begin(self._when)
        self._hooks.notes.reports_each = overlaps or self.gradients.sums

    def _became_ready(self, index: int) -> None:
        if self.gradients.sums:
            self._num_ready[index] += 1
        self.gradients.ready(index)

    @property
    def _when(self) -> str:
        return f"step {self.steps}, reduction {self._reductions}"

    def _backward_ended(self) -> None:
        if self._muted:
            return
        self._passes += 1
        if self._passes >= self._passes_per_step:
            self._reduce()

    def _reduce(self) -> None:
        if self._would_reduce_twice():
            what = "that were summed" if self.gradients.sums else "that are divided among the ranks"
            raise InvalidArgument(
                f"DistributedOptimizer: gradients {what} already would be reduced once more; call "
                "optimizer.zero_grad() before, accumulate inside no_sync(), or set backward_passes_per_step"
            )
        self.gradients.reduce(self._when, list(self._hooks.notes.observed))
        self._reductions += 1
        self._passes = 0
        self._pending = False

    def _would_reduce_twice(self) -> bool:
        return self.gradients.would_reduce_twice(None if self._reductions else self._num_ready)

    # -- what the program asks for ------------------------------------------------------------------

    def flush(self) -> None:
        """Reduce what is pending. Where nothing is, take part: other ranks may have something.

        A second `step()` on the same gradients gives their mean again, which is what they are. Only what
        may not be reduced twice must be left alone then.
        """
        if self._pending or (not self._reductions and not self._would_reduce_twice()):
            self._reduce()

    def flush_before_step(self) -> None:
        """Do what `step()` needs: everything reduced, unless the program said otherwise."""
        if not self._skipping and not self._muted:
            self.flush()

    def restart(self) -> None:
        """Begin a new window: the gradients were reset."""
        self.gradients.abandon()
        self._reductions = self._passes = 0
        self._pending = False

    def end_step(self) -> None:
        """Begin a new window after a step."""
        self.steps += 1
        self.restart()
        if self.gradients.sums:
            self.gradients.mark()
            self._num_ready.clear()

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure as one process would see it: all gradients reduced, and everyone's loss."""

        def everyones() -> Any:
            loss = closure()
            self.flush_before_step()
            if loss is None or self._skipping or self._muted:
                return loss
            # A Python float has 64 bits, and a line search uses them.
            known = loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64)
            total = self.gradients.combine_loss(known)
            return total if isinstance(loss, Tensor) else total.item()

        return everyones

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """Send nothing inside."""
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1

    @contextlib.contextmanager
    def skipping(self) -> Iterator[None]:
        """Let step() reduce nothing inside."""
        self._skipping += 1
        try:
            yield
        finally:
            self._skipping -= 1
