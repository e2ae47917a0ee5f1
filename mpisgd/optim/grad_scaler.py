"""What a `torch.amp.GradScaler` sees of gradients that the ranks combine as late as in a step.

It looks for infinities first, and leaves the step out where it finds some. If it looked at each rank's own
gradients, a rank with infinities would leave out a step that the others take:

    rank 0   backward: inf | scaler.step: inf, no step         | next backward, reduce
    rank 1   backward      | scaler.step: step(), which reduces: with the next gradients of rank 0

So they are combined before it looks, or it looks once more. What `unscale_` has divided before that is not
combined: ranks whose window was full have combined theirs in backward, with the scale.
"""

import sys
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

__all__ = ["HANDLES", "has_unscaled", "look_again", "scaler_around"]

HANDLES = "_step_supports_amp_scaling"  # what `GradScaler.step` asks an optimizer for before it looks
DEPTH = 16  # frames to `GradScaler.step`, at most


def scaler_around() -> Any:
    """Return the GradScaler whose `step` runs, if one does."""
    frame = sys._getframe(1)
    for _ in range(DEPTH):
        if frame is None:
            break
        scaler = frame.f_locals.get("self") if frame.f_code.co_name in ("step", "_maybe_opt_step") else None
        if isinstance(scaler, torch.amp.GradScaler):
            return scaler
        frame = frame.f_back  # type: ignore[assignment]
    return None


def has_unscaled(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the scaler whose `step` runs has looked at the gradients already, in `unscale_`."""
    scaler = scaler_around()
    return scaler is not None and scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED


def look_again(optimizer: torch.optim.Optimizer) -> None:
    """Have the scaler whose `step` runs look at the gradients once more, if it has looked before."""
    if has_unscaled(optimizer):
        scaler_around()._check_inf_per_device(optimizer)
