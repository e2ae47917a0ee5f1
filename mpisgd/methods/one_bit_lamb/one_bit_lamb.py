"""1-bit LAMB: LAMB for the first steps, then its momentum by one bit per element and its factors foretold.

Source: Li, Awan, Tang, Rajbhandari and He 2021, "1-bit LAMB: Communication Efficient Large-Scale
Large-Batch Training with LAMB's Convergence Speed", algorithm 1; LAMB: You et al. 2020, "Large Batch
Optimization for Deep Learning: Training BERT in 76 minutes".
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.arguments import check_positive, shown
from mpisgd.core.group import Group
from mpisgd.errors import InvalidArgument
from mpisgd.methods.compressed_momentum.compressed_momentum import CompressedMomentumOptimizer
from mpisgd.methods.compressed_momentum.moments import Trained, adam_defaults, denominator, update_moments

__all__ = ["OneBitLamb"]


class OneBitLamb(CompressedMomentumOptimizer):
    """LAMB that sends one bit per element of the momentum from step `freeze_step` + 1 on.

    With g_i the gradient of rank i, gamma the learning rate and, for each parameter x by itself, up to
    `freeze_step`

        g = mean of g_i;   m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2
        u = m / (sqrt(v) + eps) + weight_decay x
        c = |x| / |u|, within [min_coeff, max_coeff]; 1 where one of them is zero
        x = x - gamma c u;   c_avg = b3 c_avg + (1 - b3) c

    c_avg begins as the first c. Afterwards v and c_avg are frozen, since c would follow the noise of
    compression. The change since then is estimated by w, which continues v with the gradient that is
    recovered from the momentum:

        m_i = b1 m + (1 - b1) g_i
        m'  = 1-bit average of m_i, with the workers' and the servers' errors (see `TwoStepExchange`)
        w   = b2 w + (1 - b2) ((m' - b1 m) / (1 - b1))^2;   m = m'
        r   = max of (sqrt(v) + eps) / (sqrt(w) + eps), within [factor_min, factor_max] and within
              1 - factor_threshold and 1 + factor_threshold times the last r
        x   = x - gamma r c_avg (m / (sqrt(v) + eps) + weight_decay x)

    With weight decay r is replaced by r s + 1 - s, where s is the norm of m / (sqrt(v) + eps) divided by that
    of the whole update, at most 1. Each parameter has its own magnitudes in the exchange, where the paper
    scales parameters so that one magnitude serves all. After the freeze, an element whose gradient was always
    zero before is changed by weight decay only; a parameter without any gradient before the freeze raises an
    error.

    Args:
        params: as for any torch optimizer.
        lr: gamma; not a tensor. Schedulers work as usual.
        betas: b1, b2.
        eps: added to the denominators.
        weight_decay: see above.
        freeze_step: number of LAMB steps at the beginning.
        max_coeff: upper limit of c.
        min_coeff: lower limit of c.
        coeff_beta: b3.
        factor_max: upper limit of r.
        factor_min: lower limit of r.
        factor_threshold: largest relative change of r from one step to the next.
        group: the ranks that train together, all of the job by default.

    Do not wrap it in `DistributedOptimizer`. All ranks start from equal parameters and call `step()`
    together; GradScaler raises an error. See docs/concepts/compression.md. Cost: as `OneBitAdam`.
    """

    _copied = (*CompressedMomentumOptimizer._copied, "freeze_step")

    @classmethod
    def examples(cls) -> Sequence[Mapping[str, Any]]:
        """See `CompressedMomentumOptimizer`."""
        limits = {"max_coeff": 1.5, "min_coeff": 0.75, "factor_max": 1.25, "factor_min": 0.75}
        others = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
        return (
            {"freeze_step": 2},
            {"freeze_step": 1, "coeff_beta": 0.5, "factor_threshold": 0.25, **limits, **others},
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
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        group: Group | None = None,
    ) -> None:
        defaults = adam_defaults("OneBitLamb", lr, betas, eps, weight_decay)
        check_positive("OneBitLamb", "freeze_step", freeze_step, whole=True)
        _check_limits("coeff", min_coeff, max_coeff)
        _check_limits("factor", factor_min, factor_max)
        check_positive("OneBitLamb", "factor_threshold", factor_threshold)
        if not isinstance(coeff_beta, int | float) or not 0.0 <= coeff_beta < 1.0:
            raise InvalidArgument(f"OneBitLamb: coeff_beta={shown(coeff_beta)}; expected 0 to below 1")
        self.freeze_step = freeze_step
        limits = {
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "coeff_beta": coeff_beta,
            "factor_max": factor_max,
            "factor_min": factor_min,
            "factor_threshold": factor_threshold,
        }
        super().__init__(params, {**defaults, **limits}, group, agreed=f"freeze_step={freeze_step}")

    def _update(self) -> None:
        if self.num_steps <= self.freeze_step:
            self._update_as_lamb()
        else:
            self._update_frozen()

    def _update_as_lamb(self) -> None:
        self._average_gradients()
        for trained in self._with_gradients():
            param, state, settings = trained
            assert param.grad is not None
            update_moments(state, param.grad, settings["betas"])
            update = _scaled_momentum(trained).add_(param, alpha=settings["weight_decay"])
            coeff = _trust_ratio(param, update, settings["min_coeff"], settings["max_coeff"])
            param.sub_(update, alpha=settings["lr"] * coeff)
            earlier, beta = state.get("lamb_coeff_freeze", coeff), settings["coeff_beta"]
            state["lamb_coeff_freeze"] = beta * earlier + (1.0 - beta) * coeff

    def _update_frozen(self) -> None:
        everything, updated = self._with_some_gradient(f"step {self.freeze_step}")
        earlier = [trained.state["exp_avg"].clone() for trained in updated]
        for param, state, settings in updated:
            state["step"] += 1
            state["exp_avg"].mul_(settings["betas"][0])
            if param.grad is not None:
                state["exp_avg"].add_(param.grad, alpha=1.0 - settings["betas"][0])
        self._exchange([trained.state["exp_avg"] for trained in everything if "step" in trained.state])
        for trained, momentum in zip(updated, earlier, strict=True):
            self._clear_without_variance(trained, trained.state["exp_avg"])
            _renew_variance(trained, momentum)
            ratios = _ratios(trained)
            self._clear_without_variance(trained, ratios)  # nothing to foretell there
            _apply_frozen(trained, float(ratios.max()) if ratios.numel() else 1.0)


def _check_limits(what: str, least: float, most: float) -> None:
    names = ("min_coeff", "max_coeff") if what == "coeff" else ("factor_min", "factor_max")
    for name, value in zip(names, (least, most), strict=True):
        check_positive("OneBitLamb", name, value)
    if least > most:
        raise InvalidArgument(f"OneBitLamb: {names[0]}={least} is above {names[1]}={most}")


def _scaled_momentum(trained: Trained) -> Tensor:
    """Return m / (sqrt(v) + eps)."""
    state = trained.state
    divided_by: Tensor = denominator(state["exp_avg_sq"], 1.0, trained.settings["eps"])
    return torch.div(state["exp_avg"], divided_by)


def _trust_ratio(param: Tensor, update: Tensor, least: float, most: float) -> float:
    """Return c."""
    size, length = float(param.norm()), float(update.norm())
    return min(max(size / length, least), most) if size and length else 1.0


def _renew_variance(trained: Trained, earlier: Tensor) -> None:
    """Take the gradient by which the momentum has changed into w."""
    state, (beta1, beta2) = trained.state, trained.settings["betas"]
    grad = (state["exp_avg"] - beta1 * earlier).div_(1.0 - beta1)
    if "exp_avg_sq_fresh" not in state:
        state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()
    state["exp_avg_sq_fresh"].mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)


def _ratios(trained: Trained) -> Tensor:
    """Return (sqrt(v) + eps) / (sqrt(w) + eps)."""
    frozen, fresh = trained.state["exp_avg_sq"], trained.state["exp_avg_sq_fresh"]
    eps = trained.settings["eps"]
    return denominator(frozen, 1.0, eps).div_(denominator(fresh, 1.0, eps))


def _factor(trained: Trained, most: float, share: float) -> float:
    """Return r, and remember it.

    Args:
        most: the largest ratio.
        share: s, how much of the update is momentum.
    """
    state, settings = trained.state, trained.settings
    factor = most * share + 1.0 - share
    last, threshold = float(state.get("last_factor", 1.0)), float(settings["factor_threshold"])
    factor = min(max(factor, settings["factor_min"]), settings["factor_max"])
    factor = min(max(factor, last * (1.0 - threshold)), last * (1.0 + threshold))
    state["last_factor"] = factor
    return float(factor)


def _apply_frozen(trained: Trained, most: float) -> None:
    """Update a parameter with the frozen variance and the foretold coefficient; `most`: the largest ratio."""
    param, state, settings = trained
    update, share = _scaled_momentum(trained), 1.0
    if settings["weight_decay"]:
        momentum_norm = float(update.norm())
        update.add_(param, alpha=settings["weight_decay"])
        whole = float(update.norm())
        share = min(1.0, momentum_norm / whole) if whole else 1.0
    if "lamb_coeff_freeze" not in state:  # as in a state of torch.optim.Adam
        state["lamb_coeff_freeze"] = _trust_ratio(param, update, settings["min_coeff"], settings["max_coeff"])
    coeff = state["lamb_coeff_freeze"] * _factor(trained, most, share)
    param.sub_(update, alpha=settings["lr"] * coeff)
