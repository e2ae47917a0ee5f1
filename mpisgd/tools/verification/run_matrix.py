"""Methods x situations on all cores: a process for each, with ranks as threads."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import cache, partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import NamedTuple

import psutil

from mpisgd.tools.verification.covering import alone_in, packed, pairs_of
from mpisgd.tools.verification.known_results import KnownResults, OutOfTime
from mpisgd.tools.verification.method_matrix import ALL_DIVISIONS, DIVISIONS, Row, Run, Tried
from mpisgd.tools.verification.programs.program import parse
from mpisgd.tools.verification.programs.python_text import python_text
from mpisgd.tools.verification.programs.threads_backend import ThreadsBackend
from mpisgd.tools.verification.refusals import with_unknown
from mpisgd.tools.verification.sabotage import Sabotage

__all__ = ["Extent", "Matrix", "Results", "run_matrix", "summary_of_matrix"]

SHOWN = 5  # faults with their programs
SABOTAGES = tuple(sabotage for sabotage in Sabotage if sabotage is not Sabotage.NONE)


class Extent(Enum):
    """How much of the product is tried.

    QUICK: every situation once, in as few programs as that takes.
    PAIRS: every pair of situations, each with some ranks on some hosts.
    ALL: every pair of situations with all numbers of ranks and hosts.
    """

    QUICK = "quick"
    PAIRS = "pairs"
    ALL = "all"


class Results(NamedTuple):
    """Where results are kept.

    Attributes:
        path: of the file.
        ends_at_s: see `KnownResults`.
    """

    path: Path
    ends_at_s: float = 0.0


class Matrix(NamedTuple):
    """What became of methods in situations.

    Attributes:
        found: each program, by method.
        unfinished: methods that were not done when the time was over.
    """

    found: list[Tried]
    unfinished: list[str]


def run_matrix(
    chosen: Sequence[Row],
    report: Callable[[int, int], None],
    *,
    extent: Extent = Extent.PAIRS,
    sabotage: bool = False,
    results: Results | None = None,
) -> Matrix:
    """Return the outcomes of methods in situations, on all cores.

    Args:
        chosen: the methods.
        report: called with the number of methods that are done, and of all.
        extent: how much of the product.
        sabotage: break the programs of the quick form, each in one way; see `Sabotage`.
        results: where they are kept, and taken from; None: nowhere.
    """
    extent = Extent.QUICK if sabotage else extent
    context = multiprocessing.get_context("forkserver")  # a fork of this process would lack torch's threads
    context.set_forkserver_preload([__name__])  # torch is imported once for all
    cores = psutil.cpu_count(logical=False) or 1
    done: dict[int, tuple[list[Tried], bool]] = {}
    places = context.SimpleQueue()
    for core in _own_cores(cores):
        places.put(core)
    with concurrent.futures.ProcessPoolExecutor(
        min(cores, len(chosen)), mp_context=context, initializer=_stay, initargs=(places,)
    ) as pool:
        works = {
            pool.submit(_try_row, row, number, extent, sabotage, results): number
            for number, row in enumerate(chosen)
        }
        for work in concurrent.futures.as_completed(works):
            done[works[work]] = work.result()
            report(len(done), len(chosen))
    return Matrix(
        [tried for number in sorted(done) for tried in done[number][0]],
        [chosen[number].name for number in sorted(done) if not done[number][1]],
    )


def _own_cores(count: int) -> Sequence[int | None]:
    """Return a core for each of so many processes, None where the system is to place one."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return usable if len(usable) == count else [None] * count  # else two of them may be parts of one core


def _stay(places: SimpleQueue[int | None]) -> None:
    """Keep this process on a core: its threads take turns, and waking one on another core takes longer."""
    if (core := places.get()) is not None:
        os.sched_setaffinity(0, {core})


@cache
def _backend() -> ThreadsBackend:
    return ThreadsBackend()


@cache
def _known(results: Results) -> KnownResults:
    return KnownResults(*results)


def _try_row(
    row: Row, number: int, extent: Extent, sabotage: bool, results: Results | None
) -> tuple[list[Tried], bool]:
    """Try a method, which is what a process of the pool does; return whether that came to its end, too."""
    backend, found = _backend(), list[Tried]()
    run: Run = backend.run
    if results is not None:
        run = partial(_known(results).run, run=backend.run)
    try:
        for tried in _programs(row, number, extent, run):
            found.append(tried if row.is_own and tried.situations else with_unknown(tried))
    except OutOfTime:
        return found, False
    return list(_sabotaged(found)) if sabotage else found, True


def _programs(row: Row, number: int, extent: Extent, run: Run) -> Iterator[Tried]:
    """Try a method in as many programs as that takes."""
    if extent is Extent.QUICK:
        yield from packed(row, number, run)
        return
    for divisions in [DIVISIONS] if extent is Extent.PAIRS else [[each] for each in ALL_DIVISIONS]:
        singles = []
        for single in alone_in(row, number, run, divisions):
            singles.append(single)
            yield single
        yield from pairs_of(row, singles, number, run, divisions)


def _sabotaged(found: Sequence[Tried]) -> Iterator[Tried]:
    """Break the programs that were compared with something; an error is no sign that numbers differ."""
    for number, tried in enumerate(found):
        if tried.kind != "ok" or not tried.has_reference:
            continue
        program = parse(tried.program)
        if program.loses:
            continue  # the ranks that are left go on with a reference that is made afterwards
        sabotage = SABOTAGES[number % len(SABOTAGES)]
        # Where the number of ranks changes they communicate again, and the last one may have gone.
        if program.is_resized or not sabotage.applies(program.ranks):
            sabotage = Sabotage.WRONG_SCALE
        verdict = _backend().run(program, sabotage)
        is_found = verdict.kind in ("values", "bits")
        kind = "ok" if is_found else "refused" if verdict.is_fault or verdict.kind == "refused" else "missed"
        yield tried._replace(kind=kind, text=verdict.kind, sabotage=sabotage.value)


def summary_of_matrix(found: Sequence[Tried]) -> list[str]:
    """Return the lines that say how many programs ended as they must, and what is wrong with the others."""
    kinds = Counter(tried.kind for tried in found)
    faults = [tried for tried in found if tried.is_fault]
    methods = len({tried.method for tried in found})
    names = {name for tried in found for name in tried.situations}
    alone = sum(not tried.has_reference for tried in found if tried.kind == "ok")
    lines = [
        f"{tried.method}, {', '.join(tried.situations) or 'plain'}: {tried.kind}: {tried.text}"
        for tried in faults
    ]
    for tried in faults[:SHOWN]:
        lines.append(python_text(parse(tried.program)))
    if any(tried.sabotage for tried in found):
        text = (
            f"{kinds['ok']} of {len(found) - kinds['refused']} programs that were broken on purpose are found"
        )
        return [*lines, f"methods x situations: {text}; {kinds['refused']} end with an error"]
    pairs = {
        (tried.method, one, other)
        for tried in found
        if tried.kind == "ok"
        for place, one in enumerate(tried.situations)
        for other in tried.situations[place + 1 :]
    }
    return [
        *lines,
        f"methods x situations: {methods} x {len(names)}; {kinds['ok']} programs, with {len(pairs)} pairs, "
        f"end as they must, {alone} of them compared with themselves alone; {kinds['refused']} are refused, "
        f"{kinds['impossible']} cannot be, {len(faults)} are wrong",
    ]
