"""`MuonWithAdamW`: one optimizer for a whole model: its matrices by torch's Muon, the rest by torch's AdamW.

Keller Jordan and others 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025,
"Muon is Scalable for LLM Training" (arXiv 2502.16982), for `adjust_lr_fn="match_rms_adamw"`, by which one
learning rate does for both.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mpisgd.errors import UnsupportedTorch
from mpisgd.methods.muon.matrix_groups import (
    ADAMW,
    ALGORITHM,
    OptimizerByAlgorithm,
    adamw_settings,
    by_algorithm,
    check_rate,
    run_step,
)
from mpisgd.sharding.update_work import matrix_work

__all__ = ["MuonWithAdamW"]

MUON = "muon"


class MuonWithAdamW(OptimizerByAlgorithm):
    """torch.optim.Muon for the matrices of a model, torch.optim.AdamW for all other parameters.

        optimizer = mpisgd.MuonWithAdamW(model.named_parameters(), lr=2e-3, adamw=["embedding", "head"])
        optimizer = mpisgd.DistributedOptimizer(optimizer, strategy=mpisgd.Sharded(1))

    Muon is not meant for embeddings and the head, which are matrices, too: name them in `adamw`. If ranks
    divide the updates (`Sharded`, `share_parameters=True`), each rank updates whole matrices, with about
    equal work for all ranks, and a part of the other parameters.

    Args:
        params: as for any torch optimizer; `model.named_parameters()` where `adamw` has names. A group may
            say which of both updates it, by the key "algorithm": "muon" or "adamw".
        lr: learning rate of Muon and, unless `adamw_lr` is given, of AdamW.
        weight_decay: decoupled weight decay of Muon and, unless `adamw_weight_decay` is given, of AdamW.
        momentum: see torch.optim.Muon, as for `nesterov`, `ns_steps` and `adjust_lr_fn`. The default of
            `adjust_lr_fn` is not torch's: with "match_rms_adamw" a learning rate that was tuned for AdamW
            can be used.
        adamw: names of parameters or modules whose matrices AdamW updates; `*` stands for anything.
        adamw_lr: see torch.optim.AdamW, as for `adamw_betas`, `adamw_eps` and `adamw_weight_decay`.

    Raises:
        InvalidArgument: a number makes no sense, or `adamw` has a name that no parameter has.
        UnsupportedTorch: this torch has no Muon.
    """

    _matrices = MUON

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = "match_rms_adamw",
        adamw: Iterable[str] = (),
        adamw_lr: float | Tensor | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
    ) -> None:
        kind = type(self).__name__
        check_rate(kind, "lr", lr)
        rest_lr = lr if adamw_lr is None else adamw_lr
        rest_decay = weight_decay if adamw_weight_decay is None else adamw_weight_decay
        muon = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        self._of_algorithm = {
            MUON: _muon_settings(muon),
            ADAMW: adamw_settings(kind, rest_lr, adamw_betas, adamw_eps, rest_decay),
        }
        super().__init__(by_algorithm(kind, params, MUON, adamw), {})

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of copies and pickles."""
        return {**super().__getstate__(), "_of_algorithm": self._of_algorithm}

    def whole_update_work(self, param: Tensor, options: Mapping[str, Any]) -> float | None:
        """Return the work of the update of a whole matrix, in units of the update of one element.

        Args:
            param: a parameter.
            options: the options of its parameter group.

        Returns:
            The work; None for parameters of AdamW, whose elements are updated independently of each other.
        """
        return matrix_work(param.shape, options["ns_steps"]) if options[ALGORITHM] == MUON else None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; see torch.optim.Optimizer.step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for algorithm, kind in ((MUON, torch.optim.Muon), (ADAMW, torch.optim.AdamW)):
            run_step(kind, self, [each for each in self.param_groups if each[ALGORITHM] == algorithm])
        return loss


def _muon_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group by Muon; torch refuses those that make no sense."""
    if not hasattr(torch.optim, "Muon"):
        raise UnsupportedTorch(f"MuonWithAdamW: torch {torch.__version__} has no Muon; expected 2.9 or later")
    (group,) = torch.optim.Muon([torch.zeros(1, 1, requires_grad=True)], **settings).param_groups
    return {key: value for key, value in group.items() if key != "params"}
