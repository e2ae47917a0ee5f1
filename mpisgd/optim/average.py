"""`average_gradients` and `average_parameters`: the mean of all ranks, without a wrapped optimizer."""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from mpisgd.collectives.coalesced import all_reduce_coalesced
from mpisgd.core.group import Group
from mpisgd.core.owner import new_owner, owned_by
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument
from mpisgd.gradients.options import DEFAULT_BUCKET_CAP_BYTES, ReductionOptions
from mpisgd.gradients.reducer import GradientReducer
from mpisgd.job.lifecycle import group_or_world
from mpisgd.methods.cast.cast import Compression
from mpisgd.optim.broadcast import Parameters, name_tensors
from mpisgd.parameters.parameter_names import agree_on
from mpisgd.sharding.layerwise.in_files import without_streamed

__all__ = ["average_gradients", "average_parameters"]

NAME = "average_parameters"

_reducers: "weakref.WeakKeyDictionary[torch.nn.Module, GradientReducer]" = weakref.WeakKeyDictionary()


def average_gradients(model: torch.nn.Module, group: Group | None = None) -> None:
    """Replace every parameter's gradient by its mean over the group. Call it after `backward()`.

    Collective: all ranks of `group` call it for the same model.

    Args:
        model: small gradients become views of one fusion buffer, which exists as long as the model; large
            gradients are reduced in place. If no rank has a gradient of a parameter, it stays None; if only
            some have one, the gradient of the others counts as zero.
        group: defaults to all processes of the job.

    Raises:
        InvalidArgument: `model` is no module.
        UnsupportedTensor: a parameter on a device whose tensors cannot be sent; found locally.
        CollectiveMismatch: the ranks' parameters differ; raised on every rank, names what differs.

    Cost: one all-reduce per 25 MiB of gradients.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgument(f"average_gradients: model is a {type(model).__name__}; expected a module")
    group = group_or_world(group)
    named = list(model.named_parameters())
    params: list[torch.Tensor] = [param for _, param in named]
    reducer = _reducers.get(model)
    if reducer is None or reducer.group is not group or [*map(id, reducer.params)] != [*map(id, params)]:
        reducer = _reducers[model] = _new_reducer(type(model).__name__, named, group)
    reducer.reduce("average_gradients")


def _new_reducer(type_name: str, named: Sequence[tuple[str, torch.Tensor]], group: Group) -> GradientReducer:
    """Return the reducer of a model's gradients. Collective."""
    owner = new_owner(group.num_owners, "average_gradients", type_name, [name for name, _ in named])
    options = ReductionOptions(ReduceOp.AVG, Compression.none, 1.0, DEFAULT_BUCKET_CAP_BYTES, overlap=False)
    with owned_by(owner):
        agree_on("average_gradients", named, group)
        return GradientReducer(named, group, options)


def average_parameters(params: Parameters, group: Group | None = None) -> None:
    """Replace every parameter by its mean over the group, and a module's floating buffers by theirs.

    Collective: all ranks of `group` call it for the same model. Use it to evaluate or save the mean model;
    training then continues from the mean. To leave the training unchanged, average a copy of the model.

    Args:
        params: a module (its parameters and buffers, BatchNorm's statistics among them), a state dict, or
            (name, tensor) pairs; overwritten in place. Integers, such as counts of batches, stay as they are.
        group: defaults to all processes of the job.

    Raises:
        InvalidArgument, UnsupportedTensor: found locally, before anything is sent.
        CollectiveMismatch: names, shapes or dtypes differ between ranks; raised on every rank, names what
            differs.

    Cost: one all-reduce per large tensor, and one per dtype of small ones, which are copied in and out.
    """
    group = group_or_world(group)
    named = [(name, value) for name, value in name_tensors(NAME, params) if _has_mean(value)]
    in_memory = [tensor for _, tensor in without_streamed(NAME, named, group)]
    agree_on(NAME, named, group)
    for device in dict.fromkeys(tensor.device for tensor in in_memory):
        alike = [tensor for tensor in in_memory if tensor.device == device]
        all_reduce_coalesced(alike, ReduceOp.AVG, group)


def _has_mean(value: object) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
