"""`ForwardOverlap`: parameters arrive while the next forward computes; each layer waits for its own.

    step           the ranks send what they have updated: first layers ......... last layers
    next forward                                             layer 1   layer 2   layer 3

A hook that torch calls before the forward of every module waits for the parameters of this module. A module
may also use parameters of modules inside it without calling these (`torch.nn.MultiheadAttention` does), so it
waits for theirs, too, unless they have been seen to be called.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from mpisgd.core.work import Work
from mpisgd.errors import InvalidArgument

__all__ = ["ForwardOverlap"]

Module = torch.nn.Module


class ForwardOverlap:
    """What is under way, and which parameters are in it."""

    def __init__(self) -> None:
        self._place_of: dict[Tensor, int] = {}  # by identity: tensors hash so
        self._works: list[Work] = []
        self._waited_for: set[Tensor] = set()
        self._num_waited = 0
        self._called: weakref.WeakSet[Module] = weakref.WeakSet()
        alive = weakref.ref(self)

        def before_forward(module: Module, _: Any) -> None:
            if (overlap := alive()) is not None:
                overlap._before_forward(module)

        handle = register_module_forward_pre_hook(before_forward)
        weakref.finalize(self, handle.remove)

    def expect(self, params: Sequence[Tensor], work: Work) -> None:
        """Note what brings some parameters; what was expected before arrives before it."""
        self._works.append(work)
        self._place_of.update(dict.fromkeys(params, len(self._works) - 1))

    def wait(self) -> None:
        """Return when everything has arrived."""
        self._wait_for(len(self._works) - 1)
        self._works.clear()
        self._place_of.clear()
        self._waited_for.clear()
        self._num_waited = 0

    def check_used(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Raise if a parameter has a gradient that was computed without waiting for it.

        Raises:
            InvalidArgument: names it.
        """
        for name, param in named:
            if param.grad is not None and param in self._place_of and param not in self._waited_for:
                raise InvalidArgument(
                    f"Sharded: {name} was used, maybe before it had arrived, outside of the forward of a "
                    "module that has it; pass overlap_forward=False"
                )

    def _wait_for(self, place: int) -> None:
        while self._num_waited <= place:
            self._works[self._num_waited].wait()
            self._num_waited += 1

    def _before_forward(self, module: Module) -> None:
        if not self._works:
            return
        if module not in self._called:
            self._called.add(module)
            if any(param in self._place_of for param in module.parameters()):
                waits = _waits(weakref.ref(self))
                module.register_state_dict_pre_hook(waits)  # type: ignore[no-untyped-call]
        used = [param for param in self._used_by(module) if param in self._place_of]
        self._waited_for.update(used)
        self._wait_for(max((self._place_of[param] for param in used), default=-1))

    def _used_by(self, module: Module) -> Iterator[Tensor]:
        """Yield the parameters that a module may use before another module's forward is called."""
        yield from (param for param in module._parameters.values() if param is not None)
        for child in module._modules.values():
            if child is not None and child not in self._called:
                yield from self._used_by(child)


def _waits(overlap: "weakref.ref[ForwardOverlap]") -> Callable[..., None]:
    """Return a hook for whoever saves a module."""

    def before_state_dict(*_: Any) -> None:
        if (alive := overlap()) is not None:
            alive.wait()

    return before_state_dict
