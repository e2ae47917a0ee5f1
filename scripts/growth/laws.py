"""By which law a count grows with hosts and ranks: the slowest one that nothing counted exceeds."""

import math
from collections.abc import Callable, Mapping

from growth.runs import Count, Shape

# In the order of their growth. Between few hosts each sends to each, so that these are those of more.
LAWS: Mapping[str, Callable[[Shape], float]] = {
    "1": lambda shape: 1.0,
    "log hosts": lambda shape: math.log2(shape.hosts),
    "log ranks": lambda shape: math.log2(shape.size),
    "hosts": lambda shape: shape.hosts,
    "ranks": lambda shape: shape.size,
    "hosts²": lambda shape: shape.hosts**2,
    "ranks²": lambda shape: shape.size**2,
}
# What a rank may do for a call, a step or once in a job.
ALLOWED = {
    "messages": "log ranks",
    "message_bytes": "ranks",
    "calls": "1",
    "call_bytes": "ranks",
    "instructions": "ranks",
}
# A count may exceed its law by such a share, and by so many: numbers take more digits.
SLACK, LEAST = 0.06, 0.5


def law_of(counts: Mapping[Shape, int]) -> str | None:
    """Return the slowest law that counts do not exceed, from the first one on; None: they exceed all."""
    base, least = next(iter(counts.items()))
    for name, law in LAWS.items():
        if all(
            count <= least * (1 + SLACK) * law(shape) / law(base) + LEAST for shape, count in counts.items()
        ):
            return name
    return None


def laws_of(counts: Mapping[Shape, Mapping[str, Count]]) -> dict[str, dict[str, str | None]]:
    """Return by act the law of each count, of acts that were done on all of some hosts."""
    acts = set.intersection(*(set(each) for each in counts.values()))
    return {
        act: {
            field: law_of({shape: getattr(each[act], field) for shape, each in counts.items()})
            for field in ALLOWED
        }
        for act in next(iter(counts.values()))
        if act in acts
    }
