"""`ByPaper`: all ranks of a program in one process, by the paper of its method.

`verification.papers` says which paper a strategy and a compressor are to be equal to. Each rank has a
`Training` with plain torch, and at each step the paper has the gradients and the parameters of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpisgd.method_state import OWNER
from mpisgd.methods.paper_kit import Slice, Vec
from mpisgd.methods.sharded.paper import Masters
from mpisgd.sharding.piece import MASTER, WRITTEN
from mpisgd.tools.verification.draws import Buckets
from mpisgd.tools.verification.paper_run import Definition, PaperRun, Saved, bucket_of
from mpisgd.tools.verification.paper_state import carried_over
from mpisgd.tools.verification.papers import paper_of
from mpisgd.tools.verification.programs import events
from mpisgd.tools.verification.programs.events import Event
from mpisgd.tools.verification.programs.model import Model
from mpisgd.tools.verification.programs.one_bit_papers import definition_of_optimizer
from mpisgd.tools.verification.programs.optimizer_part import Part
from mpisgd.tools.verification.programs.option_text import evaluated
from mpisgd.tools.verification.programs.program import (
    ONE_BIT,
    Layer,
    Optimizer,
    Program,
    examples_of,
    examples_of_step,
)
from mpisgd.tools.verification.programs.training import Training, initial_groups
from mpisgd.tools.verification.shares import Shares

__all__ = ["ByPaper", "Member", "arguments_of", "averages_gradients", "has_own_gradients", "paper_among"]

OPTIONS = ("strategy", "compression", "op")


def averages_gradients(optimizer: Optimizer) -> bool:
    """Return whether all ranks step with the same gradients, and at the same time."""
    goes_with = optimizer.strategy.goes_with
    return goes_with.op.goes and goes_with.repeats.goes


def has_own_gradients(optimizer: Optimizer) -> bool:
    """Return whether each rank steps with gradients of its own."""
    return not averages_gradients(optimizer) and getattr(optimizer.strategy, "learners", "rank") == "rank"


def arguments_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the options of `DistributedOptimizer` that the paper depends on."""
    return {name: evaluated(text) for name, text in optimizer.options if name in OPTIONS}


def paper_among(program: Program, size: int, place: int = 0) -> Definition:
    """Return the definition of the method of one of a program's optimizers, among so many ranks."""
    optimizer = program.optimizers[place]
    layers = [layer for group, _ in initial_groups(program, optimizer) for layer in group]
    lengths = [(f"layers.{layer}", _nbytes(program.layers[layer])) for layer in layers]
    definition = paper_of(**arguments_of(optimizer), size=size, lengths=lengths)
    layout, cap_bytes = definition.layout, optimizer.option("bucket_cap_bytes")
    if isinstance(layout, Shares) and cap_bytes:
        return definition._replace(layout=replace(layout, cap_bytes=int(cap_bytes)))
    if cap_bytes == "1" and layout is bucket_of:
        return definition._replace(layout=_bucket_of_each)
    return definition


def _nbytes(layer: Layer) -> int:
    dtype: torch.dtype = getattr(torch, layer.dtype)
    return math.prod(layer.shape) * dtype.itemsize


def _bucket_of_each(x: Vec) -> Buckets:
    return tuple((Slice(name, 0, tensor.numel()),) for name, tensor in x.items())


class Member(NamedTuple):
    """A rank of a training in which one process has all of them.

    Attributes:
        training: of this rank.
        takes_part: see `Training`.
        masters: of its optimizers, what they update instead of parameters, by the places of these.
    """

    training: Training
    takes_part: bool
    masters: Sequence[Mapping[int, Tensor]] = ()

    @property
    def model(self) -> Model:
        """See `Training`."""
        return self.training.model

    def states(self) -> list[dict[str, Any]]:
        """See `Training`."""
        states = self.training.states() if self.takes_part else []
        for place, (state, masters) in enumerate(zip(states, self.masters, strict=False)):
            params = self.training.params_of(place)
            for index, master in masters.items():
                if not torch.equal(master, params[index]):
                    written = params[index].detach().clone()
                    state["state"].setdefault(index, {}).update({MASTER: master, WRITTEN: written})
        return states


