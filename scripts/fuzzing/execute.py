"""`execute`: run a program, on this rank or as one process, and keep what came out after each event."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import mpisgd
from fuzzing import program as events
from fuzzing.program import Event, Program
from fuzzing.training import DistributedTraining, Training

__all__ = ["Failure", "Run", "digest", "execute", "has_reference", "state_digest"]

CHANGING = (events.Step, events.AddGroup, events.Reload, events.FailedBackward)
LOCAL_SGD = re.compile(r"mpisgd\.LocalSGD\(sync_every=(\d+)\)")
SYNCHRONOUS = re.compile(r"mpisgd\.(Synchronous|Sharded)\(.*\)")
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
        states: state dicts of the optimizers after the last event.
        failure: what ended it early.
    """

    params: dict[int, list[Tensor]] = field(default_factory=dict)
    states: list[dict[str, Any]] = field(default_factory=list)
    failure: Failure | None = None


def execute(program: Program, distributed: bool, rank: int = 0) -> Run:
    """Run a program.

    Args:
        program: what is run.
        distributed: on this rank, together with the others, with mpisgd: collective. Else in this process
            alone, with plain torch: the reference, for those that `has_reference`.
        rank: whose model the reference is of, where the ranks have models of their own.
    """
    if distributed:
        return _run(program, lambda: _Distributed(program))
    if period := _local_period(program):
        return _run(program, lambda: _LocalSGD(program, period, rank))
    return _run(program, lambda: _Joined(program))


def has_reference(program: Program) -> bool:
    """Return whether a program can be compared with one process."""
    return all(_is_serial(program, optimizer) for optimizer in program.optimizers)


def _is_serial(program: Program, optimizer: events.Optimizer) -> bool:
    compression = optimizer.option("compression", LOSSLESS[0])
    strategy = optimizer.option("strategy", "mpisgd.Synchronous()")
    is_plain = compression in LOSSLESS or (program.exact and compression in EXACT_CASTS)
    is_local = len(program.optimizers) == 1 and "compression" not in dict(optimizer.options)
    known = SYNCHRONOUS.fullmatch(strategy) or (is_local and LOCAL_SGD.fullmatch(strategy))
    return is_plain and bool(known) and optimizer.option("op") != "mpisgd.Adasum"


def _local_period(program: Program) -> int:
    found = LOCAL_SGD.fullmatch(program.optimizers[0].option("strategy"))
    return int(found.group(1)) if found else 0


def _run(program: Program, begin: Callable[[], _Joined | _LocalSGD | _Distributed]) -> Run:
    run, event = Run(), -1
    try:
        training = begin()
        run.params[-1] = copies(training.params)
        for event, what in enumerate(program.events):
            training.do(what)
            if isinstance(what, CHANGING):
                run.params[event] = copies(training.params)
        event = len(program.events)
        run.states = training.states()
    except Exception as exc:
        run.failure = Failure(event, type(exc).__name__, str(exc))
    return run


class _Trained:
    """A training and its parameters."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.params = training.model.params

    def do(self, event: Event) -> None:
        self._training.do(event)

    def states(self) -> list[dict[str, Any]]:
        return self._training.states()


class _Joined(_Trained):
    """One process that has the losses of all ranks."""

    def __init__(self, program: Program) -> None:
        super().__init__(Training(program, range(program.ranks)))


class _Distributed(_Trained):
    """This rank of several."""

    def __init__(self, program: Program) -> None:
        group = None
        if program.group != "world":
            ranks = range(mpisgd.size())
            group = mpisgd.new_group(ranks[::-1] if program.group == "reversed" else ranks)
        super().__init__(DistributedTraining(program, group))


class _LocalSGD:
    """The ranks of local SGD in one process: each has a model; every so many steps all take the mean.

    Source: Stich, "Local SGD Converges Fast and Communicates Little", 2019.
    """

    def __init__(self, program: Program, period: int, rank: int) -> None:
        self._ranks = [Training(program, [each], program.ranks) for each in range(program.ranks)]
        self._period, self._steps, self._rank = period, 0, rank
        self.params = self._ranks[rank].model.params

    def do(self, event: Event) -> None:
        for training in self._ranks:
            training.do(event)
        if not isinstance(event, events.Step):
            return
        self._steps += 1
        if self._steps % self._period == 0:
            for layer in self._ranks[0].layers:
                _average([training.model.params[layer] for training in self._ranks])

    def states(self) -> list[dict[str, Any]]:
        return self._ranks[self._rank].states()


@torch.no_grad()
def _average(params: Sequence[Tensor]) -> None:
    total = params[0].clone()
    for param in params[1:]:
        total += param
    total /= len(params)
    for param in params:
        param.copy_(total)


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
