"""The buffers that a stage's forward changes: BatchNorm's statistics, the vectors of spectral norm.

Recomputation does a forward again. It must see the buffers as they were then, and what it changes in them
does not count: otherwise BatchNorm would have each batch in its statistics twice.
"""

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["ChangingBuffers"]

Place = tuple[nn.Module, str]


class ChangingBuffers:
    """Copies those buffers of a module that its forward changes, and puts the copies in their place.

    Args:
        module: its buffers may be replaced by others.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # torch does not count what the kernels of norms change. All others count as changing until one
        # forward has shown that they are not: copies of large tables of constants would take memory.
        self._constant: set[Place] = set()
        self._versions: dict[Place, tuple[int, int]] = {}

    def copies(self) -> dict[Place, Tensor]:
        """Return copies of what the next forward may change."""
        self._versions = {place: _version(buffer) for place, buffer in self._buffers()}
        return {place: buffer.clone() for place, buffer in self._buffers() if place not in self._constant}

    def learn(self, copies: dict[Place, Tensor]) -> None:
        """Note which buffers the forward since `copies` has not changed; drop their copies."""
        for place, buffer in self._buffers():
            if isinstance(place[0], _NormBase) or self._versions.get(place) != _version(buffer):
                self._constant.discard(place)
            else:
                self._constant.add(place)
                copies.pop(place, None)

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


def _version(buffer: Tensor) -> tuple[int, int]:
    return id(buffer), buffer._version
