"""From any tensor to contiguous memory that can travel, and back.

Contiguous tensors travel from where they are. Others (strided, channels_last, conjugated, on a GPU) are
copied in logical order into contiguous memory and back afterwards, so ranks may use different layouts.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from mpisgd.accelerator.runtime import on_device
from mpisgd.accelerator.staging import deliver, fetch, room_for
from mpisgd.errors import ShapeMismatch, UnsupportedTensor

__all__ = [
    "ALONE_BYTES",
    "StagedOutput",
    "apart",
    "as_one",
    "check_output",
    "check_place",
    "check_same",
    "check_tensor",
    "check_tensors",
    "cut_by",
    "dtype_name",
    "in_order",
    "overlap",
    "readable",
]

# Smaller tensors cost less to copy to where others lie than a reduction of their own; see `bench step`.
ALONE_BYTES = 512 * 2**10


def check_tensor(name: str, tensor: object, what: str = "tensor") -> Tensor:
    """Return `tensor` if it is one that can travel, else raise UnsupportedTensor naming it."""
    if not isinstance(tensor, Tensor):
        raise UnsupportedTensor(f"{name}: {what} is a {type(tensor).__name__}; expected a torch.Tensor")
    if (tensor.is_cpu or on_device(tensor)) and tensor.layout is torch.strided and not tensor.is_quantized:
        return tensor
    if tensor.layout is not torch.strided:
        raise UnsupportedTensor(
            f"{name}: {what} has layout {tensor.layout}; send its indices() and values(), or to_dense()"
        )
    if not tensor.is_cpu and not on_device(tensor):
        raise UnsupportedTensor(
            f"{name}: {what} is on {tensor.device}; tensors of the CPU and of CUDA devices can be sent"
        )
    raise UnsupportedTensor(f"{name}: {what} is quantized; send its int_repr()")


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


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the memory of `tensor` holds its elements in order, as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def readable(tensor: Tensor) -> Tensor:
    """Return the elements of `tensor` as a contiguous [numel] tensor on the CPU: its memory, or a copy."""
    return fetch(tensor) if on_device(tensor) else in_order(tensor)


def in_order(tensor: Tensor) -> Tensor:
    """Return the elements of `tensor` as a contiguous [numel] tensor, wherever it lies."""
    if _is_plain(tensor):
        return _flattened(tensor)
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def _flattened(tensor: Tensor) -> Tensor:
    """Return a plain tensor as [numel], itself if it is that already: a small message feels every call."""
    if tensor.dim() == 1 and not tensor.requires_grad:
        return tensor
    return tensor.detach().view(-1)


def as_one(flats: Sequence[Tensor]) -> Tensor:
    """Return contiguous [n] tensors of one dtype as one, in new memory if there are several."""
    return flats[0] if len(flats) == 1 else torch.cat(list(flats))


def cut_by(flat: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Return consecutive pieces of a contiguous [sum(lengths)] tensor, sharing its memory."""
    return list(torch.split_with_sizes(flat, list(lengths)))


def overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two contiguous tensors share bytes."""
    a_start, b_start = a.data_ptr(), b.data_ptr()
    return a_start < b_start + b.nbytes and b_start < a_start + a.nbytes


def apart(source: Tensor, places: Sequence[Tensor], own: int = -1) -> Tensor:
    """Return `source`, copied if results will arrive in its memory.

    Args:
        source: contiguous.
        places: where results arrive, contiguous.
        own: the one where `source` itself arrives, if any: it may lie there already.
    """
    for i, place in enumerate(places):
        if overlap(source, place) and not (i == own and source.data_ptr() == place.data_ptr()):
            return source.clone()
    return source


class StagedOutput:
    """Where a result arrives: contiguous memory `flat`, and `settle()` to bring it into the tensor.

    Args:
        tensor: the tensor to be overwritten.
        keep: whether the present elements matter (in-place operations).
        at_home: whether `flat` lies where the tensor does, rather than on the CPU.
    """

    def __init__(self, tensor: Tensor, *, keep: bool, at_home: bool = False) -> None:
        self.tensor = tensor
        self._staged = not at_home and on_device(tensor)
        self._direct = not self._staged and _is_plain(tensor)
        if self._direct:
            self.flat = _flattened(tensor)
        elif keep:
            self.flat = fetch(tensor) if self._staged else in_order(tensor)
        elif self._staged:
            self.flat = room_for(tensor)
        else:
            self.flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)

    def settle(self, result: Tensor | None = None) -> None:
        """Make `result` ([numel], default: what lies in `flat`) the tensor's elements.

        Autograd is told that the tensor has changed, as after any in-place operation of torch.
        """
        if result is not None and result.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(result)
        if self._direct:
            torch.autograd.graph.increment_version(self.tensor)
        elif self._staged:
            deliver(self.flat, self.tensor)
        else:
            self.tensor.detach().copy_(self.flat.view(self.tensor.shape))
