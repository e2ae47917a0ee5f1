"""`mpisgd.verify`: is a model of the user's trained by all ranks as by one process?"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import mpisgd
from mpisgd.arguments import shown
from mpisgd.compress.compressor import Compressor
from mpisgd.dtypes import as_reduce_op
from mpisgd.errors import InvalidArgument
from mpisgd.methods.strategy.strategy import Strategy
from mpisgd.tools.verification.cell import CANNOT_TELL, Comparison, compare, flaw_anywhere
from mpisgd.tools.verification.first_module import Place, Recording, locate, record, record_step
from mpisgd.tools.verification.mode import JOINED, RANDOM, TURNED, Reference, between_orders
from mpisgd.tools.verification.papers import paper_of
from mpisgd.tools.verification.problem import Batch, Loss, Problem, flat_parameters
from mpisgd.tools.verification.trainer import Trainer
from mpisgd.tools.verification.trajectories import MakeOptimizer, joined_batch, trajectory

__all__ = ["Verification", "verify"]

_repeatable = partial(between_orders, repeats=True)
HALF = 2  # bytes of a parameter whose gradients of shares are rounded, and not those of the joined batch
SILENCE = (
    "ranks that never communicate come to the same parameters, within the tolerance; give each rank other "
    "examples, and as many steps as it takes until the ranks communicate"
)


class Verification(NamedTuple):
    """What `verify` found; the same on all ranks. It is true if the training equals its definition.

    Attributes:
        difference: the largest difference over all ranks, steps and parameters.
        tolerance: the largest tolerance of all steps. That of a step is the difference that another order of
            additions makes, at most a hundredth of the step's update.
        reason: how the tolerance was found.
        step: the first step in which the difference was too large; -1 if none.
        parameter: the parameter that differed most in that step; "" if none.
        module: the first module whose computation in that step differs from that of one process; "" if none,
            or if it is the model itself or the loss.
        what: what of the module differs, in words; "" if no step differs.
        undecided: why the comparison cannot decide, "" if it can. If it cannot, the result is false.
    """

    difference: float
    tolerance: float
    reason: str
    step: int
    parameter: str
    module: str = ""
    what: str = ""
    undecided: str = ""

    def __bool__(self) -> bool:
        return self.step < 0 and not self.undecided

    def __str__(self) -> str:
        where = f"module {self.module!r}: {self.what}" if self.module else self.what
        if self.undecided:
            return f"cannot tell: {self.undecided}" + f"; the first that differs: {where}" * bool(self.what)
        allowed = f"allowed are {self.tolerance:.1e} ({self.reason})"
        if self:
            return f"equal: the largest difference is {self.difference:.1e}, {allowed}"
        return (
            f"different from step {self.step} on, most in {self.parameter} there; the first that differs: "
            f"{where}; the largest difference is {self.difference:.1e}, {allowed}"
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
    """Compare the training of a model on all ranks with that of one process, step by step. Collective.

    Every rank also computes what one process would compute: twice, to see that nothing is random, and once
    more with the examples in another order, to measure the rounding error. So it takes about as long as four
    trainings by one process.

    A training that ranks without any communication would finish with the same parameters counts as not
    verified.

    Args:
        make_model: makes the model. Its first values may differ between ranks; those of rank 0 are used.
            Parameters may be frozen, unused, or shared by several modules. The training must not be random,
            so no dropout.
        make_optimizer: makes the optimizer of a list of parameters, without mpisgd; with any groups. One
            whose `step` needs a closure, such as LBFGS, gets one.
        loss: the mean loss over the examples, called with the model and a part of a batch.
        batches: joined batches of all ranks, the same on each; tensors whose first dimension is a multiple
            of the number of ranks. There is one step for each.
        strategy: as for `DistributedOptimizer`; `Synchronous` by default.
        definition: the strategy that is computed by one process for comparison: `Synchronous`, `Sharded`,
            `LocalSGD(sync_every)`, `DiLoCo` with its outer SGD, or `ElasticAveraging`. By default the same as
            `strategy`. A strategy of your own needs a method `paper()`, or a `definition` that it must equal.
        options: further arguments of `DistributedOptimizer`, such as `share_parameters`. With `op=SUM` the
            reference adds up the gradients of all shares; with `op=mpisgd.Adasum` it combines them
            adaptively.

    Raises:
        InvalidArgument: a batch does not divide evenly, or there is nothing to compare with: no definition,
            or the training of one process is not finite or differs when it is repeated.

    Example:
        >>> found = mpisgd.verify(make_model, make_optimizer, loss, batches)
        >>> assert found, found
    """
    strategy = mpisgd.Synchronous() if strategy is None else strategy
    problem = Problem(_as_on_rank_0(make_model), loss, _checked(batches), mpisgd.size())
    reference = _reference(strategy, definition, make_optimizer, options)(problem)
    if flaw := flaw_anywhere(reference):
        raise InvalidArgument(f"verify: the training by one process is nothing to compare with: {flaw}")
    start = flat_parameters(problem.model())
    mine = _trained(problem, make_optimizer, strategy, options)
    found = compare(mine, reference, start)
    if found.undecided and _is_random(problem):
        raise InvalidArgument(f"verify: the loss of the same examples is another one each time: {RANDOM}")
    parameter = _most_different(problem, mine, reference, found.step)
    undecided = f"from step {found.step} on, most in {parameter}: {_too_large(found)}" * found.undecided
    if not undecided and not _would_notice_silence(problem, make_optimizer, reference, start):
        undecided = SILENCE
    place = Place()
    if found.step >= 0:
        meant = strategy if definition is None else definition
        before = reference.of_rank(mpisgd.rank())[found.step - 1] if found.step else start
        place = _place(problem, make_optimizer, strategy, options, meant, found.step, before)
        if not place.what:
            place = Place(parameter.rpartition(".")[0], f"the update of {parameter}")
    return Verification(
        found.difference, found.tolerance, found.reason, found.step, parameter, *place, undecided
    )


def _trained(
    problem: Problem, make_optimizer: MakeOptimizer, strategy: Strategy, options: dict[str, Any]
) -> Tensor:
    """Return this rank's parameters after each step of the training that is verified. Collective."""
    model = problem.model()
    optimizer = _distributed(model, make_optimizer, strategy, options)
    return torch.stack(Trainer(problem).train(model, optimizer))


