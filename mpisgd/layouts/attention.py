"""Fused attention on divided tensors, which DTensor does not know on CPUs.

Attention over [batch, heads, length, width of a head] works on each sequence and each head by itself. So it
is torch's own function on each rank's sequences and heads; where the length or the width is divided, it is
gathered before.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import local_map
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

__all__ = ["LocalAttention", "attends_in_layout"]

BATCH, HEADS = 0, 1
TENSORS = ("query", "key", "value")
NAMES = (*TENSORS, "attn_mask", "dropout_p", "is_causal")  # torch takes these by position, too

_inside: ContextVar[bool] = ContextVar("mpisgd_layout_attention", default=False)

attends_in_layout = _inside.get  # whether attention on plain tensors is that of a rank's parts


class LocalAttention(TorchFunctionMode):
    """In here, `scaled_dot_product_attention` takes DTensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, attention on DTensors by parts."""
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            named = dict(zip(NAMES, args, strict=False)) | kwargs
            mesh = next((named[name].device_mesh for name in TENSORS if _is_divided(named.get(name))), None)
            if mesh is not None:
                return _attention(mesh, **named)
        return func(*args, **kwargs)


def _is_divided(value: Any) -> bool:
    return isinstance(value, DTensor)


def _attention(
    mesh: DeviceMesh,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Run attention by parts; with a mask, which may have any shape that broadcasts, on whole tensors."""
    tensors = [_on_mesh(tensor, mesh) for tensor in (query, key, value)]
    where = _placements(tensors, divides=attn_mask is None)
    whole = attn_mask.full_tensor() if isinstance(attn_mask, DTensor) else attn_mask

    def of_part(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, whole, **options)

    run = local_map(of_part, where, (where, where, where), device_mesh=mesh, redistribute_inputs=True)
    token = _inside.set(True)
    try:
        out: Tensor = run(*tensors)
    finally:
        _inside.reset(token)
    return out


def _on_mesh(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a tensor that all ranks have whole as a DTensor."""
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _placements(tensors: Sequence[DTensor], *, divides: bool) -> list[Placement]:
    """Return the placements of all: sequences or heads, where one tensor is divided so and all can be."""
    mesh = tensors[0].device_mesh
    where: list[Placement] = []
    for axis in range(mesh.ndim):
        wishes = [tensor.placements[axis] for tensor in tensors]
        wanted = [wish for wish in wishes if wish in (Shard(BATCH), Shard(HEADS)) and divides]
        where.append(wanted[0] if wanted else Replicate())
    for dim in (BATCH, HEADS):
        parts = [mesh.size(axis) for axis, placement in enumerate(where) if placement == Shard(dim)]
        if any(tensor.shape[dim] % prod(parts) for tensor in tensors):
            where = [Replicate() if placement == Shard(dim) else placement for placement in where]
    return where
