"""`mpisgd.verify`: is a model of the user's trained by all ranks as by one process?"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import mpisgd
from mpisgd.arguments import shown
from mpisgd.compress.compressor import Compressor
from mpisgd.errors import InvalidArgument
from mpisgd.strategies.strategy import Strategy
from mpisgd.verification.cell import compare
from mpisgd.verification.mode import Reference, between_orders
from mpisgd.verification.modes.synchronous import equal_to_one_process
from mpisgd.verification.problem import Batch, Loss, Problem
from mpisgd.verification.serial.strategies import diloco, elastic_averaging, local_sgd
from mpisgd.verification.serial.training import MakeOptimizer
from mpisgd.verification.trainee import Trainee

__all__ = ["Verification", "verify"]


class Verification(NamedTuple):
    """What `verify` found; the same on all ranks. It is true if the training is what it must be.

    Attributes:
        difference: the largest one of all ranks, steps and parameters.
        tolerance: the largest one allowed.
        reason: where the tolerance comes from.
        step: the first one in which the difference was too large; -1 if none.
        parameter: the one that differed most in that step, "" if none.
    """

    difference: float
    tolerance: float
    reason: str
    step: int
    parameter: str

    def __bool__(self) -> bool:
        return self.step < 0

    def __str__(self) -> str:
        allowed = f"allowed are {self.tolerance:.1e} ({self.reason})"
        if self:
            return f"equal: the largest difference is {self.difference:.1e}, {allowed}"
        return (
            f"different from step {self.step} on, most in {self.parameter} there; the largest difference is "
            f"{self.difference:.1e}, {allowed}"
        )


def verify(
    make_model: Callable[[], nn.Module],
    make_optimizer: MakeOptimizer,
    loss: Loss,
    batches: Iterable[Batch],
    *,
    strategy: Strategy | None = None,
    definition: Strategy | None = None,
    **options: Any,
) -> Verification:
    """Train a model by all ranks and by one process, and compare the parameters after each step. Collective.

    Every rank also does what one process would do, so this takes about as long as two trainings by one
    process; three for strategies whose ranks have models of their own.

    Args:
        make_model: makes the model; it need not be the same on all ranks, rank 0's is taken. Nothing in it
            may be random during the training, as dropout is.
        make_optimizer: makes the optimizer of a list of parameters, without mpisgd.
        loss: the mean loss over the examples, called with the model and a part of a batch.
        batches: joined batches of all ranks, the same on each; tensors whose first dimension is a multiple
            of the number of ranks. There is one step for each.
        strategy: as for `DistributedOptimizer`; `Synchronous` by default.
        definition: the strategy that this must be equal to, of which one process does the arithmetic:
            `Synchronous`, `Sharded`, `LocalSGD(sync_every)`, `DiLoCo` with its outer SGD, `ElasticAveraging`.
            By default `strategy`; for a strategy or a compressor of your own say what it is to be equal to.
        options: further arguments of `DistributedOptimizer`, such as `share_parameters`.

    Raises:
        InvalidArgument: a batch does not divide evenly, or nothing is there to compare with.

    Example:
        >>> found = mpisgd.verify(make_model, make_optimizer, loss, batches)
        >>> assert found, found
    """
    strategy = mpisgd.Synchronous() if strategy is None else strategy
    problem = Problem(_as_on_rank_0(make_model), loss, _checked(batches), mpisgd.size())
    reference = _reference(strategy, definition, make_optimizer, options)(problem)
    model = problem.model()
    optimizer = mpisgd.DistributedOptimizer(
        make_optimizer(list(model.parameters())), model.named_parameters(), strategy=strategy, **options
    )
    mine = torch.stack(Trainee(problem).train(model, optimizer))
    difference, step = compare(mine, reference)
    parameter = (
        _most_different(model, mine[step], reference.of_rank(mpisgd.rank())[step]) if step >= 0 else ""
    )
    return Verification(difference, reference.tolerance, reference.reason, step, parameter)


def _as_on_rank_0(make_model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return what makes models with rank 0's first values. Collective."""
    first = make_model()
    mpisgd.broadcast_parameters(first)
    state = first.state_dict()

    def make() -> nn.Module:
        model = make_model()
        model.load_state_dict(state)
        return model

    return make


