"""`Attempts`: which of several attempts at one reduction a rank is at, after exceptions in backward.

Gradients are sent while backward computes others, so an exception on all ranks may find them at different
buckets: a parameter that only some ranks use completes its bucket on these alone, which have sent it. The
others have nothing that it could be reduced with, and say so when they forget the backward:

    rank 0   bucket 0   bucket 1                   raises | attempt 2: bucket 0
    rank 1   bucket 0   raises | attempt 2: none          | attempt 2: bucket 0

What the ranks compare then differs in the attempt alone, and by that each of them knows what has happened.
A rank sends no more in such a backward. If no exception ends it after all, what it has is sent at its end,
in the latest attempt; where a part of it was reduced before, that is an error. So it is where a rank has had
no gradient at all before the exception, and does not know that others have sent some.
"""

from mpisgd.errors import CollectiveMismatch

__all__ = ["Attempts"]

MARK = ", attempt "


class Attempts:
    """Counts the attempts at the reductions of a list of parameters; their number never becomes less."""

    def __init__(self) -> None:
        self._number = 1

    def name(self, when: str) -> str:
        """Return which reduction of the program the next one is, and which attempt but for the first."""
        return when if self._number == 1 else f"{when}{MARK}{self._number}"

    def note_left(self, when: str) -> str:
        """Note that an exception has ended the backward of this reduction; return the name of the next."""
        self._number = max(self._number, _number_in(when) + 1)
        return self.name(when.partition(MARK)[0])

    def differ(self, error: CollectiveMismatch) -> bool:
        """Return whether ranks were at different attempts at one reduction; the latest comes next then."""
        reductions = {when.partition(MARK)[0] for when in error.whens}
        if len(error.whens) < 2 or len(reductions) > 1:
            return False
        self._number = max(self._number, *map(_number_in, error.whens))
        return True


def _number_in(when: str) -> int:
    return int(when.partition(MARK)[2] or 1)
