"""What ranks are told when they are not about to do the same: a sentence, then what each was about to do."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mpisgd import config
from mpisgd.arguments import ranks_text
from mpisgd.errors import CollectiveMismatch

__all__ = ["COMPARED", "Intention", "in_short", "mismatch_of"]

UNEVEN = (
    "the usual cause is that the ranks have unequal numbers of batches: train inside `with "
    "optimizer.join():`, or give all as many, as DistributedSampler(drop_last=True) does"
)
ON_SOME_RANKS = "the usual cause is a call that only some ranks make, such as one behind `if rank() == 0`"
# What messages call an operation of which the program has not called a function by its name.
PHRASES = {
    "gradients": "reduces gradients",
    "shutdown": "has ended its program",
    "join": "is inside join()",
}
ENDED_BEFORE_OTHERS = {"gradients", "shutdown"}
LABELS = {"when": "step"}  # of what ranks compare, in sentences
COMPARED = ("op", "dtype", "shape", "root", "device", "owner", "when")
OWNER, WHEN = COMPARED.index("owner"), COMPARED.index("when")
SHOWN_LINES = 5
SHOWN_ARGUMENTS = 6  # of an operation with more, those that differ are shown, or the first ones
# What tells people nothing: it is shown where nothing else differs.
HASHES = re.compile(r"( of plan [0-9a-f-]+|hash [0-9a-f]+)$")


class Intention(NamedTuple):
    """What a rank was about to do.

    Attributes:
        exit_code: with which it leaves its program by `sys.exit`, 0 if it does not.
        number: of the operation in its group.
        past: the hash of all operations before it.
        kind: of the operation.
        fields: the values of COMPARED, in words.
        text: the operation.
        site: where it was called.
        detail: more about it, in lines.
    """

    exit_code: int
    number: int
    past: int
    kind: str
    fields: tuple[str, ...]
    text: str
    site: str
    detail: str


def mismatch_of(group: str, told: Mapping[int, Intention]) -> CollectiveMismatch:
    """Return the error for what the ranks of a group were about to do, by rank; the same on all of them."""
    described: dict[tuple[int, str, str, str], list[int]] = defaultdict(list)
    exits: dict[int, list[int]] = defaultdict(list)
    for rank, mine in told.items():
        described[mine.number, mine.site, mine.text, mine.detail].append(rank)
        if mine.exit_code:
            exits[mine.exit_code].append(rank)
    common = set.intersection(*(set(detail.splitlines()) for *_, detail in described))
    lines = [f"{ranks_text(ranks)} left the program by sys.exit({code})" for code, ranks in exits.items()]
    sentence = summary(told)
    if exits:
        sentence = sentence.partition("; the usual cause")[0]  # the cause is known
    lines += filter(None, [sentence])
    lines.append(f"the ranks of group '{group}' do not agree on what comes next:")
    shown = _shown(told.values())
    for (number, site, text, detail), ranks in sorted(described.items(), key=lambda item: item[1]):
        lines.append(f"  {ranks_text(ranks)} at {site}: operation {number}, {shown[text]}")
        lines += [f"      {line}" for line in _only_here(detail, common)]
    error = CollectiveMismatch("\n".join(lines))
    error.agreed_before = len({mine.past for mine in told.values()}) == 1
    error.exit_code = next(iter(exits), error.exit_code)
    whats = {(mine.kind, mine.fields[OWNER].partition(" (")[0]) for mine in told.values()}
    error.whens = tuple(sorted({mine.fields[WHEN] for mine in told.values()})) if len(whats) == 1 else ()
    return error


def summary(told: Mapping[int, Intention]) -> str:
    """Return in a sentence what differs; "" where it is not to be seen in what the ranks do now."""
    by_kind = _ranks_by((mine.kind, rank) for rank, mine in told.items())
    if len(by_kind) > 1:
        sentence = ", ".join(f"{ranks_text(ranks)} {_does(kind, ranks)}" for kind, ranks in by_kind.items())
        if "shutdown" in by_kind:
            return f"{sentence}; {UNEVEN if by_kind.keys() == ENDED_BEFORE_OTHERS else ON_SOME_RANKS}"
        return sentence
    (kind,) = by_kind
    for place, name in enumerate(COMPARED):
        values = _ranks_by((mine.fields[place], rank) for rank, mine in told.items())
        if len(values) > 1 and name == "owner" and len({value.partition(" (")[0] for value in values}) > 1:
            return f"{kind} is of different optimizers, or of none: see each rank's line"
        if len(values) > 1 and name == "owner":
            break
        if len(values) > 1:
            differ = ", ".join(f"{value or 'none'} on {ranks_text(ranks)}" for value, ranks in values.items())
            return f"{LABELS.get(name, name)} of {kind} differs: {differ}"
    if len({mine.detail for mine in told.values()}) > 1:
        return f"{kind}: the parameters differ; those that differ are listed below each rank"
    by_argument = _ranks_by((text, rank) for rank, mine in told.items() for text in _arguments(mine.text))
    apart = [
        f"{argument} on {ranks_text(ranks)}"
        for argument, ranks in by_argument.items()
        if len(ranks) < len(told) and not HASHES.search(argument)
    ]
    return f"the arguments of {kind} differ: {', '.join(apart)}" if apart else ""


def _does(kind: str, ranks: Sequence[int]) -> str:
    phrase = PHRASES.get(kind, f"calls {kind}")
    if len(ranks) == 1:
        return phrase
    plural = {"has": "have", "its": "their", "reduces": "reduce", "calls": "call", "is": "are"}
    return " ".join(plural.get(word, word) for word in phrase.split(" "))


def _ranks_by(pairs: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for value, rank in pairs:
        found[value].append(rank)
    return found


def _shown(told: Iterable[Intention]) -> dict[str, str]:
    """Return the fields of each operation that are shown: all if MPISGD_FULL_TRACEBACK is set."""
    texts: dict[str, set[str]] = defaultdict(set)
    for mine in told:
        texts[mine.kind].add(mine.text)
    if config.full_traceback():
        return {text: text for alike in texts.values() for text in alike}
    return {text: shown for alike in texts.values() for text, shown in _shortened(sorted(alike)).items()}


def _shortened(texts: Sequence[str]) -> dict[str, str]:
    """Return operations of one kind without hashes, and long ones without what all of them have."""
    arguments = {text: _arguments(text) for text in texts}
    plain = {
        text: list(filter(None, (HASHES.sub("", one) for one in ones))) for text, ones in arguments.items()
    }
    if len(set(map(tuple, plain.values()))) < len(texts):
        plain = arguments  # hashes alone differ
    common = set.intersection(*map(set, plain.values()))
    shown = {}
    for text, ones in plain.items():
        told = ones
        if len(ones) > SHOWN_ARGUMENTS:
            told = [*([one for one in ones if one not in common] or ones[:SHOWN_ARGUMENTS]), "..."]
        shown[text] = f"{text.partition('(')[0]}({', '.join(told)})"
    return shown


def in_short(text: str) -> str:
    """Return an operation in words, without hashes and with its first arguments only."""
    return text if config.full_traceback() else _shortened([text])[text]


def _arguments(text: str) -> list[str]:
    """Return the arguments of an operation in words; there may be commas within brackets."""
    found: list[str] = []
    for piece in text.partition("(")[2].removesuffix(")").split(", "):
        if found and any(found[-1].count(left) > found[-1].count(right) for left, right in ("()", "[]")):
            found[-1] += f", {piece}"
        else:
            found.append(piece)
    return found


def _only_here(detail: str, common: set[str]) -> list[str]:
    """Return the lines of `detail` that not all ranks have; the first few of many."""
    lines = [line for line in detail.splitlines() if line not in common]
    more = [f"... and {len(lines) - SHOWN_LINES} more"] if len(lines) > SHOWN_LINES else []
    return lines[:SHOWN_LINES] + more
