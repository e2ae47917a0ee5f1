"""`Dion`: matrices by orthonormal updates of low rank, whose factors alone are sent; the rest by AdamW.

Ahn, Xu, Abreu and Langford 2025, "Dion: Distributed Orthonormalized Updates", arXiv 2504.05295.

Everything before the two factors is linear in the momentum, so each rank keeps one of its own, from its own
gradients, and their mean is that of the paper:

    B_i = M_i + G_i;   mean of B_i Q = (mean of B_i) Q;   mean of B_i^T P;   M_i = B_i - (1 - mu) P R^T
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil, sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor

from mpisgd.arguments import check_seed, shown
from mpisgd.compress.randomness import generator
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument
from mpisgd.methods.compressed_momentum.compressed_momentum import (
    GOES_WITH,
    CompressedMomentumOptimizer,
)
from mpisgd.methods.compressed_momentum.means import combine
from mpisgd.methods.compressed_momentum.moments import Trained
from mpisgd.methods.muon.matrix_groups import (
    ADAMW,
    ALGORITHM,
    OptimizerByAlgorithm,
    adamw_settings,
    by_algorithm,
    check_rate,
    run_step,
)
from mpisgd.methods.strategy.goes_with import GoesWith, yes

__all__ = ["SCALES", "Dion"]

DION = "dion"
EPS = 1e-8  # of the norm of a column
SCALES: Mapping[str, Callable[[torch.Size], float]] = {
    "none": lambda shape: 1.0,
    "spectral_norm": lambda shape: sqrt(shape[0] / shape[1]),
    "match_rms_adamw": lambda shape: 0.2 * sqrt(max(shape)),
}


def rank_of(shape: Sequence[int], fraction: float) -> int:
    """Return how many columns the factors of a matrix have."""
    return max(1, ceil(fraction * min(shape)))


class Dion(OptimizerByAlgorithm, CompressedMomentumOptimizer):
    """Orthonormal updates of low rank for the matrices of a model, torch.optim.AdamW for the rest.

        optimizer = mpisgd.Dion(model.named_parameters(), lr=2e-3, adamw=["embedding", "head"])

    With G_i the gradient of rank i of a matrix X [m, n], and r = ceil(rank_fraction min(m, n)):

        B_i = M_i + G_i
        P   = orthonormal basis of mean of B_i Q        [m, r]; Q [n, r]: of the step before
        R   = mean of B_i^T P                           [n, r]
        M_i = B_i - (1 - mu) P R^T
        Q   = R with columns of norm 1
        X   = (1 - lr weight_decay) X - lr scale P Q^T

    Up to rounding this is Dion with the mean of the gradients. Only P, R and the gradients of the other
    parameters are sent. Each rank has its own momentum M_i; `state_dict()` is collective, and returns the
    mean of the momenta on all ranks.

    Args:
        params: as for any torch optimizer; `model.named_parameters()` where `adamw` has names. A group may
            say what updates it, by the key "algorithm": "dion" or "adamw".
        lr: learning rate of Dion and, unless `adamw_lr` is given, of AdamW.
        weight_decay: decoupled weight decay of Dion and, unless `adamw_weight_decay` is given, of AdamW.
        momentum: mu.
        rank_fraction: above 0, at most 1. At 1/2 as much is sent for a square matrix as its gradient has.
        adjust_lr_fn: the factor "scale" above. "spectral_norm": sqrt(m / n); "match_rms_adamw":
            0.2 sqrt(max(m, n)), for which a learning rate that was tuned for AdamW can be used; "none": 1.
        adamw: names of parameters or modules whose matrices AdamW updates; `*` stands for anything.
        adamw_lr: see torch.optim.AdamW, as for `adamw_betas`, `adamw_eps` and `adamw_weight_decay`.
        seed: seed of the first Q, which is normally distributed and the same on all ranks.
        group: the ranks that train together, all of the job by default.

    Do not wrap it in `DistributedOptimizer`. All ranks start from equal parameters and call `step()`
    together; GradScaler raises an error.

    Cost: all-reduces of r m and of r n words for each matrix, and of the gradients of other parameters; in
        each step one byte per parameter.
    """

    goes_with: ClassVar[GoesWith] = replace(
        GOES_WITH, of="Dion", checkpoint=yes("`state_dict()` is collective: the mean of the momenta")
    )
    saved_as_mean = ("momentum",)
    _matrices = DION
    _copied = (*CompressedMomentumOptimizer._copied, "_of_algorithm", "_seed")

    @classmethod
    def examples(cls) -> Sequence[Mapping[str, Any]]:
        """See `CompressedMomentumOptimizer`."""
        others = {"adamw_betas": (0.8, 0.9), "adamw_eps": 1e-6, "adamw_weight_decay": 0.05, "seed": 1}
        whole = {"rank_fraction": 1.0, "adjust_lr_fn": "spectral_norm"}
        return ({"rank_fraction": 0.5}, {**whole, "weight_decay": 0.3, "momentum": 0.75, **others})

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        rank_fraction: float = 0.25,
        adjust_lr_fn: str = "match_rms_adamw",
        adamw: Iterable[str] = (),
        adamw_lr: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
        seed: int = 0,
        group: Group | None = None,
    ) -> None:
        for what, value in (("lr", lr), ("weight_decay", weight_decay)):
            check_rate("Dion", what, value)
        if not isinstance(momentum, int | float) or not 0.0 <= momentum < 1.0:
            raise InvalidArgument(f"Dion: momentum={shown(momentum)}; expected a number from 0 to below 1")
        if not isinstance(rank_fraction, int | float) or not 0.0 < rank_fraction <= 1.0:
            raise InvalidArgument(f"Dion: rank_fraction={shown(rank_fraction)}; expected above 0, at most 1")
        if adjust_lr_fn not in SCALES:
            raise InvalidArgument(
                f"Dion: adjust_lr_fn={shown(adjust_lr_fn)}; expected one of {', '.join(SCALES)}"
            )
        rest_lr = lr if adamw_lr is None else adamw_lr
        rest_decay = weight_decay if adamw_weight_decay is None else adamw_weight_decay
        self._of_algorithm = {
            DION: {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "rank_fraction": rank_fraction,
                "adjust_lr_fn": adjust_lr_fn,
            },
            ADAMW: adamw_settings("Dion", rest_lr, adamw_betas, adamw_eps, rest_decay),
        }
        check_seed("Dion", seed)
        self._seed = seed
        super().__init__(by_algorithm("Dion", params, DION, adamw), {}, group, agreed=f"seed={seed}")

    def _new_state_of_method(self) -> Any:
        return None

    def _settings(self) -> str:
        left_out = ("params", "param_names")
        groups = [{k: v for k, v in group.items() if k not in left_out} for group in self.param_groups]
        return str(groups)

    # -- a step -------------------------------------------------------------------------------------

    def _update(self) -> None:
        everything = list(self._trained())
        exist = self._exist_somewhere([trained.param.grad is not None for trained in everything])
        updated = [trained for trained, here in zip(everything, exist, strict=True) if here]
        matrices = [trained for trained in updated if trained.settings[ALGORITHM] == DION]
        rest = [trained for trained in updated if trained.settings[ALGORITHM] == ADAMW]
        for trained in matrices:
            self._add_gradient(trained)
        bases, factors = self._factors(matrices, [_gradient(trained) for trained in rest])
        for trained, basis, factor in zip(matrices, bases, factors, strict=True):
            _apply(trained, basis, factor)
        run_step(torch.optim.AdamW, self, [each for each in self.param_groups if each[ALGORITHM] == ADAMW])

    def _add_gradient(self, trained: Trained) -> None:
        """Make B of a matrix, where its momentum is."""
        param, state, settings = trained
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            state["momentum"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["factor"] = self._first_factor(param, rank_of(param.shape, settings["rank_fraction"]))
        state["step"] += 1
        if param.grad is not None:
            state["momentum"] += param.grad

    def _first_factor(self, param: Tensor, rank: int) -> Tensor:
        """Return a random Q, the same on all ranks."""
        drawn = generator(self._seed, 0, param.numel()).standard_normal((param.shape[1], rank))
        return torch.from_numpy(drawn).to(param.device, param.dtype)

    def _factors(
        self, matrices: Sequence[Trained], gradients: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return P and R of each matrix, and make gradients their mean. Collective."""
        bases = [_wide(state["momentum"]) @ _wide(state["factor"]) for _, state, _ in matrices]
        self._average([*bases, *gradients])
        for place, product in enumerate(bases):  # one after the other: a product is freed with its basis
            bases[place] = torch.linalg.qr(product).Q
        factors = [
            _wide(state["momentum"]).T @ basis for (_, state, _), basis in zip(matrices, bases, strict=True)
        ]
        self._average(factors)
        return bases, factors

    def _average(self, tensors: Sequence[Tensor]) -> None:
        if self.group.size > 1:
            combine(tensors, ReduceOp.AVG, self.group)

    def _complete_state(self) -> None:
        """See `TrainedParameters`: a state has all that there is."""


def _gradient(trained: Trained) -> Tensor:
    """Return a gradient that is sent where it lies; zeros where this rank has none and another one has."""
    if trained.param.grad is None:
        trained.param.grad = torch.zeros_like(trained.param)
    return trained.param.grad


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 at least: products and bases are computed, and sent, in it."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _apply(trained: Trained, basis: Tensor, factor: Tensor) -> None:
    """Take P R^T out of the momentum, and update the parameter by P Q^T."""
    param, state, settings = trained
    _subtract(state["momentum"], 1.0 - settings["momentum"], basis, factor)
    right = factor / (factor.norm(dim=0) + EPS)
    state["factor"] = right.to(param.dtype)
    lr, scale = settings["lr"], SCALES[settings["adjust_lr_fn"]](param.shape)
    param.mul_(1.0 - lr * settings["weight_decay"])
    _subtract(param, lr * scale, basis, right)


def _subtract(matrix: Tensor, factor: float, left: Tensor, right: Tensor) -> None:
    """Subtract a multiple of the product of two factors, where the matrix lies if it has their precision."""
    if matrix.dtype == left.dtype:
        matrix.addmm_(left, right.T, alpha=-factor)
    else:
        matrix.sub_((factor * (left @ right.T)).to(matrix.dtype))
