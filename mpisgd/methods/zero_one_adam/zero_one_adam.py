"""0/1 Adam: a variance that is renewed ever more rarely, and steps between which the ranks do not meet.

Source: Lu, Li, Zhang, De Sa and He 2022, "Maximizing Communication Efficiency for Large-scale Training via
0/1 Adam", algorithm 1 and the policies of its section 6.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpisgd.arguments import check_positive
from mpisgd.collectives.coalesced import all_reduce_coalesced
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.method_state import own
from mpisgd.methods.compressed_momentum.compressed_momentum import CompressedMomentumOptimizer, Kept
from mpisgd.methods.compressed_momentum.moments import Trained, adam_defaults, denominator, update_moments

__all__ = ["ZeroOneAdam", "is_variance_step", "local_interval"]

OWN_MOMENTUM = "momentum_is_own"  # in a parameter's state, after a meeting for which the learning rate was 0


def is_variance_step(step: int, scaler: int) -> bool:
    """Return whether `step`, the first one is 1, renews the variance: T_v.

    Step 1 does; `scaler` times it is every step, then `scaler` times every second, every fourth and so on:
    after the j-th renewal the next one comes 2^(j // scaler) steps later.
    """
    doublings = ((step - 1 + scaler) // scaler).bit_length() - 1
    interval = 1 << doublings
    begun = scaler * (interval - 1)  # steps before those with this interval
    return (step - 1 - begun) % interval == 0


def local_interval(steps_frozen: int, scaler: int, clipper: int) -> int:
    """Return how far apart the ranks meet at the so many-th step, from 1, after the variance was frozen.

    1 for `scaler` steps, then 2, 4 and so on, at most `clipper`.
    """
    doublings = (steps_frozen - 1) // scaler
    return clipper if doublings >= clipper.bit_length() else min(clipper, 1 << doublings)


@dataclass
class _Kept(Kept):
    """What is kept beside the state of parameters.

    Attributes:
        awaited: places of parameters that had their first gradient since the last meeting, on this rank.
    """

    awaited: list[int] = own(default_factory=list)


class ZeroOneAdam(CompressedMomentumOptimizer):
    """Adam that sends one bit per element in most steps, and nothing in others.

    With g_i the gradient of rank i and gamma the learning rate divided by 1 - b1^t. In the steps of the set
    T_v, which become rarer (see `is_variance_step`) and end with `var_freeze_step`, as torch.optim.Adam:

        g = mean of g_i;   m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2
        x = x - gamma m / D        D = sqrt(v / (1 - b2^j)) + eps, with j the renewals of v so far

    In all other steps each rank continues by itself. With x' the parameters after the last exchange, which
    all ranks have:

        m_i = b1 m_i + (1 - b1) g_i;   x_i = x_i - gamma m_i / D;   u_i = u_i + gamma m_i

    and in the steps of the set T_u they exchange: in each step until `local_step_scaler` steps after
    `var_freeze_step`, then in every second, every fourth and so on, at most `local_step_clipper` steps apart:

        u = 1-bit average of u_i, with the workers' and the servers' errors (see `TwoStepExchange`)
        x = x' - u / D;   m = u / (sum of gamma since x');   u_i = 0

    If that sum is 0, since the learning rate was 0, m_i stays as it is; the next step of T_v begins with the
    mean of the m_i.

    The paper's algorithm also sends one bit per element of the momentum in steps of T_v. Here, as in its
    authors' implementation, the gradient that is averaged for the variance is used for the momentum as well.
    A step in which a parameter has its first gradient belongs to T_v; after `var_freeze_step` it raises an
    error. In other steps a missing gradient counts as zero. An element whose gradient was always zero is not
    updated.

    Between exchanges the ranks have different parameters: check `is_synchronized` before you evaluate or
    save.

    Args:
        params: as for any torch optimizer.
        lr: the learning rate; not a tensor. Schedulers work as usual.
        betas: b1, b2.
        eps: added to the denominator.
        weight_decay: times the parameter, added to the gradient.
        var_freeze_step: the last step that may update the variance; usually the end of the warm-up of the
            learning rate.
        var_update_scaler: number of updates of the variance after which they become half as frequent; kappa
            in the paper.
        local_step_scaler: number of steps beyond `var_freeze_step` after which the ranks exchange half as
            often.
        local_step_clipper: largest number of steps between two exchanges; H in the paper. 1: in every step.
        group: the ranks that train together, all of the job by default.

    Do not wrap it in `DistributedOptimizer`. All ranks start from equal parameters and call `step()`
    together; GradScaler raises an error. See docs/concepts/compression.md.

    Cost: in steps of T_v 2 (size - 1) / size times the gradients' bytes; in other steps with an exchange 1/32
        of that, the magnitudes and a byte per parameter; in the remaining steps nothing.
    """

    _keeps_models_equal = False
    _copied = (
        *CompressedMomentumOptimizer._copied,
        "local_step_clipper",
        "local_step_scaler",
        "var_freeze_step",
        "var_update_scaler",
    )

    @classmethod
    def examples(cls) -> Sequence[Mapping[str, Any]]:
        """See `CompressedMomentumOptimizer`."""
        return (
            {"var_freeze_step": 3, "var_update_scaler": 1, "local_step_scaler": 1},
            {
                "var_freeze_step": 3,
                "var_update_scaler": 2,
                "local_step_scaler": 1,
                "local_step_clipper": 2,
                "betas": (0.8, 0.95),
                "eps": 1e-6,
            },
            {"var_freeze_step": 100, "var_update_scaler": 100, "weight_decay": 0.1},
        )

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        var_freeze_step: int,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
        group: Group | None = None,
    ) -> None:
        defaults = adam_defaults("ZeroOneAdam", lr, betas, eps, weight_decay)
        steps = {
            "var_freeze_step": var_freeze_step,
            "var_update_scaler": var_update_scaler,
            "local_step_scaler": local_step_scaler,
            "local_step_clipper": local_step_clipper,
        }
        for what, value in steps.items():
            check_positive("ZeroOneAdam", what, value, whole=True)
        self.var_freeze_step = var_freeze_step
        self.var_update_scaler = var_update_scaler
        self.local_step_scaler = local_step_scaler
        self.local_step_clipper = local_step_clipper
        super().__init__(params, defaults, group, agreed=f"{steps}")

    @property
    def is_synchronized(self) -> bool:
        """Whether all ranks have the same parameters at this moment."""
        return self._meets(self.num_steps)

    def _new_state_of_method(self) -> Any:
        return _Kept()

    def replica(self, *, anyway: bool = False) -> dict[str, Tensor]:
        """See `CompressedMomentumOptimizer`."""
        own_momenta = any(trained.state.get(OWN_MOMENTUM) for trained in self._trained())
        return super().replica(anyway=anyway or own_momenta or not self.is_synchronized)

    def _meets(self, step: int) -> bool:
        """Return whether `step` is one of T_u."""
        frozen = step - self.var_freeze_step
        if frozen <= 0:
            return True
        return frozen % local_interval(frozen, self.local_step_scaler, self.local_step_clipper) == 0

    def _update(self) -> None:
        step, meets = self.num_steps, self._meets(self.num_steps)
        is_open = step <= self.var_freeze_step
        renews = is_open and is_variance_step(step, self.var_update_scaler)
        if renews or (meets and self._has_new_parameters(is_open)):
            self._update_as_adam()
        else:
            self._update_alone()
            if meets:
                self._meet()

    def _has_new_parameters(self, is_open: bool) -> bool:
        """Return whether parameters have their first gradient on any rank; raise where it is too late.

        Collective.
        """
        everything = list(self._trained())
        self._note_new(everything)
        first = self._exist_somewhere([place in self._kept.awaited for place in range(len(everything))])
        self._kept.awaited.clear()
        if not is_open:
            self._refuse_new(first, f"step {self.var_freeze_step}")
        return any(first)

    def _note_new(self, everything: list[Trained]) -> None:
        for place, (param, state, _) in enumerate(everything):
            if param.grad is not None and "step" not in state and place not in self._kept.awaited:
                self._kept.awaited.append(place)

    def _update_as_adam(self) -> None:
        self._join_momenta()
        self._average_gradients()
        self._no_variance.clear()
        for trained in self._with_gradients():
            param, state, settings = trained
            update_moments(state, _decayed(trained), settings["betas"])
            param.addcdiv_(state["exp_avg"], _denominator(trained), value=-_rate(trained))

    def _join_momenta(self) -> None:
        """Make momenta their mean that the last meeting has left to the ranks. Collective where any are."""
        states = [trained.state for trained in self._trained()]
        own = [state["exp_avg"] for state in states if state.pop(OWN_MOMENTUM, False)]
        if own and self.group.size > 1:
            all_reduce_coalesced(own, ReduceOp.AVG, self.group)

    def _update_alone(self) -> None:
        """Update this rank's momentum and what it adds up to; and the parameters, until the ranks meet."""
        everything = list(self._trained())
        self._note_new(everything)
        meets = self._meets(self.num_steps)
        for trained in self._with_variance(everything):
            param, state, settings = trained
            state["step"] += 1
            momentum, rate = state["exp_avg"], _rate(trained)
            momentum.lerp_(_decayed(trained), 1.0 - settings["betas"][0])
            self._clear_without_variance(trained, momentum)
            if "momentum_accumulator" not in state:
                state["momentum_accumulator"], state["lrs"] = torch.zeros_like(momentum), 0.0
            state["momentum_accumulator"].add_(momentum, alpha=rate)
            state["lrs"] += rate
            if not meets:
                if "synchronized_param" not in state:
                    state["synchronized_param"] = param.clone()
                param.addcdiv_(momentum, _denominator(trained), value=-rate)

    def _meet(self) -> None:
        """Replace the steps that each rank has made since the last meeting by their average. Collective."""
        updated = self._with_variance(list(self._trained()))
        self._exchange([trained.state["momentum_accumulator"] for trained in updated])
        for trained in updated:
            param, state, _ = trained
            accumulated = state["momentum_accumulator"]
            self._clear_without_variance(trained, accumulated)
            if "synchronized_param" in state:
                param.copy_(state.pop("synchronized_param"))
            param.addcdiv_(accumulated, _denominator(trained), value=-1.0)
            if state["lrs"] > 0.0:
                torch.div(accumulated, state["lrs"], out=state["exp_avg"])
                state.pop(OWN_MOMENTUM, None)
            else:  # no step was made: what was exchanged tells nothing of the momentum
                state[OWN_MOMENTUM] = True
            accumulated.zero_()
            state["lrs"] = 0.0

    @staticmethod
    def _with_variance(everything: list[Trained]) -> list[Trained]:
        return [trained for trained in everything if "step" in trained.state]


def _decayed(trained: Trained) -> Tensor:
    """Return the gradient, zero where this rank has none, with weight decay."""
    param, decay = trained.param, trained.settings["weight_decay"]
    grad = param.new_zeros(param.shape) if param.grad is None else param.grad
    return grad.add(param, alpha=decay) if decay else grad


def _denominator(trained: Trained) -> Tensor:
    """Return D."""
    state, settings = trained.state, trained.settings
    correction = 1.0 - settings["betas"][1] ** state["variance_steps"]
    return denominator(state["exp_avg_sq"], correction, settings["eps"])


def _rate(trained: Trained) -> float:
    """Return gamma."""
    steps = float(trained.state["step"])
    return float(trained.settings["lr"] / (1.0 - trained.settings["betas"][0] ** steps))
