"""`Owner`: the optimizer, or whatever else, that operations of a group belong to.

Two optimizers of equal shapes send equal operations. If a rank is in the first one while another is in the
second, gradients of unrelated parameters would be added up. So each has a number, which counts what was made
on its group and is the same on all ranks, and all operations begun inside `owned_by` carry it. Ranks compare
it with the rest of the operation, and a message about them names the optimizer that each rank is in.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, NamedTuple

from mpisgd.threads.service_thread import not_inherited

__all__ = ["OPTIMIZER", "Owner", "current_owner", "new_owner", "owned_by"]


class Owner(NamedTuple):
    """What operations belong to; equal on all ranks that make them.

    Attributes:
        kind: what it is, `optimizer`.
        number: how many of this kind have been made on the group, this one included.
        contents: for messages, `AdamW, 12 parameters from 'body.weight'`.
        names_hash: of the names of its parameters.
    """

    kind: str
    number: int
    contents: str
    names_hash: str

    def __str__(self) -> str:
        return f"{self.kind} {self.number} ({self.contents})"


def new_owner(counts: Counter[str], kind: str, type_name: str, names: Sequence[str]) -> Owner:
    """Return the owner that is made next. All ranks of a group make the same ones in the same order.

    Args:
        counts: of those that were made on the group, `Group.num_owners`.
        kind: what it is.
        type_name: its class.
        names: of its parameters.
    """
    counts[kind] += 1
    plural = "" if len(names) == 1 else "s"
    first = f" from {names[0]!r}" if names else ""
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=4).hexdigest()
    return Owner(kind, counts[kind], f"{type_name}, {len(names)} parameter{plural}{first}", digest)


OPTIMIZER = "optimizer"  # the kind of those that have a backward or a step of their own

_current: ContextVar[Owner | None] = ContextVar("mpisgd_owner", default=None)

current_owner = _current.get  # of operations that this thread begins now
# Which rank comes to start a thread, and in the middle of what, differs: its operations belong to nobody.
not_inherited(_current)


class owned_by:  # used like a function; a generator would cost more, and every backward enters
    """Context manager: operations that this thread begins inside belong to `owner`."""

    def __init__(self, owner: Owner | None) -> None:
        self._owner = owner
        self._token: Token[Any] | None = None

    def __enter__(self) -> None:
        self._token = _current.set(self._owner)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._token is not None
        _current.reset(self._token)
