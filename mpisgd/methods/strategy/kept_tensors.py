"""Tensors that a strategy keeps beside the parameters, such as a centre: they follow these to another dtype.

`model.double()` and `param.data = ...` give a parameter other memory while it stays the same object. So
`param.detach()`, which goes on showing the old memory, is never kept, and what lies beside it is converted.
"""

from collections.abc import Sequence

from torch import Tensor

from mpisgd.errors import InvalidArgument

__all__ = ["follow"]


def follow(kept: Sequence[Tensor], params: Sequence[Tensor], what: str) -> bool:
    """Bring `kept` to the dtypes and devices of the parameters they belong to; return whether any changed.

    Args:
        kept: one for each parameter; changed in place, so that an optimizer over them still knows them.
        params: what they belong to.
        what: the strategy, for messages.

    Raises:
        InvalidArgument: a parameter has another shape now; on every rank where all have changed it.
    """
    changed = False
    for tensor, param in zip(kept, params, strict=True):
        if tensor.shape != param.shape:
            raise InvalidArgument(
                f"{what}: a parameter has the shape {list(param.shape)} now, and had {list(tensor.shape)} "
                "when its training began; make a new optimizer after such a change"
            )
        if tensor.dtype != param.dtype or tensor.device != param.device:
            tensor.data = tensor.to(param.device, param.dtype)
            changed = True
    return changed
