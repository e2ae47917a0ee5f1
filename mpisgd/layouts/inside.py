"""What holds while a model in a layout computes: plain tensors count as whole, attention takes DTensors.

Recomputation (torch.utils.checkpoint) calls modules of the model in backward, from autograd's thread. So each
module enters for itself, and the outermost one counts.
"""

import threading
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.distributed.tensor.experimental import implicit_replication

from mpisgd.layouts.attention import LocalAttention

__all__ = ["enter_with_every_module"]


class _Inside(threading.local):
    """The modules whose forward is under way in this thread, the outermost first."""

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._contexts = ExitStack()

    def enter(self, module: nn.Module, args: Any) -> None:
        if not self._modules:
            self._contexts.enter_context(implicit_replication())
            self._contexts.enter_context(LocalAttention())
        self._modules.append(module)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._modules and self._modules[-1] is module:  # otherwise another hook raised before `enter`
            self._modules.pop()
            if not self._modules:
                self._contexts.close()


def enter_with_every_module(model: nn.Module) -> None:
    """Register the hooks; before the other hooks of the modules in forward, and after them at its end."""
    inside = _Inside()
    for module in model.modules():
        module.register_forward_pre_hook(inside.enter, prepend=True)
        module.register_forward_hook(inside.leave, always_call=True)
