"""Sparse tensors of the device: indices and values that lie on it.

What they hold depends on the data, which torch's sparse kernels of the CPU look at: the host waits for the
current stream and computes. CUDA's wait as well where they coalesce.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from simulated_gpu.device import Device
from simulated_gpu.memory import host_alias

__all__ = ["SparseKernels"]

aten = torch.ops.aten
CPU_KERNEL = torch._C.DispatchKey.SparseCPU
# These look at no element: what they do with the parts of a tensor is done on the device.
STRUCTURE = (
    "_coalesced_",
    "_indices",
    "_nnz",
    "_sparse_coo_tensor_with_dims",
    "_sparse_coo_tensor_with_dims_and_tensors",
    "_values",
    "clone",
    "copy_",
    "copy_sparse_to_sparse_",
    "dense_dim",
    "empty.memory_format",
    "indices",
    "is_coalesced",
    "resize_as_sparse_",
    "sparse_dim",
    "sparse_resize_",
    "sparse_resize_and_clear_",
    "values",
)


class SparseKernels:
    """What torch calls for sparse tensors of the device."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def named(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Yield the operations that are those of the CPU, by name."""
        for name in STRUCTURE:
            base, _, overload = name.partition(".")
            op = getattr(getattr(aten, base), overload or "default")
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "SparseCPU"):
                yield name, functools.partial(op._op_dk, CPU_KERNEL)

    def fallback(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Wait, and compute on the host."""
        given = [x for x in tree_leaves((args, kwargs)) if self._device.holds_it(x)]
        place = given[0].device
        self._device.synchronize(self._device.current_stream(place.index))
        on_host = {id(x): _host_form(x) for x in given}

        def form(tensor: Tensor) -> Tensor:
            return on_host.get(id(tensor), tensor)

        found = op(*tree_map_only(Tensor, form, args), **tree_map_only(Tensor, form, kwargs))
        given_of = {id(form(x)): x for x in given}
        for x in given:
            if x.is_sparse and id(form(x)) in {id(result) for result in tree_leaves(found)}:
                aten.copy_sparse_to_sparse_(x, _to_device(form(x), place))  # what was changed in place
        return tree_map_only(
            Tensor, lambda x: given_of[id(x)] if id(x) in given_of else _to_device(x, place), found
        )


def _host_form(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory that is one of the CPU."""
    if not tensor.is_sparse:
        return host_alias(tensor)
    return _sparse(host_alias(tensor._indices()), host_alias(tensor._values()), tensor)


def _to_device(tensor: Tensor, place: torch.device) -> Tensor:
    if not tensor.is_sparse:
        return tensor.to(place)
    return _sparse(tensor._indices().to(place), tensor._values().to(place), tensor)


def _sparse(indices: Tensor, values: Tensor, like: Tensor) -> Tensor:
    made: Tensor = aten._sparse_coo_tensor_unsafe(indices, values, like.shape)
    return made._coalesced_(like.is_coalesced())
