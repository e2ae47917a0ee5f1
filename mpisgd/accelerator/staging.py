"""Device tensors through host memory: there, and back.

What the collectives work on lies in pinned memory then, in logical order, whatever the tensor's strides. The
copies are work on the current stream, like any kernel: `fetch` comes after what produced the tensor, and
whatever uses it later comes after `deliver`. The host waits for one thing only, its own copy of `fetch`.
"""

import torch
from torch import Tensor

from mpisgd.accelerator.runtime import runtime

__all__ = ["deliver", "fetch", "room_for"]


def room_for(tensor: Tensor) -> Tensor:
    """Return pinned memory for the elements of `tensor`, [numel]."""
    return runtime().pinned(tensor.numel(), tensor.dtype)


def fetch(tensor: Tensor) -> Tensor:
    """Return the elements of a device tensor in pinned memory, [numel]; they are there."""
    source = tensor.detach().resolve_conj().resolve_neg()
    there = room_for(tensor)
    if tensor.numel():
        runtime().copy(there.view(tensor.shape), source)
        runtime().current_stream(tensor.device).record_event().synchronize()
    return there


def deliver(flat: Tensor, tensor: Tensor) -> None:
    """Begin to make `flat`, [numel] in pinned memory, the elements of a device tensor."""
    if tensor.numel():
        runtime().copy(tensor.detach(), flat.view(tensor.shape))
    else:
        torch.autograd.graph.increment_version(tensor)
