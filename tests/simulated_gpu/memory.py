"""Tensors over given memory, by DLPack's structures: of the device `simgpu`, or of the CPU."""

from __future__ import annotations

import atexit
import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from simulated_gpu import guard

__all__ = ["host_alias", "tensor_over"]

CPU, EXTENSION = 1, 12  # DLPack's numbers of kinds of devices
CODES = {torch.bfloat16: 4, torch.bool: 6} | dict.fromkeys(
    (torch.uint8, torch.uint16, torch.uint32, torch.uint64), 1
)
DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Tensor(ctypes.Structure):
    """DLTensor and the rest of DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
    )


_alive: dict[int, tuple[_Tensor, Callable[[], None]]] = {}

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


@DELETER
def _delete(address: int) -> None:
    _, then = _alive.pop(address)
    then()


@functools.cache
def _deleter() -> ctypes._CFuncPtr:
    """Return what frees a tensor's memory wherever that happens, also while an exception is raised."""
    library = guard.load()
    library.use_deleter(_delete)
    return DELETER(("delete_tensor", library))


@atexit.register
def _forget() -> None:
    """torch may free tensors after Python's end, when nothing can be called any more."""
    for managed, _ in list(_alive.values()):
        ctypes.cast(ctypes.addressof(managed) + _Tensor.deleter.offset, ctypes.POINTER(ctypes.c_void_p))[
            0
        ] = None


def _code(dtype: torch.dtype) -> int:
    if dtype in CODES:
        return CODES[dtype]
    return 5 if dtype.is_complex else 2 if dtype.is_floating_point else 0


def tensor_over(
    address: int,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    *,
    device: int | None,
    then: Callable[[], None],
) -> Tensor:
    """Return a tensor over memory that lies at `address`.

    Args:
        size: of it, as for `stride` and `dtype`.
        device: the number of the simulated GPU; None: a tensor of the CPU.
        then: called when torch has freed the memory, in any thread.
    """
    bits = 8 if dtype is torch.bool else dtype.itemsize * 8
    dims = ctypes.c_int64 * len(size)
    managed = _Tensor(
        address, CPU if device is None else EXTENSION, device or 0, len(size), _code(dtype), bits, 1
    )
    managed.shape, managed.strides, managed.deleter = dims(*size), dims(*stride), _deleter()
    _alive[ctypes.addressof(managed)] = (managed, then)
    return from_dlpack(_new_capsule(ctypes.addressof(managed), b"dltensor", None))


def host_alias(tensor: Tensor) -> Tensor:
    """Return a tensor of the CPU over the memory of one of the device, which it does not keep alive."""
    with torch.inference_mode(False):
        return tensor_over(
            tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.dtype, device=None, then=lambda: None
        )
