"""The decorator behind `mpisgd.elastic.run` and `mpisgd.horovod.elastic.run`: its options and its wrapper."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from mpisgd.arguments import check_callable, check_flag, check_positive, shown
from mpisgd.elastic.joining import ElasticOptions, is_joiner
from mpisgd.errors import InvalidArgument
from mpisgd.job import rank_info

__all__ = ["Frontend", "Function", "elastic_function"]

Function = Callable[..., Any]


class Frontend(NamedTuple):
    """How an API runs a function.

    Attributes:
        check_state: raises where the first argument of a function, given second, is not a state.
        join: lets a joiner enter the job; gets the state.
        until_done: calls a function, with a state and options, until it returns on every remaining
            rank; the last argument is whether this rank has just joined.
    """

    check_state: Callable[[Function, Any], None]
    join: Callable[[Any], None]
    until_done: Callable[[Function, Any, ElasticOptions, bool], Any]


def elastic_function(
    frontend: Frontend, func: Function | None, *, min_ranks: int, max_ranks: int | None, regrow: bool
) -> Any:
    """Return the wrapper of `func` that `mpisgd.elastic.run` describes; without `func`, a decorator.

    Raises:
        InvalidArgument: an invalid option.
    """
    if func is None:
        return functools.partial(
            elastic_function, frontend, min_ranks=min_ranks, max_ranks=max_ranks, regrow=regrow
        )
    check_callable("elastic.run", "func", func)
    check_positive("elastic.run", "min_ranks", min_ranks, whole=True)
    check_flag("elastic.run", "regrow", regrow)
    if max_ranks is not None and (not isinstance(max_ranks, int) or max_ranks < min_ranks):
        raise InvalidArgument(
            f"elastic.run: max_ranks={shown(max_ranks)}; expected {min_ranks} (min_ranks) or more"
        )

    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        frontend.check_state(func, state)
        joiner = is_joiner()
        if joiner:
            frontend.join(state)
        size = rank_info.size()
        options = ElasticOptions(min_ranks, size if max_ranks is None else min(size, max_ranks), regrow)
        return frontend.until_done(lambda state: func(state, *args, **kwargs), state, options, joiner)

    return wrapper
