"""Methods of which one process with all losses is no definition, by their papers, in one process.

`mpisgd.verification.papers` says which paper a strategy and a compressor are to be equal to. It is asked,
and a program carried out by the answer: each rank has a `Training` with plain torch, and at each step the
paper has the gradients and the parameters of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import mpisgd
from fuzzing import program as events
from fuzzing.model import Model
from fuzzing.program import Event, Optimizer, Program
from fuzzing.training import Training, initial_groups
from mpisgd.methods.paper_kit import Vec
from mpisgd.verification.paper_run import Definition, PaperRun, Saved
from mpisgd.verification.papers import paper_of

__all__ = ["SerialDefinition", "definition_of", "rounds"]

# Others draw numbers for buckets, or look at a bucket as a whole: then the paper needs the plan, too.
PER_PARAMETER = (
    mpisgd.compress.TopK,
    mpisgd.compress.Threshold,
    mpisgd.compress.DeepGradient,
    mpisgd.compress.SignSGD,
    mpisgd.compress.OneBit,
    mpisgd.compress.PowerSGD,
)
ROUNDING = ("Adasum", "OneBit", "PowerSGD", "SignSGD")
CHOOSES = (mpisgd.compress.TopK, mpisgd.compress.DeepGradient)  # among equals whichever it likes
SYNCHRONOUS = (mpisgd.Synchronous, mpisgd.Sharded)
OPTIONS = ("strategy", "compression", "op")


class SerialDefinition(Protocol):
    """What a program computes on one of its ranks, by the definition of its method."""

    @property
    def model(self) -> Any:
        """The model of this rank."""

    @property
    def takes_part(self) -> bool:
        """Whether this rank trains now."""

    def do(self, event: Event) -> None:
        """Carry out an event, on all ranks."""

    def states(self) -> list[dict[str, Any]]:
        """Return the state dicts of this rank's optimizers."""


def definition_of(program: Program) -> Callable[[Program, int], SerialDefinition] | None:
    """Return what makes the definition of a program's method for a rank; None: it has none here."""
    if len(program.optimizers) > 1 or program.optimizers[0].name in events.ONE_BIT:
        return None
    options = _evaluated(program.optimizers[0])
    strategy = options.get("strategy", mpisgd.Synchronous())
    is_local = not isinstance(strategy, SYNCHRONOUS)
    compression = options.get("compression")
    compresses = isinstance(compression, PER_PARAMETER) and not getattr(compression, "two_step", False)
    reduces = compresses or options.get("op") is mpisgd.Adasum
    if is_local == reduces or not _has_paper(program, strategy):
        return None
    if reduces and not (_reduces_once(program) and _someone_has_each(program)):
        return None
    if program.exact and isinstance(compression, CHOOSES):
        return None
    is_double = all(layer.dtype == "float64" for layer in program.layers)
    if not is_double and rounds(program):
        return None
    return _ByPaper


def rounds(program: Program) -> bool:
    """Return whether a method computes with gradients what is rounded, such as a mean of magnitudes."""
    options = [optimizer.option("compression") + optimizer.option("op") for optimizer in program.optimizers]
    return any(name in text for text in options for name in ROUNDING)


def _evaluated(optimizer: Optimizer) -> dict[str, Any]:
    names = {"__builtins__": {}, "mpisgd": mpisgd, "torch": torch}
    return {name: eval(text, names) for name, text in optimizer.options if name in OPTIONS}


def _has_paper(program: Program, strategy: Any) -> bool:
    added = any(isinstance(event, events.AddGroup) for event in program.events)
    has_empty = any(0 in layer.shape for layer in program.layers)
    if (added or has_empty) and getattr(strategy, "fragments", 1) > 1:
        return False  # the paper's fragments are those of the beginning, and all have elements
    freezes = any(isinstance(event, events.SetFrozen) for event in program.events)
    if freezes and isinstance(strategy, mpisgd.Gossip):
        return False  # what was frozen is not mixed, and updated all the same while it has a gradient
    warms_up = getattr(strategy, "warmup_steps", 0)
    if warms_up and (program.scaler or any(isinstance(event, events.Clip) for event in program.events)):
        return False  # something looks at gradients that are reduced by then
    try:
        _definition(program, program.ranks)
    except mpisgd.InvalidArgument:
        return False
    return True


