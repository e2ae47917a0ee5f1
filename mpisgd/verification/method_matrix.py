"""Methods x situations: programs that cover the product, and what became of each.

    `alone_in`      every situation alone: allowed, refused with a reason, impossible, or a fault
    `pairs_of`      every pair of those that are allowed, up to `PACK` situations in one program
    `packed`        every situation that is not refused, in as few programs as that takes: the quick form

A program with several situations that ends as it must has all of its pairs. One that does not is tried again
in parts. Which ranks and hosts a program has goes round `DIVISIONS`, so that each situation meets each.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import mpisgd
from mpisgd.errors import InvalidArgument
from mpisgd.methods import catalogue
from mpisgd.methods.cast.cast import Cast
from mpisgd.methods.catalogue import text_of
from mpisgd.verification.programs.compare import Verdict
from mpisgd.verification.programs.contract import violation
from mpisgd.verification.programs.execute import has_reference
from mpisgd.verification.programs.option_text import evaluated
from mpisgd.verification.programs.program import Optimizer, Program
from mpisgd.verification.situations import SITUATIONS, Situation, compose, plain_program

__all__ = ["DIVISIONS", "ONE_BIT", "Row", "Tried", "alone_in", "packed", "pairs_of", "row_of", "rows"]

DIVISIONS = ((3, 0), (2, 0), (4, 2), (3, 1), (4, 0), (2, 1), (3, 2), (1, 0))  # ranks, and those of each host
PACK = 5  # situations in one program, at most
MOMENTUM = (("lr", 0.25), ("momentum", 0.5))
ONE_BIT = (
    Optimizer("OneBitAdam", (("lr", 0.01), ("freeze_step", 2))),
    Optimizer("OneBitAdam", (("lr", 0.01), ("freeze_step", 100))),
    Optimizer(
        "ZeroOneAdam",
        (("lr", 0.01), ("var_freeze_step", 3), ("var_update_scaler", 1), ("local_step_scaler", 1)),
    ),
    Optimizer("ZeroOneAdam", (("lr", 0.01), ("var_freeze_step", 100), ("var_update_scaler", 100))),
    Optimizer("OneBitLamb", (("lr", 0.01), ("freeze_step", 2))),
)

Run = Callable[[Program], Verdict]


class Row(NamedTuple):
    """One method.

    Attributes:
        name: in tables.
        optimizer: what `DistributedOptimizer` is asked for.
        exact: whether all its numbers are exact, so that bits are compared.
    """

    name: str
    optimizer: Optimizer
    exact: bool

    def program(self, situations: Sequence[Situation], division: tuple[int, int]) -> Program | None:
        """Return the program in which all of these happen, None where they make no sense together."""
        names = [self.name, *(situation.name for situation in situations), str(division)]
        plain = plain_program(
            self.optimizer, *division, exact=self.exact, seed=zlib.crc32(" ".join(names).encode())
        )
        return compose(plain, situations)


class Tried(NamedTuple):
    """What became of a method in some situations.

    Attributes:
        method: its name.
        situations: their names; none in a plain program.
        kind: "ok", "refused", "impossible": no program can do that; else what is wrong, as in `Verdict`, or
            "missed", where it was broken on purpose and nothing differed.
        text: why.
        has_reference: whether it was compared with one process or a paper, and not with itself alone.
        program: which was run, in a form that `parse` reads; "" if none.
        sabotage: how it was broken on purpose.
    """

    method: str
    situations: tuple[str, ...]
    kind: str
    text: str = ""
    has_reference: bool = False
    program: str = ""
    sabotage: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether something is wrong."""
        return self.kind not in ("ok", "refused", "impossible")


def rows() -> Iterator[Row]:
    """Yield the methods: every example of a strategy and of a compressor, pairs of both, and optimizers."""
    kinds: set[tuple[type, type]] = set()
    for strategy, compressor in catalogue.examples_that_go_together():
        if not strategy.goes_with.repeats.goes:
            continue  # what it does depends on time: its events are replayed
        plain = strategy == mpisgd.Synchronous() or compressor == mpisgd.Compression.none
        pair = type(strategy), type(compressor)
        if pair in kinds and not plain:
            continue
        kinds.add(pair)
        options = []
        if strategy != mpisgd.Synchronous():
            options.append(("strategy", text_of(strategy)))
        if compressor != mpisgd.Compression.none:
            options.append(("compression", text_of(compressor)))
        name = ", ".join(text for _, text in options) or "mpisgd.Synchronous()"
        exact = strategy.goes_with.op.goes and isinstance(compressor, Cast)
        row = Row(name.replace("mpisgd.", ""), Optimizer("SGD", MOMENTUM, (), tuple(options)), exact)
        yield row if _is_defined(row) else _per_parameter(row)
    for optimizer in ONE_BIT:
        given = ", ".join(f"{key}={value}" for key, value in optimizer.settings[1:])
        yield Row(f"{optimizer.name}({given})", optimizer, exact=False)


def row_of(text: str) -> Row:
    """Return the row of a method of the user's own, written as `my_methods:BlockMomentum(steps=2)`.

    Raises:
        InvalidArgument: it is neither a strategy nor a compressor.
    """
    expression = text.replace(":", ".", 1)
    value = evaluated(expression)
    if not isinstance(value, mpisgd.Strategy | mpisgd.Compressor):
        raise InvalidArgument(f"--method: {text} is neither a strategy nor a compressor")
    option = "strategy" if isinstance(value, mpisgd.Strategy) else "compression"
    return Row(text, Optimizer("SGD", MOMENTUM, (), ((option, expression),)), exact=False)


