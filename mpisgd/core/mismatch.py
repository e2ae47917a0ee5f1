"""What ranks are told when they are not about to do the same: a sentence, then what each was about to do."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mpisgd.arguments import ranks_text
from mpisgd.errors import CollectiveMismatch

__all__ = ["COMPARED", "Intention", "mismatch_of"]

UNEVEN = (
    "the usual cause is that the ranks have unequal numbers of batches: give all as many, as "
    "DistributedSampler(drop_last=True) does"
)
# What messages call an operation of which the program has not called a function by its name.
PHRASES = {"gradients": "reduces gradients", "shutdown": "has ended its program"}
COMPARED = ("op", "dtype", "shape", "root", "device", "owner", "when")
SHOWN_LINES = 5


class Intention(NamedTuple):
    """What a rank was about to do.

    Attributes:
        exit_code: with which it leaves its program by `sys.exit`, 0 if it does not.
        number: of the operation in its group.
        kind: of the operation.
        fields: the values of COMPARED, in words.
        text: the operation, and where it was called.
        detail: more about it, in lines.
    """

    exit_code: int
    number: int
    kind: str
    fields: tuple[str, ...]
    text: str
    detail: str


def mismatch_of(group: str, told: Mapping[int, Intention]) -> CollectiveMismatch:
    """Return the error for what the ranks of a group were about to do, by rank; the same on all of them."""
    described: dict[tuple[int, str, str], list[int]] = defaultdict(list)
    exits: dict[int, list[int]] = defaultdict(list)
    for rank, mine in told.items():
        described[mine.number, mine.text, mine.detail].append(rank)
        if mine.exit_code:
            exits[mine.exit_code].append(rank)
    common = set.intersection(*(set(detail.splitlines()) for _, _, detail in described))
    lines = [f"{ranks_text(ranks)} left the program by sys.exit({code})" for code, ranks in exits.items()]
    lines += filter(None, [summary(told)])
    lines.append(f"the ranks of group '{group}' do not agree on what comes next:")
    for (number, text, detail), ranks in sorted(described.items(), key=lambda item: item[1]):
        lines.append(f"  {ranks_text(ranks)}: operation {number}, {text}")
        lines += [f"      {line}" for line in _only_here(detail, common)]
    error = CollectiveMismatch("\n".join(lines))
    error.exit_code = next(iter(exits), error.exit_code)
    return error


def summary(told: Mapping[int, Intention]) -> str:
    """Return in a sentence what differs; "" where it is not to be seen in what the ranks do now."""
    by_kind = _ranks_by((mine.kind, rank) for rank, mine in told.items())
    if len(by_kind) > 1:
        sentence = ", ".join(f"{ranks_text(ranks)} {_does(kind, ranks)}" for kind, ranks in by_kind.items())
        return f"{sentence}; {UNEVEN}" if by_kind.keys() == PHRASES.keys() else sentence
    (kind,) = by_kind
    for place, name in enumerate(COMPARED):
        values = _ranks_by((mine.fields[place], rank) for rank, mine in told.items())
        if len(values) > 1 and name == "owner":
            return f"{kind} is of different optimizers, or of none: see each rank's line"
        if len(values) > 1:
            differ = ", ".join(f"{value or 'none'} on {ranks_text(ranks)}" for value, ranks in values.items())
            return f"{name} of {kind} differs: {differ}"
    return ""


def _does(kind: str, ranks: Sequence[int]) -> str:
    phrase = PHRASES.get(kind, f"calls {kind}")
    if len(ranks) == 1:
        return phrase
    plural = {"has": "have", "its": "their", "reduces": "reduce", "calls": "call"}
    return " ".join(plural.get(word, word) for word in phrase.split(" "))


def _ranks_by(pairs: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for value, rank in pairs:
        found[value].append(rank)
    return found


def _only_here(detail: str, common: set[str]) -> list[str]:
    """Return the lines of `detail` that not all ranks have; the first few of many."""
    lines = [line for line in detail.splitlines() if line not in common]
    more = [f"... and {len(lines) - SHOWN_LINES} more"] if len(lines) > SHOWN_LINES else []
    return lines[:SHOWN_LINES] + more
