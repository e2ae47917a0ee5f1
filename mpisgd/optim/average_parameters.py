"""`average_parameters`: one model of those of all ranks, where a strategy lets them differ."""

from torch import Tensor

from mpisgd.collectives.coalesced import all_reduce_coalesced
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.job.lifecycle import group_or_world
from mpisgd.optim.broadcast import Parameters, name_tensors
from mpisgd.parameters.parameter_names import agree_on
from mpisgd.sharding.layerwise.offload_parameters import without_streamed

__all__ = ["average_parameters"]

NAME = "average_parameters"


def average_parameters(params: Parameters, group: Group | None = None) -> None:
    """Replace every parameter by its mean over the group, and a module's floating buffers by theirs.

    Collective: all ranks of `group` call it for the same model. To evaluate or save the model that ranks have
    together; they go on from there. To go on as if nothing had been, average a copy of the model.

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
