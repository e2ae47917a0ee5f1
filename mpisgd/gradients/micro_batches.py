"""`MicroBatchWindow`: a window whose backward passes are the leaves of a tree, for `reproducible="ranks"`.

`backward()` adds to `.grad` from left to right: g0 + g1 + g2 + g3. With twice as many ranks that would be
(g0 + g1) + (g2 + g3). So each pass's gradients are taken away at its end, and added here in the second order:

    pass       0    1        2    3                 partial sums in memory after the pass
    0          g0                                   1
    1          g01                                  1
    2          g01           g2                     2
    3          g0123                                1, which becomes `.grad` and is added to the other ranks'
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from mpisgd.core.group import Group
from mpisgd.core.owner import Owner
from mpisgd.errors import InvalidArgument
from mpisgd.gradients.accumulation import AccumulationWindow
from mpisgd.gradients.gradient_sync import GradientSync
from mpisgd.gradients.reduced import ReducedGradients
from mpisgd.gradients.tree_sum import TreeSum

__all__ = ["MicroBatchSums", "MicroBatchWindow"]

Gradients = dict[int, Tensor]  # by parameter, those that there are


class MicroBatchSums:
    """Adds up the gradients of leaves as they come.

    The tree halves the leaves as long as their number is even; what is left, an odd number, is added from
    left to right. So it is a part of the same tree over two, four ... times as many leaves.

    Memory: at most log2(num_leaves) partial sums beside the leaf that comes.

    Args:
        num_leaves: how many there will be.
    """

    def __init__(self, num_leaves: int) -> None:
        self._odd = num_leaves // (num_leaves & -num_leaves)
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._count = 0
        self._sums: list[Gradients] = []

    @property
    def are_pending(self) -> bool:
        """Whether there are leaves that nobody has taken the sum of."""
        return self._count > 0

    def add(self, leaf: Gradients) -> None:
        """Take the next leaf; what follows it is added to its tensors, as backward would."""
        within = self._count % self._odd > 0
        self._count += 1
        self._sums.append(leaf)
        for _ in range(within + _trailing_zeros(self._count, self._odd)):
            right = self._sums.pop()
            _add(self._sums[-1], right)

    def take(self) -> Gradients:
        """Return the sum of all leaves, and begin anew."""
        (total,) = self._sums
        self.clear()
        return total


def _trailing_zeros(count: int, odd: int) -> int:
    """Return how many subtrees end with the `count`-th leaf."""
    groups, rest = divmod(count, odd)
    return 0 if rest else (groups & -groups).bit_length() - 1


def _add(left: Gradients, right: Gradients) -> None:
    both = [index for index in left if index in right]
    if both:
        torch._foreach_add_([left[i] for i in both], [right[i] for i in both])
    left.update({i: grad for i, grad in right.items() if i not in left})


class MicroBatchWindow(AccumulationWindow):
    """Has the gradients of backward passes added along the tree, and refuses what would add them otherwise.

    Args:
        tree: adds up over the ranks.

    The others are those of `AccumulationWindow`.
    """

    def __init__(
        self,
        gradients: GradientSync,
        passes_per_step: int,
        *,
        tree: TreeSum,
        trained: Sequence[Tensor],
        group: Group,
        owner: Owner,
    ) -> None:
        self._tree = tree
        self._sums = MicroBatchSums(passes_per_step)
        self._sparse: Gradients = {}  # those that are refused
        self._reduced = ReducedGradients()
        for param in trained:
            tree.check(param.dtype, param.device)
        super().__init__(gradients, passes_per_step, trained=trained, group=group, owner=owner)
        self.why_fixed = f"{tree} adds up as many micro-batches with each number of ranks"

    @property
    def when(self) -> str:
        """See `AccumulationWindow`: ranks with other numbers of micro-batches are told so."""
        return f"{super().when}, {self._passes} of {self._passes_per_step} micro-batches"

    @property
    def why_not_uneven(self) -> str:
        """See `AccumulationWindow`."""
        return f"{self.owner} has {self._tree}, for which all ranks have equally many micro-batches"

    def cover(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """See `AccumulationWindow`."""
        for _, param in named:
            self._tree.check(param.dtype, param.device)
        super().cover(named)

    def _touched(self, nested: bool) -> None:
        super()._touched(nested)
        self._reduced.forget_unless_they_remain(self.gradients.params, self._hooks.first_ready)

    @torch.no_grad()
    def count_pass(self, *, in_step: bool = False) -> None:
        """See `AccumulationWindow`; what the pass has computed is a leaf."""
        if self._reduced and self._reduced.remain(self.gradients.params):
            self._refuse(
                "a backward on top of gradients that were reduced; call optimizer.zero_grad() before"
            )
        grads = {i: self.gradients.params[i].grad for i in sorted(self._hooks.watching)}
        there = {i: grad for i, grad in grads.items() if grad is not None}
        for index in there:
            self.gradients.params[index].grad = None
        self._sparse |= {i: grad for i, grad in there.items() if grad.is_sparse}
        self._sums.add({i: grad for i, grad in there.items() if not grad.is_sparse})
        super().count_pass(in_step=in_step)

    @torch.no_grad()
    def reduce(self, *, in_step: bool = False) -> None:
        """See `AccumulationWindow`.

        Raises:
            InvalidArgument: some leaves are missing; on every rank.
        """
        passes, params = self._passes, self.gradients.params
        if passes == self._passes_per_step:
            # Where any rank has a sparse one, all find out when they reduce.
            for index, total in (self._sums.take() | self._sparse).items():
                params[index].grad = total
        super().reduce(in_step=in_step)  # where ranks have other numbers of passes, all raise here
        if passes != self._passes_per_step:
            self._sums.clear()
            self._refuse(
                f"a step after {passes} of {self._passes_per_step} micro-batches; call backward() "
                "backward_passes_per_step times before each, on all ranks",
                on_every_rank=True,
            )
        if self._group.size == 1 and passes > 1:  # what a single pass has left is the program's memory
            for index in self._hooks.watching:
                if (grad := params[index].grad) is not None:
                    self._tree.check(grad.dtype, grad.device, is_sparse=grad.is_sparse)
                    self._tree.finish(grad)
        self._reduced.note(params, sorted(self._hooks.watching))

    def flush_before_step(self) -> None:
        """See `AccumulationWindow`."""
        if self._is_passed_over and self._sums.are_pending:
            self._refuse("a step inside skip_synchronize() before all micro-batches were added up")
        super().flush_before_step()

    def muted(self) -> NoReturn:
        """Raise: a pass inside would be no leaf."""
        self._refuse("no_sync(); give backward_passes_per_step instead")

    def around(self, closure: Callable[[], Any]) -> NoReturn:
        """Raise: the mean of the losses, which a line search takes, depends on the number of ranks."""
        self._refuse("step(closure): the loss of all ranks is added in another order")

    def _relied_on(self) -> list[AccumulationWindow]:
        if self._others:
            self._refuse("parameters in common with an optimizer that was made later")
        return []

    def _begin_window(self) -> None:
        self._sums.clear()
        self._sparse.clear()
        super()._begin_window()

    def restart(self) -> None:
        """See `AccumulationWindow`."""
        self._reduced.forget()
        super().restart()

    def _refuse(self, what: str, *, on_every_rank: bool = False) -> NoReturn:
        error = InvalidArgument(f"DistributedOptimizer: {self._tree} does not go with {what}")
        error.on_every_rank = on_every_rank
        raise error
