"""Tensors of a call in contiguous memory that can travel, several as one message, and the results back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import ALONE_BYTES, StagedOutput, as_one, cut_by, in_order, overlap, readable

__all__ = ["Packer", "messages_of", "own_part", "put"]


class Packer:
    """The contiguous memory of one call. Tensors that are contiguous already are not copied.

    Attributes:
        on_device: whether that memory lies where the tensors do, rather than on the host.
    """

    __slots__ = ("_outputs", "on_device")

    def __init__(self, *, on_device: bool = False) -> None:
        self.on_device = on_device
        self._outputs: list[StagedOutput] = []

    def read(self, tensor: Tensor) -> Tensor:
        """Return the elements of an input as contiguous [numel]."""
        return in_order(tensor) if self.on_device else readable(tensor)

    def read_as_one(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the elements of several inputs one after the other."""
        return as_one([self.read(tensor) for tensor in tensors])

    def write(self, tensor: Tensor, *, keep: bool = False) -> Tensor:
        """Return contiguous [numel] for the result in `tensor`; `keep`: what it holds now is an input."""
        output = StagedOutput(tensor, keep=keep, at_home=self.on_device)
        self._outputs.append(output)
        return output.flat

    def write_as_one(self, tensors: Sequence[Tensor], *, keep: bool = False) -> Tensor:
        """Return the same for several tensors of one dtype, one after the other."""
        if len(tensors) == 1:
            return self.write(tensors[0], keep=keep)
        outputs = [StagedOutput(tensor, keep=keep, at_home=self.on_device) for tensor in tensors]
        flats = [output.flat for output in outputs]
        whole = as_one(flats) if keep else flats[0].new_empty(sum(map(torch.numel, flats)))
        for output, result in zip(outputs, cut_by(whole, [flat.numel() for flat in flats]), strict=True):
            output.result = result
        self._outputs += outputs
        return whole

    def finish(self) -> None:
        """Bring all results into the tensors."""
        for output in self._outputs:
            output.copy_back()


def messages_of(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Cut into what travels as one: a large tensor by itself, the small ones of each dtype together."""
    if len(tensors) == 1:
        return [list(tensors)]
    messages: list[list[Tensor]] = []
    small: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes >= ALONE_BYTES:
            messages.append([tensor])
        elif tensor.dtype in small:
            small[tensor.dtype].append(tensor)
        else:
            messages.append(small.setdefault(tensor.dtype, [tensor]))
    return messages


def put(result: Tensor, out: Tensor) -> None:
    """Copy `result` into `out`, unless it lies there already."""
    if result.data_ptr() != out.data_ptr():
        out.copy_(result)


def own_part(out: Tensor, tensor: Tensor, rank: int) -> Tensor:
    """Return `tensor`, copied if it overlaps `out` elsewhere than at this rank's place among equal parts."""
    in_place = tensor.data_ptr() == out.data_ptr() + rank * tensor.nbytes
    return tensor.clone() if not in_place and overlap(tensor, out) else tensor
