"""Which situations come together in a program, so that few programs have all of them, or all pairs.

    `alone_in`      every situation alone: allowed, refused with a reason, impossible, or a fault
    `pairs_of`      every pair of those that are allowed, up to `PACK` situations in one program
    `packed`        every situation that is not refused, in as few programs as that takes: the quick form

A program with several situations that ends as it must has all of its pairs. One that does not is tried again
in parts. No program has a pair that could be compared with one process, or with a paper, where another of its
situations prevents that.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mpisgd.tools.verification.method_matrix import DIVISIONS, Division, Row, Run, Tried, program_of, try_in
from mpisgd.tools.verification.programs.compare import Verdict
from mpisgd.tools.verification.programs.execute import has_reference
from mpisgd.tools.verification.programs.program import Program, parse
from mpisgd.tools.verification.situations import SITUATIONS, Situation

__all__ = ["alone_in", "packed", "pairs_of"]

PACK = 8  # situations in one program, at most
ORDER = {name: place for place, name in enumerate(SITUATIONS)}

Pair = tuple[str, str]


def alone_in(row: Row, first: int, run: Run, divisions: Sequence[Division] = DIVISIONS) -> Iterator[Tried]:
    """Try a method in no situation, and in each alone.

    Args:
        row: the method.
        first: where in the divisions to begin, another place for each method.
        run: runs a program.
        divisions: how many ranks, on which hosts.
    """
    for number, situations in enumerate([(), *((each,) for each in SITUATIONS.values())]):
        yield try_in(row, situations, first + number, run, divisions)


def packed(row: Row, number: int, run: Run, divisions: Sequence[Division] = DIVISIONS) -> Iterator[Tried]:
    """Try a method in every situation once, several at once; those that are refused in no program.

    Args:
        row: the method.
        number: draws which situations come together, another one for each method.
        run: runs a program.
        divisions: see `alone_in`; that which was taken longest ago comes first.
    """
    left, begin = list(SITUATIONS.values()), number % len(divisions)
    random.Random(number).shuffle(left)
    yield try_in(row, (), number, run, divisions)
    order = [*divisions[begin + 1 :], *divisions[: begin + 1]]
    while left:
        first = left.pop(0)
        alone, why = program_of(row, [first], 0, order)
        if alone is None:
            yield Tried(row.name, (first.name,), "impossible", why)
            continue
        if (made := _made(alone, row, run)).kind == "refused":
            yield Tried(row.name, (first.name,), made.kind, made.text, program=repr(alone))
            continue
        pack = _filled(row, first, alone, left, run, order)
        left = [situation for situation in left if situation not in pack]
        tried = try_in(row, pack, 0, run, order)
        yield tried
        if len(pack) > 1 and tried.kind != "ok":
            yield from (try_in(row, [situation], 0, run, order) for situation in pack)
        taken = parse(tried.program)
        order.sort(key=(taken.ranks, taken.ranks_per_host).__eq__)


def _filled(
    row: Row,
    first: Situation,
    alone: Program,
    others: Sequence[Situation],
    run: Run,
    divisions: Sequence[Division],
) -> list[Situation]:
    """Return a pack with more situations, that can be and can still be compared as without them."""
    pack, before, is_compared = [first], alone, has_reference(alone)
    for situation in others:
        if len(pack) == PACK:
            break
        after, _ = program_of(row, [*pack, situation], 0, divisions)
        if after is None or has_reference(after) != is_compared:
            continue
        if _asked(after) == _asked(before) or _made(after, row, run).kind == "ok":
            pack.append(situation)
            before = after
    return sorted(pack, key=lambda each: ORDER[each.name])


def _asked(program: Program) -> object:
    """Return the facts on which it depends whether optimizers are refused."""
    optimizers = [replace(optimizer, layers=()) for optimizer in program.optimizers]
    return optimizers, {(layer.kind, layer.dtype) for layer in program.layers}


def _made(program: Program, row: Row, run: Run) -> Verdict:
    """Return whether optimizers can be made, where they are asked for more than those of the row."""
    if all(optimizer.options == row.optimizer.options for optimizer in program.optimizers):
        return Verdict("ok")
    return run(replace(program, events=()))


# --- pairs ----------------------------------------------------------------------------------------------


def pairs_of(
    row: Row, singles: Sequence[Tried], first: int, run: Run, divisions: Sequence[Division] = DIVISIONS
) -> Iterator[Tried]:
    """Try a method in all pairs of the situations in which it was right, several pairs at once.

    Args:
        row: the method.
        singles: what `alone_in` found.
        first: see there.
        run: runs a program.
        divisions: see there.
    """
    allowed = [SITUATIONS[each.situations[0]] for each in singles if each.kind == "ok" and each.situations]
    left: dict[Pair, bool] = {}  # whether there is something to compare it with
    number = first
    asking = {each.name for each in allowed if _asks(row, each)}
    for one, other in itertools.combinations(allowed, 2):
        number += 1
        program, why = program_of(row, (one, other), number, divisions)
        names = (one.name, other.name)
        if program is None:
            yield Tried(row.name, names, "impossible", why)
        elif {*names} <= asking and (made := _made(program, row, run)).kind == "refused":
            yield Tried(row.name, names, made.kind, made.text, program=repr(program))
        else:
            left[names] = has_reference(program)
    possible = {*left}
    while left:
        number += 1
        pack = _grown(row, left, possible, number, divisions)
        tried = try_in(row, pack, number, run, divisions)
        parts = [tried] if tried.kind == "ok" else _shrunk(row, pack, tried, number, run, divisions)
        yield from parts
        for part in parts:
            _cross_off(left, part)
        if parts[-1].kind != "ok":
            possible -= {*itertools.combinations(parts[-1].situations, 2)}  # other packs go without it


def _cross_off(left: dict[Pair, bool], tried: Tried) -> None:
    """Take the pairs away that a program had; where it failed, also those that it could not compare."""
    for pair in itertools.combinations(tried.situations, 2):
        if pair in left and (tried.kind != "ok" or tried.has_reference or not left[pair]):
            del left[pair]


def _shrunk(
    row: Row, pack: Sequence[Situation], failed: Tried, number: int, run: Run, divisions: Sequence[Division]
) -> list[Tried]:
    """Try less of a pack that failed; return what ends well, and last the least that fails.

    Args:
        row: the method.
        pack: what failed.
        failed: how.
        number: see `alone_in`.
        run: see there.
        divisions: see there.
    """
    well = []
    for situation in pack:
        fewer = [SITUATIONS[name] for name in failed.situations if name != situation.name]
        if len(fewer) < 2:
            break
        tried = try_in(row, fewer, number, run, divisions)
        if tried.kind == failed.kind:
            failed = tried
        elif tried.kind == "ok":
            well.append(tried)
    return [*well, failed]


def _asks(row: Row, situation: Situation) -> bool:
    """Return whether optimizers might be refused by what a situation asks them for."""
    plain, changed = row.program((), DIVISIONS[0]), row.program([situation], DIVISIONS[0])
    return plain is not None and changed is not None and _asked(plain) != _asked(changed)


def _grown(
    row: Row, left: dict[Pair, bool], possible: set[Pair], number: int, divisions: Sequence[Division]
) -> list[Situation]:
    """Return the first pair that is left, with the situations that bring most of the others into its program.

    Args:
        row: the method.
        left: pairs that no program has yet; see `pairs_of`.
        possible: all pairs that may be in a program.
        number: see `alone_in`.
        divisions: see there.
    """
    seed = next(iter(left))
    is_compared = left[seed]
    pack = [SITUATIONS[name] for name in seed]
    tried = {*seed}
    partners = defaultdict[str, list[str]](list)  # of each, what it is in no program with yet
    for (one, other), compared in left.items():
        if compared == is_compared:
            partners[one].append(other)
            partners[other].append(one)
    while len(pack) < PACK:
        names = [each.name for each in pack]
        gains = Counter(partner for name in names for partner in partners[name])
        candidates = (
            name
            for name in sorted(gains.keys() - tried, key=lambda name: (-gains[name], ORDER[name]))
            if all(_pair(name, each) in possible for each in names)
        )
        if (best := next(candidates, None)) is None:
            break
        tried.add(best)
        grown = sorted([*pack, SITUATIONS[best]], key=lambda each: ORDER[each.name])
        program, _ = program_of(row, grown, number, divisions)
        if program is not None and has_reference(program) == is_compared:
            pack = grown
    return pack


def _pair(one: str, other: str) -> Pair:
    return (one, other) if ORDER[one] < ORDER[other] else (other, one)
