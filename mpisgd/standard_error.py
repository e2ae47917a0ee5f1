"""What is printed for the user, on the standard error: whole lines, in one write."""

import io
import sys
from typing import TextIO

__all__ = ["print_error", "print_to_user"]


def print_to_user(text: str) -> None:
    """Print what the user should know about the job, in one piece."""
    print_error(f"mpisgd: {text}")


def print_error(text: str) -> None:
    """Print whole lines on the standard error, in one write.

    `print` writes the end of the last line by itself, and mpirun puts what it has to say in between.
    """
    stream = _stream()
    stream.write(f"{text}\n")
    stream.flush()


def _stream() -> TextIO:
    """Return the standard error of the process: torch.distributed's hook collects what others print.

    It would put its own mark in front of it after they return, and we do not.
    """
    collected = isinstance(sys.stderr, io.StringIO)
    return sys.__stderr__ if collected and sys.__stderr__ is not None else sys.stderr
