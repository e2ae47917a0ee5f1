"""An error of one rank's file is raised on every rank: the others would wait for this one."""

import contextlib
from collections.abc import Iterator

from mpisgd.arguments import texts_with_ranks
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.errors import MpisgdError, OffloadError

__all__ = ["raised_on_every_rank"]


@contextlib.contextmanager
def raised_on_every_rank(group: Group) -> Iterator[None]:
    """Raise on every rank what one of them raises inside. Collective, at the end.

    Raises:
        OffloadError: names the ranks and what happened there. A rank raises its own error if that is of
            another kind.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    texts: list[str | None] = []
    said = _text_of(mine)
    try:
        group.queue.run(
            Operation("offload", extra="errors"),
            lambda: texts.extend(group.queue.communicator.all_gather_object(said)),
        )
    except MpisgdError:  # the others cannot be told
        if mine is not None:
            raise mine from None
        raise
    if mine is not None and not isinstance(mine, OffloadError):
        raise mine
    if text := texts_with_ranks(group.ranks, texts):
        raise OffloadError(text) from mine


def _text_of(error: Exception | None) -> str | None:
    if error is None or isinstance(error, OffloadError):
        return None if error is None else str(error)
    return f"{type(error).__name__}: {error}"