def _distributed(
    model: nn.Module, make_optimizer: MakeOptimizer, strategy: Strategy, options: dict[str, Any]
) -> torch.optim.Optimizer:
    return mpisgd.DistributedOptimizer(
        make_optimizer(list(model.parameters())), model.named_parameters(), strategy=strategy, **options
    )


def _place(
    problem: Problem,
    make_optimizer: MakeOptimizer,
    strategy: Strategy,
    options: dict[str, Any],
    meant: Strategy,
    step: int,
    before: Tensor,
) -> Place:
    """Return where a step begins to differ from that of one process. Collective.

    Args:
        meant: the strategy that it must be equal to.
        step: which one.
        before: the parameters that one process has before it, [numel].
    """
    joined = isinstance(meant, mpisgd.Synchronous | mpisgd.Sharded)
    alone = problem.model()
    torch.nn.utils.vector_to_parameters(before, alone.parameters())
    batch = problem.batches[step] if joined else problem.share(step, mpisgd.rank())
    expected = record_step(alone, problem.loss, batch)

    model, trainer, mine = problem.model(), Trainer(problem), Recording()
    optimizer = _distributed(model, make_optimizer, strategy, options)
    trainer.train(model, optimizer, last=step)

    def backward(loss: Tensor) -> None:
        mine.keep_loss(loss)
        torch.autograd.backward(loss)

    with record(model, mine):
        keep = partial(mine.keep_gradients, model)
        trainer.train(model, optimizer, backward=backward, before_step=keep, first=step, last=step + 1)
    factors = {mpisgd.ReduceOp.AVG: 1.0, mpisgd.ReduceOp.SUM: float(problem.size)}
    is_divided = isinstance(strategy, mpisgd.Sharded)  # each rank has a part of the gradients then
    factor = None if is_divided else factors.get(_op_of(options))
    return locate(mine, expected, joined=joined, factor=factor)


def _too_large(found: Comparison) -> str:
    return f"the difference, up to {found.difference:.1e}, is {CANNOT_TELL}"


def _would_notice_silence(
    problem: Problem, make_optimizer: MakeOptimizer, reference: Reference, start: Tensor
) -> bool:
    """Return whether ranks that never communicate would be seen to differ from the reference. Collective."""
    if problem.size == 1:
        return True
    shares = [problem.share(step, mpisgd.rank()) for step in range(problem.steps)]
    alone = joined_batch(problem._replace(batches=shares), make_optimizer)
    return compare(alone, reference, start).step >= 0


