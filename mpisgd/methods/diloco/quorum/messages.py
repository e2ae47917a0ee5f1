"""What a learner of `DiLoCo(quorum=)` and the rank with the outer parameters tell each other."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ASK_TAG", "BEHIND_TAG", "CLOSE", "DONE", "ENTER", "FAILED", "FEW", "GONE", "MINE_TAG", "MIXED"]
__all__ += ["NEWEST_TAG", "OTHER_STATE", "SAVE", "STALLED", "TAKE", "TOLD_TAG", "Said", "Told"]

ASK_TAG, MINE_TAG, TOLD_TAG, NEWEST_TAG = 1, 2, 3, 4
BEHIND_TAG = 5  # of the version of the outer parameters after a step without the learner
# What a learner says: here are my parameters; I train no more; I end the exchanges, as all others do; my
# state is being saved; one of my ranks was lost. The first three are answered.
ENTER, DONE, CLOSE, SAVE, GONE = 1, 2, 3, 4, 5
# What it is told: here are the outer parameters; or why there are none.
TAKE, FEW, MIXED, FAILED, STALLED, OTHER_STATE = 1, 2, 3, 4, 5, 6


class Said(NamedTuple):
    """What a learner says.

    Attributes:
        kind: see above; after ENTER its parameters follow.
        base: the version of the outer parameters that it began from.
        steps, examples, is_counted: see `Contribution`; after SAVE `steps` are all that it has taken.
        full_us: how many microseconds it has trained, where it has taken all its steps since then; else 0.
    """

    kind: int = 0
    base: int = 0
    steps: int = 0
    examples: int = 0
    is_counted: int = 0
    full_us: int = 0

    @property
    def words(self) -> Tensor:
        """The message."""
        return torch.tensor(self, dtype=torch.int64)


class Told(NamedTuple):
    """What it is told.

    Attributes:
        kind: see above; after TAKE they follow.
        version: of the outer parameters.
        entered: number, among all that has happened to these, of its own entering.
        taken: of its taking them.
        left: how many learners there are.
        late: the first that has said nothing for too long.
        left_us: how many microseconds the learner trains until it comes next; -1: all its steps.
    """

    kind: int = 0
    version: int = 0
    entered: int = 0
    taken: int = 0
    left: int = 0
    late: int = 0
    left_us: int = -1

    @property
    def words(self) -> Tensor:
        """The message."""
        return torch.tensor(self, dtype=torch.int64)
