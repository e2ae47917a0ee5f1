"""Threads of mpisgd work on the GPU of the thread that starts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_under_test import DEVICE, gpu
from verdicts import everyone

from mpisgd.accelerator.runtime import runtime
from mpisgd.threads.service_thread import InheritingThread


@pytest.fixture
def last_device() -> Any:
    """The last GPU is the current one of this thread."""
    before = gpu.current_device()
    gpu.set_device(gpu.device_count() - 1)
    torch.ones(1, device=DEVICE)
    yield gpu.device_count() - 1
    gpu.set_device(before)


def found_by_a_thread(ask: Any) -> Any:
    found: list[Any] = []
    thread = InheritingThread(target=lambda: found.append(ask()))
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_begins_on_the_gpu_of_who_starts_it(last_device):
    everyone(found_by_a_thread(gpu.current_device) == last_device)


def test_memory_in_use_is_the_same_in_every_thread(last_device):
    kept = torch.ones(10_000, device=DEVICE)
    gpu.set_device(0)
    everyone(found_by_a_thread(lambda: runtime().memory_in_use()) >= kept.nbytes)
