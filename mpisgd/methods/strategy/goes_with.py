"""What goes with what: one declaration per method, which errors, tables and cells of `verify` are made of.

Strategies declare it, and optimizers that average by themselves.

`GoesWith` has an answer for each option of `DistributedOptimizer` that some strategy cannot follow, and for
each situation of a training in which strategies differ. An answer says whether it goes, and in which words.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mpisgd.compress.compressor import Casting, Compressor, has_momentum, is_contraction, wire_dtype_of
from mpisgd.errors import InvalidArgument
from mpisgd.gradients.tree_sum import TreeSum
from mpisgd.methods.strategy.training import Training

__all__ = [
    "OPTIONS",
    "SITUATIONS",
    "UNDECLARED",
    "Answer",
    "Compressions",
    "GoesWith",
    "Sent",
    "averages_by_itself",
    "check_goes_with",
    "needs_all_in_time",
    "needs_casting",
    "needs_contraction",
    "needs_default",
    "needs_magnitudes",
    "needs_none",
    "no",
    "no_momentum",
    "yes",
]


class Answer(NamedTuple):
    """Whether a strategy goes with something.

    Attributes:
        goes: whether it does.
        words: in the table of the documentation where it goes; else why not, "" where nothing need be said.
    """

    goes: bool
    words: str


def yes(words: str = "yes") -> Answer:
    """Return that it goes, and how."""
    return Answer(True, words)


def no(why: str = "") -> Answer:
    """Return that it does not, and why."""
    return Answer(False, why)


# --- compressors ----------------------------------------------------------------------------------------


class Sent(NamedTuple):
    """What a compressor would have to send.

    Attributes:
        compressor: what is asked for.
        dtypes: of the parameters.
    """

    compressor: Compressor
    dtypes: Collection[torch.dtype]

    @property
    def is_changed(self) -> bool:
        """Whether anything travels as something else."""
        return any(map(self.compressor.changes, self.dtypes))


Rule = Callable[[Sent], str]  # returns why a compressor does not go, "" if it does


def no_momentum(sent: Sent) -> str:
    """A mean of parameters, or of their changes, has no momentum."""
    if not has_momentum(sent.compressor):
        return ""
    return "it has a momentum, with which parameters would go beyond their mean"


def needs_magnitudes(sent: Sent) -> str:
    """Of changes of parameters not only the signs count."""
    if sent.compressor.traits.has_magnitudes:
        return ""
    return (
        "it sends signs alone, so every parameter would move by 1; mpisgd.compress.OneBit has magnitudes, too"
    )


def needs_all_in_time(sent: Sent) -> str:
    """What arrives is added up, and stands for what was meant."""
    if not sent.compressor.traits.fades:
        return ""
    return (
        "a part of what it has not sent never arrives, by which the sum of what has arrived would be wrong "
        "for good; error_decay=1 or 0 goes with it"
    )


def needs_casting(sent: Sent) -> str:
    """A rank gets a part of the bucket only."""
    if all(wire_dtype_of(sent.compressor, dtype) is not None for dtype in sent.dtypes):
        return ""
    return (
        "it combines whole buckets for all ranks, and each gets its shard only here; Compression.fp16 and "
        "Compression.bf16 go with it"
    )


def needs_contraction(sent: Sent) -> str:
    """What neighbours leave out must become less."""
    if isinstance(sent.compressor, Casting) or is_contraction(sent.compressor):
        return ""
    return (
        "changes of parameters travel as they are, cast, or by TopK, ChunkTopK, RandomK, OneBit, Natural or "
        "QSGD of 4 bits and more"
    )


def needs_none(sent: Sent) -> str:
    """What is one rank's travels as it is."""
    return "what a rank sends travels as it is" if sent.is_changed else ""


def needs_default(sent: Sent) -> str:
    """What travels is the method's own."""
    return "what travels is its own" if sent.is_changed else ""


@dataclass(frozen=True)
class Compressions:
    """Which compressors a strategy goes with.

    Attributes:
        words: in the table.
        rules: each says why one does not go.
    """

    words: str = "yes"
    rules: tuple[Rule, ...] = ()

    def why_not(self, compressor: Compressor, dtypes: Collection[torch.dtype] = (torch.float32,)) -> str:
        """Return why a compressor does not go with parameters of these dtypes, "" if it does."""
        return next(filter(None, (rule(Sent(compressor, dtypes)) for rule in self.rules)), "")


# --- the declaration ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GoesWith:
    """What a strategy goes with; by default, what one may be whose ranks all have one model.

    Attributes:
        of: what it is called in tables, where not all of a class go with the same.
        compression: which compressors, and what they compress.
        adaptive_sum: `op=mpisgd.Adasum`.
        reproducible: `reproducible="ranks"`.
        whole_gradients: optimizers whose step needs the gradients of all parameters together.
        repeats: whether the result of a training is the same each time.
        uneven_data: `join()`.
        context_parallel: whether its ranks may share sequences, for which all need the same parameters.

    The others are options of `DistributedOptimizer`, or situations, by their names.
    """

    of: str = ""
    # Options: what does not go is refused at construction.
    compression: Compressions = Compressions()
    op: Answer = yes()
    adaptive_sum: Answer = no()
    reproducible: Answer = no("the order of its additions depends on the number of ranks")
    gradient_predivide_factor: Answer = yes()
    error_if_nonfinite: Answer = yes()
    check_in_sync_every: Answer = yes()
    share_parameters: Answer = no()
    named_buffers: Answer = yes()
    whole_gradients: Answer = yes()
    # Situations: how it goes.
    backward_passes_per_step: Answer = yes()
    clip_grad_norm_: Answer = yes("of the mean")
    grad_scaler: Answer = yes()
    sparse_gradients: Answer = yes("yes, as they are")
    closures: Answer = yes()
    repeats: Answer = yes()
    uneven_data: Answer = no("the method does not say what a rank without data does")
    context_parallel: Answer = yes()
    elastic: Answer = yes()
    checkpoint: Answer = yes("has what each rank's compressor kept")

    def answer(self, name: str) -> Answer:
        """Return the answer to an option or a situation."""
        answer: Answer = getattr(self, name)
        return answer


