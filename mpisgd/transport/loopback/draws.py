"""`Draws`: the random numbers of a run, of which one may have the first ones alone.

Whatever is drawn once these are used up is the default: whoever has waited longest runs, a message takes no
time. So a run that goes wrong is reduced to the draws that it needs.
"""

import random

__all__ = ["Draws"]

FOREVER = 2**63


class Draws:
    """Random numbers.

    Args:
        seed: of all that is drawn.
        limit: how many are drawn; from then on there are the defaults.

    Attributes:
        number: how many were drawn.
    """

    def __init__(self, seed: object, limit: int | None = None) -> None:
        self._random = random.Random(seed if isinstance(seed, (int, str)) else str(seed)).random
        self._limit = FOREVER if limit is None else limit
        self.number = 0

    @property
    def are_over(self) -> bool:
        """Whether from now on there are the defaults."""
        return self.number >= self._limit

    def fraction(self) -> float:
        """Return a number from 0 on, below 1; by default 0."""
        if self.number >= self._limit:
            return 0.0
        self.number += 1
        return self._random()

    def chance(self, probability: float) -> bool:
        """Return whether something of this probability happens; by default it does not."""
        if self.number >= self._limit:
            return False
        self.number += 1
        return self._random() < probability

    def index(self, length: int) -> int:
        """Return one of the numbers below `length`; by default 0."""
        return int(self.fraction() * length) if length > 1 else 0
