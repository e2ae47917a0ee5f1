"""`Sabotage`: ways to break a training on purpose, to see that its comparison notices."""

import enum

__all__ = ["Sabotage"]


class Sabotage(enum.Enum):
    """What is wrong, on the last rank or on all."""

    NONE = "none"
    NO_COMMUNICATION = "no communication"  # every rank is alone in its group
    WRONG_SCALE = "wrong scale"  # the last rank's loss counts one and a half times, with the wrong sign
    STALE = "stale buffer"  # the last rank's parameters, or gradients, are those of a step before, once
    OTHER_DATA = "another seed"  # the last rank draws other examples

    def applies(self, size: int) -> bool:
        """Return whether it changes anything with so many ranks."""
        return self is not Sabotage.NO_COMMUNICATION or size > 1
