"""The tests of `torch_distributed.py` that ask for GPUs, with CPU tensors: most of them are about DDP.

What asks for a GPU gives a CPU: `.cuda()`, `.to(rank)`, `device=rank`, DDP's `device_ids`. No test that torch
runs on CPUs anyway is among them.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import in_job
import torch
import torch_distributed
from torch.testing._internal import common_distributed

FACTORIES = ("empty", "full", "ones", "rand", "randn", "tensor", "zeros")
wanting_gpus: set[str] = set()


def without_gpus(*_: Any, **__: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """In place of torch's decorators that leave a test out where there are too few GPUs."""
    return noted


def noted(test: Callable[..., Any]) -> Callable[..., Any]:
    """The test as it is; its name is noted."""
    wanting_gpus.add(test.__name__)
    return test


def cpu_for(device: object) -> object:
    """The CPU for the number or the name of a GPU; anything else as it is."""
    return "cpu" if type(device) is int or str(device).startswith("cuda") else device


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the CPU as `device=`."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if "device" in options:
            options["device"] = cpu_for(options["device"])
        return function(*args, **options)

    return call


def to_cpu(move: Callable[..., Any]) -> Callable[..., Any]:
    """The method `to`, with the CPU as the device."""

    @functools.wraps(move)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        return move(self, *(cpu_for(one) for one in args), **options)

    return on_cpu(call)


class OnCpu(torch.nn.parallel.DistributedDataParallel):
    """DDP without devices."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "device_ids": None, "output_device": None})


def note_who_wants_gpus() -> None:
    """Change torch's decorators; before the tests are loaded."""
    common_distributed.skip_if_lt_x_gpu = without_gpus
    common_distributed.skip_if_no_gpu = noted
    common_distributed.nccl_skip_if_lt_x_gpu = without_gpus


def take_gpus_away() -> None:
    """Change what asks for a GPU; after the tests are loaded, since torch compiles some of itself then."""
    for name in FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    for kind in (torch.Tensor, torch.nn.Module):
        kind.cuda = lambda self, *_, **__: self
        kind.to = to_cpu(kind.to)
    torch.cuda.set_device = lambda *_, **__: None
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.device_count = lambda: int(os.environ["WORLD_SIZE"])
    for module in (torch.nn.parallel, *torch_distributed.loaded):
        module.DistributedDataParallel = OnCpu


def tests() -> in_job.Tests:
    """The tests that ask for GPUs, and run without them."""
    note_who_wants_gpus()
    found = torch_distributed.tests()
    take_gpus_away()
    return {name: test for name, test in found.items() if name in wanting_gpus}


if __name__ == "__main__":
    in_job.main(tests, sys.argv[1:])
