"""How the state of an optimizer lies in memory: as its parameters, also after a load.

Fused optimizers walk a parameter, its gradient and its state in the order of memory, whatever their strides.
A state that has come by a message or from a file lies in the order of its elements, and a parameter that is
channels last or transposed does not: elements would be updated with the momentum of others.
"""

import torch
from torch import Tensor

from mpisgd.gradients.fusion_buffer import laid_out

__all__ = ["lay_out_state"]


def lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """Copy the state that has a number for each element of a parameter to where it lies as this one does."""
    for param, entries in optimizer.state.items():
        if not isinstance(param, Tensor) or not isinstance(entries, dict):
            continue
        for key, value in entries.items():
            if type(value) is Tensor and value.dim() > 1 and value.shape == param.shape:
                entries[key] = laid_out(value, param)
