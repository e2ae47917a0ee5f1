"""A program in which ranks are lost, carried out by `mpisgd.elastic`, and what it must come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

import mpisgd
from mpisgd import elastic
from mpisgd.job.threads_as_ranks import lose_ranks
from mpisgd.methods.sharded.paper import Masters
from mpisgd.tools.verification.paper_state import carried_over
from mpisgd.tools.verification.programs import events
from mpisgd.tools.verification.programs.by_paper import ByPaper, Member
from mpisgd.tools.verification.programs.distributed_training import DistributedTraining, group_of
from mpisgd.tools.verification.programs.events import Event
from mpisgd.tools.verification.programs.execute import (
    Failure,
    Joined,
    Run,
    Seen,
    copies,
    has_reference,
    is_looked_at,
    run_events,
)
from mpisgd.tools.verification.programs.lost_ranks import Resumption, without_losses
from mpisgd.tools.verification.programs.program import ONE_BIT, Program
from mpisgd.tools.verification.programs.serial_definition import definition_of
from mpisgd.tools.verification.programs.training import Training

__all__ = ["Survived", "references_after", "survive"]


class Survived(NamedTuple):
    """What a rank has seen that is left.

    Attributes:
        run: what came out.
        resumptions: where it went on, in their order.
    """

    run: Run
    resumptions: tuple[Resumption, ...]


def survive(program: Program) -> Survived:
    """Run a program on this rank, together with the others, as long as it is not lost. Collective."""
    run = Run()
    try:
        training = _ElasticTraining(program, run)
    except Exception as exc:
        run.failure = Failure(-1, type(exc).__name__, str(exc))
        return Survived(run, ())
    try:
        training.go()
    except Exception as exc:
        run.failure = Failure(training.event_of(exc), type(exc).__name__, str(exc))
    return Survived(run, tuple(training.resumptions))


class _ElasticTraining(DistributedTraining):
    """A program with mpisgd, on this rank, that outlives losses. Collective to make.

    Attributes:
        resumptions: where it went on.
    """

    def __init__(self, program: Program, run: Run) -> None:
        super().__init__(program)
        self.resumptions: list[Resumption] = []
        self._run = run
        self._me, self._left = mpisgd.rank(), tuple(range(program.ranks))
        self._at = -1
        self._raised: tuple[int, Exception | None] = (-1, None)
        run.params[-1] = copies(self.model.params)
        self._state = elastic.State(
            **{f"optimizer_{place}": optimizer for place, optimizer in enumerate(self.optimizers)},
            **({} if self.scaler is None else {"scaler": self.scaler}),
            model=nn.ParameterList(self.model.params),
            frozen=self._frozen,
            event=0,
        )
        self._state.register_reset_callbacks([self._make_groups])

    @property
    def _frozen(self) -> list[bool]:
        return [not param.requires_grad for param in self.model.params]

    def event_of(self, error: Exception) -> int:
        """Return the event that has raised; -1: the return to a commit has."""
        at, raised = self._raised
        return at if raised is error else -1

    def go(self) -> None:
        """Do all events."""
        elastic.run(self._go_on)(self._state)

    def _make_groups(self) -> None:
        """Make a group of its own for those that are left."""
        if self._group is not None:
            self._group = group_of(self.program)
            for place in range(len(self.program.optimizers)):
                getattr(self._state, f"optimizer_{place}").rebuild(self._group)

    def _go_on(self, state: elastic.State) -> None:
        try:
            self._resume(state)
            while state.event < len(self.program.events):
                self._at = state.event
                state.event += 1
                self._do(self.program.events[self._at], state)
            self._at = len(self.program.events)
            self._run.states = self.states()
        except Exception as exc:
            self._raised = self._at, exc
            raise

    def _resume(self, state: elastic.State) -> None:
        """Take over what was restored, for those that are left."""
        self.optimizers = [
            getattr(state, f"optimizer_{place}") for place in range(len(self.program.optimizers))
        ]
        for param, frozen in zip(self.model.params, state.frozen, strict=True):
            param.requires_grad_(not frozen)
        if self.scaler is not None:
            self.scaler = state.scaler
            self.renew_scaler()
            state.scaler = self.scaler
        left: list[Any] = [None] * mpisgd.size()
        mpisgd.all_gather_object(left, self._me)
        if tuple(left) != self._left:
            self._left = tuple(left)
            self._num_ranks = len(left)
            self.weight = self.weight_of(self.program)
            self.resumptions = [each for each in self.resumptions if each.position != state.event]
            self.resumptions.append(Resumption(state.event, self._left))

    def _do(self, event: Event, state: elastic.State) -> None:
        match event:
            case events.Commit():
                state.commit()
            case events.Lose():
                gone = [rank for rank in event.ranks if rank in self._left]
                if gone[:1] == [self._me]:
                    lose_ranks(*map(self._left.index, gone), waits=event.waits)
            case _:
                self.do(event)
        for place, optimizer in enumerate(self.optimizers):
            if getattr(state, f"optimizer_{place}") is not optimizer:
                setattr(state, f"optimizer_{place}", optimizer)
        if state.frozen != self._frozen:
            state.frozen = self._frozen
        if is_looked_at(self.program, self._at):
            self.wait()
            self._run.params[self._at] = copies(self.model.params)


# --- what it must come to -------------------------------------------------------------------------------


def references_after(program: Program, resumptions: Sequence[Resumption]) -> Sequence[Run | None]:
    """Return the results of one process for each rank that goes on with fewer ranks, Nones: there is none.

    Args:
        program: with losses.
        resumptions: where the ranks that are left have gone on.
    """
    plain = without_losses(program, resumptions)
    if not has_reference(plain):
        return [None] * program.ranks
    if definition_of(plain) is not None:
        return run_events(program, lambda: _Resuming(_ByPaper(program), resumptions))
    return run_events(program, lambda: _Resuming(Joined(program), resumptions)) * program.ranks


class _Resuming:
    """A training in one process that goes on with fewer ranks at some events; see `Steps`."""

    def __init__(self, training: Training | _ByPaper, resumptions: Sequence[Resumption]) -> None:
        self._training = training
        self._left = {each.position: each.left for each in resumptions}
        self._next = 0

    @property
    def members(self) -> Sequence[Seen]:
        """See `Training`."""
        return self._training.members

    def do(self, event: Event) -> None:
        """See `Training`."""
        if self._next in self._left:
            self._training.shrink(self._left[self._next])
        self._next += 1
        self._training.do(event)


class _ByPaper(ByPaper):
    """All ranks by the paper of their method, of which some are lost."""

    def __init__(self, program: Program) -> None:
        self._left = tuple(range(program.ranks))
        super().__init__(program)

    @property
    def _here(self) -> list[tuple[int, Training]]:
        here = [(place, self._all[rank]) for place, rank in enumerate(self._left)]
        return here[::-1] if self._program.group == "reversed" else here

    @property
    def members(self) -> Sequence[Member]:
        """See `Training`: only those that are left are looked at."""
        return [Member(each, True, self.masters) for each in self._all]

    def shrink(self, left: tuple[int, ...]) -> None:
        """Go on with the ranks that are left, which are numbered anew in their order."""
        places = [self._left.index(rank) for rank in left]
        self._left, self._num_ranks = left, len(left)
        self._changes.clear()
        for _, training in self._here:
            training.weight = 1.0 if self._program.optimizers[0].sums else len(left)
            training.shrink(training.ranks)
        before = self._runs
        for run in before:
            run.follow_dtypes()
        self._begin()
        for run, former in zip(self._runs, before, strict=True):
            # One rank compresses nothing, but has masters.
            if len(left) > 1 or self._is_local or isinstance(run.state, Masters):
                begun = run.state
                run.state = carried_over(former.state, begun, dict(enumerate(places)))
                if self._program.optimizers[0].name in ONE_BIT:  # its errors are of use among as many ranks
                    run.state = replace(run.state, wire=begun.wire)
            run.steps = former.steps