def _definition(program: Program, size: int) -> Definition:
    """Return the definition of a program's method among so many ranks."""
    optimizer, params = program.optimizers[0], Model(program).params
    layers = [layer for group, _ in initial_groups(program, optimizer) for layer in group]
    lengths = [(f"layers.{layer}", params[layer].nbytes) for layer in layers]
    return paper_of(**_evaluated(optimizer), size=size, lengths=lengths)


def _names(program: Program, training: Training) -> dict[str, nn.Parameter]:
    """Return the parameters of the optimizer by name, in its order."""
    name_of = {id(param): f"layers.{place}" for place, param in enumerate(training.model.params)}
    return {name_of[id(param)]: param for param in training.params_of(0)}


def _reduces_once(program: Program) -> bool:
    """Return whether there is one reduction for each step, of all that came since the last reset."""
    if program.scaler:
        return False
    passes, has_new, is_reduced = 0, False, False
    for event in program.events:
        match event:
            case events.Backward():
                if is_reduced:
                    return False
                has_new, passes = True, passes + (not event.no_sync)
                is_reduced = not event.no_sync and passes == program.optimizers[0].passes
            case events.Step(closure=data):
                if data or not has_new:
                    return False
                has_new, is_reduced = False, True
            case events.Clip() | events.Synchronize():
                is_reduced = True
                if not has_new:
                    return False
            case (
                events.ZeroGrad(by_model=True, set_to_none=False) | events.FailedBackward() | events.Convert()
            ):
                return False
            case events.ZeroGrad() | events.Reload() | events.Broadcast() | events.AddGroup():
                if has_new:
                    return False
                if not isinstance(event, (events.Broadcast, events.AddGroup)):
                    passes, is_reduced = 0, False
    return True


def _someone_has_each(program: Program) -> bool:
    """Return whether each gradient is that of some rank in every reduction, or never.

    Elsewhere what the ranks have not sent of it goes round, and comes back as everyone's: see
    `BucketReducer.put_back`.
    """
    skips = any(isinstance(event, events.Backward) and event.skipped for event in program.events)
    if not skips and not program.is_resized:
        return True
    return all(layer.used_by in ("all", "none") for layer in program.layers)


