"""`in_order`: what all ranks have recorded while nobody waited, in an order in which a paper can repeat it.

for event in in_order(dict(enumerate(logs))):
    run.event(event)            # of a `PaperRun` of all ranks
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence

from mpisgd.errors import InvalidArgument
from mpisgd.event_log import Entry
from mpisgd.methods.paper_kit import Event, Vec

__all__ = ["in_order"]


def in_order(logs: Mapping[int, Sequence[Entry]]) -> Iterator[Event]:
    """Yield the events of all ranks: those of a rank in its order, and those of a place by their numbers.

    There may be several such orders; events that are in another one in them concern different things.

    Args:
        logs: `EventLog.entries` by rank. Of ranks whose next events might be either's, the first goes on.

    Raises:
        InvalidArgument: there is none, since a log lacks something; after what could be put in order.
    """
    left = {rank: deque(entries) for rank, entries in logs.items()}
    numbers: dict[str, Counter[int]] = defaultdict(Counter)  # of what is left, by place
    for entries in logs.values():
        for entry in entries:
            if entry.place is not None:
                numbers[entry.place.what][entry.place.number] += 1

    def is_next(entry: Entry) -> bool:
        return entry.place is None or entry.place.number == min(numbers[entry.place.what])

    while any(left.values()):
        ready = [entries for entries in left.values() if entries and is_next(entries[0])]
        if not ready:
            waiting = {rank: entries[0]._replace(g={}) for rank, entries in left.items() if entries}
            raise InvalidArgument(f"in_order: logs lack what must come before one of {waiting}")
        entry = ready[0].popleft()
        if entry.place is not None:
            counts = numbers[entry.place.what]
            counts[entry.place.number] -= 1
            if not counts[entry.place.number]:
                del counts[entry.place.number]
        yield Event(entry.what, entry.ranks, Vec(entry.g), entry.names)
