"""From any tensor to contiguous host memory that can travel, and back.

Contiguous tensors travel from where they are. Others (strided, channels_last, conjugated, on a GPU) are
copied in logical order into contiguous memory and back afterwards, so ranks may use different layouts.

What comes from a GPU lies in pinned memory then, or has come through it where it is long (bounce_buffers.py).
The copies are work on the current stream, like any kernel: `copy_to_host` comes after what produced the
tensor, and whatever uses it later comes after `copy_to_device`. The host waits for one thing only, its own
copy in `copy_to_host`, and for the pieces of long tensors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpisgd.accelerator import bounce_buffers
from mpisgd.accelerator.runtime import on_device, runtime

__all__ = [
    "ALONE_BYTES",
    "StagedOutput",
    "as_one",
    "clone_if_overlapping",
    "cut_by",
    "flattened",
    "in_order",
    "on_host",
    "overlap",
    "readable",
    "round_to_device",
]

# Smaller tensors cost less to copy to where others lie than a reduction of their own; see `bench step`.
ALONE_BYTES = 512 * 2**10


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the memory of `tensor` holds its elements in order, as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def readable(tensor: Tensor) -> Tensor:
    """Return the elements of `tensor` as a contiguous [numel] tensor on the CPU: its memory, or a copy."""
    return copy_to_host(tensor) if on_device(tensor) else in_order(tensor)


def in_order(tensor: Tensor) -> Tensor:
    """Return the elements of `tensor` as a contiguous [numel] tensor, wherever it lies."""
    if _is_plain(tensor):
        return flattened(tensor)
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def flattened(tensor: Tensor) -> Tensor:
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


def clone_if_overlapping(source: Tensor, places: Sequence[Tensor], own: int = -1) -> Tensor:
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
    """Where a result arrives: contiguous memory `flat`, and `copy_back()` to bring it into the tensor.

    Args:
        tensor: the tensor to be overwritten.
        keep: whether the present elements matter (in-place operations).
        at_home: whether `flat` lies where the tensor does, rather than on the CPU.

    Attributes:
        flat: see above, [numel].
        result: [numel], where the result came to lie elsewhere; None at first.
    """

    __slots__ = ("_is_direct", "_is_staged", "flat", "result", "tensor")

    def __init__(self, tensor: Tensor, *, keep: bool, at_home: bool = False) -> None:
        self.tensor = tensor
        self.result: Tensor | None = None
        self._is_staged = not at_home and on_device(tensor)
        self._is_direct = not self._is_staged and _is_plain(tensor)
        if self._is_direct:
            self.flat = flattened(tensor)
        elif keep:
            self.flat = copy_to_host(tensor) if self._is_staged else in_order(tensor)
        elif self._is_staged:
            self.flat = _room(tensor)
        else:
            self.flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)

    def copy_back(self) -> None:
        """Make what lies in `flat`, or in `result` where there is one, the tensor's elements.

        Autograd is told that the tensor has changed, as after any in-place operation of torch.
        """
        if self.result is not None and self.result.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(self.result)
        if self._is_direct:
            torch.autograd.graph.increment_version(self.tensor)
        elif self._is_staged:
            copy_to_device(self.flat, self.tensor)
        else:
            if on_device(self.flat):  # made on the stream of the call, and read on this one
                self.flat.record_stream(runtime().current_stream(self.flat.device))
            self.tensor.detach().copy_(self.flat.view(self.tensor.shape))


def _room(tensor: Tensor) -> Tensor:
    """Return uninitialized host memory for the elements of a device tensor, [numel], pinned unless long."""
    if bounce_buffers.goes_by_pieces(tensor.numel(), tensor.dtype):
        return torch.empty(tensor.numel(), dtype=tensor.dtype)
    return runtime().pinned(tensor.numel(), tensor.dtype)


def copy_to_host(tensor: Tensor) -> Tensor:
    """Return the elements of a device tensor in memory of the host, [numel]; the copy is complete."""
    source = tensor.detach().resolve_conj().resolve_neg()
    there = _room(tensor)
    if bounce_buffers.goes_by_pieces(tensor.numel(), tensor.dtype):
        bounce_buffers.fetch(source.contiguous().view(-1), there)
    elif tensor.numel():
        runtime().copy(there.view(tensor.shape), source)
        runtime().current_stream(tensor.device).record_event().synchronize()
    return there


def copy_to_device(flat: Tensor, tensor: Tensor) -> None:
    """Begin to make `flat`, [numel] as `_room` returns it, the elements of a device tensor."""
    if bounce_buffers.goes_by_pieces(tensor.numel(), tensor.dtype):
        target = tensor.detach()
        whole = target.view(-1) if _is_plain(target) else torch.empty_like(flat, device=tensor.device)
        bounce_buffers.put(flat, whole)
        if not _is_plain(target):
            target.copy_(whole.view(tensor.shape))
    elif tensor.numel():
        runtime().copy(tensor.detach(), flat.view(tensor.shape))
    else:
        torch.autograd.graph.increment_version(tensor)


def on_host(tensor: Tensor) -> Tensor:
    """Return a tensor that the host can read: itself, or a copy of one on a device."""
    if not on_device(tensor):
        return tensor
    return tensor.cpu() if tensor.is_sparse else copy_to_host(tensor).view(tensor.shape)


def round_to_device(source: Tensor, tensor: Tensor) -> None:
    """Begin to make a host tensor, rounded, the elements of a device tensor; `source` may change at once."""
    staged = _room(tensor)
    staged.view(tensor.shape).copy_(source)
    copy_to_device(staged, tensor)