class ByPaper:
    """All ranks of a program by the paper of its method.

    Args:
        program: what is carried out.
    """

    def __init__(self, program: Program) -> None:
        weight = 1.0 if program.optimizers[0].sums else program.ranks
        self._program, self._num_ranks = program, program.ranks
        self._all = [Training(program, [each], weight) for each in range(program.ranks)]
        self._changes: list[events.Clip | events.SetGradient] = []  # of the reduced gradients
        self._apart: dict[int, Any] = {}  # by optimizer, the state from before a rank went on alone
        first = program.optimizers[0]
        self._is_local = first.name in ONE_BIT or has_own_gradients(first)
        self._mixes_first = getattr(first.strategy, "style", "") == "combine_then_adapt"
        self._begin()

    def _begin(self) -> None:
        """Make the runs of the ranks that train now, one for each optimizer."""
        self._parts = [Part(place, self._here) for place in range(len(self._program.optimizers))]
        self._runs = [self._new_run(part) for part in self._parts]

    def _new_run(self, part: Part) -> PaperRun:
        optimizer = self._program.optimizers[part.place]
        if optimizer.name in ONE_BIT:
            rate = partial(self._rate, part.place)
            return PaperRun(definition_of_optimizer(self._program, rate), part.params, hosts=self._hosts)
        definition = paper_among(self._program, self._num_ranks, part.place)
        if isinstance(definition.layout, Shares):
            definition = definition._replace(layout=replace(definition.layout, places=part.places))
        return PaperRun(definition, part.params, part.optimizers, hosts=self._hosts)

    def _rate(self, place: int, _: int) -> float:
        """Return the learning rate of an optimizer now."""
        rate: float = self._all[0].optimizers[place].param_groups[0]["lr"]
        return rate

    @property
    def _here(self) -> list[tuple[int, Training]]:
        here = list(enumerate(self._all[: self._num_ranks]))
        return here[::-1] if self._program.group == "reversed" else here  # in the group's order

    @property
    def _hosts(self) -> list[list[int]]:
        """The ranks of each host, in the group's order."""
        hosts: dict[int, list[int]] = {}
        each = self._program.ranks_per_host or self._program.ranks
        for rank, training in self._here:
            hosts.setdefault(self._all.index(training) // each, []).append(rank)
        return list(hosts.values())

    @property
    def members(self) -> Sequence[Member]:
        """See `Training`: one for each rank."""
        masters = self.masters
        return [Member(each, rank < self._num_ranks, masters) for rank, each in enumerate(self._all)]

    @property
    def masters(self) -> list[dict[int, Tensor]]:
        """What each optimizer updates instead of parameters."""
        found = []
        for part, run in zip(self._parts, self._runs, strict=True):
            names = next(iter(part.params.values()))
            masters = run.state.y if isinstance(run.state, Masters) else {}
            found.append({place: masters[name] for place, name in enumerate(names) if name in masters})
        return found

    def do(self, event: Event) -> None:
        """See `Training`."""
        match event:
            case events.Step():
                self._step(event)
            case events.Clip() | events.SetGradient() if not self._is_local:
                self._changes.append(event)
            case events.Reload(ranks=ranks) if ranks and ranks != self._num_ranks:
                self._resize(ranks)
            case events.AddGroup() | events.SetFrozen() | events.Convert():
                for training in self._all:  # also those that may train again
                    training.do(event)
                for part in self._parts:
                    part.note_groups(self._here)
            case events.Reload():
                for _, training in self._here:
                    training.do(event)
                for part in self._parts:
                    part.note_reload()
            case events.Join():
                for training in self._all:
                    training.examples = examples_of(self._program, range(self._num_ranks))
            case events.Clip() | events.SetGradient() | events.ZeroGrad() if (
                self._examples and self._is_local
            ):
                for rank, training in self._here:
                    if rank in self._examples:
                        training.do(event)
            case events.RunOut() | events.EndJoin():
                for training in self._all:
                    training.do(event)
            case events.Broadcast():
                self._copy_from(event.src, self._all[: self._num_ranks])
                self._go_on(self._runs)
            case _:
                for _, training in self._here:
                    training.do(event)

    @property
    def _examples(self) -> dict[int, int]:
        return self._all[0].examples

    def _step(self, event: events.Step) -> None:
        if event.closure:
            self._changes.clear()  # it resets them
        if event.closure and self._mixes_first:  # its first gradient is of what the ranks have before
            for _, training in self._here:
                training.compute(event)
            event = events.Step()
        for part, run in zip(self._parts, self._runs, strict=True):
            for rank, optimizer in part.optimizers.items():
                optimizer.event = event
                optimizer.rests = self._is_local and bool(self._examples) and rank not in self._examples
            here = [rank for rank, _ in self._here]
            weight = self._weight(part.place, here)
            grads = part.grads()
            kept = {rank: grads.pop(rank) for rank in here if self._is_local and weight and not weight[rank]}
            run.step(grads, partial(self._changed, part), weight=weight)
            part.give(kept)
        self._changes.clear()

    def _weight(self, place: int, here: Sequence[int]) -> dict[int, float] | None:
        """Return the weight of each rank in a step of an optimizer; None: equal weights."""
        if self._program.optimizers[place].weighs_learners:  # t^2 / s, and all take as many steps
            learners = self._learners(self._program.optimizers[place].strategy)
            return {rank: float(sum(map(examples_of_step, each)) ** 2) for each in learners for rank in each}
        return {rank: self._examples.get(rank, 0) for rank in here} if self._examples else None

    def _learners(self, strategy: Any) -> list[list[int]]:
        """Return the ranks of each learner of a `DiLoCo`."""
        count = 1 if strategy.learners == "rank" else strategy.learners
        cut = [(host, len(host) if count == "host" else count) for host in self._hosts]
        return [host[start : start + n] for host, n in cut for start in range(0, len(host), n)]

    def _changed(self, part: Part, grads: Vec) -> Vec:
        """Return the reduced gradients as the program has changed them."""
        for change in self._changes:
            grads = (
                self._set(part, grads, change)
                if isinstance(change, events.SetGradient)
                else _clipped(grads, change)
            )
        return grads

    def _set(self, part: Part, grads: Vec, event: events.SetGradient) -> Vec:
        name, value = f"layers.{event.layer}", self._all[0].model.gradient_for(event)
        others = {each: grad for each, grad in grads.items() if each != name}
        is_here = name in next(iter(part.params.values()))
        return Vec(others if value is None or not is_here else {**others, name: value})

    # -- what is kept, where ranks begin anew ---------------------------------------------------------

    def _resize(self, num_ranks: int) -> None:
        """Go on with other ranks from the consensus of the models."""
        before = self._runs
        for part, run in zip(self._parts, self._runs, strict=True):
            for name, value in self._consensus(part, run).items():
                for params in part.params.values():
                    _overwrite(params[name], value)
        newcomers = self._all[self._num_ranks : num_ranks]
        self._copy_from(0, newcomers)
        for training in newcomers:  # whose scale is of before they were left out
            training.take_scale(self._all[0])
        self._num_ranks = num_ranks
        for _, training in self._here:
            training.weight = 1.0 if self._program.optimizers[0].sums else num_ranks
            training.do(events.Reload())
        self._begin()
        self._go_on(before)

    def _consensus(self, part: Part, run: PaperRun) -> dict[str, Tensor]:
        if run.paper.consensus and (common := getattr(run.state, run.paper.consensus)):
            return dict(common)
        ranks = list(part.params.values())
        if not self._is_local:  # all ranks have the same, and a mean of three of them would be rounded
            return dict(ranks[0])
        return {name: torch.stack([params[name].detach() for params in ranks]).mean(0) for name in ranks[0]}

    def _go_on(self, before: Sequence[PaperRun]) -> None:
        """Let the runs go on from the parameters that there are, with what was alike in other ones."""
        self._runs = []
        for part, former in zip(self._parts, before, strict=True):
            former.follow_dtypes()
            run, state = self._new_run(part), former.state
            if self._num_ranks == 1:  # it sends nothing, and keeps what a compressor had for other ranks
                self._apart.setdefault(part.place, state)
            elif part.place in self._apart:
                state = _filled_up(state, self._apart.pop(part.place))
            states: dict[int, dict[str, Any]] = {rank: {} for rank in part.params}
            run.load(Saved(carried_over(state, run.state, {}), part.copies(), states, former.steps))
            self._runs.append(run)

    def _copy_from(self, src: int, trainings: Sequence[Training]) -> None:
        for training in trainings:
            if training is not self._all[src]:
                for param, other in zip(training.model.params, self._all[src].model.params, strict=True):
                    _overwrite(param, other)
                copies = self._all[src].states()  # of its own: torch keeps what it loads
                for optimizer, state in zip(training.optimizers, copies, strict=True):
                    optimizer.load_state_dict(state)
                    _undo_casts(optimizer, state["state"])


def _clipped(grads: Vec, clip: events.Clip) -> Vec:
    params = {name: nn.Parameter(torch.empty_like(grad)) for name, grad in grads.items()}
    for name, grad in grads.items():
        params[name].grad = grad.clone()
    if clip.by_value:
        nn.utils.clip_grad_value_(params.values(), clip.max_norm)
    else:
        nn.utils.clip_grad_norm_(params.values(), clip.max_norm, clip.norm_type)
    return Vec({name: param.grad for name, param in params.items() if param.grad is not None})


def _filled_up(state: Any, older: Any) -> Any:
    """Return a paper's state, with that of a compressor from before the rank went on alone."""
    if type(state) is not type(older):
        return older
    if isinstance(state, dict):  # by what travels together
        names = {**older, **state}
        return {each: _filled_up(state.get(each), older.get(each)) for each in names}
    if not is_dataclass(state) or isinstance(state, type):
        return state
    parts = [each.name for each in fields(state) if each.metadata[OWNER] == "part"]
    return replace(state, **{name: _filled_up(getattr(state, name), getattr(older, name)) for name in parts})


def _undo_casts(optimizer: Any, state: dict[int, dict[str, Any]]) -> None:
    """Give a state back the dtypes that it was sent in: torch casts to those of the parameters."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for place, entries in state.items():
        optimizer.state[params[place]].update(entries)


@torch.no_grad()
def _overwrite(param: Tensor, other: Tensor) -> None:
    param.copy_(other)
