"""The line of the user's program that called an operation, for messages."""

import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["LIBRARIES", "call_site"]

# A call site is a line of the program: not ours, and not torch's, which calls us at the end of backward.
LIBRARIES = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
)


def call_site() -> Callable[[], str]:
    """Return a function that formats the line of the program that called into mpisgd."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return lambda: "unknown place"
    code, line = frame.f_code, frame.f_lineno
    return lambda: f"{code.co_filename}:{line} in {code.co_name}"


@functools.cache
def _is_library(filename: str) -> bool:
    return filename.startswith(LIBRARIES)
