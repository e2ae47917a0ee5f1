"""1-bit Adam: Adam for the first steps, then its momentum by one bit per element.

Source: Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
Speed", algorithm 1.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mpisgd.arguments import check_flag, check_positive
from mpisgd.core.group import Group
from mpisgd.methods.compressed_momentum.compressed_momentum import CompressedMomentumOptimizer
from mpisgd.methods.compressed_momentum.moments import Trained, adam_defaults, denominator, update_moments

__all__ = ["OneBitAdam"]


class OneBitAdam(CompressedMomentumOptimizer):
    """Adam that sends one bit per element of the momentum from step `freeze_step` + 1 on.

    With g_i the gradient of rank i, gamma the learning rate, up to `freeze_step` exactly torch.optim.Adam:

        g = mean of g_i;   m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2
        x = x - gamma m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

    and afterwards, with v and the correction 1 - b2^t as they were at the last of these steps,

        m_i = b1 m + (1 - b1) g_i
        m   = 1-bit average of m_i, with the workers' and the servers' errors (see `TwoStepExchange`)
        x   = x - gamma m / (1 - b1^t) / (sqrt(v / (1 - b2^T)) + eps)

    Each parameter has its own magnitudes in the exchange. An element whose gradient was always zero before
    the freeze is not updated after it; a parameter without any gradient before the freeze raises an error.

    Args:
        params: as for any torch optimizer.
        lr: gamma; not a tensor. Schedulers work as usual.
        betas: b1, b2.
        eps: added to the denominator.
        weight_decay: times the parameter, added to the gradient.
        decoupled_weight_decay: x = (1 - gamma weight_decay) x before the update instead, as in AdamW.
        freeze_step: number of Adam steps at the beginning. The variance must be stable then, and the warm-up
            of the learning rate over. The paper uses 15 to 20 % of all steps.
        group: the ranks that train together, all of the job by default.

    Do not wrap it in `DistributedOptimizer`. All ranks start from equal parameters and call `step()`
    together; GradScaler raises an error. See docs/concepts/compression.md.

    Cost: 2 (size - 1) / size times the gradients' bytes per step, then 1/32 of that and the magnitudes; and
        in each step a byte per parameter.
    """

    _copied = (*CompressedMomentumOptimizer._copied, "freeze_step")

    @classmethod
    def examples(cls) -> Sequence[Mapping[str, Any]]:
        """See `CompressedMomentumOptimizer`."""
        with_decay = {"weight_decay": 0.1, "decoupled_weight_decay": True}
        return (
            {"freeze_step": 2},
            {"freeze_step": 2, "betas": (0.8, 0.95), "eps": 1e-6, **with_decay},
            {"freeze_step": 100, "weight_decay": 0.1},
        )

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int,
        decoupled_weight_decay: bool = False,
        group: Group | None = None,
    ) -> None:
        defaults = adam_defaults("OneBitAdam", lr, betas, eps, weight_decay)
        decoupled = check_flag("OneBitAdam", "decoupled_weight_decay", decoupled_weight_decay)
        check_positive("OneBitAdam", "freeze_step", freeze_step, whole=True)
        self.freeze_step = freeze_step
        super().__init__(
            params,
            {**defaults, "decoupled_weight_decay": decoupled},
            group,
            agreed=f"freeze_step={freeze_step}",
        )

    def _update(self) -> None:
        if self.num_steps <= self.freeze_step:
            self._update_as_adam()
        else:
            self._update_frozen()

    def _update_as_adam(self) -> None:
        self._average_gradients()
        for trained in self._with_gradients():
            update_moments(trained.state, _decayed(trained), trained.settings["betas"])
            _apply(trained)

    def _update_frozen(self) -> None:
        everything, updated = self._with_some_gradient(f"step {self.freeze_step}")
        for trained in updated:
            trained.state["step"] += 1
            trained.state["exp_avg"].lerp_(_decayed(trained), 1.0 - trained.settings["betas"][0])
        self._exchange([trained.state["exp_avg"] for trained in everything if "step" in trained.state])
        for trained in updated:
            self._clear_without_variance(trained, trained.state["exp_avg"])
            _apply(trained)


def _decayed(trained: Trained) -> Tensor:
    """Return the gradient, zero where this rank has none, with the weight decay that goes into it."""
    param, settings = trained.param, trained.settings
    grad = param.new_zeros(param.shape) if param.grad is None else param.grad
    if settings["weight_decay"] and not settings["decoupled_weight_decay"]:
        return grad.add(param, alpha=settings["weight_decay"])
    return grad


def _apply(trained: Trained) -> None:
    """Update a parameter by its momentum over the root of its variance, both corrected for their start."""
    param, state, settings = trained
    (beta1, beta2), lr = settings["betas"], settings["lr"]
    if settings["decoupled_weight_decay"]:
        param.mul_(1.0 - lr * settings["weight_decay"])
    divided_by = denominator(state["exp_avg_sq"], 1.0 - beta2 ** state["variance_steps"], settings["eps"])
    param.addcdiv_(state["exp_avg"], divided_by, value=-lr / (1.0 - beta1 ** float(state["step"])))
