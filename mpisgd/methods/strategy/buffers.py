"""`Buffers`: the buffers of a module, as long as they are the module's.

`Module.double()` and `Module.to(...)` keep parameters the same objects, and put new tensors in the place of
buffers. Who kept the old ones would go on to average memory that no model has any more.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import overload

from torch import Tensor

from mpisgd.errors import InvalidArgument

__all__ = ["Buffers"]


class Buffers(Sequence[Tensor]):
    """Buffers, which are not kept alive.

    Args:
        named: with names, for messages.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._named = [(name, weakref.ref(buffer)) for name, buffer in named]

    def __len__(self) -> int:
        return len(self._named)

    @overload
    def __getitem__(self, place: int) -> Tensor: ...
    @overload
    def __getitem__(self, place: slice) -> list[Tensor]: ...
    def __getitem__(self, place: int | slice) -> Tensor | list[Tensor]:
        """Return a buffer, or some.

        Raises:
            InvalidArgument: the module has another one in its place by now.
        """
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        name, ref = self._named[place]
        buffer = ref()
        if buffer is None:
            raise InvalidArgument(
                f"DistributedOptimizer: the buffer {name!r} that was given by named_buffers is gone; "
                "model.double() and model.to() put new tensors in the place of buffers: convert the model "
                "before the optimizer is made, and pass named_buffers=model.named_buffers()"
            )
        return buffer
