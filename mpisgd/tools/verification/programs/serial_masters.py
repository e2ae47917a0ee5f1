"""`SerialMasters`: one process that updates parameters in a higher precision, as `Sharded(master_dtype=...)`.

    step    master <- what the optimizer makes of master and gradient, both in the higher precision
            parameter <- master, rounded

During a step the optimizer finds masters where it has parameters; a closure finds these, rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpisgd.sharding.piece import MASTER

__all__ = ["SerialMasters", "halves_with_masters"]

HALVES = ("bfloat16", "float16")


def halves_with_masters(dtypes: Sequence[str], master: torch.dtype | None) -> bool:
    """Return whether parameters of 16 bits have masters, of which another order of additions says nothing."""
    return master is not None and any(dtype in HALVES for dtype in dtypes)


class SerialMasters:
    """The masters of an optimizer's parameters.

    Args:
        dtype: in which parameters of lower precision are updated.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._masters: dict[Tensor, Tensor] = {}
        self._aside: dict[Tensor, tuple[torch.dtype, Tensor | None]] = {}  # dtypes and gradients, in a step

    def of(self, params: Sequence[nn.Parameter]) -> dict[int, Tensor]:
        """Return the masters of those that have one, by their places."""
        return {
            place: self._master_of(param)
            for place, param in enumerate(params)
            if param.dtype.itemsize < self._dtype.itemsize
        }

    def _master_of(self, param: nn.Parameter) -> Tensor:
        """Return the master of a parameter, with what somebody else has written to that."""
        here = param.detach()
        master = self._masters.get(param, here.to(self._dtype))
        self._masters[param] = torch.where(master.to(here.dtype) == here, master, here.to(self._dtype))
        return self._masters[param]

    def step_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer update the masters in each of its steps."""

        def begin(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            params = _params_of(optimizer)
            self._show_masters(params)
            if args and callable(args[0]):
                args = (self._around(args[0], params), *args[1:])
            return args, kwargs

        optimizer.register_step_pre_hook(begin)
        optimizer.register_step_post_hook(lambda *_: self._round(_params_of(optimizer)))

    def _around(self, closure: Callable[[], Any], params: Sequence[nn.Parameter]) -> Callable[[], Any]:
        def rounded() -> Any:
            self._round(params)
            loss = closure()
            self._show_masters(params)
            return loss

        return rounded

    def _show_masters(self, params: Sequence[nn.Parameter]) -> None:
        for place, master in self.of(params).items():
            param = params[place]
            grad, param.grad = param.grad, None
            self._aside[param] = param.dtype, grad
            param.data = master
            param.grad = None if grad is None else grad.to(self._dtype)

    def _round(self, params: Sequence[nn.Parameter]) -> None:
        for param in params:
            if param in self._aside:
                dtype, grad = self._aside.pop(param)
                param.grad = None
                self._masters[param] = param.data
                param.data = param.data.to(dtype)
                param.grad = grad

    # -- states -------------------------------------------------------------------------------------

    def add_to(self, state: dict[str, Any], params: Sequence[nn.Parameter]) -> None:
        """Add the masters to the state of the optimizer, but for those that alone say what parameters do."""
        for place, master in self.of(params).items():
            if place in state["state"] or not torch.equal(master, params[place].detach().to(self._dtype)):
                state["state"].setdefault(place, {})[MASTER] = master.clone()

    def load(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Have an optimizer load a state without a loss of precision: torch casts to that of parameters."""
        plain = {
            place: {name: entry for name, entry in entries.items() if name != MASTER}
            for place, entries in state["state"].items()
        }
        plain = {place: entries for place, entries in plain.items() if entries}
        optimizer.load_state_dict({**state, "state": plain})
        params = _params_of(optimizer)
        for place, entries in plain.items():
            optimizer.state[params[place]].update(entries)


def _params_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]
