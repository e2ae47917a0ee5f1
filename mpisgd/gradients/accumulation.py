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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.collectives.all_reduce import all_reduce
from mpisgd.core.dtypes import ReduceOp
from mpisgd.core.group import Group
from mpisgd.errors import InvalidArgument
from mpisgd.gradients.backward_hooks import BackwardHooks
from mpisgd.gradients.options import ReductionOptions
from mpisgd.gradients.reducer import GradientReducer
from mpisgd.sharding.shared_parameters import SharedParameters

__all__ = ["AccumulationWindow"]


class AccumulationWindow:
    """Counts backward passes over parameters and has them reduced at the right moment.

    Attributes:
        reducer: does the work.
        steps: how many there have been.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]],
        group: Group,
        recipe: ReductionOptions,
        passes_per_step: int,
        shared: SharedParameters | None = None,
    ) -> None:
        self.reducer = GradientReducer(named, group, recipe, shared)
        self._passes_per_step = passes_per_step
        self._watch = BackwardHooks(self._touched, self._became_ready, self._backward_ended)
        self._watch.watch(self.reducer.params)
        # A sum over the ranks must not be summed once more: only then it matters who has added to what.
        self._sums = recipe.op is ReduceOp.SUM
        self._num_ready: collections.Counter[int] = collections.Counter()
        self.steps = 0
        self._reductions = 0  # since the last step or zero_grad
        self._passes = 0  # since the last reduction
        self._pending = False  # something was accumulated and not reduced
        self._muted = 0
        self._skipping = 0

    def cover(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Take over a longer list of parameters."""
        self._watch.remove()
        self.reducer.cover(named)
        self._watch.watch(self.reducer.params)

    def move_to(self, group: Group, shared: SharedParameters | None = None) -> None:
        """Begin anew with other ranks; there are no gradients. What was on its way has failed."""
        self.reducer = GradientReducer(self.reducer.named, group, self.reducer.recipe, shared)
        self._watch.remove()
        self._watch.watch(self.reducer.params)
        self.steps = self._reductions = self._passes = 0
        self._pending = False

    # -- what backward tells ------------------------------------------------------------------------

    def _touched(self, nested: bool) -> None:
        """A backward has reached its first gradient."""
        self._pending = True
        if nested:
            self.reducer.hold()
            return
        reduces = not self._muted and self._passes + 1 >= self._passes_per_step
        overlaps = reduces and not self._would_reduce_twice() and self.reducer.begin(self._when)
        self._watch.told_of_each = overlaps or self._sums

    def _became_ready(self, index: int) -> None:
        if self._sums:
            self._num_ready[index] += 1
        self.reducer.ready(index)

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
            with_what = "share_parameters=True" if self.reducer.has_given() else "op=SUM"
            raise InvalidArgument(
                f"DistributedOptimizer: with {with_what}, gradients that were reduced already would be "
                "reduced once more; call optimizer.zero_grad() before, accumulate inside no_sync(), or set "
                "backward_passes_per_step"
            )
        self.reducer.reduce(self._when, list(self._watch.observed))
        self._reductions += 1
        self._passes = 0
        self._pending = False

    def _would_reduce_twice(self) -> bool:
        """Return whether something that may be reduced only once would be reduced once more.

        The mean of means that all ranks have is the same again; a sum, or what only its owner has, is not.
        """
        if self.reducer.has_given():
            return True
        if not self._sums:
            return False
        return self.reducer.holds_reduced() if self._reductions else self._kept_since_step()

    def _kept_since_step(self) -> bool:
        return self.reducer.kept_since_mark(self._num_ready)

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
        self.reducer.abandon()
        self._reductions = self._passes = 0
        self._pending = False

    def end_step(self) -> None:
        """Begin a new window after a step."""
        self.steps += 1
        self.restart()
        if self._sums:
            self.reducer.mark()
            self._num_ready.clear()

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure as one process would see it: all gradients reduced, and everyone's loss."""

        def everyones() -> Any:
            loss = closure()
            self.flush_before_step()
            return loss if self._skipping or self._muted else self._combined(loss)

        return everyones

    def _combined(self, loss: Any) -> Any:
        if loss is None:
            return None
        # A Python float has 64 bits, and a line search uses them.
        known = loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64)
        total = known.clone()
        all_reduce(total, self.reducer.recipe.op, self.reducer.group)
        return total if isinstance(loss, Tensor) else total.item()

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