def _checked(batches: Iterable[Batch]) -> list[Batch]:
    listed = list(batches)
    if not listed:
        raise InvalidArgument("verify: batches is empty; expected one for each step")
    for step, batch in enumerate(listed):
        lengths = {len(part) for part in batch}
        if len(lengths) != 1 or max(lengths) % mpisgd.size():
            raise InvalidArgument(
                f"verify: batch {step} has tensors of {sorted(lengths)} examples; expected equally many, and "
                f"a multiple of {mpisgd.size()} ranks"
            )
    return listed


def _reference(
    strategy: Strategy, definition: Strategy | None, make_optimizer: MakeOptimizer, options: dict[str, Any]
) -> Callable[[Problem], Reference]:
    """Return what makes that of a strategy, or of the definition that the user names."""
    compression = options.get("compression")
    is_compressed = isinstance(compression, Compressor) and compression != mpisgd.Compression.none
    if is_compressed and definition is None:
        raise InvalidArgument(
            f"verify: there is no definition of {compression} for a model of one's own; name a strategy that "
            "it is to be equal to as definition="
        )
    meant = strategy if definition is None else definition
    if isinstance(meant, mpisgd.Synchronous | mpisgd.Sharded):
        return equal_to_one_process(make_optimizer)
    simulate = _simulation(meant, make_optimizer)
    if simulate is None:
        raise InvalidArgument(
            f"verify: {'strategy' if definition is None else 'definition'}={shown(meant)}; expected "
            "Synchronous, Sharded, LocalSGD(sync_every), DiLoCo or ElasticAveraging, with what else they "
            "take as by default; or name as definition= which of these it is to be equal to"
        )
    return between_orders(simulate)


def _simulation(strategy: Strategy, make_optimizer: MakeOptimizer) -> Callable[[Problem, int], Tensor] | None:
    """Return the simulation of a strategy in its plain form."""
    if type(strategy) is mpisgd.LocalSGD and strategy == mpisgd.LocalSGD(strategy.sync_every):
        every = strategy.period
        return lambda problem, order: local_sgd(problem, make_optimizer, every, order)
    if type(strategy) is mpisgd.DiLoCo and strategy.outer_options is None:
        return _outer_steps(strategy, make_optimizer)
    if type(strategy) is mpisgd.ElasticAveraging:
        alpha, every = strategy.alpha or 0.9 / mpisgd.size(), strategy.every
        return lambda problem, order: elastic_averaging(problem, make_optimizer, every, alpha, order)
    return None


def _outer_steps(
    strategy: mpisgd.DiLoCo, make_optimizer: MakeOptimizer
) -> Callable[[Problem, int], Tensor] | None:
    """Return the simulation of outer SGD as it is by default."""
    if strategy.outer_optimizer is not torch.optim.SGD:
        return None
    return lambda problem, order: diloco(
        problem,
        make_optimizer,
        strategy.sync_every,
        (0.7, 0.9),
        order,
        fragments=strategy.fragments,
        overlap_steps=strategy.overlap_steps,
        alpha=strategy.overlap_alpha,
    )


def _most_different(model: nn.Module, mine: Tensor, expected: Tensor) -> str:
    """Return the name of the parameter that differs most, on any rank. Collective."""
    names = [name for name, _ in model.named_parameters()]
    apart = torch.split((mine - expected).abs(), [param.numel() for param in model.parameters()])
    largest = torch.stack([part.max() if part.numel() else part.new_zeros(()) for part in apart])
    mpisgd.all_reduce(largest, mpisgd.ReduceOp.MAX)
    return names[int(largest.argmax())]
