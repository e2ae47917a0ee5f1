"""`average_gradients`: for a training loop of one's own, without a wrapped optimizer."""

import weakref

import torch

from mpisgd.comm.dtypes import ReduceOp
from mpisgd.comm.group import Group
from mpisgd.comm.job import group_or_world
from mpisgd.compress.cast import Compression
from mpisgd.optim.distributed import DEFAULT_BUCKET_CAP_BYTES
from mpisgd.optim.names import agree_on
from mpisgd.optim.reducer import GradientReducer, Recipe

__all__ = ["average_gradients"]

_reducers: "weakref.WeakKeyDictionary[torch.nn.Module, GradientReducer]" = weakref.WeakKeyDictionary()


def average_gradients(model: torch.nn.Module, group: Group | None = None) -> None:
    """Replace every parameter's gradient by its mean over the group. Call it after `backward()`.

    Collective: all ranks of `group` call it for the same model.

    Args:
        model: its parameters' gradients become views of one fusion buffer, which lives as long as the model.
            Where no rank has a gradient it stays None; where some have, the others count as zero.
        group: defaults to all processes of the job.

    Raises:
        UnsupportedTensor: a parameter that is not on the CPU; found locally, before anything is sent.
        CollectiveMismatch: the ranks' parameters differ; raised on every rank, names what differs.

    Cost: one all-reduce per 25 MiB of gradients.
    """
    group = group_or_world(group)
    params: list[torch.Tensor] = list(model.parameters())
    reducer = _reducers.get(model)
    if reducer is None or reducer.group is not group or not _same(reducer.params, params):
        agree_on("average_gradients", list(model.named_parameters()), group)
        recipe = Recipe(ReduceOp.AVG, Compression.none, 1.0, DEFAULT_BUCKET_CAP_BYTES)
        reducer = _reducers[model] = GradientReducer(params, group, recipe)
    reducer.reduce("average_gradients")


def _same(before: list[torch.Tensor], now: list[torch.Tensor]) -> bool:
    return len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))
