"""`HiddenParameters`: what an optimizer does not see during a step, in which it updates pieces."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

__all__ = ["HiddenParameters"]


class HiddenParameters:
    """Takes the parameters out of an optimizer's groups, and puts them back."""

    def __init__(self) -> None:
        self._by_group: list[list[Tensor]] | None = None
        self._replaced_state = False

    def __bool__(self) -> bool:
        """Whether the optimizer is without its parameters now."""
        return self._by_group is not None

    def hide(self, optimizer: torch.optim.Optimizer, state: Any = None) -> None:
        """Leave the optimizer with empty groups, and with `state` instead of its own if there is one."""
        self._by_group = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = []
        self._replaced_state = state is not None
        if self._replaced_state:
            optimizer.state = state

    def show(self, optimizer: torch.optim.Optimizer) -> bool:
        """Give the optimizer its parameters back, without a state that was put in; False if it has them."""
        if self._by_group is None:
            return False
        by_group, self._by_group = self._by_group, None
        for group, params in zip(optimizer.param_groups, by_group, strict=True):
            group["params"] = params
        if self._replaced_state:
            optimizer.state = defaultdict(dict)
        return True
