"""What every face of `elastic.run` shares: its options, and who comes in when a function is called."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from mpisgd.arguments import check_callable, check_flag, check_positive, shown
from mpisgd.elastic.regrow import Terms, is_newcomer
from mpisgd.errors import InvalidArgument
from mpisgd.job import rank_info

__all__ = ["Face", "Function", "surviving"]

Function = Callable[..., Any]


class Face(NamedTuple):
    """In what the faces differ.

    Attributes:
        check_state: raises where the first argument of a function, given second, is no state.
        join: makes this process, started in the place of a lost rank, one of the job; gets the state.
        until_done: calls what it is given, on some terms, until it returns on every rank that is left; the
            last argument is whether this rank has just joined.
    """

    check_state: Callable[[Function, Any], None]
    join: Callable[[Any], None]
    until_done: Callable[[Function, Any, Terms, bool], Any]


def surviving(
    face: Face, func: Function | None, *, min_ranks: int, max_ranks: int | None, regrow: bool
) -> Any:
    """Return what calls `func(state, ...)` as `mpisgd.elastic.run` says; without one, what takes it.

    Raises:
        InvalidArgument: an option that makes no sense.
    """
    if func is None:
        return functools.partial(surviving, face, min_ranks=min_ranks, max_ranks=max_ranks, regrow=regrow)
    _check(func, min_ranks, max_ranks, regrow)

    @functools.wraps(func)
    def survivor(state: Any, *args: Any, **options: Any) -> Any:
        face.check_state(func, state)
        newcomer = is_newcomer()
        if newcomer:
            face.join(state)
        size = rank_info.size()
        terms = Terms(min_ranks, size if max_ranks is None else min(size, max_ranks), regrow)
        return face.until_done(lambda state: func(state, *args, **options), state, terms, newcomer)

    return survivor


def _check(func: Any, min_ranks: Any, max_ranks: Any, regrow: Any) -> None:
    check_callable("elastic.run", "func", func)
    check_positive("elastic.run", "min_ranks", min_ranks, whole=True)
    check_flag("elastic.run", "regrow", regrow)
    if max_ranks is not None and (not isinstance(max_ranks, int) or max_ranks < min_ranks):
        raise InvalidArgument(
            f"elastic.run: max_ranks={shown(max_ranks)}; expected {min_ranks} (min_ranks) or more"
        )
