"""`JobAbort`: ends all ranks of a job, where `MPI_Abort` does not.

`MPI_Abort` of an MPI that outlives lost ranks ends the rank that calls it alone, if that (Open MPI 5.0.11
under `--with-ft ulfm`), and the others take it for lost. So the rank revokes a communicator that is there for
nothing else: the failure detector of every rank sees that and ends its process, whatever it does, and after a
while those of its host that are still there, as they are stopped, or in C code that keeps the interpreter's
lock.
"""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from mpisgd.monitor.process_inspector import ProcessIdentity, is_gone, is_stopped_or_gone

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = ["JobAbort"]

EXIT_S = 1.5  # a failure detector polls 20 times a second
POLL_S = 0.02
PROPAGATE_S = 0.1  # MPI sends the revocation on


class JobAbort:
    """The abort of the ranks of `communicator`. Making one is collective over these.

    Args:
        communicator: of the job's world.
        processes: of the ranks of this host, in their order.
        place: this rank's among them.
    """

    def __init__(
        self, communicator: "Communicator", processes: Sequence[ProcessIdentity], place: int
    ) -> None:
        self._communicator = communicator.duplicate(apart=True)
        self._before, self._behind = processes[:place], processes[place + 1 :]
        self._is_ours = False

    def is_called(self) -> bool:
        """Return whether another rank has called for it."""
        return not self._is_ours and self._communicator.is_revoked()

    def call(self, exit_code: int, *, all_are_here: bool) -> NoReturn:
        """End all ranks; `exit_code` is the job's, unless a rank had to be killed.

        Args:
            all_are_here: whether all are in this world. Otherwise one that does not notice may be in the next
                one, and only those that are stopped are killed.
        """
        self._is_ours = True
        self._communicator.revoke()
        others = [*self._before, *self._behind]
        self._exit_after(others if all_are_here else _stopped(others), exit_code)

    def follow(self) -> NoReturn:
        """End this process, since another rank has called for it.

        Of those that do so each waits for the ranks behind it alone, or all would wait for each other.
        """
        self._exit_after([*_stopped(self._before), *self._behind], 0)

    def _exit_after(self, others: Sequence[ProcessIdentity], exit_code: int) -> NoReturn:
        time.sleep(PROPAGATE_S)
        deadline_s = time.monotonic() + EXIT_S
        while others and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
            others = [process for process in others if not is_gone(process)]
        for process in others:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
        os._exit(exit_code)

    def free(self) -> None:
        """Give the communicator back. Collective."""
        self._communicator.free()


def _stopped(processes: Sequence[ProcessIdentity]) -> list[ProcessIdentity]:
    return [process for process in processes if is_stopped_or_gone(process)]
