r"""`StreamGuard`: orders one operation on a stream of ours after its caller's work and before its use.

An operation may run on the queue's thread, whose current stream is not its caller's. So its copies go to a
stream of the group's own:

    caller's stream   produce ... * call                          | use the result
                                   \ ready                        / done
    the group's stream              | fetch ... (MPI) ... deliver *

The caller's stream waits for `done` when a blocking call returns. What is asynchronous is done when its
copies are: then its Work and its future need no stream, and no memory is given back too early.
"""

from collections.abc import Callable
from typing import Any

import torch

from mpisgd.accelerator.runtime import runtime

__all__ = ["StreamGuard"]


class StreamGuard:
    """Made in the caller's thread, at the call.

    Args:
        device: where the operation's tensors lie.
        stream: of the group's own on that device: on one shared with other groups its copies could come after
            theirs, and no group waits for another.
        waits: whether the operation is over only when its copies are.

    Attributes:
        stream: see above.
        ready: the event after which the tensors may be touched.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream, *, waits: bool) -> None:
        self._device = device
        self.stream = stream
        self._waits = waits
        self.ready = runtime().current_stream(device).record_event()
        self._done: Any = None

    def through(self, part: Callable[[], Any]) -> Callable[[], None]:
        """Return `part`, to be run after what the caller's stream has to do for it."""

        def call() -> None:
            with runtime().on(self.stream):
                self.stream.wait_event(self.ready)
                part()

        return call

    def to_its_end(self, action: Callable[[], None]) -> Callable[[], None]:
        """Return the last part of the operation."""

        def call() -> None:
            self.through(action)()
            self._done = self.stream.record_event()
            if self._waits:
                self._done.synchronize()

        return call

    def join(self) -> None:
        """Let the caller's stream wait for the result. In the caller's thread, when the operation is over."""
        if self._done is not None:
            runtime().current_stream(self._device).wait_event(self._done)
