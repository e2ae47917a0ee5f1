"""One process, or all ranks simulated in one: what each mode is compared with, written from its definition.

Nothing here uses the engine. Every function returns the parameters after each step: of all ranks alike,
[steps, numel], or of each rank, [size, steps, numel].
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from mpisgd.verification.problem import Batch, Problem, flat_parameters

__all__ = [
    "Combine",
    "MakeOptimizer",
    "Ranks",
    "apply",
    "gradients",
    "joined_batch",
    "mean_in_order",
    "one_model",
]

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
Combine = Callable[[list[list[Tensor]]], list[Tensor]]  # gradients by rank and parameter: those of the step


def gradients(problem: Problem, model: nn.Module, batch: Batch) -> list[Tensor]:
    """Return the gradients of the mean loss."""
    return list(torch.autograd.grad(problem.loss(model, batch), list(model.parameters())))


def apply(optimizer: torch.optim.Optimizer, grads: Sequence[Tensor]) -> None:
    """Take a step with these gradients."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad if grad.is_sparse else grad.reshape(param.shape)
    optimizer.step()


def joined_batch(problem: Problem, make_optimizer: MakeOptimizer, max_norm: float = 0.0) -> Tensor:
    """Train one model on the joined batches; return its parameters after each step, [steps, numel]."""
    model = problem.model()
    optimizer = make_optimizer(list(model.parameters()))
    rows = []
    for step in range(problem.steps):
        apply(optimizer, _clipped(gradients(problem, model, problem.batches[step]), max_norm))
        rows.append(flat_parameters(model))
    return torch.stack(rows)


def _clipped(grads: list[Tensor], max_norm: float) -> list[Tensor]:
    if not max_norm:
        return grads
    norm = torch.sqrt(torch.stack([grad.square().sum() for grad in grads]).sum())
    return [grad * torch.clamp(max_norm / (norm + 1e-6), max=1.0) for grad in grads]  # as torch does


def one_model(problem: Problem, make_optimizer: MakeOptimizer, combine: Combine) -> Tensor:
    """Train one model with what a method makes of the ranks' gradients; return [steps, numel]."""
    model = problem.model()
    optimizer = make_optimizer(list(model.parameters()))
    rows = []
    for step in range(problem.steps):
        ranks = [gradients(problem, model, problem.share(step, rank)) for rank in range(problem.size)]
        apply(optimizer, combine(ranks))
        rows.append(flat_parameters(model))
    return torch.stack(rows)


def mean_in_order(tensors: Sequence[Tensor], order: int = 1) -> Tensor:
    """Return the mean, added up in the order of the ranks, or from the last to the first (order=-1)."""
    total = torch.zeros_like(tensors[0])
    for tensor in tensors[::order]:
        total = total + tensor
    return total / len(tensors)


class Ranks:
    """All ranks of a method whose models differ between them.

    Args:
        problem: what they train on.
        make_optimizer: of each rank.

    Attributes:
        models: by rank.
    """

    def __init__(self, problem: Problem, make_optimizer: MakeOptimizer) -> None:
        self._problem = problem
        self.models = [problem.model() for _ in range(problem.size)]
        self._optimizers = [make_optimizer(list(model.parameters())) for model in self.models]
        self._rows: list[list[Tensor]] = [[] for _ in self.models]

    def gradients(self, step: int) -> list[list[Tensor]]:
        """Return each rank's gradients on its own share."""
        problem = self._problem
        return [gradients(problem, model, problem.share(step, i)) for i, model in enumerate(self.models)]

    def step(self, step: int) -> None:
        """Let each rank take a step by itself."""
        for optimizer, grads in zip(self._optimizers, self.gradients(step), strict=True):
            apply(optimizer, grads)

    def parameters(self) -> list[Tensor]:
        """Return the parameters of each rank, [numel]."""
        return [flat_parameters(model) for model in self.models]

    def set(self, rank: int, values: Tensor) -> None:
        """Replace the parameters of a rank."""
        with torch.no_grad():
            nn.utils.vector_to_parameters(values.clone(), self.models[rank].parameters())

    def note(self) -> None:
        """Remember the parameters of all ranks: the end of a step."""
        for row, values in zip(self._rows, self.parameters(), strict=True):
            row.append(values)

    def trajectory(self) -> Tensor:
        """Return what was noted, [size, steps, numel]."""
        return torch.stack([torch.stack(row) for row in self._rows])
