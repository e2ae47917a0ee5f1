"""`is_main` and `print0`: what one rank does for all."""

from typing import Any

from mpisgd.config import launcher_rank
from mpisgd.job.lifecycle import is_initialized
from mpisgd.job.rank_info import rank

__all__ = ["is_main", "print0"]


def is_main() -> bool:
    """Return whether this is rank 0 of the job: the one that prints, logs and saves.

    Before `init()` it goes by the rank that the launcher has given, so it starts no MPI. What all ranks take
    part in, such as `mpisgd.checkpoint.save`, must not stand behind it.
    """
    return rank() == 0 if is_initialized() else launcher_rank() in (None, 0)


def print0(*args: Any, **options: Any) -> None:
    """Print on rank 0 alone, with the arguments of `print`."""
    if is_main():
        print(*args, **options)
