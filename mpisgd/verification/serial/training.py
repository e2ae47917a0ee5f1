"""One process, or all ranks simulated in one: what each mode is compared with, written from its definition.

Nothing here uses the engine. Every function returns the parameters after each step: of all ranks alike,
[steps, numel], or of each rank, [size, steps, numel].
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial

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
    "mean_of_shares",
    "needs_closure",
    "one_model",
    "sum_of_shares",
]

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
Combine = Callable[[list[list[Tensor]]], list[Tensor]]  # gradients by rank and parameter: those of the step


def gradients(problem: Problem, model: nn.Module, batch: Batch) -> list[Tensor]:
    """Return the gradients of the mean loss, of a model of which every parameter has one."""
    return [grad for grad in evaluate(problem, model, batch)[1] if grad is not None]


def evaluate(problem: Problem, model: nn.Module, batch: Batch) -> tuple[Tensor, list[Tensor | None]]:
    """Return the mean loss, and its gradients by parameter: None for one that is frozen or not used."""
    loss = problem.loss(model, batch)
    params = list(model.parameters())
    trained = [param for param in params if param.requires_grad]
    found = dict(zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True))
    return loss.detach(), [found.get(param) for param in params]


def apply(model: nn.Module, optimizer: torch.optim.Optimizer, grads: Sequence[Tensor | None]) -> None:
    """Take a step with these gradients, one for each parameter of the model, however these are grouped."""
    set_gradients(model, grads)
    optimizer.step()


def set_gradients(model: nn.Module, grads: Sequence[Tensor | None]) -> None:
    """Give every parameter its gradient."""
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = grad if grad is None or grad.is_sparse else grad.reshape(param.shape)


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step` must be called with a closure, as that of LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_and_gradients: Callable[[], tuple[Tensor, list[Tensor | None]]],
) -> None:
    """Take a step, for which some optimizers evaluate the loss several times."""

    def closure() -> float:
        loss, grads = loss_and_gradients()
        set_gradients(model, grads)
        return float(loss)

    if needs_closure(optimizer):
        optimizer.step(closure)
    else:
        apply(model, optimizer, loss_and_gradients()[1])


def joined_batch(problem: Problem, make_optimizer: MakeOptimizer, max_norm: float = 0.0) -> Tensor:
    """Train one model on the joined batches; return its parameters after each step, [steps, numel]."""
    model = problem.model()
    optimizer = make_optimizer(list(model.parameters()))
    rows = []
    for batch in problem.batches:

        def of_batch(batch: Batch = batch) -> tuple[Tensor, list[Tensor | None]]:
            loss, grads = evaluate(problem, model, batch)
            return loss, _clipped(grads, max_norm)

        take_step(model, optimizer, of_batch)
        rows.append(flat_parameters(model))
    return torch.stack(rows)


def _clipped(grads: list[Tensor | None], max_norm: float) -> list[Tensor | None]:
    if not max_norm:
        return grads
    norm = torch.sqrt(torch.stack([grad.square().sum() for grad in grads if grad is not None]).sum())
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch does
    return [None if grad is None else grad * factor for grad in grads]


def one_model(
    problem: Problem,
    make_optimizer: MakeOptimizer,
    combine: Combine,
    combine_losses: Callable[[list[Tensor]], Tensor] | None = None,
) -> Tensor:
    """Train one model with what a method makes of the ranks' gradients; return [steps, numel].

    A gradient that is missing on some ranks counts as zero there; one that is missing on all stays so.

    Args:
        problem: what is trained.
        make_optimizer: of the one model.
        combine: what the method does.
        combine_losses: what it makes of the ranks' losses, for optimizers that take a closure; the mean.
    """
    model = problem.model()
    optimizer = make_optimizer(list(model.parameters()))
    combined = combine_losses or mean_in_order
    rows = []
    for step in range(problem.steps):

        def of_ranks(step: int = step) -> tuple[Tensor, list[Tensor | None]]:
            found = [evaluate(problem, model, problem.share(step, rank)) for rank in range(problem.size)]
            return combined([loss for loss, _ in found]), _combined([grads for _, grads in found], combine)

        take_step(model, optimizer, of_ranks)
        rows.append(flat_parameters(model))
    return torch.stack(rows)


def _combined(ranks: Sequence[Sequence[Tensor | None]], combine: Combine) -> list[Tensor | None]:
    """Return what a method makes of the gradients that exist on some rank."""
    columns = list(zip(*ranks, strict=True))
    like = [next((grad for grad in column if grad is not None), None) for column in columns]
    filled = [
        [torch.zeros_like(some) if grad is None else grad for grad in column]
        for column, some in zip(columns, like, strict=True)
        if some is not None
    ]
    found = iter(combine([list(grads) for grads in zip(*filled, strict=True)]))
    return [None if some is None else next(found) for some in like]


def mean_in_order(tensors: Sequence[Tensor], order: int = 1) -> Tensor:
    """Return the mean, added up in the order of the ranks, or from the last to the first (order=-1)."""
    total = torch.zeros_like(tensors[0])
    for tensor in tensors[::order]:
        total = total + tensor
    return total / len(tensors)


def mean_of_shares(order: int) -> Combine:
    """Return what takes the mean of the ranks' gradients; 16-bit ones are added in float32, rounded once."""
    return _of_shares(order, lambda total, size: total / size)


def sum_of_shares(order: int) -> Combine:
    """Return what adds up the ranks' gradients; 16-bit ones in float32, rounded once."""
    return _of_shares(order, lambda total, _: total)


def _of_shares(order: int, finish: Callable[[Tensor, int], Tensor]) -> Combine:
    def combine(ranks: list[list[Tensor]]) -> list[Tensor]:
        return [_combined_shares(grads, order, finish) for grads in zip(*ranks, strict=True)]

    return combine


def _combined_shares(grads: Sequence[Tensor], order: int, finish: Callable[[Tensor, int], Tensor]) -> Tensor:
    dtype = grads[0].dtype
    wide = torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype
    total = grads[::order][0].to(wide)
    for grad in grads[::order][1:]:
        total = total + grad.to(wide)
    return finish(total, len(grads)).to(dtype)


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
        problem = self._problem
        for rank, (model, optimizer) in enumerate(zip(self.models, self._optimizers, strict=True)):
            take_step(model, optimizer, partial(evaluate, problem, model, problem.share(step, rank)))

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
