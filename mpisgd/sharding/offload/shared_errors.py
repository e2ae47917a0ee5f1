"""An error of one rank's file is raised on every rank: the others would wait for this one."""

import contextlib
from collections.abc import Iterator

from mpisgd.arguments import ranks_text
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.errors import OffloadError

__all__ = ["raised_on_every_rank"]


@contextlib.contextmanager
def raised_on_every_rank(group: Group) -> Iterator[None]:
    """Raise on every rank what one of them raises inside. Collective, at the end.

    Raises:
        OffloadError: names the ranks and what happened there.
    """
    mine: OffloadError | None = None
    try:
        yield
    except OffloadError as error:
        mine = error
    texts: list[str | None] = []
    said = None if mine is None else str(mine)
    group.queue.run(
        Operation("offload", extra="errors"),
        lambda: texts.extend(group.queue.communicator.all_gather_object(said)),
    )
    if any(text is not None for text in texts):
        raise OffloadError(_together(group, texts)) from mine


def _together(group: Group, texts: list[str | None]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, text in zip(group.ranks, texts, strict=True):
        if text is not None:
            ranks.setdefault(text, []).append(rank)
    return "; ".join(f"{ranks_text(whose)}: {text}" for text, whose in ranks.items())
