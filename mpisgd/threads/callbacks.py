"""`Callbacks`: what the program runs on the futures of a queue's operations, on the queue's own thread.

The operations behind wait for the end of a callback. One that waits for one of these runs it (`run_until` of
the queue), but not if it waits in a way that we do not see: for a future that `then` has made of ours. Then
those that wait for the queue end with an error.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

from mpisgd.errors import CollectiveTimeout
from mpisgd.threads import scheduling, wait_registry
from mpisgd.threads.wait_registry import RunningCallback

__all__ = ["Callbacks"]


class Callbacks:
    """The callbacks of one queue.

    Args:
        group: name of the queue's group, for messages.
        timeout_s: returns how long one may take while others wait for its end.
    """

    def __init__(self, group: str, timeout_s: Callable[[], float]) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._running: RunningCallback | None = None

    @contextlib.contextmanager
    def run(self, name: str) -> Iterator[None]:
        """Note that this thread runs callbacks on the future of an operation meanwhile."""
        thread, before = threading.get_ident(), self._running
        self._running = RunningCallback(name, self._group, scheduling.now_s(), self._timeout_s())
        wait_registry.callbacks[thread] = self._running
        try:
            yield
        finally:
            self._running = before
            if before is None:
                wait_registry.callbacks.pop(thread, None)

    def check(self) -> None:
        """Raise where one has run for longer than the timeout; called by those that wait for its end.

        Raises:
            CollectiveTimeout: says on which operation's future.
        """
        running = self._running
        if running is not None and scheduling.now_s() - running.since_s > running.timeout_s:
            raise CollectiveTimeout(
                f"group '{self._group}': a callback on the future of {running.name} has run for longer than "
                f"the timeout of {running.timeout_s:g} s, and all operations behind it wait for its end. If "
                "it waits for one of these, let it call `wait()` of that operation's Work"
            )
