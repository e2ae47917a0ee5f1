"""`UnevenWindow`: what an accumulation window does where some ranks may run out of data.

It counts what this rank has computed gradients of, tells the others before it reduces, and weights what it
sends. A rank without data reduces with the others: what it has left in a window that it could not fill, else
nothing.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mpisgd.core.uneven_data import UnevenData
from mpisgd.gradients.weight import Count

__all__ = ["UnevenWindow"]

REDUCE, LOSS = "reduce", "loss"


class UnevenWindow:
    """The counts of one window.

    Args:
        data: what the ranks tell each other.
        place: of the optimizer among those inside `join()`.
        reset: resets its gradients, as `optimizer.zero_grad()`.
        reduced: called when gradients were reduced.

    Attributes:
        data: as given.
        place: as given.
        others_begin: whether the ranks with data have reduced nothing in their window; on one without.
    """

    def __init__(
        self, data: UnevenData, place: int, reset: Callable[[], None], reduced: Callable[[], None]
    ) -> None:
        self.data, self.place = data, place
        self.others_begin = True
        self._reset, self._reduced = reset, reduced
        self.restart()

    @property
    def count(self) -> Count:
        """What this rank has computed gradients of since the last reduction, or reset."""
        data = self.data
        passes = data.num_passes - self._passes_before
        if not passes:
            return Count(data.examples if data.has_data else 0)
        return Count(self._last or data.latest_examples, data.num_examples - self._examples_before, passes)

    def restart(self) -> None:
        """Count from 0: gradients were reset, or reduced."""
        self._passes_before, self._examples_before = self.data.num_passes, self.data.num_examples
        self._last = 0  # what they were rescaled for

    @torch.no_grad()
    def next_batch(self, params: Sequence[Tensor], examples: int) -> None:
        """Make what was accumulated count as much as before, where the next pass has so many examples."""
        count = self.count
        if count.passes and count.last != examples:
            for param in params:
                if param.grad is not None:
                    param.grad.mul_(count.last / examples)
            self._last = examples

    def clear(self, params: Sequence[Tensor]) -> None:
        """Have nothing to contribute to what is reduced next, on a rank without data, but what is left."""
        if self.data.has_data or self.count.passes:
            return
        if self.others_begin:
            self._reset()
        for param in params:
            param.grad = None

    @contextlib.contextmanager
    def reducing(self, *, is_first: bool) -> Iterator[list[Count]]:
        """Tell the others that gradients are reduced; return what all ranks have computed them of.

        Args:
            is_first: whether it is the first reduction of a window.
        """
        with self.data.act(REDUCE, self.place, detail=lambda: is_first):
            mine = self.count._replace(again=int(not is_first))
            counts = [Count(*row) for row in self.data.gather(mine)]
            self.restart()
            yield counts
            self._reduced()

    @contextlib.contextmanager
    def sharing(self, loss: Tensor, *, weighted: bool) -> Iterator[Tensor]:
        """Tell the others of a loss that a closure has returned; return what this rank's counts."""
        with self.data.act(LOSS, self.place, loss.dtype, tuple(loss.shape)) as told:
            told = told or self.data.last
            assert told is not None
            yield loss * told.share(self.data.group.rank) if weighted else loss
