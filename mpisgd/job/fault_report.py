"""`FaultReport`: a process that ends by a fault, such as SIGSEGV, prints its rank and its threads' stacks.

Python's `faulthandler` prints nothing but stacks: files, lines and functions. So a thread waits in a function
whose file has the name of the rank.
"""

import contextlib
import faulthandler
import io
import threading
from types import FunctionType

__all__ = ["FaultReport"]

THREAD = "mpisgd fault report"


def _wait(event: threading.Event) -> None:
    event.wait()


class FaultReport:
    """The fault handler of one rank; where the program has enabled Python's itself, only the thread.

    Args:
        rank: of this process.
        size: of the job; alone it needs no name.
        host: of this process.
    """

    def __init__(self, rank: int, size: int, host: str) -> None:
        self._name = f"<this is rank {rank} of {size} on {host}>"
        self._is_needed = size > 1
        self._enabled = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def install(self) -> None:
        """Have faults reported from now on."""
        if not self._is_needed:
            return
        if not faulthandler.is_enabled():
            with contextlib.suppress(io.UnsupportedOperation, ValueError, AttributeError, OSError):
                faulthandler.enable()  # on a standard error that is a file
                self._enabled = True
        wait = FunctionType(_wait.__code__.replace(co_filename=self._name), _wait.__globals__)
        self._thread = threading.Thread(target=wait, args=(self._ended,), name=THREAD, daemon=True)
        self._thread.start()

    def remove(self) -> None:
        """Leave faults to the program again."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._enabled:
            faulthandler.disable()
            self._enabled = False
