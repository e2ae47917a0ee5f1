"""Methods x situations under MPI: programs of the quick form again with ranks of mpirun, for the same bits.

Ranks as threads, on which the product is tried, share everything above the communicator with ranks of MPI.
So a program of each method is enough for each division into ranks and hosts, with every situation in one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpisgd.tools.verification.covering import packed
from mpisgd.tools.verification.method_matrix import Division, Row, Tried
from mpisgd.tools.verification.programs.both_backends import BothBackends
from mpisgd.tools.verification.programs.mpirun_backend import MpirunBackend

__all__ = ["DIVISIONS", "confirm"]

DIVISIONS: tuple[Division, ...] = ((2, 0), (3, 0), (3, 2))


def confirm(
    chosen: Sequence[Row],
    report: Callable[[int, int], None],
    *,
    launcher: Sequence[str],
    cluster: Sequence[str] = (),
) -> list[Tried]:
    """Return the outcomes of methods in situations, on threads and by mpirun: "backends" where they differ.

    Args:
        chosen: the methods.
        report: called with the number of methods that are done, and of all.
        launcher: see `MpirunBackend`.
        cluster: see there.
    """
    found: list[Tried] = []
    with MpirunBackend(launcher=launcher, cluster=cluster) as mpirun:
        both = BothBackends(mpirun)
        for place, division in enumerate(DIVISIONS):
            for number, row in enumerate(chosen):
                found += packed(row, number + place, both.run, [division])
                report(place * len(chosen) + number + 1, len(DIVISIONS) * len(chosen))
    return found
