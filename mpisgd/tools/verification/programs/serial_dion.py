"""`SerialDion`: Dion in one process, by its paper: what ranks must come to with their joined loss."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

import torch

from mpisgd.compress.randomness import generator
from mpisgd.methods.dion.dion import EPS, SCALES
from mpisgd.methods.dion.paper import dion

__all__ = ["SerialDion"]

DEFAULTS = {
    "weight_decay": 0.1,
    "momentum": 0.95,
    "rank_fraction": 0.25,
    "adjust_lr_fn": "match_rms_adamw",
    "adamw_betas": (0.9, 0.95),
    "adamw_eps": 1e-8,
    "adamw_weight_decay": None,
    "seed": 0,
}


class SerialDion(torch.optim.Optimizer):
    """Matrices by the paper, the rest by torch.optim.AdamW; arguments are those of `mpisgd.Dion`."""

    def __init__(self, params: Any, lr: float, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **DEFAULTS, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    (self._matrix if param.dim() == 2 else self._other)(param, group)
        return loss

    def _matrix(self, param: torch.Tensor, group: Mapping[str, Any]) -> None:
        state, lr = self.state[param], group["lr"]
        if not state:
            columns = max(1, ceil(group["rank_fraction"] * min(param.shape)))
            first = generator(group["seed"], 0, param.numel()).standard_normal((param.shape[1], columns))
            state["momentum"], state["factor"] = torch.zeros_like(param), torch.from_numpy(first).to(param)
        assert param.grad is not None
        state["momentum"], state["factor"], step = dion(
            param.grad, state["momentum"], state["factor"], group["momentum"], EPS
        )
        scale = SCALES[group["adjust_lr_fn"]](param.shape)
        param.copy_((1 - lr * group["weight_decay"]) * param - lr * scale * step)

    def _other(self, param: torch.Tensor, group: Mapping[str, Any]) -> None:
        decay, given = group["weight_decay"], group["adamw_weight_decay"]
        decay = decay if given is None else given
        other = torch.optim.AdamW([param], group["lr"], group["adamw_betas"], group["adamw_eps"], decay)
        other.state = self.state
        other.step()
