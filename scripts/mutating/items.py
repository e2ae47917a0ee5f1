"""`Item`: the least part of a check that can be run alone, and how it is run in this process.

The checks:

    matrix      the programs of `verify --quick`: methods in situations, whose ranks are threads
    cells       the modes of `verify --quick`, in a job of 3 ranks
    fuzz        drawn programs, on threads, too
    pairs       the programs of `verify`: pairs of situations of methods whose quick programs execute the line
    schedules   drawn schedules of the engine
    unit        files of tests/unit, in one process
    mpi         files of tests/mpi, in a job of 3 ranks

Nothing here imports mpisgd before it is called: each fault is imported in a process of its own.
"""

from __future__ import annotations

import contextlib
import io
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

__all__ = [
    "ARITHMETIC",
    "CHECKS",
    "COMMANDS",
    "ENGINE",
    "IN_PROCESS",
    "REFUSED",
    "ROOMS",
    "Item",
    "items_in_process",
    "kinds_of",
    "runner",
    "try_pairs",
]

# By room of the package: which score it counts for.
ARITHMETIC = ("collectives", "compress", "gradients", "methods", "optim", "parameters", "sharding")
ENGINE = ("checkpoint", "core", "elastic", "job", "monitor", "threads", "transport")
ROOMS = (*ARITHMETIC, *ENGINE)

IN_PROCESS = ("fuzz", "matrix", "rows", "schedules")
OF_METHODS = ("matrix", "rows")  # programs: of one example of each kind, and of all others
COMMANDS = ("unit", "cells", "modes", "mpi")
DERIVED = "pairs"
# What counts for the score of each kind of rooms, in the order in which it is run; what only tells what else
# would have found it has no name.
CHECKS = {
    "arithmetic": {
        "verify --quick": ("matrix", "cells"),
        "verify and fuzz": ("fuzz", "rows", "pairs", "modes"),
        "": ("unit",),
    },
    "engine": {"all tests": ("unit", "schedules", "mpi"), "": ("fuzz", "matrix", "cells")},
}
REFUSED = "refused"
FUZZ_PROGRAMS, SCHEDULES, SEED = 200, 150, 1
PAIRS_LIMIT_S = 90.0  # of `verify`, which takes twenty minutes for all methods
BETWEEN = " | "  # the kind of a method and its program


class Item(NamedTuple):
    """One part of a check.

    Attributes:
        check: of which it is a part.
        text: a program, the kind of a method and its program, the seed of a schedule, or a file of tests.
    """

    check: str
    text: str

    @property
    def name(self) -> str:
        """What it is known by."""
        return f"{self.check} {self.text}"

    @classmethod
    def named(cls, name: str) -> Item:
        """Return the item of a name."""
        check, _, text = name.partition(" ")
        return cls(check, text)


def items_in_process() -> Iterator[Item]:
    """Yield the parts of the checks that need no job; the programs of the matrix are run to find them."""
    from fuzzing.draw import draw
    from fuzzing.draw_losses import loses, with_losses

    from mpisgd.tools.verification.covering import packed
    from mpisgd.tools.verification.matrix_report import kind_of, one_of_each_kind
    from mpisgd.tools.verification.method_matrix import rows
    from mpisgd.tools.verification.programs.compare import Verdict
    from mpisgd.tools.verification.programs.program import Program
    from mpisgd.tools.verification.programs.threads_backend import ThreadsBackend

    for seed in range(SEED, SEED + FUZZ_PROGRAMS):
        program = draw(seed)
        yield Item("fuzz", repr(with_losses(program) if loses(seed, 0.1) else program))
    yield from (Item("schedules", str(seed)) for seed in range(SEED, SEED + SCHEDULES))
    backend, found = ThreadsBackend(), dict[str, None]()

    def noted(program: Program) -> Verdict:
        found[repr(program)] = None
        return backend.run(program)

    everything = [*rows()]
    quick = one_of_each_kind(everything)  # as `verify --quick`
    others = [row for row in everything if row not in quick]
    for check, chosen in zip(OF_METHODS, (quick, others), strict=True):
        for number, row in enumerate(chosen):
            for _ in packed(row, number, noted):
                yield from (Item(check, f"{kind_of(row.name)}{BETWEEN}{text}") for text in found)
                found.clear()


def runner() -> Callable[[Item], str]:
    """Return what runs an item in this process.

    It returns what is wrong, "" if nothing is, REFUSED if the program is refused: that is a fault where it
    was not before.
    """
    from fuzzing.schedules import check, draw

    from mpisgd.tools.verification.programs.program import parse
    from mpisgd.tools.verification.programs.threads_backend import ThreadsBackend

    backend = ThreadsBackend()

    def run(item: Item) -> str:
        if item.check == "schedules":
            with contextlib.redirect_stderr(io.StringIO()):
                return check(draw(int(item.text), writes=False))
        verdict = backend.run(parse(item.text.rpartition(BETWEEN)[2]))
        if verdict.kind == "refused":
            return REFUSED
        return f"{verdict.kind}: {verdict.text}" if verdict.is_fault else ""

    return run


def kinds_of(items: Iterable[Item]) -> set[str]:
    """Return the kinds of methods that programs of the matrix have."""
    return {item.text.partition(BETWEEN)[0] for item in items if item.check in OF_METHODS}


def try_pairs(kinds: Collection[str], seed: int, limit_s: float = PAIRS_LIMIT_S) -> str:
    """Try pairs of situations as `verify` does, until something is wrong.

    Args:
        kinds: of methods, whose examples are tried in an order that is drawn.
        seed: of that.
        limit_s: seconds after which no other program is begun.

    Returns:
        What is wrong, "" if nothing is.
    """
    from mpisgd.tools.verification.covering import alone_in, pairs_of
    from mpisgd.tools.verification.matrix_report import kind_of
    from mpisgd.tools.verification.method_matrix import Row, Tried, rows
    from mpisgd.tools.verification.programs.threads_backend import ThreadsBackend

    run, until_s = ThreadsBackend().run, time.monotonic() + limit_s

    def programs(row: Row, number: int) -> Iterator[Tried]:
        singles = []
        for tried in alone_in(row, number, run):
            singles.append(tried)
            yield tried
        yield from pairs_of(row, singles[1:], number, run)

    chosen = [(number, row) for number, row in enumerate(rows()) if kind_of(row.name) in kinds]
    random.Random(seed).shuffle(chosen)
    for number, row in chosen:
        for tried in programs(row, number):
            if tried.is_fault:
                return f"{row.name} in {', '.join(tried.situations) or 'nothing'}: {tried.text}"
            if time.monotonic() > until_s:
                return ""
    return ""
