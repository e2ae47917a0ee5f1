"""`EventLog`: what a rank has done, in the methods in which nobody waits.

    optimizer.synchronizer.events = mpisgd.event_log.EventLog()      # before the first step
    ...
    logs = [None] * mpisgd.size()
    mpisgd.all_gather_object(logs, optimizer.synchronizer.events.entries)

Without a log, which is the default, nothing is recorded. The entries of a rank are in its order. How those
of several ranks lie to each other is said by places: what ranks use one after another, such as a shard of
a server, has a number that grows with each change, and an entry has the number that it has found or made.
`mpisgd.tools.verification.replay` puts the entries of all ranks in one order, in which their method's paper
repeats them.

A log is of a training from its first step on, among the same ranks and without a state that is loaded. It
has a copy of each gradient.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

__all__ = ["Entry", "EventLog", "Place", "grads_of"]


class Place(NamedTuple):
    """When something happened, for those who used the same thing.

    Attributes:
        what: is used: by one rank after another.
        number: entries of larger numbers came later; those of equal ones change nothing for each other.
    """

    what: str
    number: int


class Entry(NamedTuple):
    """An event, as `mpisgd.methods.paper_kit.Event` has it; its ranks are those of the group.

    Attributes:
        what: its name in the paper.
        ranks: to whom it happened.
        g: the gradient that came with it, by the names of parameters: copies.
        names: of which parameters it is; (): of all.
        place: see `Place`; None: it concerns this rank alone.
    """

    what: str
    ranks: tuple[int, ...]
    g: Mapping[str, Tensor] = {}
    names: tuple[str, ...] = ()
    place: Place | None = None


class EventLog:
    """What a rank has done.

    Attributes:
        entries: in its order.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._counts: Counter[str] = Counter()

    def add(self, entry: Entry) -> None:
        """Append an entry."""
        self.entries.append(entry)

    def count(self, what: str) -> int:
        """Return how many there have been of something; this one counts from the next call on."""
        self._counts[what] += 1
        return self._counts[what] - 1


def grads_of(named: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return copies of the gradients that parameters have."""
    return {name: param.grad.detach().clone() for name, param in named if param.grad is not None}
