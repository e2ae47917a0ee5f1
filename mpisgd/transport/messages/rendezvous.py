"""`Rendezvous`: all of some ranks go on together, or none does; who has given up can come again.

What a rank has sent cannot be taken back: others who come later would find it, and believe that the rank is
still there. So there are two exchanges. Who is in the second knows that all have come, and gives up no more.
Who gives up before sends all messages of both that are left, with word that it is gone.

    rank 0   here ...... gone          here    all here   ->
    rank 1             here  gone      here    all here   ->
                       ^ learns of the first attempt of rank 0, and begins anew with it

Every attempt of a rank has the same number of messages to and from each other, so the n-th attempts of all
belong together, however far apart they are.
"""

import contextlib
from collections.abc import Sequence

from mpisgd.errors import MpisgdError
from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.transport.messages.dissemination import Dissemination

__all__ = ["NUM_TAGS", "Rendezvous"]

MAX_ROUNDS = 16
NUM_TAGS = 2 * MAX_ROUNDS
GONE = 2**63  # larger than what ranks compare


class Rendezvous:
    """The meeting of some ranks, this one among them. Cost: twice that of `Dissemination`.

    Args:
        communicator: carries the messages.
        ranks: those of its ranks that take part, at most 2**16, in the same order on all.
        tag: the first of NUM_TAGS.
        value: below 2**63, to be compared.
    """

    def __init__(self, communicator: GroupCommunicator, ranks: Sequence[int], tag: int, value: int) -> None:
        self._communicator, self._ranks, self._tag, self._value = communicator, ranks, tag, value
        self._begin()

    def _begin(self) -> None:
        self._first, self._second = (
            Dissemination(self._communicator, self._ranks, tag=self._tag + more) for more in (0, MAX_ROUNDS)
        )
        self._first.start(self._value, self._value)
        self._now = self._first

    @property
    def all_have_come(self) -> bool:
        """Whether all have come, some of which may have given up since."""
        return self._now is self._second

    def advance(self) -> bool:
        """Go as far as possible without waiting; return whether all are here."""
        while self._now.advance():
            low, high = self._now.extremes()
            if high >= GONE:  # of an attempt that has failed there
                self.close()
                self._begin()
            elif self._now is self._second:
                return True
            else:
                self._now = self._second
                self._second.start(low, high)
        return False

    def extremes(self) -> tuple[int, int]:
        """Return the smallest and the largest value."""
        return self._second.extremes()

    def missing(self) -> str:
        """Describe the ranks that this rank waits for."""
        return self._now.missing()

    def close(self) -> None:
        """Free what MPI keeps for it; where it is not over, tell the others that this rank is gone."""
        with contextlib.suppress(MpisgdError):  # where a rank was lost, all get that error
            if self._now is self._first:
                self._first.finish(GONE)
                self._second.start(self._value, GONE)
            self._second.finish(GONE)
        self._first.close()
        self._second.close()
