"""Methods x situations on all cores: a process for each, with ranks as threads."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import psutil

from mpisgd.verification.method_matrix import Row, Tried, alone_in, packed, pairs_of
from mpisgd.verification.programs.program import parse
from mpisgd.verification.programs.python_text import python_text
from mpisgd.verification.programs.threads_backend import ThreadsBackend
from mpisgd.verification.sabotage import Sabotage

__all__ = ["run_matrix", "summary_of_matrix"]

SHOWN = 5  # faults with their programs
SABOTAGES = tuple(sabotage for sabotage in Sabotage if sabotage is not Sabotage.NONE)


def run_matrix(
    chosen: Sequence[Row], report: Callable[[int, int], None], *, quick: bool = False, sabotage: bool = False
) -> list[Tried]:
    """Return what became of methods in every situation, and in pairs of them unless it is quick.

    Args:
        chosen: the methods.
        report: called with the number of methods that are done, and of all.
        quick: every situation once, in as few programs as that takes.
        sabotage: break these programs, each in one way; see `Sabotage`.
    """
    context = multiprocessing.get_context("spawn")  # torch's threads do not outlive a fork
    cores = psutil.cpu_count(logical=False) or 1
    found: dict[int, list[Tried]] = {}
    with concurrent.futures.ProcessPoolExecutor(min(cores, len(chosen)), mp_context=context) as pool:
        works = {
            pool.submit(_try_row, row, number, quick or sabotage, sabotage): number
            for number, row in enumerate(chosen)
        }
        for work in concurrent.futures.as_completed(works):
            found[works[work]] = work.result()
            report(len(found), len(chosen))
    return [tried for number in sorted(found) for tried in found[number]]


@cache
def _backend() -> ThreadsBackend:
    return ThreadsBackend()


def _try_row(row: Row, number: int, quick: bool, sabotage: bool) -> list[Tried]:
    """Try a method: what a process of the pool does."""
    run = _backend().run
    found = list(packed(row, number, run) if quick else alone_in(row, number, run))
    if sabotage:
        return list(_sabotaged(found))
    return found if quick else [*found, *pairs_of(row, found, number, run)]


def _sabotaged(found: Sequence[Tried]) -> Iterator[Tried]:
    """Break the programs that were compared with something; an error is no sign that numbers differ."""
    for number, tried in enumerate(found):
        if tried.kind != "ok" or not tried.has_reference:
            continue
        program = parse(tried.program)
        sabotage = SABOTAGES[number % len(SABOTAGES)]
        if not sabotage.applies(program.ranks):
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
