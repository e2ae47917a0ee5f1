"""`execute`: run a program, on this rank or as one process, and keep what came out after each event."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from mpisgd.tools.verification.programs import events
from mpisgd.tools.verification.programs.by_paper import averages_gradients
from mpisgd.tools.verification.programs.distributed_training import DistributedTraining
from mpisgd.tools.verification.programs.model import Model
from mpisgd.tools.verification.programs.one_bit_papers import is_adam
from mpisgd.tools.verification.programs.program import ONE_BIT, Optimizer, Program
from mpisgd.tools.verification.programs.sabotaged import SabotagedTraining
from mpisgd.tools.verification.programs.serial_definition import codes_between_hosts, definition_of
from mpisgd.tools.verification.programs.serial_masters import SerialMasters, halves_with_masters
from mpisgd.tools.verification.programs.training import SERIAL, Training
from mpisgd.tools.verification.sabotage import Sabotage

__all__ = [
    "Failure",
    "Joined",
    "Run",
    "Steps",
    "copies",
    "digest",
    "execute",
    "has_reference",
    "is_looked_at",
    "master_dtype_of",
    "references_of",
    "run_events",
    "state_digest",
]

CHANGING = (
    events.Step,
    events.AddGroup,
    events.Reload,
    events.FailedBackward,
    events.Broadcast,
    events.Convert,
    events.EndJoin,
)
EXACT_CASTS = ("mpisgd.Compression.fp16", "mpisgd.Compression.bf16")
LOSSLESS = ("mpisgd.compress.TopK(ratio=1.0)",)


@dataclass(frozen=True)
class Failure:
    """An exception.

    Attributes:
        event: during which, -1 where the optimizers were made, or the number of events where states were
            read.
        kind: its type.
        text: what it says.
    """

    event: int
    kind: str
    text: str


@dataclass
class Run:
    """What came out.

    Attributes:
        params: of the model, by the event after which they are these: copies. -1: before all of them.
            Without those events of which this rank took no part.
        states: state dicts of the optimizers after the last event.
        failure: what ended it early.
    """

    params: dict[int, list[Tensor]] = field(default_factory=dict)
    states: list[dict[str, Any]] = field(default_factory=list)
    failure: Failure | None = None


class Seen(Protocol):
    """What is looked at after each event; see `Training`."""

    @property
    def model(self) -> Model:
        """See `Training`."""

    @property
    def takes_part(self) -> bool:
        """See `Training`."""

    def states(self) -> list[dict[str, Any]]:
        """See `Training`."""


class Steps(Protocol):
    """Carries out events; see `Training`."""

    @property
    def members(self) -> Sequence[Seen]:
        """See `Training`."""

    def do(self, event: events.Event) -> None:
        """See `Training`."""


def execute(program: Program, sabotage: Sabotage = Sabotage.NONE) -> Run:
    """Run a program on this rank, together with the others, with mpisgd. Collective.

    Args:
        program: what is run.
        sabotage: what is broken on purpose.
    """
    if sabotage is not Sabotage.NONE:
        return run_events(program, lambda: SabotagedTraining(program, sabotage))[0]
    return run_events(program, lambda: DistributedTraining(program))[0]


def references_of(program: Program) -> list[Run]:
    """Return the expected results of each rank, computed in this process alone, once for all of them.

    Args:
        program: one that `has_reference`.
    """
    if (definition := definition_of(program)) is not None:
        runs = run_events(program, lambda: definition(program))
        return runs if len(runs) == program.ranks else runs * program.ranks  # it has failed at once
    return run_events(program, lambda: Joined(program)) * program.ranks


def has_reference(program: Program) -> bool:
    """Return whether a program can be compared with one process."""
    return all(_is_serial(program, optimizer) for optimizer in program.optimizers)


def _is_serial(program: Program, optimizer: Optimizer) -> bool:
    if optimizer.name == SERIAL:
        return True
    if optimizer.name in ONE_BIT and is_adam(optimizer):
        return True
    if definition_of(program) is not None:
        return True
    if optimizer.name in ONE_BIT:
        return False
    dtypes = [program.layers[layer].dtype for layer in optimizer.layers]
    rounds_halves = not program.exact and halves_with_masters(dtypes, master_dtype_of(optimizer))
    if codes_between_hosts(program) or rounds_halves:
        return False
    compression = optimizer.option("compression", LOSSLESS[0])
    is_plain = compression in LOSSLESS or (program.exact and compression in EXACT_CASTS)
    return is_plain and averages_gradients(optimizer) and optimizer.option("op") != "mpisgd.Adasum"


def run_events(program: Program, begin: Callable[[], Steps]) -> list[Run]:
    """Let what `begin` makes carry out a program's events; return what came out for each of its members."""
    runs, event = [Run()], -1
    try:
        training = begin()
        runs = [Run({-1: copies(member.model.params)}) for member in training.members]
        for event, what in enumerate(program.events):
            training.do(what)
            if is_looked_at(program, event):
                _note(runs, training.members, event)
        event = len(program.events)
        for run, member in zip(runs, training.members, strict=True):
            run.states = member.states()
    except Exception as exc:
        for run in runs:
            run.failure = Failure(event, type(exc).__name__, str(exc))
    return runs


