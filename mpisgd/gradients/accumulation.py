"""`AccumulationWindow`: when gradients are reduced.

A window is what lies between two steps: backward passes, some of them muted, and one reduction, at the end of
the pass that fills it or in `step()` if none did.

    backward   backward   (k = 2)     backward                (a partial last window)
    local      reduce                 local
                          step()                  step()
                          as it is                reduce
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.core.group import Group
from mpisgd.core.owner import Owner
from mpisgd.core.work import Work
from mpisgd.errors import CollectiveMismatch, InvalidArgument
from mpisgd.gradients.backward_hooks import BackwardHooks
from mpisgd.gradients.gradient_sync import GradientSync
from mpisgd.gradients.uneven_window import LOSS, Begun, UnevenWindow
from mpisgd.gradients.windows import windows_of

__all__ = ["AccumulationWindow"]


class AccumulationWindow:
    """Counts backward passes over parameters and has their gradients reduced at the right moment.

    Collective to make, where the group has had others.

    Where two optimizers have parameters in common, the window that was made last takes care of these, and the
    other one relies on it: it flushes that one, too, before its own step.

    Args:
        gradients: reduces them.
        passes_per_step: how many backward passes fill a window.
        trained: the parameters that the optimizer updates.
        group: the ranks.
        owner: of the operations: the optimizer.

    Attributes:
        gradients: as given; replaced by `use`.
        owner: as given.
        steps: how many there have been.
        num_reductions: how many there have been.
        uneven: what it does where ranks may run out of data; None elsewhere.
        has_flushed: whether this window was reduced when somebody asked for it, and not at the end of a
            backward: what had looked at the gradients before has seen those of this rank alone.
        why_fixed: why it cannot go on with other ranks, "" if it can.
    """

    why_fixed = ""

    def __init__(
        self,
        gradients: GradientSync,
        passes_per_step: int,
        *,
        trained: Sequence[Tensor],
        group: Group,
        owner: Owner,
    ) -> None:
        self.gradients = gradients
        self.owner = owner
        self.steps = self.num_reductions = 0
        self.uneven: UnevenWindow | None = None
        self.has_flushed = False
        self._group = group
        self._passes_per_step = passes_per_step
        self._reductions_before = 0  # the last step or zero_grad
        self._passes = 0  # since the last reduction
        self._pending = False  # something was accumulated and not reduced
        self._left_some = False  # whether there were gradients after the last reduction; alike on all ranks
        self._in_pass = False  # a backward has begun, and its end was not seen yet
        self._muted = 0
        self._was_muted = False  # since the last reduction; alike on all ranks
        self._skipping = 0
        # By parameter, the windows made later that take care of it. They must live as long as this one.
        self._others: dict[int, AccumulationWindow] = {}
        self._others_before: dict[AccumulationWindow, int] = {}  # their reductions, as `_reductions_before`
        self._hooks = BackwardHooks(self._touched, self._became_ready, self._backward_ended, self._lost)
        self._watch(trained)
        self._windows = windows_of(group)
        self._windows.join(self, group)

    def cover(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Take over a longer list of parameters. Collective.

        It may have had none to take care of before, where another window has them all.
        """
        was_active = self.is_active
        self.gradients.cover(named)
        self._watch([param for _, param in named])
        if self.is_active and not was_active:
            self._windows.join(self, self._group)

    def use(self, gradients: GradientSync) -> None:
        """Have gradients combined by something else from the next window on."""
        if gradients is not self.gradients:
            self.gradients = gradients
            self._watch()

    def move_to(self, gradients: GradientSync, group: Group, owner: Owner) -> None:
        """Begin anew with other ranks; there are no gradients. What was on its way has failed. Collective."""
        self._windows.leave(self)
        self._group, self.owner = group, owner
        self.use(gradients)
        self.steps = 0  # the reductions go on: windows that rely on this one have counted them
        self._begin_window()
        self._windows = windows_of(group)
        self._windows.join(self, group)

    def _watch(self, trained: Sequence[Tensor] = ()) -> None:
        """Watch the parameters whose gradients are combined; see that nobody else does so for `trained`."""
        self.gradients.leave_out(self._others)
        self._hooks.take(trained, self._others)
        self._hooks.watch(self.gradients.params, self._others)

    def _lost(self, index: int, other: "AccumulationWindow") -> None:
        """Leave a parameter to a window that was made later."""
        self._others[index] = other
        self._others_before.setdefault(other, other.num_reductions)
        self.gradients.leave_out(self._others)

    # -- what others of the group must know; see `windows.Window` -------------------------------------

    @property
    def is_active(self) -> bool:
        """Whether it reduces anything by itself."""
        return self.gradients.combines and bool(self._hooks.watching)

    @property
    def is_muted(self) -> bool:
        """Whether nothing is to be sent now."""
        return self._muted > 0

    @property
    def contents(self) -> str:
        """Which of its parameters take part in the next reduction, in words."""
        return self.gradients.contents

    @property
    def latest_backward(self) -> int:
        """The number of the latest backward that has reached it."""
        return self._hooks.outer_task

    @property
    def sent_last(self) -> Work | None:
        """What was sent last during the backward that is under way, if anything was."""
        return self.gradients.sent_last

    def forget_backward(self) -> None:
        """Forget the backward that is under way, and what became of what was sent."""
        with contextlib.suppress(CollectiveMismatch):
            self.gradients.forget_backward()

    @property
    def _is_one_of_several(self) -> bool:
        windows = self._windows
        return windows.are_several and self._group.size > 1 and self.owner in windows.active

    # -- what backward tells ------------------------------------------------------------------------

    def _touched(self, nested: bool) -> None:
        """A backward has reached its first gradient."""
        self._pending = True
        is_new = not (nested and self._in_pass)
        self._in_pass = True
        if is_new:
            self.gradients.note_pass(self._hooks.first_ready)
        if nested:
            if is_new:
                self.gradients.forget_backward()
            self.gradients.hold()
            return
        # Inside `join()` a rank without data takes part from the end of the pass on.
        reduces = not self._muted and self._passes + 1 >= self._passes_per_step and self.uneven is None
        if reduces and not self.gradients.why_not_again():
            self._hooks.notes.reports_each = self.gradients.begin(self.when)
        else:
            self._hooks.notes.reports_each = False
            self.gradients.forget_backward()

    def _became_ready(self, index: int) -> None:
        self.gradients.ready(index)

    @property
    def when(self) -> str:
        """Which reduction of the program the next one is."""
        return f"step {self.steps}, reduction {self.num_reductions - self._reductions_before}"

    @property
    def is_first(self) -> bool:
        """Whether nothing was reduced since the last step or reset."""
        return self.num_reductions == self._reductions_before

    @property
    def begun(self) -> Begun:
        """What ranks without data must know of the next reduction."""
        params = enumerate(self.gradients.params)
        still = [index for index, param in params if not param.requires_grad and param.grad is not None]
        return Begun(self.is_first, tuple(still))

    def _backward_ended(self) -> None:
        self._in_pass = False
        if self.uneven is not None:
            self.uneven.data.note_backward(self.latest_backward)
        if self._is_one_of_several:
            self._windows.end_backward(self.latest_backward, self._group)
        elif not self._muted:
            self.count_pass()

    def count_pass(self, *, in_step: bool = False) -> None:
        """Count a backward pass, and reduce if it fills the window. Collective then."""
        self._passes += 1
        self._pending = True
        if self._passes >= self._passes_per_step:
            self.reduce(in_step=in_step)

    def reduce(self, *, in_step: bool = False) -> None:
        """Reduce what there is. Collective."""
        if self.uneven is not None:
            self.uneven.clear(self.gradients.params)
        if why := self.gradients.why_not_again():
            raise InvalidArgument(
                f"DistributedOptimizer: gradients {why} already would be reduced once more; call "
                "optimizer.zero_grad() before, accumulate inside no_sync(), or set backward_passes_per_step"
            )
        observed = list(self._hooks.notes.observed)
        self._hooks.notes.observed.clear()  # a rank without a backward has seen none, as after a restart
        if self.uneven is None or not self.gradients.combines:
            self.gradients.reduce(self.when, observed, in_step=in_step)
        else:
            with self.uneven.reducing(self.begun) as counts:
                if self.gradients.is_weighted:
                    self.gradients.weigh(counts)
                self.gradients.reduce(self.when, observed, in_step=in_step)
        self.num_reductions += 1
        self._left_some = self._has_gradients
        self._passes = 0
        self._pending = self._in_pass = self._was_muted = False

    # -- what the program asks for ------------------------------------------------------------------

    def flush(self, *, in_step: bool = False) -> None:
        """Reduce what is pending. Where nothing is, take part: other ranks may have something.

        A second `step()` on the same gradients gives their mean again, which is what they are. Only what
        may not be reduced twice must be left alone then.
        """
        if not self.gradients.combines:
            return
        for other in self._relied_on():
            self.has_flushed |= other._flush_since(self._others_before[other], in_step)
        if self._hooks.watching:
            self.has_flushed |= self._flush_since(self._reductions_before, in_step)

    def _flush_since(self, reductions: int, in_step: bool) -> bool:
        """Do it unless there was a reduction after so many; return whether it was done."""
        # What was accumulated inside `no_sync()` may have reached this optimizer on other ranks only.
        nothing_yet = self.num_reductions == reductions or self._were_reset or self._was_muted
        if not self._pending and (not nothing_yet or self.gradients.why_not_again()):
            return False
        if self._is_one_of_several:
            self._windows.flush(self, self._group, in_step=in_step)
        else:
            self.reduce(in_step=in_step)
        return True

    @property
    def _were_reset(self) -> bool:
        """Whether what the last reduction left is gone: by `model.zero_grad()`, which tells nobody."""
        return self._left_some and not self._has_gradients

    @property
    def why_not_uneven(self) -> str:
        """Why its ranks may not run out of data from now on, "" if they may."""
        if self._others:
            return f"{self.owner} has parameters in common with an optimizer that was made later"
        if self._pending or self._was_muted or self._muted:
            return f"{self.owner} has gradients that were accumulated before; enter join() before backward()"
        return ""

    @property
    def _has_gradients(self) -> bool:
        params = self.gradients.params
        return any(params[index].grad is not None for index in self._hooks.watching)

    def _relied_on(self) -> list["AccumulationWindow"]:
        """Return the windows that take care of parameters for this one. Collective where that changes.

        One that combines nothing takes care of nothing: what it has taken comes back.
        """
        if any(not other.gradients.combines for other in self._others.values()):
            self._others = {i: other for i, other in self._others.items() if other.gradients.combines}
            self._watch()
            self._windows.join(self, self._group)
        for index, other in self._others.items():
            if other.gradients.combined_by != self.gradients.combined_by:
                raise InvalidArgument(
                    f"{self.owner} has parameters in common with {other.owner}, which was made later and "
                    f"decides what becomes of their gradients (parameter {index}). They are combined by "
                    f"{other.gradients.combined_by}, and this optimizer needs {self.gradients.combined_by}; "
                    "use the same in both, or make this optimizer again after the other one"
                )
        return sorted(set(self._others.values()), key=lambda other: other.owner.number)

    def flush_before_step(self) -> None:
        """Do what `step()` needs: everything reduced, unless the program said otherwise."""
        if not self._is_passed_over:
            self.flush(in_step=True)

    def check_before_step(self) -> None:
        """Make sure that no rank has changed what others got in their step only. Collective if it can be."""
        if not self._is_passed_over:
            for window in (*self._others.values(), self):
                window.gradients.check_unchanged(window.when)

    @property
    def _is_passed_over(self) -> bool:
        """Whether `step()` takes the gradients as they are."""
        return self._skipping > 0 or self._muted > 0

    @property
    def lacks_reduction(self) -> bool:
        """Whether there are gradients of this rank alone that `flush_before_use` is going to reduce."""
        is_shared = self.gradients.combines and self._group.size > 1
        return self._pending and is_shared and not self._is_passed_over

    def flush_before_use(self) -> None:
        """Do the same before somebody looks at the gradients."""
        if not self._is_passed_over:
            self.flush()

    def restart(self) -> None:
        """Begin a new window: the gradients were reset."""
        self.gradients.forget_reduced()
        self._begin_window()

    def _begin_window(self) -> None:
        self.gradients.forget_backward()
        self._reductions_before, self._passes = self.num_reductions, 0
        if self.uneven is not None:
            self.uneven.restart()
        self._others_before = {other: other.num_reductions for other in self._others.values()}
        self._pending = self._in_pass = self._was_muted = self.has_flushed = False

    def end_step(self) -> None:
        """Begin a new window after a step."""
        self.steps += 1
        self._begin_window()

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure as one process would see it: all gradients reduced, and everyone's loss."""

        def everyones() -> Any:
            loss = closure()
            self.flush_before_step()
            if self.uneven is None:
                self.check_before_step()
            if loss is None or self._is_passed_over:
                return loss
            # A Python float has 64 bits, and a line search uses them.
            known = loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64)
            total = self.combine_loss(known)
            return total if isinstance(loss, Tensor) else total.item()

        def together() -> Any:
            """Do the same where ranks may run out of data: one without follows what a closure does."""
            if self.uneven is None:
                return everyones()
            data, combines = self.uneven.data, self.gradients.combines
            if not data.has_data:
                return data.follow(until=LOSS) if combines else torch.zeros(())
            with data.outside():
                return everyones()

        return together

    def combine_loss(self, loss: Tensor) -> Tensor:
        """Return the loss of all ranks together. Collective."""
        if self.uneven is None or not self.gradients.combines:
            return self.gradients.combine_loss(loss)
        with self.uneven.sharing(loss, weighted=self.gradients.is_weighted) as mine:
            self.check_before_step()
            return self.gradients.combine_loss(mine)

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """Send nothing inside."""
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1
            self._was_muted = True

    @contextlib.contextmanager
    def skipping(self) -> Iterator[None]:
        """Let step() reduce nothing inside."""
        self._skipping += 1
        try:
            yield
        finally:
            self._skipping -= 1
