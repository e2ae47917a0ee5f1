"""What a job prints for its user: one rank of a host at a time, and of an error only one."""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator

from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.transport.ipc.memfd import open_shared

__all__ = ["ConsoleLock"]

POLL_S = 0.02


class ConsoleLock:
    """The lock that a rank holds while it prints. Making one is collective over the job.

    The ranks of a host lock one file without a name. The kernel releases it when its owner ends, whatever way
    it does, and nothing remains of the file. A rank that cannot open it, as in a container of its own, prints
    whenever it wants to.

    Args:
        communicator: of the job's world.
    """

    def __init__(self, communicator: GroupCommunicator) -> None:
        local = communicator.same_host()
        self._file = open_shared(local, 0)
        local.barrier()  # the first rank's own must stay until the others have opened it
        local.free()
        self._threads = threading.Lock()  # the lock of a file is the process's, whichever thread took it

    def acquire(self, timeout_s: float, sleep: Callable[[float], None] = time.sleep) -> bool:
        """Return whether this thread holds the lock, which it waits for.

        Args:
            timeout_s: the longest wait.
            sleep: called meanwhile.
        """
        deadline_s = time.monotonic() + timeout_s
        while not (acquired := self._try()) and time.monotonic() < deadline_s:
            sleep(POLL_S)
        return acquired

    def _try(self) -> bool:
        if not self._threads.acquire(blocking=False):
            return False
        try:
            if self._file >= 0:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._threads.release()
            return False
        return True

    @contextlib.contextmanager
    def turn(self, timeout_s: float, sleep: Callable[[float], None] = time.sleep) -> Iterator[None]:
        """Wait until nobody else of this host prints, or for `timeout_s`; nobody else does meanwhile then."""
        acquired = self.acquire(timeout_s, sleep)
        try:
            yield
        finally:
            if acquired:
                self.release()

    def release(self) -> None:
        """Let others print."""
        if self._file >= 0:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._threads.release()

    def claim_error(self, timeout_s: float) -> bool:
        """Return whether this rank is to print the error that ends the job: the first of its host that asks.

        Args:
            timeout_s: how long it waits for a rank that prints something else.
        """
        if self._file < 0:
            return True
        with self.turn(timeout_s):
            if os.fstat(self._file).st_size > 0:  # what is in a file stays, also when its writer is gone
                return False
            os.write(self._file, b"!")
            return True

    def close(self) -> None:
        """Give the file back; after that this rank prints whenever it wants to."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