class _ByPaper:
    """All ranks of a program by the paper of its method.

    Args:
        program: what is carried out.
        rank: whose model is looked at.
    """

    def __init__(self, program: Program, rank: int) -> None:
        weight = 1.0 if program.optimizers[0].sums else program.ranks
        self._program, self._rank, self._num_ranks = program, rank, program.ranks
        self._all = [Training(program, [each], weight) for each in range(program.ranks)]
        self._clips: list[events.Clip] = []
        self.model = self._all[rank].model
        strategy = _evaluated(program.optimizers[0]).get("strategy", mpisgd.Synchronous())
        self._is_local, self._mixes = (
            not isinstance(strategy, SYNCHRONOUS),
            isinstance(strategy, mpisgd.Gossip),
        )
        self._begin()

    def _begin(self) -> None:
        """Make the run of the ranks that train now."""
        self._params = {each: _names(self._program, training) for each, training in self._here}
        self._optimizers = {each: _Stepping(training) for each, training in self._here}
        self._run = PaperRun(_definition(self._program, self._num_ranks), self._params, self._optimizers)

    @property
    def _here(self) -> list[tuple[int, Training]]:
        return list(enumerate(self._all[: self._num_ranks]))

    @property
    def takes_part(self) -> bool:
        """See `SerialDefinition`."""
        return self._rank < self._num_ranks

    def states(self) -> list[dict[str, Any]]:
        """See `SerialDefinition`."""
        return self._all[self._rank].states() if self.takes_part else []

    def do(self, event: Event) -> None:
        """See `SerialDefinition`."""
        match event:
            case events.Step():
                self._step(event)
            case events.Clip() if not self._is_local:
                self._clips.append(event)
            case events.Reload(ranks=ranks) if ranks and ranks != self._num_ranks:
                self._resize(ranks)
            case events.AddGroup() | events.SetFrozen() | events.Convert():
                for training in self._all:  # also those that may train again
                    training.do(event)
                for rank, training in self._here:
                    self._params[rank].update(_names(self._program, training))
            case events.Broadcast():
                self._copy_from(event.src, self._all[: self._num_ranks])
                self._go_on(self._run)
            case _:
                for _, training in self._here:
                    training.do(event)

    def _step(self, event: events.Step) -> None:
        for optimizer in self._optimizers.values():
            optimizer.event = event
        grads = {
            rank: {name: param.grad for name, param in params.items() if param.grad is not None}
            for rank, params in self._params.items()
        }
        frozen = self._frozen() if self._mixes else {}
        self._run.step(grads, self._clipped)
        self._clips.clear()
        for rank, values in frozen.items():
            for name, value in values.items():
                _overwrite(self._params[rank][name], value)
                self._run.x[rank][name] = value

    def _frozen(self) -> dict[int, dict[str, Tensor]]:
        """Return copies of the parameters that are not trained, which ranks do not mix."""
        return {
            rank: {name: p.detach().clone() for name, p in params.items() if not p.requires_grad}
            for rank, params in self._params.items()
        }

    def _clipped(self, grads: Vec) -> Vec:
        for clip in self._clips:
            params = [nn.Parameter(torch.empty_like(grad)) for grad in grads.values()]
            for param, grad in zip(params, grads.values(), strict=True):
                param.grad = grad.clone()
            if clip.by_value:
                nn.utils.clip_grad_value_(params, clip.max_norm)
            else:
                nn.utils.clip_grad_norm_(params, clip.max_norm, clip.norm_type)
            grads = Vec({name: param.grad for name, param in zip(grads, params, strict=True)})
        return grads

    # -- what is kept, where ranks begin anew ---------------------------------------------------------

    def _resize(self, num_ranks: int) -> None:
        """Go on with other ranks from what the models stand for together."""
        before = self._run
        for name, value in self._consensus().items():
            for params in self._params.values():
                _overwrite(params[name], value)
        self._copy_from(0, self._all[self._num_ranks : num_ranks])
        self._num_ranks = num_ranks
        for _, training in self._here:
            training.weight = 1.0 if self._program.optimizers[0].sums else num_ranks
            training.do(events.Reload())
        self._begin()
        self._go_on(before)

    def _consensus(self) -> dict[str, Tensor]:
        state = self._run.state
        for name in ("theta", "z"):
            if common := getattr(state, name, None):
                return dict(common)
        ranks = list(self._params.values())
        return {name: torch.stack([params[name].detach() for params in ranks]).mean(0) for name in ranks[0]}

    def _go_on(self, before: PaperRun) -> None:
        """Let the run go on from the parameters that there are, with what was alike in another one."""
        x = {
            rank: Vec({name: param.detach().clone() for name, param in params.items()})
            for rank, params in self._params.items()
        }
        run = PaperRun(_definition(self._program, self._num_ranks), self._params, self._optimizers)
        states: dict[int, dict[str, Any]] = {rank: {} for rank in self._params}
        run.load(Saved(_without_own(before.state, run.state), x, states, before.steps))
        self._run = run

    def _copy_from(self, src: int, trainings: Sequence[Training]) -> None:
        for training in trainings:
            if training is not self._all[src]:
                for param, other in zip(training.model.params, self._all[src].model.params, strict=True):
                    _overwrite(param, other)
                copies = self._all[src].states()  # of its own: torch keeps what it loads
                for optimizer, state in zip(training.optimizers, copies, strict=True):
                    optimizer.load_state_dict(state)
                    _undo_casts(optimizer, state["state"])


class _Stepping:
    """What a paper calls the optimizer: a step of a training, as the program asks for it."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.event = events.Step()

    def step(self) -> None:
        """Update the parameters by the gradients that they have."""
        self._training.step(self.event)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the training keeps its state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load nothing."""


def _without_own(state: Any, fresh: Any) -> Any:
    """Return a paper's state of which nothing is left but what is alike."""
    if not is_dataclass(state):
        return state
    kept = {}
    for each in fields(state):
        value, anew = getattr(state, each.name), getattr(fresh, each.name)
        owner = each.metadata["owner"]
        kept[each.name] = {"alike": value, "own": anew}.get(owner) or (
            _without_own(value, anew) if owner == "part" else value
        )
    return replace(state, **kept)


def _undo_casts(optimizer: Any, state: dict[int, dict[str, Any]]) -> None:
    """Give a state back the dtypes that it was sent in: torch casts to those of the parameters."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for place, entries in state.items():
        optimizer.state[params[place]].update(entries)


@torch.no_grad()
def _overwrite(param: Tensor, other: Tensor) -> None:
    param.copy_(other)
