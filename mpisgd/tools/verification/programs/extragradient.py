"""`Extragradient`: an optimizer whose closure runs twice a step, and that updates each element by itself.

    there <- x - lr g(x)                     g: the gradients that a call of the closure leaves
    m     <- beta m + g(there)
    x     <- x - lr m

torch has one optimizer that calls its closure again, LBFGS, which updates parameters as a whole: where ranks
have parts of them, it is refused.

Source: Korpelevich 1976.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["Extragradient"]


class Extragradient(torch.optim.Optimizer):
    """Takes each step by the gradients that there are one step ahead; needs a closure."""

    def __init__(self, params: Any, lr: float, beta: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        closure()
        before = {param: param.clone() for param, _, _ in self._with_grads()}
        for param, grad, options in self._with_grads():
            param.add_(grad, alpha=-options["lr"])
        loss = closure()
        for param, grad, options in self._with_grads():
            momentum = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
            momentum.mul_(options["beta"]).add_(grad)
            param.copy_(before[param]).add_(momentum, alpha=-options["lr"])
        return loss

    def _with_grads(self) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
        for options in self.param_groups:
            for param in options["params"]:
                if param.grad is not None:
                    yield param, param.grad, options