def _is_declared(sent: Sent) -> str:
    return NOT_DECLARED.words if sent.is_changed else ""


NOT_DECLARED = no("its goes_with does not declare it")
# Of a strategy that says nothing: its working part may leave out whatever is asked for.
UNDECLARED = GoesWith(
    compression=Compressions("no", (_is_declared,)),
    op=NOT_DECLARED,
    gradient_predivide_factor=NOT_DECLARED,
    error_if_nonfinite=NOT_DECLARED,
    check_in_sync_every=NOT_DECLARED,
    named_buffers=NOT_DECLARED,
    share_parameters=NOT_DECLARED,
    context_parallel=NOT_DECLARED,
)


def averages_by_itself(optimizer: object) -> bool:
    """Return whether an optimizer, or a class of one, communicates in its own step: it declares so."""
    return isinstance(getattr(optimizer, "goes_with", None), GoesWith)


class Option(NamedTuple):
    """An option that not every strategy can follow.

    Attributes:
        argument: of `DistributedOptimizer`.
        chosen: what the user has chosen, None where that is the default.
    """

    argument: str
    chosen: Callable[[Training], Any]


def _unless(default: Any, value: Any) -> Any:
    return None if value == default else value


def _replaced(training: Training) -> Any:
    return _unless("", training.options.compression.traits.replaces_op)


def _tree(training: Training) -> bool:
    return isinstance(training.options.compression, TreeSum)


def _is_lbfgs(training: Training) -> Any:
    return "LBFGS" if isinstance(training.optimizer, torch.optim.LBFGS) else None


OPTIONS: Mapping[str, Option] = {
    "op": Option("op", lambda training: _unless("AVG", training.options.op.name)),
    "adaptive_sum": Option("op", lambda training: None if _tree(training) else _replaced(training)),
    "reproducible": Option("reproducible", lambda training: "'ranks'" if _tree(training) else None),
    "gradient_predivide_factor": Option(
        "gradient_predivide_factor", lambda training: _unless(1.0, training.options.predivide_factor)
    ),
    "error_if_nonfinite": Option(
        "error_if_nonfinite", lambda training: _unless(False, training.options.error_if_nonfinite)
    ),
    "check_in_sync_every": Option(
        "check_in_sync_every", lambda training: _unless(0, training.check_in_sync_every)
    ),
    "share_parameters": Option(
        "share_parameters", lambda training: _unless(False, training.share_parameters)
    ),
    "named_buffers": Option("named_buffers", lambda training: "..." if training.buffers else None),
    "whole_gradients": Option("optimizer", _is_lbfgs),
}
SITUATIONS = (
    "backward_passes_per_step",
    "clip_grad_norm_",
    "grad_scaler",
    "sparse_gradients",
    "closures",
    "repeats",
    "uneven_data",
    "context_parallel",
    "elastic",
    "checkpoint",
)
# Options of which one at most can be had.
EXCLUSIVE = {
    ("adaptive_sum", "gradient_predivide_factor"): "it does not change with the size of gradients",
    ("reproducible", "gradient_predivide_factor"): "the sum is divided once, at its end",
    ("reproducible", "share_parameters"): "each rank gets sums of a part only, in the order of the ranks",
    ("whole_gradients", "reproducible"): "its line search takes losses, which are added in another order",
    ("adaptive_sum", "share_parameters"): "it combines whole gradients, and each rank has those of its own",
    ("whole_gradients", "share_parameters"): (
        "it computes its direction from all gradients together, and each rank has those of its own parameters"
    ),
}


def check_goes_with(strategy: object, goes_with: GoesWith, training: Training) -> None:
    """Raise where something was chosen with which a strategy does not go.

    Raises:
        InvalidArgument: names both, and says why.
    """
    chosen = {
        name: f"{option.argument}={value}"
        for name, option in OPTIONS.items()
        if (value := option.chosen(training)) is not None
    }
    for name, text in chosen.items():
        answer = goes_with.answer(name)
        if not answer.goes:
            _refuse(text, str(strategy), answer.words)
    for (one, other), why in EXCLUSIVE.items():
        if one in chosen and other in chosen:
            _refuse(chosen[one], chosen[other], why)
    compressor = training.options.compression
    dtypes = {param.dtype for _, param in training.named}
    if why := goes_with.compression.why_not(compressor, dtypes):
        _refuse(f"compression={compressor}", str(strategy), why)
    _check_momentum(training)


def _refuse(one: str, other: str, why: str) -> None:
    raise InvalidArgument(
        f"DistributedOptimizer: {one} does not go with {other}" + (f": {why}" if why else "")
    )


def _check_momentum(training: Training) -> None:
    """Raise where both the compression and the optimizer have a momentum: an update would have it twice.

    Raises:
        InvalidArgument: says which to leave out.
    """
    compression = training.options.compression
    if not has_momentum(compression):
        return
    beta = max(float(options.get("momentum", 0.0)) for options in training.optimizer.param_groups)
    if beta:
        raise InvalidArgument(
            f"DistributedOptimizer: {compression} has a momentum, and so has the optimizer, {beta}; make it "
            "with momentum=0"
        )
