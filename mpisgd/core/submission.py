"""`Submission`: one operation from its call to its end, as the queue of its group runs it."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from mpisgd import tracing
from mpisgd.call_site import call_site, site_of
from mpisgd.core.consistency import ConsistencyCheck, ConsistencyChecker, Operation, digest_of
from mpisgd.core.owner import current_owner, owned_by
from mpisgd.core.work import Work
from mpisgd.errors import CollectiveMismatch, Deadlock, MpisgdError, afresh
from mpisgd.threads.waiting import Backoff

__all__ = ["Note", "RepeatedOperation", "Submission", "call_site", "inference_mode_of"]

_NO_CONTEXT = contextlib.nullcontext()


def inference_mode_of(tensors: Any) -> contextlib.AbstractContextManager[Any]:
    """Return torch's inference mode for tensors that were made in it; outside they cannot be written to."""
    for tensor in tensors or ():
        if tensor.is_inference():
            return torch.inference_mode()
    return _NO_CONTEXT


class Submission(ConsistencyCheck):
    """One operation. See `OperationQueue.run` for what it is given.

    Attributes:
        thread: the one that runs it, while one does.
        span: its entry in the timeline, where one is recorded.
    """

    __slots__ = ("_action", "_after", "_before", "_tensors", "_timeout_s", "span", "thread")

    def __init__(
        self,
        operation: Operation,
        action: Callable[[], None],
        detail: Callable[[], str] | None,
        before: Callable[[], None] | None,
        after: Work | None,
        tensors: Any,
        timeout_s: float | None,
    ) -> None:
        super().__init__(operation, None, detail)
        self.span: tracing.OperationSpan | None = None
        self.thread = 0
        self._action = action
        self._before = before
        self._after = after
        self._tensors = tensors
        self._timeout_s = timeout_s

    def remember_site(self) -> None:
        """Note which line of the program calls it: another thread is going to run it."""
        self._site = call_site()

    def site(self) -> str:
        """Return where the program called it; as long as the call lasts, its thread is still there."""
        return site_of(self.thread) if self._site is None else self._site()

    def check_usable(self, broken: MpisgdError | None) -> None:
        """Raise where an earlier failure makes this operation impossible.

        Args:
            broken: why its queue cannot be used any more.
        """
        if broken is not None:
            raise afresh(broken)
        if self._after is not None and (error := self._after.error) is not None:
            raise error

    def begin(self, checker: ConsistencyChecker) -> None:
        """Begin the consistency check."""
        self.thread = threading.get_ident()
        checker.begin(self, self._before if self.span is None else self._recorded(self.span, checker))

    def _recorded(self, span: tracing.OperationSpan, checker: ConsistencyChecker) -> Callable[[], None]:
        def before() -> None:
            if self._before is not None:
                self._before()
            span.arrives(checker.number)

        span.begins()
        return before

    def perform(self, checker: ConsistencyChecker) -> None:
        """Check and act."""
        if self.checker is None:
            self.begin(checker)
        else:
            self.thread = threading.get_ident()
        if not (agreed := checker.digest_exchange.agree_soon()):
            limit_s = self._timeout_s
            self.wait(Backoff(limit_s or checker.timeout_s, own_limit=limit_s is not None))
        if self.span is not None:
            self.span.all_arrived()
        if not agreed:
            self.verify()
        try:
            self._act()
        except Deadlock:
            raise
        except CollectiveMismatch as exc:  # found only now, such as one of sizes: add where it was
            place = f"group '{checker.name}', operation {checker.number}, at {self.site()}"
            raise CollectiveMismatch(f"{exc} ({place})") from None
        if self.span is not None:
            self.span.ends()

    def _act(self) -> None:
        """Do the communication. What is communicated within it has the same owner, on whichever thread."""
        mode, owner = inference_mode_of(self._tensors), self.operation.owner
        if mode is _NO_CONTEXT and owner is current_owner():
            self._action()
            return
        with mode, owned_by(owner):
            self._action()


class Note(Submission):
    """An operation that others carry out, such as NCCL: it only has its place in the order."""

    __slots__ = ()

    def __init__(self, operation: Operation) -> None:
        super().__init__(operation, lambda: None, None, None, None, None, None)

    def perform(self, checker: ConsistencyChecker) -> None:
        """Count it."""
        checker.note(self.operation)


class RepeatedOperation(Submission):
    """An operation of a form that is called again and again: what is the same each time is looked up once.

    One call is on its way at a time. See `OperationQueue.run_again`.

    Args:
        operation: what the ranks must agree on.
        first_part: is given the tensor of a call before the others hear of it; None: does nothing.
        rest: is given it once all ranks have agreed; likewise.

    Attributes:
        digest: of the operation.
        first_part: as given.
        rest: as given.
    """

    __slots__ = ("digest", "first_part", "rest")

    def __init__(
        self,
        operation: Operation,
        first_part: Callable[[Any], object] | None = None,
        rest: Callable[[Any], object] | None = None,
    ) -> None:
        super().__init__(operation, lambda: None, None, None, None, None, None)
        self.digest = digest_of(operation)
        self.first_part = first_part
        self.rest = rest
