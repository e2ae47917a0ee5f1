"""Errors of one rank are raised on every rank, so that none continues alone or waits for a failed one."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from mpisgd.arguments import texts_with_ranks
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.errors import CheckpointError

__all__ = ["ROOT", "agree", "at_root", "gather_at_root", "merge_problems"]

T = TypeVar("T")
ROOT = 0  # the group rank that reads and writes the files


def gather_at_root(group: Group, operation: Operation, obj: Any) -> list[Any] | None:
    """Return the objects of all ranks on the root, None elsewhere. Collective."""
    got: list[list[Any] | None] = []
    group.queue.run(operation, lambda: got.append(group.queue.communicator.gather_object(obj, ROOT)))
    return got[0]


def at_root(group: Group, operation: Operation, action: Callable[[], T]) -> T:
    """Return on every rank what `action` returns on the root. Collective.

    Raises:
        CheckpointError: the action raised that, or anything else; on every rank.
    """
    result: Any = None
    failure: CheckpointError | None = None
    if group.rank == ROOT:
        try:
            result = action()
        except CheckpointError as exc:
            failure = exc
        except Exception as exc:  # the others wait for the outcome
            text = str(exc) if isinstance(exc, OSError) else f"{type(exc).__name__}: {exc}"
            failure = CheckpointError(f"{operation.kind}: {text}")
            failure.__cause__ = exc
    outcomes: list[Any] = []
    mine = (result, failure and (type(failure), str(failure)))
    group.queue.run(operation, lambda: outcomes.append(group.queue.communicator.broadcast_object(mine, ROOT)))
    if failure is not None:
        raise failure
    theirs, problem = outcomes[0]
    if problem is not None:
        raise problem[0](problem[1])
    return cast(T, result if group.rank == ROOT else theirs)


def agree(group: Group, operation: Operation, problem: str | None, kind: type[CheckpointError]) -> None:
    """Raise `kind` on every rank where one of them has a problem. Collective."""
    got: list[Any] = []
    group.queue.run(operation, lambda: got.extend(group.queue.communicator.all_gather_object(problem)))
    if text := merge_problems(group, got):
        raise kind(f"{operation.kind}: {text}")


def merge_problems(group: Group, problems: list[str | None]) -> str:
    """Return the problems in one text, with their ranks unless all have the same one; "" for none."""
    if problems[0] is not None and problems.count(problems[0]) == group.size:
        return problems[0]
    return texts_with_ranks(group.ranks, problems)
