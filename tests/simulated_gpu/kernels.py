"""Operations on tensors of the device: each is a kernel on the current stream, computed by the CPU's kernel, later.

The shapes of results are those that torch's device "meta" finds at the launch. What it cannot find depends on the
data (`nonzero`, `equal`): the host waits for the stream first, as with CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from simulated_gpu.device import Device
from simulated_gpu.memory import host_alias

__all__ = ["register"]

aten = torch.ops.aten
CPU_KERNEL = torch._C.DispatchKey.CPU
Stream = Any


class Kernels:
    """What torch calls for the device; `register` names them."""

    def __init__(self, device: Device) -> None:
        self._device = device

    # -- any operation --------------------------------------------------------------------------------------

    def fallback(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Launch an operation that has no method below."""
        schema = op._schema
        if any(result.alias_info and not result.alias_info.is_write for result in schema.returns):
            return op._op_dk(CPU_KERNEL, *args, **kwargs)  # a view: the same memory
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_device = [x for x in tensors if self._device.holds(x)]
        if not on_device:
            raise NotImplementedError(f"{op} on the simulated device, of no tensor of it")
        kwargs = self._with_generator(op, kwargs)
        written = self._written(schema, args, kwargs)
        results = self._results(op, args, kwargs, written)
        queue = self._device.current_stream(on_device[0].device.index)
        alias = self._aliases(args, kwargs)
        if results is NotImplemented:
            return self._synchronously(op, queue, on_device[0].device, *alias)
        self._device.launch(queue, self._computed(op, *alias, results, written))
        if not schema.returns:
            return None
        if written and len(written) == len(schema.returns):
            return written[0] if len(written) == 1 else tuple(written)
        return results

    def _with_generator(self, op: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Draw at the launch where the random numbers begin, as CUDA does."""
        if any(argument.name == "generator" for argument in op._schema.arguments):
            return {**kwargs, "generator": self._device.generator()}
        return kwargs

    def _written(self, schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Return the arguments that the operation changes."""
        named = [
            (argument, args[i] if i < len(args) else kwargs.get(argument.name))
            for i, argument in enumerate(schema.arguments)
        ]
        return [
            value
            for argument, value in named
            if argument.alias_info and argument.alias_info.is_write and value is not None
        ]

    def _results(self, op: Any, args: Any, kwargs: Any, written: list[Any]) -> Any:
        """Return the tensors for the results, NotImplemented where their shapes are not known yet."""
        if written and not op._schema.is_mutable:
            return None
        if written and not any(argument.is_out for argument in op._schema.arguments):
            return None
        plain = {name: value for name, value in kwargs.items() if name != "generator"}
        try:
            found = op(*tree_map_only(Tensor, _meta, tuple(args)), **tree_map_only(Tensor, _meta, plain))
        except (NotImplementedError, RuntimeError):
            return None if written else NotImplemented
        if written:
            for place, shaped in zip(written, [found] if isinstance(found, Tensor) else found, strict=True):
                if place.shape != shaped.shape:
                    self.resize_(place, shaped.shape)
            return None
        if not all(isinstance(x, Tensor | None) for x in torch.utils._pytree.tree_leaves(found)):
            return NotImplemented
        index = next(
            x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if self._device.holds_it(x)
        ).device.index
        return tree_map_only(Tensor, lambda x: self._device.empty(x.shape, x.stride(), x.dtype, index), found)

    def _aliases(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments as the CPU's kernel gets them; numbers on the host are read now."""

        def alias(tensor: Tensor) -> Tensor:
            if self._device.holds(tensor):
                return host_alias(tensor)
            assert tensor.dim() == 0, "expected all tensors to be on the same device"
            return tensor.clone()

        return tree_map_only(Tensor, alias, tuple(args)), tree_map_only(Tensor, alias, kwargs)

    def _computed(self, op: Any, args: Any, kwargs: Any, results: Any, written: Any) -> Callable[[], None]:
        places = tree_map_only(Tensor, host_alias, results)

        def run() -> None:
            with torch.no_grad():
                found = op(*args, **kwargs)
                if results is not None:
                    leaves = torch.utils._pytree.tree_leaves
                    for place, value in zip(leaves(places), leaves(found), strict=True):
                        if isinstance(place, Tensor):
                            place.copy_(value)

        return run

    def _synchronously(self, op: Any, queue: Any, device: torch.device, args: Any, kwargs: Any) -> Any:
        self._device.synchronize(queue)
        with torch.no_grad():
            found = op(*args, **kwargs)
        return tree_map_only(Tensor, lambda x: x.to(device), found)

    # -- memory ---------------------------------------------------------------------------------------------

    def empty(
        self,
        size: Any,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
        memory_format: Any = None,
    ) -> Tensor:
        shaped = torch.empty(
            size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format
        )
        return self._device.empty(shaped.shape, shaped.stride(), shaped.dtype, device and device.index)

    def empty_strided(
        self,
        size: Any,
        stride: Any,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
    ) -> Tensor:
        return self._device.empty(size, stride, dtype or torch.get_default_dtype(), device and device.index)

    def resize_(self, tensor: Tensor, size: Any, memory_format: Any = None) -> Tensor:
        shaped = torch.empty(size, device="meta")
        storage = tensor.untyped_storage()
        if shaped.numel() * tensor.element_size() > storage.nbytes():
            storage = self._device.empty(
                size, shaped.stride(), tensor.dtype, tensor.device.index
            ).untyped_storage()
        return self._set(tensor, storage, 0, size, shaped.stride())

    def _set(self, tensor: Tensor, storage: Any, offset: Any, size: Any, stride: Any = ()) -> Tensor:
        op = aten.set_.source_Storage_storage_offset
        return op._op_dk(CPU_KERNEL, tensor, storage, offset, size, stride)

    def set_tensor(self, tensor: Tensor, source: Tensor) -> Tensor:
        return self._set(
            tensor, source.untyped_storage(), source.storage_offset(), source.size(), source.stride()
        )

    def set_storage(self, tensor: Tensor, storage: Any) -> Tensor:
        numel = storage.nbytes() // tensor.element_size()
        return self._set(tensor, storage, 0, [numel], [1])

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        self._device.record_stream(tensor, stream.device_index, stream.stream_id)

    # -- between host and device ----------------------------------------------------------------------------

    def item(self, tensor: Tensor) -> Any:
        self._device.synchronize(self._device.current_stream(tensor.device.index))
        return aten._local_scalar_dense(host_alias(tensor))

    def copy_(self, out: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """As cudaMemcpyAsync: what is not pinned is read at once, or written before it returns."""
        source = source.expand(out.shape)
        to_device, from_device = self._device.holds(out), self._device.holds(source)
        if to_device and from_device:
            self._between_devices(out, source)
        elif to_device:
            pinned = self._device.is_pinned(source)
            given = source if pinned else source.clone()
            queue = self._device.current_stream(out.device.index)
            self._device.launch(queue, _copy(host_alias(out), given))
            if pinned and not non_blocking:
                self._device.synchronize(queue)
        else:
            queue = self._device.current_stream(source.device.index)
            self._device.launch(queue, _copy(out.detach(), host_alias(source)))
            if not (non_blocking and self._device.is_pinned(out)):
                self._device.synchronize(queue)
        return out

    def _between_devices(self, out: Tensor, source: Tensor) -> None:
        queue = self._device.current_stream(source.device.index)
        other = self._device.current_stream(out.device.index)
        if other is not queue:
            self._device.wait(queue, other)
        self._device.launch(queue, _copy(host_alias(out), host_alias(source)))
        if other is not queue:
            self._device.wait(other, queue)


def _copy(out: Tensor, source: Tensor) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            out.copy_(source)

    return run


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def register(device: Device) -> list[Any]:
    """Make them known to torch; return what must stay alive."""
    kernels = Kernels(device)
    every, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(kernels.fallback, "PrivateUse1")
    for name, function in {
        "empty.memory_format": kernels.empty,
        "empty_strided": kernels.empty_strided,
        "resize_": kernels.resize_,
        "set_.source_Storage_storage_offset": kernels._set,
        "set_.source_Tensor": kernels.set_tensor,
        "set_.source_Storage": kernels.set_storage,
        "record_stream": kernels.record_stream,
        "_local_scalar_dense": kernels.item,
        "copy_": kernels.copy_,
    }.items():
        own.impl(name, function, "PrivateUse1")
    return [every, own]
