"""What differs by rank is judged by all: a rank that fails alone would leave the others waiting."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mpi4py import MPI


@lru_cache(maxsize=1)
def referee() -> MPI.Intracomm:
    """A communicator of the tests' own. It must not depend on what is being tested. Collective."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.Dup()


def everyone(condition: bool, message: str = "") -> None:
    """Fail on all ranks where `condition` does not hold on one of them."""
    said = referee().allgather(None if condition else message or "did not hold")
    wrong = {rank: text for rank, text in enumerate(said) if text is not None}
    if wrong:
        pytest.fail("; ".join(f"rank {rank}: {text}" for rank, text in wrong.items()))


def same_on_all_ranks(value: Any) -> None:
    """Fail on all ranks unless `value` is equal on all of them."""
    values = referee().allgather(value)
    everyone(all(other == values[0] for other in values), f"{values}")


class Caught:
    """The exception that `raises_everywhere` saw on this rank."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    @property
    def text(self) -> str:
        return str(self.error)


@contextlib.contextmanager
def raises_everywhere(kind: type[Exception]) -> Iterator[Caught]:
    """As pytest.raises, on every rank of the job."""
    caught = Caught()
    try:
        yield caught
    except Exception as exc:
        caught.error = exc
    everyone(isinstance(caught.error, kind), f"expected {kind.__name__}, got {caught.error!r}")
