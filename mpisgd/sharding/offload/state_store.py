"""`StateStore`: where the optimizer state of pieces is between their updates; here it stays in memory."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from mpisgd.core.group import Group
from mpisgd.sharding.piece import Entries

__all__ = ["StateInMemory", "StateStore"]


class StateStore(Protocol):
    """What an optimizer has as its `state` during a step: a dictionary that makes entries that are missing.

    Keys are the tensors of pieces, and whatever else the optimizer uses. Whoever has worked on the state of
    pieces releases these, and whoever has finished a step says so.
    """

    def __getitem__(self, key: Any) -> dict[str, Any]: ...

    def __setitem__(self, key: Any, entries: dict[str, Any]) -> None: ...

    def __contains__(self, key: object) -> bool: ...

    def __iter__(self) -> Iterator[Any]: ...

    def update(self, others: Any) -> None:
        """Add entries, those of a mapping."""

    def clear(self) -> None:
        """Remove all entries."""

    def pop(self, key: Any) -> dict[str, Any]:
        """Remove an entry and return it; its tensors are the caller's."""

    def read(self, key: Any) -> Entries:
        """Return an entry, {} where there is none; nobody changes its tensors before the next step."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor with any content, where there is room for the whole state."""

    def release(self, keys: Iterable[Any]) -> None:
        """Note that these pieces were updated, and that their state is not needed now."""

    def end_step(self) -> None:
        """Note that all pieces of a step were updated."""

    def held_errors(self) -> AbstractContextManager[None]:
        """Return a context to work on the state in, where other ranks may not; what goes wrong is kept.

        Whatever works on the state next raises it, up to the next `shared_errors`, until `clear`.
        """

    def shared_errors(self, group: Group) -> AbstractContextManager[None]:
        """Return a context to work on the state in; all ranks raise what one of them does. Collective."""


class StateInMemory(defaultdict[Any, Any]):
    """The state of pieces in memory, where the optimizer has put it."""

    def __init__(self, entries: Mapping[Any, Any] | None = None) -> None:
        super().__init__(dict, entries or {})

    def read(self, key: Any) -> Entries:
        """See `StateStore`."""
        entries: Entries = self.get(key, {})
        return entries

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `StateStore`."""
        return torch.empty(shape, dtype=dtype)

    def release(self, keys: Iterable[Any]) -> None:
        """See `StateStore`."""

    def end_step(self) -> None:
        """See `StateStore`."""

    def held_errors(self) -> AbstractContextManager[None]:
        """See `StateStore`."""
        return nullcontext()

    def shared_errors(self, group: Group) -> AbstractContextManager[None]:
        """See `StateStore`; memory does not fail, and nothing is sent."""
        return nullcontext()
