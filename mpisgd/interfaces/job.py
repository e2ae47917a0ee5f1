"""`Job`: what a group asks of the job that it is in."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

__all__ = ["Job"]


class Job(Protocol):
    """What is asked of a group's job; `mpisgd.job.world.Job` is the real one, which explains it."""

    timeout_s: float
    threads_allowed: bool
    gpu: str
    pg_options: Any
    at_end: list[Callable[[], None]]

    @property
    def world(self) -> Any:
        """The group of all ranks."""

    @property
    def monitor(self) -> Any:
        """Tells what the other ranks are doing; None where the ranks are threads of one process."""

    @property
    def failure_detector(self) -> Any:
        """Notices the loss of a rank; None where the job does not survive that."""

    @property
    def leaving(self) -> list[Callable[[], None]]:
        """What this rank does before it ends by itself, while the job goes on; empty where it does not."""

    @property
    def groups(self) -> list[Any]:
        """The groups that this rank knows of and has not closed."""

    @property
    def names(self) -> Iterator[int]:
        """Numbers of the groups without a name."""

    def add(self, group: Any) -> None:
        """Add a group."""
