"""Operations on tensors of the device: kernels on the current stream, computed by those of the CPU, later.

The shapes of results are those that torch's device "meta" finds at the launch. What it cannot find depends on
the data (`nonzero`, `equal`): the host waits for the stream first, as with CUDA.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from simulated_gpu.device import Device
from simulated_gpu.memory import host_alias
from simulated_gpu.sparse import SparseKernels

__all__ = ["register"]

aten = torch.ops.aten
CPU_KERNEL = torch._C.DispatchKey.CPU
Stream = Any

# What finds the shapes of results where torch's "meta" does not, and CUDA need not wait.
SHAPED = {
    aten.batch_norm_update_stats.default: lambda values, mean, var, momentum: (
        mean.new_empty(values.size(1)),
        mean.new_empty(values.size(1)),
    )
}
# torch's "meta" knows CUDA's results; the CPU's kernel returns others, and its backward needs them.
REFUSED = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)


class Kernels:
    """What torch calls for the device; `register` names them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known: dict[Any, Any] = {}

    # -- any operation --------------------------------------------------------------------------------------

    def fallback(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Launch an operation that has no method below."""
        if op in REFUSED:
            raise NotImplementedError(f"{op} on the simulated device, which has no EmbeddingBag")
        schema = op._schema
        if any(result.alias_info and not result.alias_info.is_write for result in schema.returns):
            return op._op_dk(CPU_KERNEL, *args, **kwargs)  # a view: the same memory
        args = _numbers_as_tensors(op, args)
        device = next((x.device for x in tree_leaves((args, kwargs)) if self._device.holds_it(x)), None)
        if device is None:
            raise NotImplementedError(f"{op} on the simulated device, of no tensor of it")
        kwargs = self._with_generator(op, kwargs)
        outs = {argument.name: kwargs[argument.name] for argument in schema.arguments if argument.is_out}
        given = {name: value for name, value in kwargs.items() if name not in outs}
        written = self._written(schema, args, given)
        results = None if written else self._results(op, args, given, outs, device.index)
        queue = self._device.current_stream(device.index)
        alias = self._aliases(args, given)
        if results is NotImplemented:
            self._device.synchronize(queue)
            return self._at_once(op, device, *alias, outs)
        fresh = {name: value.dtype for name, value in outs.items()}
        self._device.launch(queue, self._computed(op, *alias, fresh, results))
        if not schema.returns:
            return None
        if written:
            return written[0] if len(schema.returns) == 1 else tuple(written)
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

    def _results(self, op: Any, args: Any, kwargs: Any, outs: dict[str, Tensor], number: int) -> Any:
        """Return the tensors for the results, NotImplemented where their shapes are not known yet."""
        plain = {name: value for name, value in kwargs.items() if name != "generator"}
        found = self._shaped(op, args, plain, {name: value.dtype for name, value in outs.items()})
        if found is NotImplemented:
            return NotImplemented
        if outs:
            places = list(outs.values())
            for place, shaped in zip(places, [found] if isinstance(found, Tensor) else found, strict=True):
                if place.shape != shaped.shape:
                    self.resize_(place, shaped.shape)
            return places[0] if isinstance(found, Tensor) else tuple(places)
        if not all(isinstance(x, Tensor | None) for x in tree_leaves(found)):
            return NotImplemented
        return tree_map_only(
            Tensor, lambda x: self._device.empty(x.shape, x.stride(), x.dtype, number), found
        )

    def _shaped(self, op: Any, args: Any, kwargs: Any, outs: dict[str, torch.dtype]) -> Any:
        """Return the results on torch's device "meta", which takes most of a launch, so they are kept."""
        about = (op, _described([*args]), _described(kwargs), _described(outs), torch.get_default_dtype())
        try:
            known = self._known.get(about)
        except TypeError:  # of an argument that cannot be looked up
            about, known = None, None
        if known is None:
            fresh = {name: torch.empty(0, dtype=dtype, device="meta") for name, dtype in outs.items()}
            try:
                known = SHAPED.get(op, op)(
                    *tree_map_only(Tensor, _meta, tuple(args)),
                    **tree_map_only(Tensor, _meta, kwargs),
                    **fresh,
                )
            except (NotImplementedError, RuntimeError):
                known = NotImplemented
            if about is not None and known is not None:
                self._known[about] = known
        return known

    def _aliases(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments as the CPU's kernel gets them; numbers on the host are read now."""

        def alias(tensor: Tensor) -> Tensor:
            if self._device.holds(tensor):
                return host_alias(tensor)
            assert tensor.dim() == 0, "expected all tensors to be on the same device"
            return tensor.clone()

        return tree_map_only(Tensor, alias, tuple(args)), tree_map_only(Tensor, alias, kwargs)

    def _computed(
        self, op: Any, args: Any, kwargs: Any, outs: dict[str, torch.dtype], results: Any
    ) -> Callable[[], None]:
        places = [host_alias(x) if isinstance(x, Tensor) else None for x in tree_leaves(results)]
        has_results = results is not None
        del results  # a kernel keeps no memory alive

        def run() -> None:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fresh = {name: torch.empty(0, dtype=dtype) for name, dtype in outs.items()}
                found = op(*args, **kwargs, **fresh)
                if has_results:
                    for place, value in zip(places, tree_leaves(found), strict=True):
                        if (
                            place is not None and value is not None and value.numel()
                        ):  # the CPU leaves out what has no use
                            place.copy_(value)

        return run

    def _at_once(self, op: Any, device: torch.device, args: Any, kwargs: Any, outs: dict[str, Tensor]) -> Any:
        with torch.no_grad():
            fresh = {name: torch.empty(0, dtype=value.dtype) for name, value in outs.items()}
            found = op(*args, **kwargs, **fresh)
            if not outs:
                return tree_map_only(Tensor, lambda x: x.to(device), found)
            for place, value in zip(outs.values(), fresh.values(), strict=True):
                (place if place.shape == value.shape else self.resize_(place, value.shape)).copy_(value)
            return next(iter(outs.values())) if isinstance(found, Tensor) else tuple(outs.values())

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


def _numbers_as_tensors(op: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Undo what torch does to numbers that it has made tensors, where the operation takes tensors only."""
    if torch._C._should_allow_numbers_as_tensors(op._schema.name.split("::")[1]):
        return args
    kinds = [str(argument.type) for argument in op._schema.arguments]
    return [
        torch.tensor(arg) if kind == "Tensor" and isinstance(arg, int | float) else arg
        for arg, kind in zip(args, kinds, strict=False)
    ]


def _described(value: Any) -> Any:
    """Return what the shapes of results depend on."""
    if isinstance(value, Tensor):
        return tuple(value.size()), value.stride(), value.dtype
    if isinstance(value, dict):
        return tuple((name, _described(each)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    return type(value), value


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def register(device: Device) -> list[Any]:
    """Make them known to torch; return what must stay alive."""
    kernels = Kernels(device)
    every, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(kernels.fallback, "PrivateUse1")
    sparse = SparseKernels(device)
    every.fallback(sparse.fallback, "SparsePrivateUse1")
    for name, function in sparse.named():
        own.impl(name, function, "SparsePrivateUse1")
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
