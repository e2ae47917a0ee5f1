"""The buffers that a stage's forward changes: BatchNorm's statistics, the vectors of spectral norm.

Recomputation does a forward again. It must see the buffers as they were then, and what it changes in them
does not count: otherwise BatchNorm would have each batch in its statistics twice.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mpisgd.errors import InvalidArgument

__all__ = ["ChangingBuffers"]

Place = tuple[nn.Module, str]
Mode = tuple[nn.Module, str, bool]  # where it is, and whether the module trains


class ChangingBuffers:
    """Copies those buffers of a module that its forward changes, and puts the copies in their place.

    Args:
        module: its buffers may be replaced by others.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # torch does not count what the kernels of norms change. All others count as changing until one
        # forward in this mode has shown that they are not: copies of large tables of constants would take
        # memory.
        self._constant: set[Mode] = set()
        self._before: dict[Place, tuple[Tensor, int]] = {}  # the buffers, with their counts of changes

    def copies(self) -> dict[Place, Tensor]:
        """Return copies of what the next forward may change."""
        self._before = {place: (buffer, buffer._version) for place, buffer in self._buffers()}
        return {
            place: buffer.clone()
            for place, (buffer, _) in self._before.items()
            if _mode(place) not in self._constant
        }

    def learn(self, copies: dict[Place, Tensor]) -> None:
        """Note which buffers the forward since `copies` has not changed; drop their copies.

        Raises:
            InvalidArgument: it has changed one in place that earlier ones have not: there is no copy.
        """
        before, self._before = self._before, {}
        for place, (was, version) in before.items():
            now, copy = place[0]._buffers.get(place[1]), copies.get(place)
            is_same = now is was and was._version == version
            if copy is None:
                if was._version != version:
                    raise InvalidArgument(
                        f"pipeline: forward has changed the buffer {place[1]!r} of a "
                        f"{type(place[0]).__name__} in place, and has not in earlier ones: with "
                        "checkpoint=True there is no copy then for the forward that backward computes again; "
                        "change it in every forward, or pass checkpoint=False"
                    )
                if not is_same:
                    copies[place] = was  # by another one: what was there is as it was
            # What a kernel changes without counting shows in the values.
            elif is_same and not isinstance(place[0], _NormBase) and torch.equal(copy, was):
                self._constant.add(_mode(place))
                copies.pop(place)

    @contextlib.contextmanager
    def replaced(self, copies: Mapping[Place, Tensor]) -> Iterator[None]:
        """Within, the module has these in the places of its own buffers, which stay as they are."""
        own = {(module, name): module._buffers[name] for module, name in copies}
        # By another tensor, not by its values: autograd refuses what has changed since forward.
        for (module, name), copy in copies.items():
            module._buffers[name] = copy
        try:
            yield
        finally:
            for (module, name), buffer in own.items():
                module._buffers[name] = buffer

    def _buffers(self) -> Iterator[tuple[Place, Tensor]]:
        for module in self._module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield (module, name), buffer


def _mode(place: Place) -> Mode:
    return (*place, place[0].training)
