"""From any tensor to contiguous memory that can travel, and back.

Contiguous tensors travel from where they are. Others (strided, channels_last, conjugated) are copied in
logical order into contiguous memory and back afterwards, so ranks may use different layouts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpisgd.errors import ShapeMismatch, UnsupportedTensor

__all__ = [
    "Landing",
    "check_output",
    "check_same",
    "check_tensor",
    "check_tensors",
    "cut_by",
    "dtype_name",
    "overlap",
    "readable",
]


def check_tensor(name: str, tensor: object, what: str = "tensor") -> Tensor:
    """Return `tensor` if it is one that can travel, else raise UnsupportedTensor naming it."""
    if not isinstance(tensor, Tensor):
        raise UnsupportedTensor(f"{name}: {what} is a {type(tensor).__name__}; expected a torch.Tensor")
    if tensor.layout is not torch.strided:
        raise UnsupportedTensor(
            f"{name}: {what} has layout {tensor.layout}; send its indices() and values(), or to_dense()"
        )
    if tensor.device.type != "cpu":
        raise UnsupportedTensor(f"{name}: {what} is on {tensor.device}; this version sends CPU tensors only")
    if tensor.is_quantized:
        raise UnsupportedTensor(f"{name}: {what} is quantized; send its int_repr()")
    return tensor


def check_output(name: str, tensor: object, what: str = "tensor") -> Tensor:
    """Return `tensor` if it can travel and can be written to, else raise UnsupportedTensor naming it."""
    checked = check_tensor(name, tensor, what)
    if any(
        stride == 0 and length > 1 for stride, length in zip(checked.stride(), checked.shape, strict=True)
    ):
        raise UnsupportedTensor(
            f"{name}: {what} is expanded: several of its elements are one place in memory; clone() it"
        )
    return checked


def check_tensors(
    name: str, tensors: object, what: str, *, count: int | None = None, output: bool = False
) -> list[Tensor]:
    """Return a list of tensors that can travel; `count`: how many, `output`: they will be written to."""
    if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
        raise UnsupportedTensor(f"{name}: {what} is a {type(tensors).__name__}; expected a list of tensors")
    if count is not None and len(tensors) != count:
        raise ShapeMismatch(f"{name}: {what} has {len(tensors)} tensors; expected {count}, one per rank")
    check = check_output if output else check_tensor
    return [check(name, tensor, f"{what}[{i}]") for i, tensor in enumerate(tensors)]


def check_same(name: str, what: str, tensor: Tensor, numel: int, like: Tensor, why: str) -> None:
    """Raise ShapeMismatch unless `tensor` has `numel` elements of the dtype of `like`."""
    if tensor.numel() != numel or tensor.dtype != like.dtype:
        raise ShapeMismatch(
            f"{name}: {what} has {tensor.numel()} elements of {tensor.dtype}; expected {numel} of "
            f"{like.dtype} ({why})"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the memory of `tensor` holds its elements in order, as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def readable(tensor: Tensor) -> Tensor:
    """Return the elements of `tensor` as a contiguous [numel] tensor: its own memory, or a copy."""
    plain = tensor.detach()
    if not _is_plain(plain):
        plain = plain.resolve_conj().resolve_neg().contiguous()
    return plain.view(-1)


def cut_by(flat: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Return consecutive pieces of a contiguous [sum(lengths)] tensor, sharing its memory."""
    return list(torch.split_with_sizes(flat, list(lengths)))


def overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two contiguous tensors share bytes."""
    a_end = a.data_ptr() + a.numel() * a.element_size()
    b_end = b.data_ptr() + b.numel() * b.element_size()
    return a.data_ptr() < b_end and b.data_ptr() < a_end


class Landing:
    """Where a result arrives: contiguous memory `flat`, and `settle()` to bring it into the tensor.

    Args:
        tensor: the tensor to be overwritten.
        keep: whether the present elements matter (in-place operations).
    """

    def __init__(self, tensor: Tensor, *, keep: bool) -> None:
        self.tensor = tensor
        self._direct = _is_plain(tensor)
        if self._direct:
            self.flat = tensor.detach().view(-1)
        elif keep:
            self.flat = readable(tensor)
        else:
            self.flat = torch.empty(tensor.numel(), dtype=tensor.dtype)

    def settle(self, result: Tensor | None = None) -> None:
        """Make `result` ([numel], default: what lies in `flat`) the tensor's elements.

        Autograd is told that the tensor has changed, as after any in-place operation of torch.
        """
        if result is not None and result.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(result)
        if self._direct:
            torch.autograd.graph.increment_version(self.tensor)
        else:
            self.tensor.detach().copy_(self.flat.view(self.tensor.shape))
