"""`LastReduction`: what a reduction has left as gradients, and what must not become of that."""

import functools
import operator
from collections.abc import Iterable, Sequence

from torch import Tensor

from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.owner import Owner, owned_by
from mpisgd.errors import InvalidArgument
from mpisgd.gradients.gradient_flags import IN_BACKWARD, IN_STEP, FlagsExchange
from mpisgd.gradients.reduced import ReducedGradients

__all__ = ["LastReduction"]

CHANGED, UNCHANGED = 1, 2


class LastReduction:
    """Remembers the gradients that may not be reduced twice, and those that must stay as they are.

    The latter where some ranks got them in backward and others, which had none, in their step: what the
    former do to them before, such as clipping, the latter do not.

    Attributes:
        reduced: those that may not be reduced twice.
    """

    def __init__(self) -> None:
        self.reduced = ReducedGradients()
        self._unchanged: ReducedGradients | None = None  # what this rank must find so in its step

    def note(
        self, params: Sequence[Tensor], covered: Sequence[int], flags: Iterable[FlagsExchange], *, once: bool
    ) -> None:
        """Note that gradients were reduced.

        Args:
            params: the parameters.
            covered: which of them have taken part.
            flags: what ranks have told each other about them, and when each got them.
            once: whether they may not be reduced twice.
        """
        if once:
            self.reduced.note(params, covered)
        noted = functools.reduce(operator.or_, (exchange.noted for exchange in flags), 0)
        if noted == IN_BACKWARD | IN_STEP or self._unchanged is not None:
            self._unchanged = ReducedGradients()
            self._unchanged.note(params, covered)

    def forget(self) -> None:
        """Note that all gradients were reset."""
        self.reduced.forget()
        self._unchanged = None

    def check_unchanged(self, params: Sequence[Tensor], group: Group, owner: Owner | None, when: str) -> None:
        """Raise where a rank has changed gradients that another one got in its step only. Collective then.

        Raises:
            InvalidArgument: on every rank.
        """
        unchanged, self._unchanged = self._unchanged, None
        if unchanged is None:
            return
        told = FlagsExchange(bytes([CHANGED if unchanged.were_changed(params) else UNCHANGED]), group)
        what = Operation("gradients", extra="were they changed after the reduction?", when=when)
        with owned_by(owner):
            group.queue.run(what, told.finish, before=told.before)
        if told.joined == bytes([CHANGED | UNCHANGED]):
            raise InvalidArgument(
                "DistributedOptimizer: gradients were changed between their reduction and step() on some "
                f"ranks ({when}), as clipping does. Another rank had no backward, and got them in step(). "
                "Call optimizer.synchronize() on all ranks before, or optimizer.clip_grad_norm_()"
            )
