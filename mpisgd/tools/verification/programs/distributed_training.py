"""`DistributedTraining`: a program carried out on one of several ranks, by what a user can call of mpisgd."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import mpisgd
from mpisgd.tools.verification.programs import events
from mpisgd.tools.verification.programs.events import Event
from mpisgd.tools.verification.programs.option_text import evaluated
from mpisgd.tools.verification.programs.program import ONE_BIT, Program, examples_of_step
from mpisgd.tools.verification.programs.training import Training

__all__ = ["DistributedTraining", "group_of"]


# What reads parameters elsewhere than in the forward of a module, where they are waited for.
READING = (events.Broadcast, events.Convert, events.FailedBackward, events.Commit, events.Lose)


class Raises(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """Return a copy."""
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Raise what a program may go on after."""
        raise ArithmeticError("this backward is to fail")


def forgotten_optimizer(group: mpisgd.Group | None) -> torch.optim.Optimizer:
    """Return an optimizer that nobody will use. Collective."""
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0)
    return mpisgd.DistributedOptimizer(plain, group=group)


class DistributedTraining(Training):
    """A program with mpisgd, on this rank. Collective to make, and so is each event.

    Attributes:
        takes_part: whether this rank trains now.
    """

    def __init__(self, program: Program) -> None:
        self.program, self._num_ranks = program, program.ranks
        self._join: mpisgd.Join | None = None
        self._is_out = False  # it has come to the end of the block before the others
        self._group = self.make_group()
        forgotten = [forgotten_optimizer(self._group) for _ in range(program.forgotten)]
        del forgotten
        super().__init__(program, [mpisgd.rank()], self.weight_of(program))
        if program.apart == "after":
            mpisgd.broadcast_parameters(self._named, program.first_rank, self._group)

    def begin(self) -> None:
        """See `Training`."""
        if self.program.apart:
            with torch.no_grad():
                for param in self.model.params:
                    param.add_(mpisgd.rank() - self.program.first_rank)
        if self.program.apart == "before":
            mpisgd.broadcast_parameters(self._named, self.program.first_rank, self._group)

    def make_group(self) -> mpisgd.Group | None:
        """Return the group of those that train, None where that is the job. Collective."""
        return group_of(self.program)

    def weight_of(self, program: Program) -> float:
        """Return the factor of a rank's loss by which those of all ranks come to their sum."""
        first = program.optimizers[0]
        return 1.0 if first.sums else float(self._num_ranks * first.averaged_passes)

    @property
    def takes_part(self) -> bool:
        """Whether this rank trains now."""
        return mpisgd.rank() < self._num_ranks and not self._is_out

    @property
    def num_ranks(self) -> int:
        """See `Training`."""
        return self._num_ranks

    def make(self, place: int) -> Any:
        """See `Training`."""
        optimizer = self.program.optimizers[place]
        options = {name: evaluated(text) for name, text in optimizer.options}
        if optimizer.name in ONE_BIT:
            settings = dict(optimizer.settings)
            return getattr(mpisgd, optimizer.name)(self.groups_of(place), group=self._group, **settings)
        if optimizer.names != "none":
            form = "layers.{}" if optimizer.names == "model" else "other_{}.weight"
            options["named_parameters"] = [(form.format(i), p) for i, p in enumerate(self.model.params)]
        return mpisgd.DistributedOptimizer(super().make(place), group=self._group, **options)

    def wait(self) -> None:
        """Return when the parameters have arrived, for what is no module."""
        for place, optimizer in enumerate(self.optimizers):
            if "overlap_forward" in self.program.optimizers[place].option("strategy"):
                optimizer.synchronizer.wait()

    def do(self, event: Event) -> None:
        """See `Training`."""
        if self._is_out:
            self._is_out = not isinstance(event, events.EndJoin)
            return
        if not self.takes_part:
            self._follow(event)
            return
        if isinstance(event, READING) or (isinstance(event, events.Reload) and event.ranks):
            self.wait()
        super().do(event)

    @property
    def members(self) -> Sequence[Training]:
        """See `Training`; their parameters have arrived."""
        self.wait()
        return super().members

    def _follow(self, event: Event) -> None:
        """Do on a rank that does not train what it must know when it does again."""
        match event:
            case events.SetFrozen() | events.Convert():
                super().do(event)
            case events.AddGroup():
                self.note_group(event)
            case events.Reload(ranks=ranks) if ranks:
                self.reload(event)

    def join(self) -> None:
        """See `Training`."""
        super().join()
        changes_rate = any(isinstance(event, events.SetRate) for event in self.program.events)
        follow = [self.scaler] if self.scaler is not None else [] if changes_rate else None
        self._join = mpisgd.join(*self.optimizers, follow=follow)
        self._join.__enter__()

    def run_out(self, event: events.RunOut) -> None:
        """See `Training`."""
        super().run_out(event)
        if mpisgd.rank() in event.ranks:
            self.end_join()
            self._is_out = True

    def end_join(self) -> None:
        """See `Training`."""
        super().end_join()
        assert self._join is not None
        self._join.__exit__(None, None, None)

    def compute(self, event: events.Step) -> Tensor:
        """See `Training`."""
        self._say_examples()
        return super().compute(event)

    def _say_examples(self) -> None:
        if self.examples and self._join is not None and self.program.says_examples:
            self._join.next_batch(examples=self.examples[mpisgd.rank()])

    def step(self, event: events.Step, places: Sequence[int] | None = None) -> None:
        """See `Training`."""
        for place, optimizer in enumerate(self.optimizers):
            if self.program.optimizers[place].weighs_learners:
                optimizer.synchronizer.next_batch(examples=examples_of_step(mpisgd.rank()))
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers if event.as_they_are else ():
                stack.enter_context(optimizer.skip_synchronize())
            super().step(event, places)

    def backward(self, event: events.Backward) -> None:
        """See `Training`."""
        self._say_examples()
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers if event.no_sync else ():
                stack.enter_context(optimizer.no_sync())
            super().backward(event)

    def fail(self, event: events.FailedBackward) -> None:
        """See `Training`."""
        # What is made first is what backward comes to last.
        used = self.model.params[self._always_used]
        raises: Tensor = Raises.apply(used.double().sum())  # type: ignore[no-untyped-call]
        loss = self.loss(event.data, self.ranks)
        with contextlib.suppress(ArithmeticError):
            torch.autograd.backward(raises if loss is None else raises + loss)

    @property
    def _always_used(self) -> int:
        return min(i for i in self.layers if self.model.params[i].requires_grad)

    def clip(self, event: events.Clip) -> None:
        """See `Training`."""
        if event.by_torch or event.by_value:
            super().clip(event)
            return
        for optimizer in self.optimizers:
            optimizer.clip_grad_norm_(event.max_norm, event.norm_type)

    def synchronize(self) -> None:
        """See `Training`."""
        for optimizer in self.optimizers:
            optimizer.synchronize()

    def broadcast(self, event: events.Broadcast) -> None:
        """See `Training`."""
        mpisgd.broadcast_parameters(self._named, event.src, self._group)
        for optimizer in self.optimizers:
            mpisgd.broadcast_optimizer_state(optimizer, event.src, self._group)

    @property
    def _named(self) -> list[tuple[str, Tensor]]:
        return [(f"layers.{place}", param.detach()) for place, param in enumerate(self.model.params)]

    # -- other ranks --------------------------------------------------------------------------------

    def reload(self, event: events.Reload) -> None:
        """See `Training`."""
        if event.ranks in (0, self._num_ranks):
            super().reload(event)
            return
        states = self.saved(event)
        if self.takes_part:
            self._take_consensus()
        self.optimizers.clear()
        for param in self.model.params:
            param.grad = None  # a rank that trains no more has none when it comes back
        mpisgd.broadcast_parameters(self._named, 0)
        everyones: list[Any] = [None] * mpisgd.size()
        mpisgd.all_gather_object(everyones, (states, self.scaler and self.scaler.state_dict()))
        before, self._num_ranks = self._num_ranks, event.ranks
        self.weight = self.weight_of(self.program)
        self._group = mpisgd.new_group(range(event.ranks))
        if self.takes_part:
            taken, scale = everyones[mpisgd.rank() if mpisgd.rank() < before else 0]
            self.take_over(taken)
            if self.scaler is not None:
                self.scaler.load_state_dict(scale)

    def states(self) -> list[dict[str, Any]]:
        """See `Training`."""
        return super().states() if self.takes_part else []

    def saved(self, event: events.Reload) -> list[dict[str, Any]]:
        """See `Training`."""
        states = self.states()
        for state in states if event.forgets else ():
            if "mpisgd" in state:
                state["mpisgd"]["own"] = None
        return states

    @torch.no_grad()
    def _take_consensus(self) -> None:
        """Go on from the consensus of all ranks' models."""
        for place, optimizer in enumerate(self.optimizers):
            params = self.params_of(place)
            if not isinstance(optimizer, mpisgd.DistributedOptimizer):
                continue
            with optimizer.consensus():
                values = [param.detach().clone() for param in params]
            for param, value in zip(params, values, strict=True):
                param.copy_(value)


def group_of(program: Program) -> mpisgd.Group | None:
    """Return the group of those that train, None where that is the job. Collective."""
    if program.group == "world":
        return None
    ranks = range(mpisgd.size())
    return mpisgd.new_group(ranks[::-1] if program.group == "reversed" else ranks)
