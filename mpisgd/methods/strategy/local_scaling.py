"""`LocalScaling`: a GradScaler, where gradients stay on their rank.

A GradScaler leaves out `step()` where it has found an infinity or a NaN. With gradients that are the same on
all ranks all of them leave it out. With gradients of their own, one rank would, and the others would wait
for it in the next exchange. So the optimizer says that it takes care of such steps itself, as torch's fused
ones do: then the scaler calls `step()` in any case, and tells the optimizer what it has found.
"""

import torch
from torch import Tensor

__all__ = ["LocalScaling"]

HANDLES = "_step_supports_amp_scaling"  # as torch.amp.GradScaler asks for it


class LocalScaling:
    """Has a GradScaler call every `step()`; one whose gradients are not finite changes nothing on its rank.

    Args:
        optimizer: the wrapped one.
        also_fused: whether to do it for fused optimizers, too, which else do it as they update.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, also_fused: bool = False) -> None:
        self._handles_itself = bool(getattr(optimizer, HANDLES, False)) and not also_fused
        setattr(optimizer, HANDLES, True)
        self._hidden: list[tuple[Tensor, Tensor]] = []

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Do what the scaler leaves to the optimizer: divide by the scale, or hide what is not finite."""
        self.after_step()  # a step that raised has left them hidden; what was computed since counts
        found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        if self._handles_itself or found_inf is None:
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        scale: Tensor | None = getattr(optimizer, "grad_scale", None)
        # What is not fused must not see them; the scaler deletes both after the step.
        optimizer.found_inf = optimizer.grad_scale = None  # type: ignore[attr-defined]
        if bool(found_inf):
            self._hide(params)
        elif scale is not None:
            factor = 1.0 / float(scale)
            for param in params:
                if param.grad is not None:
                    param.grad.mul_(factor)

    def _hide(self, params: list[Tensor]) -> None:
        """An optimizer passes over parameters without a gradient, and leaves their state alone."""
        self._hidden = [(param, param.grad) for param in params if param.grad is not None]
        for param, _ in self._hidden:
            param.grad = None

    def after_step(self) -> None:
        """Give back what was hidden."""
        for param, grad in self._hidden:
            if param.grad is None:
                param.grad = grad
        self.forget()

    def forget(self) -> None:
        """Note that gradients are reset."""
        self._hidden = []
