r"""`Entry`: one submitted operation on this rank: its tensors, and what becomes of it.

Tensors on a GPU are produced and used on the streams of the threads that submit and wait, and worked on in
the stream of the thread that runs the cycle:

    submitting thread   produce .. * submit                     | take_result, use
                                    \ ready                     / finished
    cycle's thread                   | begin ... perform ... * complete
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mpisgd.accelerator.futures import tensors_in
from mpisgd.accelerator.runtime import on_device, runtime
from mpisgd.errors import MpisgdError
from mpisgd.horovod.engine.request import Request
from mpisgd.horovod.exceptions import HorovodInternalError

__all__ = ["Entry", "fail", "to_internal_error"]


@dataclass(eq=False)
class Entry:
    """An operation of this rank, from its submission until somebody has taken the result.

    The tensors belong to it until it is done.

    Attributes:
        request: what the other ranks are told.
        inputs: this rank's tensors; unchanged, except where they are outputs too.
        outputs: where results go whose shape is known: the inputs themselves for what is done in place.
        splits: rows for each member (alltoall).
        contents: what a timeline tells of the tensors besides.
        finish: makes the result out of what the operation has left; runs on the thread that takes it.
        nbytes: how many bytes this rank gives.
        submitted_ns: when it was submitted, where a timeline is recorded.
        result: what the operation has left, once it is done.
        error: why it was not done.
        deadlock: why it never will be, where it is part of a deadlock; see `Engine.withdraw`.
    """

    request: Request
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()
    splits: Sequence[int] = ()
    contents: Mapping[str, Any] | None = None
    finish: Callable[[Any], Any] = lambda result: result
    result: Any = None
    error: BaseException | None = None
    deadlock: BaseException | None = None
    submitted_ns: int | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.nbytes = sum(tensor.nbytes for tensor in self.inputs)
        self._device = self.inputs[0].device if self.inputs and on_device(self.inputs[0]) else None
        self._ready_event = self._record_event()
        self._finished_event: Any = None

    def _record_event(self) -> Any:
        """Record an event in this thread's stream on the tensors' device; None where they are on the CPU."""
        return None if self._device is None else runtime().current_stream(self._device).record_event()

    def _wait_for(self, event: Any) -> None:
        """Let what this thread does with the tensors come after an event of another stream."""
        if self._device is not None and event is not None:
            runtime().current_stream(self._device).wait_event(event)

    def begin(self) -> None:
        """Let what this thread does with the tensors come after what produces them."""
        self._wait_for(self._ready_event)

    def complete(self, result: Any = None, error: BaseException | None = None) -> None:
        """Set the outcome, and wake who waits for it."""
        self.result, self.error = result, error
        if self._device is not None:  # their memory belongs to other streams than the cycle's
            _keep_for_current_stream((*self.inputs, *self.outputs))
        self._finished_event = self._record_event()
        self.inputs = self.outputs = ()
        self.done.set()

    def take_result(self) -> Any:
        """Return the result of a finished operation.

        Raises:
            MpisgdError: it was not done.
        """
        if self.error is not None:
            raise self.error
        self._wait_for(self._finished_event)
        if self._device is not None:  # made on the cycle's stream, and used on this one
            _keep_for_current_stream(self.result)
        return self.finish(self.result)


def _keep_for_current_stream(value: Any) -> None:
    """Let no memory of these tensors be handed out before this thread's current stream is done with it."""
    for tensor in tensors_in(value):
        if on_device(tensor):
            tensor.record_stream(runtime().current_stream(tensor.device))


def fail(entries: Iterable[Entry], exc: BaseException) -> None:
    """Complete operations that were not done because the engine has failed."""
    for entry in entries:
        if not entry.done.is_set():
            entry.complete(error=to_internal_error(exc))


def to_internal_error(exc: BaseException) -> HorovodInternalError:
    """Return a HorovodInternalError that was caused by this error."""
    if isinstance(exc, HorovodInternalError):
        return exc
    error = HorovodInternalError(str(exc) if isinstance(exc, MpisgdError) else f"the engine failed: {exc!r}")
    error.__cause__ = exc
    return error
