"""From a layout to torch: a DeviceMesh of the ranks, and DTensor's placements of a tensor."""

import itertools
import weakref

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, debug, distribute_tensor

from mpisgd.job.rank_info import size
from mpisgd.layouts.pretended import mark_of_pretended
from mpisgd.layouts.rules import Dims, LayoutRules

__all__ = ["device_mesh", "placements", "shard"]

# A mesh has a communicator for each of its rows: layouts of one mesh share it while torch's group lives.
_meshes: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, DeviceMesh]]" = (
    weakref.WeakKeyDictionary()
)


def device_mesh(rules: LayoutRules, device_type: str) -> DeviceMesh:
    """Return the ranks of the job as the mesh of a layout. Collective where there is none yet.

    Makes torch's default process group, of the backend "mpisgd", unless the program has made one.

    Raises:
        InvalidArgument: the mesh is not one of as many places as there are ranks.
    """
    rules.check_ranks(dist.get_world_size() if dist.is_initialized() else size())
    if not dist.is_initialized():
        dist.init_process_group("mpisgd")
    default = dist.group.WORLD
    assert default is not None
    if default not in _meshes:
        _forget_former_meshes()
    known, key = _meshes.setdefault(default, {}), (rules.mesh, device_type)
    if key not in known:
        # torch caches what it finds out by meshes, which are equal if their axes are: so no axis is of both.
        mark, lengths = mark_of_pretended(), tuple(rules.lengths.values())
        axes = tuple(axis + mark for axis in rules.lengths)
        known[key] = init_device_mesh(device_type, lengths, mesh_dim_names=axes)
        _flatten(known[key])
    return known[key]


def _forget_former_meshes() -> None:
    """Let torch find out anew what it has cached of meshes whose groups were destroyed.

    It names groups by numbers, from 0 again after `destroy_process_group()`. What it has kept of an equal
    mesh of before names groups that there are not, or others.
    """
    if (clear := getattr(debug, "_clear_sharding_prop_cache", None)) is not None:
        clear()


def _flatten(mesh: DeviceMesh) -> None:
    """Let DTensor sum over several axes in one operation, instead of one for each. Collective."""
    names = mesh.mesh_dim_names or ()
    for number in range(2, len(names) + 1):
        for axes in itertools.combinations(names, number):
            mesh[axes]._flatten()


def placements(rules: LayoutRules, dims: Dims) -> tuple[Placement, ...]:
    """Return the placements of a tensor: for each axis of the mesh the dimension that it divides, or none."""
    divided = rules.divided(dims)
    return tuple(Shard(divided[axis]) if axis in divided else Replicate() for axis in rules.lengths)


def shard(rules: LayoutRules, tensor: Tensor, dims: Dims, mesh: DeviceMesh) -> DTensor:
    """Return this rank's part of a tensor that all ranks have whole; sends nothing."""
    return distribute_tensor(tensor, mesh, placements(rules, dims), src_data_rank=None)
