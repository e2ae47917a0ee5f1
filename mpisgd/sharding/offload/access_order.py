"""`AccessOrder`: which blocks are probably used next, from the order in which they were used before.

Training uses blocks in the same order in every step: the state of pieces one after the other, layers
forward and then backward. After `a, b` that is expected which has followed `a, b` the last time. Two are
looked at because of the turn from forward to backward; where they never came together, the last one alone is:

    forward 0 1 2 | backward 2 1 0         after 1, 2 comes 2;   after 2, 2 comes 1;   after 2, 1 comes 0
"""

__all__ = ["AccessOrder"]


class AccessOrder:
    """Learns an order that repeats."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}
        self._next_of_one: dict[int, int] = {}
        self._last = (-1, -1)

    def note(self, index: int) -> None:
        """Note that a block is used."""
        self._next[self._last] = self._next_of_one[self._last[1]] = index
        self._last = (self._last[1], index)

    def expected(self, count: int) -> list[int]:
        """Return the next blocks, at most `count`, each once, without the one that is used now."""
        found: list[int] = []
        last = self._last
        for _ in range(2 * count):  # at a turn some come twice
            following = self._next.get(last, self._next_of_one.get(last[1]))
            if following is None or len(found) == count:
                break
            last = (last[1], following)
            if following != self._last[1] and following not in found:
                found.append(following)
        return found

    def forget(self) -> None:
        """Forget everything."""
        self._next.clear()
        self._next_of_one.clear()
        self._last = (-1, -1)
