"""One thread of torch's for all tests of one process.

What is computed here is small, and ranks that are threads of this process would each have a team of OpenMP's.
Its threads spin while they wait: products of matrices with six rows took five times the processor's time.
"""

from __future__ import annotations

import os
import threading
import time

import pytest

# OpenMP reads it as torch is loaded. Programs that a test starts find what was there before.
before = os.environ.get("OMP_NUM_THREADS")
os.environ["OMP_NUM_THREADS"] = "1"
import torch  # noqa: E402

torch.set_num_threads(1)  # where another file has loaded it already
del os.environ["OMP_NUM_THREADS"]
if before is not None:
    os.environ["OMP_NUM_THREADS"] = before


@pytest.fixture
def pauses(monkeypatch):
    """Seconds for which the test would sleep, which it does not. Threads from before it do."""
    found: list[float] = []
    others, sleep = {*threading.enumerate()} - {threading.current_thread()}, time.sleep

    def note(seconds: float) -> None:
        (sleep if threading.current_thread() in others else found.append)(seconds)

    monkeypatch.setattr(time, "sleep", note)
    return found
