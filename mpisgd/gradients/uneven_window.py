"""`UnevenWindow`: what an accumulation window does where some ranks may run out of data.

It counts what this rank has computed gradients of, tells the others before it reduces, and weights what it
sends. A rank without data reduces with the others: what it has left in a window that it could not fill, else
nothing.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.core.uneven_data import UnevenData
from mpisgd.gradients.weight import Count

__all__ = ["Begun", "UnevenWindow"]

REDUCE, LOSS = "reduce", "loss"


class Begun(NamedTuple):
    """What ranks without data must know of a reduction of the others.

    Attributes:
        is_first: whether nothing was reduced since their last step or reset.
        still: the parameters that are frozen and have a gradient all the same, from before: they take part.
    """

    is_first: bool = True
    still: tuple[int, ...] = ()


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
        others: what the ranks with data have begun; on one without.
    """

    def __init__(
        self, data: UnevenData, place: int, reset: Callable[[], None], reduced: Callable[[], None]
    ) -> None:
        self.data, self.place = data, place
        self.others = Begun()
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
        if self.others.is_first:
            self._reset()
        for index, param in enumerate(params):
            param.grad = torch.zeros_like(param) if index in self.others.still else None

    @contextlib.contextmanager
    def reducing(self, begun: Begun) -> Iterator[list[Count]]:
        """Tell the others that gradients are reduced; return what all ranks have computed them of."""
        with self.data.act(REDUCE, self.place, detail=lambda: begun):
            mine = self.count._replace(again=int(not begun.is_first))
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
