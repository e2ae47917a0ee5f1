"""The line of the user's program that called an operation, for messages."""

import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from types import CodeType, FrameType

__all__ = ["LIBRARIES", "call_site", "site_of", "warn_at_call_site"]

UNKNOWN = "unknown place"
ENTRY = os.path.join("mpisgd", "core", "operation_queue.py")  # whose frame every operation has
# A call site is a line of the program: not ours, and not torch's, which calls us at the end of backward.
LIBRARIES = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
)


def call_site() -> Callable[[], str]:
    """Return a function that formats the line of the program that called into mpisgd."""
    frame = _frame_of_program(sys._getframe(1))
    if frame is None:
        return lambda: UNKNOWN
    code, line = frame.f_code, frame.f_lineno  # the frame itself goes on, and would keep its variables
    return lambda: _text_of(code, line)


def site_of(thread: int) -> str:
    """Return the line of the program at which a thread is in an operation now."""
    of_thread = sys._getframe(1) if thread == threading.get_ident() else sys._current_frames().get(thread)
    entry = of_thread
    # What is called inside an operation may be in Python's library, or in the program.
    while entry is not None and not entry.f_code.co_filename.endswith(ENTRY):
        entry = entry.f_back
    frame = _frame_of_program(entry or of_thread)
    return UNKNOWN if frame is None else _text_of(frame.f_code, frame.f_lineno)


def _text_of(code: "CodeType", line: int) -> str:
    return f"{code.co_filename}:{line} in {code.co_name}"


def warn_at_call_site(text: str) -> None:
    """Warn at the line of the program that called into mpisgd, through however many frames."""
    frame = _frame_of_program(sys._getframe(1))
    where = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("mpisgd", 0)
    warnings.warn_explicit(text, RuntimeWarning, *where)


def _frame_of_program(frame: "FrameType | None") -> "FrameType | None":
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


@functools.cache
def _is_library(filename: str) -> bool:
    return filename.startswith(LIBRARIES)
