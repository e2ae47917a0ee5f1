"""The line of the user's program that called an operation, for messages."""

import functools
import os
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["LIBRARIES", "call_site", "warn_at_call_site"]

# A call site is a line of the program: not ours, and not torch's, which calls us at the end of backward.
LIBRARIES = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
)


def call_site() -> Callable[[], str]:
    """Return a function that formats the line of the program that called into mpisgd."""
    frame = _frame_of_program()
    if frame is None:
        return lambda: "unknown place"
    code, line = frame.f_code, frame.f_lineno
    return lambda: f"{code.co_filename}:{line} in {code.co_name}"


def warn_at_call_site(text: str) -> None:
    """Warn at the line of the program that called into mpisgd, through however many frames."""
    frame = _frame_of_program()
    where = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("mpisgd", 0)
    warnings.warn_explicit(text, RuntimeWarning, *where)


def _frame_of_program() -> "FrameType | None":
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


@functools.cache
def _is_library(filename: str) -> bool:
    return filename.startswith(LIBRARIES)