def _is_defined(row: Row) -> bool:
    program = row.program((), DIVISIONS[0])
    return program is not None and has_reference(program)


def _per_parameter(row: Row) -> Row:
    """Return the method with a bucket for each parameter: then papers of what it draws know its buckets."""
    options = (*row.optimizer.options, ("bucket_cap_bytes", "1"))
    return row._replace(optimizer=replace(row.optimizer, options=options))


def alone_in(row: Row, first: int, run: Run) -> Iterator[Tried]:
    """Try a method in no situation, and in each alone.

    Args:
        row: the method.
        first: where in `DIVISIONS` to begin, another place for each method.
        run: runs a program.
    """
    for number, situations in enumerate([(), *((each,) for each in SITUATIONS.values())]):
        yield _try(row, situations, first + number, run)


def pairs_of(row: Row, singles: Sequence[Tried], first: int, run: Run) -> Iterator[Tried]:
    """Try a method in all pairs of the situations in which it was right, several pairs at once.

    Args:
        row: the method.
        singles: what `alone_in` found.
        first: see there.
        run: runs a program.
    """
    allowed = [SITUATIONS[each.situations[0]] for each in singles if each.kind == "ok" and each.situations]
    left = set(itertools.combinations([situation.name for situation in allowed], 2))
    number = first
    while left:
        seed = min(left, key=lambda pair: (list(SITUATIONS).index(pair[0]), list(SITUATIONS).index(pair[1])))
        number += 1
        pack = _grown(row, [SITUATIONS[name] for name in seed], allowed, number, run, left)
        covered = {pair for pair in itertools.combinations([each.name for each in pack], 2) if pair in left}
        left -= covered
        tried = _try(row, pack, number, run)
        yield tried
        if len(pack) > 2 and tried.kind != "ok":
            for pair in sorted(covered):
                yield _try(row, [SITUATIONS[name] for name in pair], number, run)


def packed(row: Row, number: int, run: Run) -> Iterator[Tried]:
    """Try a method in every situation once, several at once; those that are refused in no program.

    Args:
        row: the method.
        number: draws which situations come together, another one for each method.
        run: runs a program.
    """
    left = list(SITUATIONS.values())
    random.Random(number).shuffle(left)
    yield _try(row, (), number, run)
    while left:
        first = left.pop(0)
        number += 1
        alone, why = _program(row, [first], number)
        if alone is None:
            yield Tried(row.name, (first.name,), "impossible", why)
            continue
        if (made := _made(alone, row, run)).kind == "refused":
            yield Tried(row.name, (first.name,), made.kind, made.text, program=repr(alone))
            continue
        pack = _grown(row, [first], left, number, run)
        left = [situation for situation in left if situation not in pack]
        tried = _try(row, pack, number, run)
        yield tried
        if len(pack) > 1 and tried.kind != "ok":
            yield from (_try(row, [situation], number, run) for situation in pack)


def _made(program: Program, row: Row, run: Run) -> Verdict:
    """Return whether optimizers can be made, where they are asked for more than those of the row."""
    if all(optimizer.options == row.optimizer.options for optimizer in program.optimizers):
        return Verdict("ok")
    return run(replace(program, events=()))


def _asked(program: Program) -> object:
    """Return what it may depend on whether optimizers are refused."""
    optimizers = [replace(optimizer, layers=()) for optimizer in program.optimizers]
    return optimizers, {(layer.kind, layer.dtype) for layer in program.layers}


def _grown(
    row: Row,
    pack: Sequence[Situation],
    others: Sequence[Situation],
    number: int,
    run: Run,
    left: Collection[tuple[str, str]] | None = None,
) -> list[Situation]:
    """Return a pack with more situations, that can be and can still be compared as without them.

    Args:
        row: the method.
        pack: what is in it.
        others: what may be added.
        number: see `packed`.
        run: runs a program: with no events, to see whether it is refused.
        left: pairs that are to be covered, of which a situation must bring one with each in the pack; None:
            whatever can be is added.
    """
    grown, order = list(pack), list(SITUATIONS)
    before, _ = _program(row, grown, number)
    if before is None:
        return grown
    is_compared = has_reference(before)
    for situation in others:
        if len(grown) == PACK:
            break
        pairs = {tuple(sorted((each.name, situation.name), key=order.index)) for each in grown}
        if situation in grown or (left is not None and not all(pair in left for pair in pairs)):
            continue
        after, _ = _program(row, [*grown, situation], number)
        if after is None or has_reference(after) != is_compared:
            continue
        if left is not None or _asked(after) == _asked(before) or _made(after, row, run).kind == "ok":
            grown.append(situation)
            before = after
    return sorted(grown, key=lambda each: order.index(each.name))


def _program(row: Row, situations: Sequence[Situation], number: int) -> tuple[Program | None, str]:
    """Return a program on the first division, from `number` on, that has one, or why there is none."""
    why = "makes no sense"
    for place in range(len(DIVISIONS)):
        program = row.program(situations, DIVISIONS[(number + place) % len(DIVISIONS)])
        if program is not None:
            why = violation(program)
            if not why:
                return program, ""
    return None, why


def _try(row: Row, situations: Sequence[Situation], number: int, run: Run) -> Tried:
    names = tuple(situation.name for situation in situations)
    program, why = _program(row, situations, number)
    if program is None:
        return Tried(row.name, names, "impossible", why)
    verdict = run(program)
    return Tried(row.name, names, verdict.kind, verdict.text, has_reference(program), repr(program))
