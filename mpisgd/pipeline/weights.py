"""The versions of a stage's weights: one, or as many as micro-batches in flight have read.

A version is a set of tensors beside the parameters, which share the memory of the parameters as long as it is
the newest. An update leaves the memory of a version that is still needed alone: the parameters move to a copy
of it, and the optimizer changes that. So a stage has exactly the versions that its schedule reads, and the
optimizer knows the newest alone.
"""

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mpisgd.errors import InvalidArgument

__all__ = ["SingleVersion", "StageWeights", "StashedVersions", "device_of"]


class StageWeights(abc.ABC):
    """The weights of one stage.

    Args:
        module: the stage.

    Attributes:
        most_held: how many versions there were at most at the same time.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.most_held = 1

    @abc.abstractmethod
    def restart(self) -> None:
        """Call the parameters as they are now version 0: the pipeline is empty."""

    @abc.abstractmethod
    def call(self, version: int, *inputs: Tensor) -> Any:
        """Return the output of the module with a version of its weights."""

    @abc.abstractmethod
    def collect_gradients(self) -> None:
        """Make the gradients since the last update those of the parameters that are trained now."""

    @abc.abstractmethod
    def update(self, version: int, keep_from: int, step: Callable[[], None]) -> None:
        """Make a new version.

        Args:
            version: its number.
            keep_from: the oldest version that will be read.
            step: changes the parameters in place.
        """


class SingleVersion(StageWeights):
    """Weights that nobody reads while they change: the parameters themselves."""

    def restart(self) -> None:
        """See `StageWeights.restart`."""

    def call(self, version: int, *inputs: Tensor) -> Any:
        """See `StageWeights.call`."""
        return self.module(*inputs)

    def collect_gradients(self) -> None:
        """See `StageWeights.collect_gradients`."""

    def update(self, version: int, keep_from: int, step: Callable[[], None]) -> None:
        """See `StageWeights.update`."""
        step()


class StashedVersions(StageWeights):
    """Weights of which old versions stay until the last backward that reads them (PipeDream's stashing)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._params = dict(module.named_parameters())
        self._newest = 0
        self._held = {0: self._as_version()}

    def restart(self) -> None:
        """See `StageWeights.restart`."""
        self._newest, self._held = 0, {0: self._as_version()}

    def call(self, version: int, *inputs: Tensor) -> Any:
        """See `StageWeights.call`."""
        return functional_call(self.module, self._held[version], inputs)

    def collect_gradients(self) -> None:
        """See `StageWeights.collect_gradients`."""
        for tensors in self._held.values():
            for name, tensor in tensors.items():
                gradient, tensor.grad = tensor.grad, None
                param = self._params[name]
                if gradient is not None and param.requires_grad:  # it may have been frozen since the forward
                    param.grad = gradient if param.grad is None else param.grad + gradient

    def update(self, version: int, keep_from: int, step: Callable[[], None]) -> None:
        """See `StageWeights.update`.

        Raises:
            InvalidArgument: the program has given a parameter other memory since the newest version was made.
        """
        self._check_in_place()
        for old in [old for old in self._held if old < keep_from]:
            del self._held[old]
        if self._newest in self._held:
            for param in self._params.values():
                if param.requires_grad:
                    param.data = param.data.clone()
        step()
        self._newest, self._held[version] = version, self._as_version()
        self.most_held = max(self.most_held, len(self._held))

    def _check_in_place(self) -> None:
        for name, tensor in self._held.get(self._newest, {}).items():
            if tensor.data_ptr() != self._params[name].data_ptr():
                raise InvalidArgument(
                    f"pipeline: parameter {name!r} of a stage has got other memory while backward passes "
                    "were left, which have read what was there before; call flush() before you replace its "
                    "values"
                )

    def _as_version(self) -> dict[str, Tensor]:
        """Return the parameters as they are: tensors in their memory, with gradients of their own.

        By `data`, which has a count of changes of its own: what autograd has saved for backward is not
        affected when the parameter changes, elsewhere.
        """
        return {name: _alias(param) for name, param in self._params.items()}


def _alias(param: Tensor) -> Tensor:
    return param.data.requires_grad_(param.requires_grad)


def device_of(module: nn.Module) -> torch.device:
    """Return where a module computes: where its first parameter or buffer is, by default the CPU."""
    first = next(iter([*module.parameters(), *module.buffers()]), None)
    return torch.device("cpu") if first is None else first.device
