"""What each rank has made of its rows, told to all: an exception of one is raised on every rank."""

from typing import Any

from torch._utils import ExceptionWrapper

from mpisgd.collectives.objects import all_gather_object
from mpisgd.core.group import Group

__all__ = ["gather_outcomes"]


def gather_outcomes(group: Group, outcome: Any, problem: Exception | None) -> list[Any]:
    """Return the outcomes of all ranks, on every rank. Collective.

    Args:
        group: the ranks.
        outcome: of this one, to be pickled.
        problem: what it has raised instead.

    Raises:
        Exception: what a rank has raised, of its type and with its traceback in the text; on every rank.
    """
    if problem is not None:
        where = f"on rank {group.ranks[group.rank]}"
        raised = (type(problem), problem, problem.__traceback__)
        outcome = ExceptionWrapper(raised, where)  # type: ignore[no-untyped-call]
    everyone: list[Any] = [None] * group.size
    all_gather_object(everyone, outcome, group)
    if problem is not None:
        raise problem
    for theirs in everyone:
        if isinstance(theirs, ExceptionWrapper):
            theirs.reraise()  # type: ignore[no-untyped-call]
    return everyone
