"""The parameters of an optimizer with Adam's moments, of which the variance is frozen later on."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpisgd.arguments import check_positive, shown
from mpisgd.errors import InvalidArgument
from mpisgd.parameters.parameter_names import name_parameters

__all__ = ["Trained", "TrainedParameters", "adam_defaults", "denominator", "update_moments"]


class Trained(NamedTuple):
    """A parameter with what an update needs.

    Attributes:
        param: the parameter.
        state: of the optimizer, for this parameter.
        settings: of its parameter group.
    """

    param: Tensor
    state: dict[str, Any]
    settings: dict[str, Any]


class TrainedParameters(torch.optim.Optimizer):
    """Goes through parameters with their state.

    Attributes:
        num_steps: how many steps there were.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._no_variance: dict[Tensor, Tensor | None] = {}  # where it is zero, None: nowhere; while frozen
        self.num_steps = 0
        super().__init__(params, defaults)

    def _trained(self) -> Iterator[Trained]:
        """Yield all parameters, in the order of the groups."""
        for group in self.param_groups:
            for param in group["params"]:
                yield Trained(param, self.state[param], group)

    def _with_gradients(self) -> Iterator[Trained]:
        """Yield the parameters that have a gradient, with the state that the first one makes."""
        for trained in self._trained():
            if trained.param.grad is not None:
                if "step" not in trained.state:
                    trained.state.update(self._new_state(trained.param))
                yield trained

    def _new_state(self, param: Tensor) -> dict[str, Any]:
        """Return a parameter's state before its first gradient: torch.optim.Adam's, and one entry more."""
        return {
            "step": torch.tensor(0.0),
            "variance_steps": 0,
            "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format),
        }

    def _refuse_new(self, has_first: Sequence[bool], since: str) -> None:
        """Raise where parameters have their first gradient when the variance is known no more."""
        if any(has_first):
            names = [name for name, _ in name_parameters(self, None)]
            first = ", ".join(name for name, new in zip(names, has_first, strict=True) if new)
            raise InvalidArgument(
                f"{type(self).__name__}: step {self.num_steps} brings the first gradient of {first}, and the "
                f"variance is frozen since {since}; use all parameters before, or make a new optimizer"
            )

    def _clear_without_variance(self, trained: Trained, momentum: Tensor) -> None:
        """Set `momentum` to zero where the variance is zero, while it is frozen.

        Such an element never had a gradient when the variance was taken, as in the row of an embedding that
        no batch has used. It gets the sign of a zero, and dividing that by eps would move it far away.
        """
        if trained.param not in self._no_variance:
            mask = trained.state["exp_avg_sq"] == 0
            self._no_variance[trained.param] = mask if mask.any() else None
        if (mask := self._no_variance[trained.param]) is not None:
            momentum.masked_fill_(mask, 0.0)

    def _complete_state(self) -> None:
        """Add what a state of torch.optim.Adam does not have."""
        for _, state, settings in self._trained():
            if "step" in state:
                state.setdefault("variance_steps", int(state["step"]))
            for key, value in self.defaults.items():
                settings.setdefault(key, value)


def adam_defaults(
    kind: str, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> dict[str, Any]:
    """Check the defaults of parameter groups, and return them."""
    check_positive(kind, "eps", eps)
    for what, value in (("lr", lr), ("weight_decay", weight_decay)):
        if not isinstance(value, int | float) or not 0.0 <= value < float("inf"):
            raise InvalidArgument(f"{kind}: {what}={shown(value)}; expected a number of at least 0")
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    if not pair or not all(isinstance(beta, int | float) and 0.0 <= beta < 1.0 for beta in betas):
        raise InvalidArgument(f"{kind}: betas={shown(betas)}; expected two numbers from 0 to below 1")
    return {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}


def update_moments(state: dict[str, Any], grad: Tensor, betas: tuple[float, float]) -> None:
    """Take a gradient into the moving averages m and v: m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2."""
    state["step"] += 1
    state["variance_steps"] += 1
    state["exp_avg"].lerp_(grad, 1.0 - betas[0])
    state["exp_avg_sq"].mul_(betas[1]).addcmul_(grad, grad, value=1.0 - betas[1])


def denominator(variance: Tensor, correction: float, eps: float) -> Tensor:
    """Return sqrt(v / correction) + eps."""
    return variance.sqrt().div_(correction**0.5).add_(eps)
