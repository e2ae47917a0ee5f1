"""`HiddenParameters`: what an optimizer does not see during a step, in which it updates pieces."""

import operator
from typing import Any

import torch
from torch import Tensor

from mpisgd.errors import InvalidArgument
from mpisgd.methods.strategy.divided_state import DividedState

__all__ = ["HiddenParameters"]


class HiddenParameters:
    """Takes the parameters out of an optimizer's groups, and puts them back.

    Args:
        optimizer: its parameters are those of now, and what it is given by `add_param_group`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._known = [list(group["params"]) for group in optimizer.param_groups]
        self._by_group: list[list[Tensor]] | None = None
        self._replaced_state = False

    def __bool__(self) -> bool:
        """Whether the optimizer is without its parameters now."""
        return self._by_group is not None

    def hide(self, optimizer: torch.optim.Optimizer, state: Any = None) -> None:
        """Leave the optimizer with empty groups, and with `state` instead of its own if there is one.

        Raises:
            InvalidArgument: see `check`.
        """
        self.check(optimizer)
        self._by_group = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = []
        self._replaced_state = state is not None
        if self._replaced_state:
            optimizer.state = state

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise where parameters are not in the groups that they were in.

        Raises:
            InvalidArgument: the program has moved parameters between groups, or taken some out.
        """
        by_group = [group["params"] for group in optimizer.param_groups]
        self._known += [list(params) for params in by_group[len(self._known) :]]
        for place, known in enumerate(self._known):
            now = by_group[place] if place < len(by_group) else []
            if len(now) != len(known) or not all(map(operator.is_, now, known)):
                raise InvalidArgument(
                    f"DistributedOptimizer: param_groups[{place}] had {len(known)} parameters and has other "
                    f"ones now ({len(now)}). Where parameters are divided among ranks, each stays in its "
                    "group: requires_grad_(False) leaves one out, add_param_group() adds others, and for "
                    "other groups make the optimizer anew"
                )

    def show(self, optimizer: torch.optim.Optimizer) -> bool:
        """Give the optimizer its parameters back, without a state that was put in; False if it has them."""
        if self._by_group is None:
            return False
        by_group, self._by_group = self._by_group, None
        for group, params in zip(optimizer.param_groups, by_group, strict=True):
            group["params"] = params
        if self._replaced_state:
            optimizer.state = DividedState()
        return True
