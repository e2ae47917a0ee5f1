"""What the ranks of a pipeline take, by the actions of its schedule: see `mpisgd.methods.cost_kit`.

Each rank does something else, so there is a stream of each. What a rank keeps, but for parameters, gradients
and the optimizer's state, by the field of `Memory` in which it is counted:

    activations   of each micro-batch, from its forward until its backward
    buffers       messages: activations from when their receive is started until the backward, gradients until
                  the backward that takes them; a gradient that is sent until the next send, as its sender
                  then looks whether it is through
    strategy      older versions of the weights

A send that is not through by the next one holds its gradient longer: whoever receives has not started to.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpisgd.methods.cost_kit import (
    REPLICAS,
    TENSOR,
    Alloc,
    Check,
    Collective,
    Compute,
    Free,
    Op,
    Send,
    Wait,
)
from mpisgd.pipeline.schedules.action import LOOK_AHEAD, Action, Kind
from mpisgd.pipeline.schedules.schedule import Schedule
from mpisgd.pipeline.schedules.shape import PipelineShape

__all__ = ["StageSizes", "cost"]

SENT_AS = {Kind.SEND_ACTIVATION: Kind.RECV_ACTIVATION, Kind.SEND_GRADIENT: Kind.RECV_GRADIENT}


@dataclass(frozen=True)
class StageSizes:
    """Bytes of a stage on one rank, and of a micro-batch in it.

    Attributes:
        parameter_bytes: and as many of gradients.
        state_bytes: of the optimizer.
        output_bytes: what goes to each stage that takes something; as much comes back from there.
        kept_bytes: what forward keeps until backward, outputs included, besides what has come from others.
        pass_bytes: what backward needs besides, at most.
        tensor_ranks: that divide the tensors of its layers, of which this is one.
        forward_sums: bytes of the activations that these ranks all-reduce forward, one after the other.
        backward_sums: likewise backward.
        rings: calls of attention whose keys other ranks have, too; each a `mpisgd.context.cost.RingCost`.
        recomputes: whether backward begins with these calls of the forward pass.
    """

    parameter_bytes: float
    state_bytes: float
    output_bytes: dict[int, float]
    kept_bytes: float
    pass_bytes: float = 0.0
    tensor_ranks: int = 1
    forward_sums: tuple[float, ...] = ()
    backward_sums: tuple[float, ...] = ()
    rings: tuple[Any, ...] = ()
    recomputes: bool = False

    def sums(self, nbytes: Sequence[float]) -> Iterator[Op]:
        """Yield all-reduces of activations."""
        for each in nbytes if self.tensor_ranks > 1 else ():
            yield Check(TENSOR)
            yield Collective("all_reduce", each, TENSOR, num_ranks=self.tensor_ranks)


def cost(
    schedule: Schedule,
    shape: PipelineShape,
    stages: Sequence[StageSizes],
    rank: int,
    num_steps: int = 1,
    tie_bytes: Sequence[float] = (),
    num_pipelines: int = 1,
) -> Iterator[Op]:
    """Yield what a rank has, and does in so many steps, from an empty pipeline to an empty one.

    Args:
        schedule: of the pipeline.
        shape: of it.
        stages: all of them.
        rank: within the pipeline.
        num_steps: see above; with a schedule that flushes all steps are alike.
        tie_bytes: of the tied parameters of each tie.
        num_pipelines: that train together: before it updates a rank means all its gradients with those of
            the same rank of the others.
    """
    own = _Rank(shape, stages, rank, tie_bytes, num_pipelines)
    yield from own.kept()
    for step in range(num_steps):
        if schedule.flushes or not step:
            yield Check()  # of the batch
        yield from own.run(schedule.actions(shape, rank, step))
        if schedule.flushes:
            yield from own.settle()
    yield from own.run(schedule.last_actions(shape, rank, num_steps))
    yield from own.settle()


@dataclass
class _Rank:
    """What a rank has at some moment."""

    shape: PipelineShape
    stages: Sequence[StageSizes]
    rank: int
    tie_bytes: Sequence[float]
    num_pipelines: int
    has_forwarded: set[tuple[int, int]] = field(default_factory=set)
    has_gradients: set[int] = field(default_factory=set)
    oldest: dict[int, int] = field(default_factory=dict)  # version of a stage's weights
    unsettled: float = 0.0

    def kept(self) -> Iterator[Op]:
        for stage in self.shape.stages_of(self.rank):
            yield Alloc("parameters", self.stages[stage].parameter_bytes)
            yield Alloc("optimizer", self.stages[stage].state_bytes)

    def run(self, actions: Sequence[Action]) -> Iterator[Op]:
        started: set[Action] = set()
        for place, action in enumerate(actions):
            for ahead in actions[place : place + LOOK_AHEAD]:
                if ahead not in started and self._is_known(ahead):
                    started.add(ahead)
                    yield Alloc("buffers", self._message_bytes(ahead))
            yield from self._do(action)

    def _is_known(self, action: Action) -> bool:
        """Return whether a receive can be started: a gradient has the shape of what was sent."""
        is_sent = (action.stage, action.micro_batch) in self.has_forwarded
        return action.kind is Kind.RECV_ACTIVATION or (action.kind is Kind.RECV_GRADIENT and is_sent)

    def settle(self) -> Iterator[Op]:
        yield Free("buffers", self.unsettled)
        self.unsettled = 0.0

    def _message_bytes(self, action: Action) -> float:
        src, dst = sorted((action.stage, action.peer))
        return self.stages[src].output_bytes[dst]

    def _do(self, action: Action) -> Iterator[Op]:
        if action.kind in SENT_AS:
            yield from self._send(action)
        elif action.kind in SENT_AS.values():
            yield Wait(str(action))
        elif action.kind is Kind.FORWARD:
            self.has_forwarded.add((action.stage, action.micro_batch))
            yield Alloc("activations", self._own(action).kept_bytes)
            yield from self._own(action).sums(self._own(action).forward_sums)
            for ring in self._own(action).rings:
                yield from ring.forward()
            yield Compute("forward", stage=action.stage)
        elif action.kind is Kind.BACKWARD:
            yield from self._backward(action)
        elif action.kind is Kind.UPDATE:
            yield from self._update(action)
        else:
            yield from self._reduce(action)

    def _own(self, action: Action) -> StageSizes:
        return self.stages[action.stage]

    def _send(self, action: Action) -> Iterator[Op]:
        yield from self.settle()
        nbytes, received = self._message_bytes(action), SENT_AS[action.kind]
        key = str(action._replace(kind=received, stage=action.peer, peer=action.stage))
        yield Send(nbytes, self.shape.rank_of(action.peer, action.micro_batch), key)
        if action.kind is Kind.SEND_GRADIENT:  # what is sent of activations is kept anyway
            self.unsettled = nbytes

    def _backward(self, action: Action) -> Iterator[Op]:
        number, sizes, shape = action.stage, self.stages[action.stage], self.shape
        sources = {src: self.stages[src].output_bytes[number] for src in shape.sources(number)}
        if number not in self.has_gradients:
            self.has_gradients.add(number)
            yield Alloc("gradients", sizes.parameter_bytes)
        yield Alloc("activations", sizes.pass_bytes)
        yield Alloc("buffers", sum(sources.values()))  # gradients of what has come
        yield from sizes.sums(sizes.backward_sums)
        for ring in sizes.rings:
            yield from ring.forward() if sizes.recomputes else ()
            yield from ring.backward()
        yield Compute("backward", stage=number)
        yield Free("activations", sizes.pass_bytes + sizes.kept_bytes)
        theirs = [src for src in sources if shape.rank_of(src, action.micro_batch) != self.rank]
        yield Free("buffers", sum(sources[src] for src in theirs) + sum(sizes.output_bytes.values()))

    def _update(self, action: Action) -> Iterator[Op]:
        """Update the newest version, in place unless it is still read; older ones that nobody reads go."""
        number, nbytes = action.stage, self.stages[action.stage].parameter_bytes
        oldest, newest = self.oldest.get(number, 0), action.version - 1
        kept = min(max(oldest, action.keep_from), newest)
        yield Free("strategy", (kept - oldest) * nbytes)
        if action.keep_from <= newest:
            yield Alloc("strategy", nbytes)
        self.oldest[number] = min(max(kept, action.keep_from), action.version)
        if self.num_pipelines > 1 and number == self.shape.stages_of(self.rank)[0]:
            held = sum(self.stages[each].parameter_bytes for each in self.shape.stages_of(self.rank))
            yield Check(REPLICAS)
            yield Collective("all_reduce", held, REPLICAS, num_ranks=self.num_pipelines)
            yield Wait()
        yield Compute("optimizer", stage=number)
        self.has_gradients.discard(number)
        yield Free("gradients", nbytes)

    def _reduce(self, action: Action) -> Iterator[Op]:
        is_tie = action.kind is Kind.REDUCE_TIED
        ranks = self.shape.ranks_of_tie(action.stage) if is_tie else self.shape.ranks[action.stage]
        nbytes = self.tie_bytes[action.stage] if is_tie else self.stages[action.stage].parameter_bytes
        if len(ranks) > 1:
            yield Check()
            yield Collective("all_reduce", nbytes, num_ranks=len(ranks))
            yield Wait()