def _is_random(problem: Problem) -> bool:
    """Return whether a loss, computed twice, differs on some rank. Collective.

    Where `make_model` sets the seed, a training with dropout repeats itself. One process still draws other
    numbers for the examples of a rank than that rank does.
    """
    model, batch = problem.model(), problem.share(0, mpisgd.rank())
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        losses = [problem.loss(model, batch) for _ in range(2)]
    found = [False] * mpisgd.size()
    mpisgd.all_gather_object(found, not torch.equal(*losses))
    return any(found)


def _as_on_rank_0(make_model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a function that makes models with rank 0's first values. Collective."""
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
    """Return a function that makes the reference of a strategy, or of the definition that the user names."""
    compression = options.get("compression")
    is_compressed = isinstance(compression, Compressor) and compression != mpisgd.Compression.none
    if is_compressed and definition is None:
        raise InvalidArgument(
            f"verify: there is no definition of {compression} for a model of your own; name a strategy that "
            "it is to be equal to as definition="
        )
    meant = strategy if definition is None else definition
    op = _op_of(options)
    if isinstance(meant, mpisgd.Synchronous | mpisgd.Sharded):
        return lambda problem: _of_one_process(problem, make_optimizer, op)
    if op != mpisgd.ReduceOp.AVG:
        raise InvalidArgument(
            f"verify: op={shown(op)} goes with Synchronous or Sharded alone, not with {meant}"
        )
    if not _is_plain(meant):
        raise InvalidArgument(
            f"verify: {'strategy' if definition is None else 'definition'}={shown(meant)}; expected "
            "Synchronous, Sharded, LocalSGD(sync_every), DiLoCo or ElasticAveraging, with what else they "
            "take as by default; or name as definition= which of these it is to be equal to"
        )
    return _repeatable(lambda problem, order: _by_paper(problem, make_optimizer, order, strategy=meant))


def _op_of(options: dict[str, Any]) -> Any:
    op = options.get("op", mpisgd.ReduceOp.AVG)
    return as_reduce_op("verify", op) if isinstance(op, str) else op


def _of_one_process(problem: Problem, make_optimizer: MakeOptimizer, op: Any) -> Reference:
    """Return the reference of a step that all ranks take together."""
    is_rounded = any(param.dtype.itemsize == HALF for param in problem.model().parameters())
    if op == mpisgd.ReduceOp.AVG and not is_rounded:
        return _repeatable(lambda p, _: joined_batch(p, make_optimizer), JOINED)(problem)
    how = (TURNED,) if op == mpisgd.Adasum else ()
    return _repeatable(lambda p, order: _by_paper(p, make_optimizer, order, op=op), *how)(problem)


def _by_paper(problem: Problem, make_optimizer: MakeOptimizer, order: int, **options: Any) -> Tensor:
    lengths = [(name, param.nbytes) for name, param in problem.model().named_parameters()]
    definition = paper_of(**options, size=problem.size, lengths=lengths)
    return trajectory(problem, make_optimizer, definition, order)


def _is_plain(strategy: Strategy) -> bool:
    """Return whether a strategy has a paper, with what else it takes as by default."""
    if not type(strategy).__module__.startswith("mpisgd.") and type(strategy).paper is not Strategy.paper:
        return True
    if type(strategy) is mpisgd.LocalSGD:
        return strategy == mpisgd.LocalSGD(strategy.sync_every)
    if type(strategy) is mpisgd.DiLoCo:
        return strategy.outer_options is None and strategy.outer_optimizer is torch.optim.SGD
    return type(strategy) is mpisgd.ElasticAveraging


def _most_different(problem: Problem, mine: Tensor, reference: Reference, step: int) -> str:
    """Return the name of the parameter that differs most in a step, on any rank; "" of none. Collective."""
    if step < 0:
        return ""
    model = problem.model()
    names = [name for name, _ in model.named_parameters()]
    differences = (mine[step] - reference.of_rank(mpisgd.rank())[step]).abs().double().nan_to_num(torch.inf)
    apart = torch.split(differences, [param.numel() for param in model.parameters()])
    largest = torch.stack([part.max() if part.numel() else part.new_zeros(()) for part in apart])
    mpisgd.all_reduce(largest, mpisgd.ReduceOp.MAX)
    return names[int(largest.argmax())]
