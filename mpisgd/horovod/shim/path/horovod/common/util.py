"""The helpers of `horovod.common.util` that scripts use."""

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mpisgd.horovod import basics

__all__ = [
    "check_extension",
    "env",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether there is something for this framework."""
    return ext_base_name == "torch"


def check_extension(ext_name: str, *args: Any) -> None:
    """Raise an ImportError unless there is something for this framework."""
    if not extension_available(ext_name.removeprefix("horovod.")):
        raise ImportError(f"{ext_name} is not there: mpisgd provides horovod.torch only")


def gpu_available(ext_base_name: str = "torch", verbose: bool = False) -> bool:
    """Return whether torch sees a GPU."""
    return torch.cuda.is_available()


def mpi_built(verbose: bool = False) -> bool:
    """Return True."""
    return basics.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """Return False."""
    return basics.gloo_built()


def nccl_built(verbose: bool = False) -> bool:
    """Return whether torch brings NCCL."""
    return bool(basics.nccl_built())


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[Any], num_parts: int) -> list[Sequence[Any]]:
    """Cut a list into parts of nearly the same length, the longer ones first."""
    length, longer = divmod(len(items), num_parts)
    starts = [length * part + min(part, longer) for part in range(num_parts + 1)]
    return [items[start:end] for start, end in itertools.pairwise(starts)]


@contextlib.contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set environment variables for a while; None: leave one out."""
    before = {name: os.environ.pop(name, None) for name in variables}
    try:
        os.environ.update({name: value for name, value in variables.items() if value is not None})
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})
