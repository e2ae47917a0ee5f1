"""What differs by rank is judged by all: a rank that fails alone would leave the others waiting."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pytest
from ranks_as_threads import thread_referee

if TYPE_CHECKING:
    from mpi4py import MPI


def referee() -> Any:
    """A communicator of the tests' own. It must not depend on what is being tested. Collective."""
    return thread_referee() or _of_processes()


@lru_cache(maxsize=1)
def _of_processes() -> MPI.Intracomm:
    from mpi4py import MPI
    from process_referee import ProcessReferee

    return ProcessReferee(MPI.COMM_WORLD.Dup())


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
def raises_everywhere(kind: type[Exception] | tuple[type[Exception], ...]) -> Iterator[Caught]:
    """As pytest.raises, on every rank of the job."""
    caught = Caught()
    try:
        yield caught
    except Exception as exc:
        caught.error = exc
    everyone(isinstance(caught.error, kind), f"expected {kind}, got {caught.error!r}")


def shared_report(item: pytest.Item, report: pytest.TestReport) -> pytest.TestReport:
    """The report of one phase of a test, failed on all ranks where it failed on one."""
    outcomes = referee().allgather((report.outcome, str(report.longrepr) if report.failed else ""))
    failed = {rank: text for rank, (outcome, text) in enumerate(outcomes) if outcome == "failed"}
    alike = report.when == "call" or len({outcome for outcome, _ in outcomes}) == 1
    if failed or not alike:
        said = [f"{report.when}: {[outcome for outcome, _ in outcomes]} on the ranks"]
        said += [f"--- rank {rank}:\n{text}" for rank, text in failed.items()]
        if report.failed:
            report.sections.append(("all ranks", "\n".join(said)))
        else:
            report.outcome, report.longrepr = "failed", "\n".join(said)
    if failed and any(referee().allgather(_world_is_broken())):
        item.session.shouldstop = "the world cannot be used any more"
    return report


def _world_is_broken() -> bool:
    """Return whether a group that is the same for all tests is of no use any more."""
    from mpisgd.job import lifecycle, rank_info

    if not lifecycle.is_initialized():
        return False
    whole = [group for group in lifecycle.current_job().groups if group.size == rank_info.size()]
    return any(group.queue.broken is not None for group in whole)
