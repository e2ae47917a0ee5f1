"""`Submission`: one operation from its call to its end, as the queue of its group runs it."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from mpisgd import tracing
from mpisgd.core.consistency import ConsistencyCheck, ConsistencyChecker, Operation
from mpisgd.core.owner import current_owner, owned_by
from mpisgd.core.work import Work
from mpisgd.errors import CollectiveMismatch, Deadlock, MpisgdError, afresh
from mpisgd.threads.waiting import Backoff

__all__ = ["Note", "Submission", "inference_mode_of"]

_NO_CONTEXT = contextlib.nullcontext()


def inference_mode_of(tensors: Any) -> contextlib.AbstractContextManager[Any]:
    """Return torch's inference mode for tensors that were made in it; outside they cannot be written to."""
    for tensor in tensors or ():
        if tensor.is_inference():
            return torch.inference_mode()
    return _NO_CONTEXT


class Submission:
    """One operation. See `OperationQueue.run` for what it is given.

    Attributes:
        check: its consistency check, where that has begun.
        thread: the one that runs it, while one does.
        span: its entry in the timeline, where one is recorded.
    """

    __slots__ = (
        "_action",
        "_after",
        "_before",
        "_detail",
        "_tensors",
        "_timeout_s",
        "check",
        "operation",
        "site",
        "span",
        "thread",
    )

    def __init__(
        self,
        operation: Operation,
        action: Callable[[], None],
        site: Callable[[], str],
        detail: Callable[[], str] | None,
        before: Callable[[], None] | None,
        after: Work | None,
        tensors: Any,
        timeout_s: float | None,
    ) -> None:
        self.operation = operation
        self.site = site
        self.check: ConsistencyCheck | None = None
        self.span: tracing.OperationSpan | None = None
        self.thread = 0
        self._action = action
        self._detail = detail
        self._before = before
        self._after = after
        self._tensors = tensors
        self._timeout_s = timeout_s

    def check_usable(self, broken: MpisgdError | None) -> None:
        """Raise where an earlier failure makes this operation impossible.

        Args:
            broken: why its queue cannot be used any more.
        """
        if broken is not None:
            raise afresh(broken)
        if self._after is not None and (error := self._after.error) is not None:
            raise error

    def begin(self, checker: ConsistencyChecker) -> ConsistencyCheck:
        """Begin the consistency check, which is returned and kept."""
        before = self._before if self.span is None else self._recorded(self.span, checker)
        self.check = check = checker.begin(self.operation, self.site, self._detail, before)
        return check

    def _recorded(self, span: tracing.OperationSpan, checker: ConsistencyChecker) -> Callable[[], None]:
        def before() -> None:
            if self._before is not None:
                self._before()
            span.arrives(checker.number)

        span.begins()
        return before

    def perform(self, checker: ConsistencyChecker) -> None:
        """Check and act."""
        self.thread = threading.get_ident()
        check = self.begin(checker) if self.check is None else self.check
        if not check.advance():
            limit_s = self._timeout_s
            check.wait(Backoff(limit_s or checker.timeout_s, own_limit=limit_s is not None))
        if self.span is not None:
            self.span.all_arrived()
        check.verify()
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

    def __init__(self, operation: Operation, site: Callable[[], str]) -> None:
        super().__init__(operation, lambda: None, site, None, None, None, None, None)

    def perform(self, checker: ConsistencyChecker) -> None:
        """Count it."""
        checker.note(self.operation)
