"""Checks of the tensors that are passed to an operation, before anything is sent."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.accelerator.runtime import on_device
from mpisgd.errors import ShapeMismatch, UnsupportedTensor

__all__ = ["check_output", "check_place", "check_same", "check_tensor", "check_tensors", "lies_in_order"]


def check_tensor(name: str, tensor: Any, what: str = "tensor") -> Tensor:
    """Return `tensor` if it is one that can travel, else raise UnsupportedTensor naming it."""
    try:  # one expression: small messages feel it
        if (
            (type(tensor) is Tensor or _is_plain(tensor))
            and ((tensor.is_cpu and (tensor.data_ptr() or not tensor.numel())) or on_device(tensor))
            and tensor.layout is torch.strided
            and not (tensor.is_quantized or tensor.is_nested)
        ):
            return tensor  # type: ignore[no-any-return]
    except RuntimeError:  # the address of a tensor without a storage, as inside torch.func
        pass
    raise _refusal(name, tensor, what)


def _is_plain(tensor: object) -> bool:
    """Return whether the elements lie where the tensor says: those of DTensor and its like lie elsewhere."""
    return isinstance(tensor, Tensor) and not hasattr(type(tensor), "__tensor_flatten__")


def _refusal(name: str, tensor: object, what: str) -> UnsupportedTensor:
    """Return the error that says why a tensor cannot travel."""
    if not isinstance(tensor, Tensor):
        number = isinstance(tensor, (int, float, complex))
        example = f", such as torch.tensor({tensor!r})" if number else ""
        text = f"a {type(tensor).__name__}; expected a torch.Tensor{example}"
    elif hasattr(tensor, "to_local"):
        text = f"a {type(tensor).__name__}, whose elements lie in another tensor; pass {what}.to_local()"
    elif tensor.layout is not torch.strided:
        return UnsupportedTensor(
            f"{name}: {what} has layout {tensor.layout}; send its indices() and values(), or to_dense()"
        )
    elif not tensor.is_cpu and not on_device(tensor):
        text = f"on {tensor.device}; tensors of the CPU and of CUDA devices can be sent"
    elif tensor.is_quantized:
        text = "quantized; send its int_repr()"
    elif tensor.is_nested:
        text = "nested; send the tensors of its unbind() as a list"
    else:
        text = (
            f"a {type(tensor).__name__} of {tensor.numel()} elements without memory of its own: it wraps "
            "others, or its storage was freed; pass the tensor inside, or a copy"
        )
    return UnsupportedTensor(f"{name}: {what} is {text}")


def check_output(name: str, tensor: object, what: str = "tensor") -> Tensor:
    """Return `tensor` if it can travel and can be written to, else raise UnsupportedTensor naming it."""
    checked = check_tensor(name, tensor, what)
    if not checked.is_contiguous() and any(
        stride == 0 and length > 1 for stride, length in zip(checked.stride(), checked.shape, strict=True)
    ):
        raise UnsupportedTensor(
            f"{name}: {what} is expanded: several of its elements are one place in memory; clone() it"
        )
    return checked


def lies_in_order(tensor: object) -> bool:
    """Return whether the elements of a tensor, some at least, lie in host memory in order and as they are.

    Such a tensor can travel and can be written to: no other check is needed, and as few of its properties are
    asked for as that takes.
    """
    try:
        return (
            type(tensor) is Tensor
            and tensor.is_cpu
            and tensor.is_contiguous()
            and not (tensor.is_neg() or tensor.is_conj() or tensor.is_quantized or tensor.is_nested)
            and not on_device(tensor)
            and tensor.data_ptr() != 0  # of another layout it raises
        )
    except RuntimeError:  # as in `check_tensor`
        return False


def check_tensors(
    name: str, tensors: object, what: str, *, count: int | None = None, output: bool = False
) -> list[Tensor]:
    """Return a list of tensors that can travel; `count`: how many, `output`: they will be written to."""
    if isinstance(tensors, (Tensor, str, bytes)) or not isinstance(tensors, Sequence):
        raise UnsupportedTensor(f"{name}: {what} is a {type(tensors).__name__}; expected a list of tensors")
    if count is not None and len(tensors) != count:
        raise ShapeMismatch(f"{name}: {what} has {len(tensors)} tensors; expected {count}, one per rank")
    check = check_output if output else check_tensor
    checked = [check(name, tensor, f"{what}[{i}]") for i, tensor in enumerate(tensors)]
    for i, tensor in enumerate(checked):
        check_place(name, f"{what}[{i}]", tensor, checked[0], f"{what}[0]")
    return checked


def check_place(name: str, what: str, tensor: Tensor, like: Tensor, like_what: str) -> None:
    """Raise UnsupportedTensor unless both tensors are on the CPU, or both on the same device."""
    if (on_device(tensor) or on_device(like)) and tensor.device != like.device:
        raise UnsupportedTensor(
            f"{name}: {what} is on {tensor.device}, {like_what} on {like.device}; an operation's tensors "
            "are all on one device"
        )


def check_same(name: str, what: str, tensor: Tensor, numel: int, like: Tensor, why: str) -> None:
    """Raise ShapeMismatch unless `tensor` has `numel` elements of the dtype of `like`."""
    if tensor.numel() != numel or tensor.dtype != like.dtype:
        raise ShapeMismatch(
            f"{name}: {what} has {tensor.numel()} elements of {tensor.dtype}; expected {numel} of "
            f"{like.dtype} ({why})"
        )
    check_place(name, what, tensor, like, "another of its tensors")