def is_looked_at(program: Program, event: int) -> bool:
    """Return whether parameters are compared after an event: where it changes them.

    With `overlap_forward` not where the next event does not read them either: they may be on their way then.
    After the last one that changes them on a rank they are.
    """
    after = program.events[event + 1 :]
    next_change = next((what for what in after if isinstance(what, CHANGING)), None)
    goes_on = isinstance(next_change, events.Step | events.AddGroup | events.Reload)
    overlaps = any("overlap_forward" in optimizer.option("strategy") for optimizer in program.optimizers)
    return isinstance(program.events[event], CHANGING) and not (overlaps and goes_on)


def _note(runs: Sequence[Run], members: Sequence[Seen], event: int) -> None:
    for run, member in zip(runs, members, strict=True):
        if member.takes_part:
            run.params[event] = copies(member.model.params)


class Joined(Training):
    """One process that has the losses of all ranks."""

    def __init__(self, program: Program) -> None:
        dtypes = map(master_dtype_of, program.optimizers)
        self._masters = [None if dtype is None else SerialMasters(dtype) for dtype in dtypes]
        super().__init__(program, range(program.ranks))

    def make(self, place: int) -> Any:
        """See `Training`."""
        optimizer = super().make(place)
        if (masters := self._masters[place]) is not None:
            masters.step_by(optimizer)
        return optimizer

    def load(self, place: int, state: dict[str, Any]) -> None:
        """See `Training`."""
        if (masters := self._masters[place]) is None:
            super().load(place, state)
        else:
            masters.load(self.optimizers[place], state)

    def states(self) -> list[dict[str, Any]]:
        """See `Training`; with the masters."""
        states = super().states()
        for place, masters in enumerate(self._masters):
            if masters is not None:
                masters.add_to(states[place], self.params_of(place))
        return states

    def weighted(self, rank: int, loss: Tensor) -> Tensor:
        """See `Training`: a mean over the ranks counts as many examples of each as it has."""
        if not self.examples or self.program.optimizers[0].sums:
            return loss
        return loss * (self.num_ranks * self.examples[rank] / sum(self.examples.values()))


def master_dtype_of(optimizer: Optimizer) -> torch.dtype | None:
    """Return the dtype in which parameters of lower precision are updated, None: in their own."""
    return getattr(optimizer.strategy, "master_dtype", None)


def copies(params: Iterable[Tensor]) -> list[Tensor]:
    """Return copies that nobody else writes to."""
    return [param.detach().clone() for param in params]


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the bits of dense tensors."""
    told = hashlib.blake2b(digest_size=12)
    for tensor in tensors:
        told.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return told.hexdigest()


def state_digest(states: Any) -> str:
    """Return a hash of the bits of everything in state dicts, or whatever has such a form."""
    told = hashlib.blake2b(digest_size=12)
    _tell(told, states)
    return told.hexdigest()


def _tell(told: Any, value: Any) -> None:
    match value:
        case Tensor():
            dense = value.detach().to_dense() if value.is_sparse else value.detach()
            told.update(f"{dense.dtype}{list(dense.shape)}{digest([dense])}".encode())
        case dict():
            for key in sorted(value, key=repr):
                told.update(f"{key!r}:".encode())
                _tell(told, value[key])
        case list() | tuple():
            told.update(f"[{len(value)}".encode())
            for entry in value:
                _tell(told, entry)
        case _:
            told.update(repr(value).encode())
