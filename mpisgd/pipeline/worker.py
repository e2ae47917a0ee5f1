"""`Worker`: does the actions of one rank of a pipeline, whatever the schedule.

The dispatch is a table: one method per kind of action. Before each action the receives of the next ones are
started, so a message finds its memory when it comes, and two ranks that send to each other do not wait.
"""

import contextlib
import functools
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpisgd import tracing
from mpisgd.arguments import shown
from mpisgd.collectives.coalesced import all_reduce_coalesced
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument, ShapeMismatch
from mpisgd.pipeline.messages import FIRST_TAG, PipelineMessages
from mpisgd.pipeline.micro_batches import Batch
from mpisgd.pipeline.schedules.action import LOOK_AHEAD, Action, Kind
from mpisgd.pipeline.schedules.shape import PipelineShape
from mpisgd.pipeline.stage import Stage, gradient_of, with_gradients
from mpisgd.tracing import Track
from mpisgd.transport.messages.message_work import MessageWork

__all__ = ["Recorded", "TensorSpec", "Tie", "Worker"]

TAGS = 64  # of a connection and direction: more micro-batches are not between two ranks at once, as a rule
TRACK = Track("pipeline")

Loss = Callable[[Any, Any], Tensor]
SpecKey = tuple[
    Kind, int, int, int, int, bool
]  # kind, stages, rank at the other end, rows, whether it trains


class TensorSpec(NamedTuple):
    """What a receiver must know of a tensor before it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Tie(NamedTuple):
    """Parameters of several stages that are to stay equal.

    Attributes:
        group: of the ranks that have them, None where that is one rank.
        ranks: of the pipeline.
        params: of this rank.
    """

    group: Group | None
    ranks: tuple[int, ...]
    params: Sequence[Tensor]


class Recorded(NamedTuple):
    """An action with its begin and its end, by `time.monotonic_ns`."""

    action: Action
    begin_ns: int
    end_ns: int


class _Receiving(NamedTuple):
    """A message of several tensors under way."""

    tensors: Sequence[Tensor]
    specs: Sequence[TensorSpec]
    works: Sequence[MessageWork]


class Worker:
    """One rank of a pipeline.

    Args:
        shape: of the pipeline.
        stages: of this rank, by number.
        messages: to the other ranks.
        loss: of the last stage's output and the targets.
        weighs_rows: whether the loss is a mean over rows, so that a micro-batch counts by its rows.
        replicas: of stages with several, the groups of their ranks.
        ties: of the tied parameters of this rank, by number.
        reduce_op: what becomes of the gradients of replicas.

    Attributes:
        action: what it does now, or has failed at.
        losses: of the micro-batches of the last step, on ranks with the last stage.
        outputs: of the last stage, where no backward follows.
        recorded: the actions done, where that is wanted.
    """

    def __init__(
        self,
        shape: PipelineShape,
        stages: Mapping[int, Stage],
        messages: PipelineMessages,
        loss: Loss,
        *,
        weighs_rows: bool,
        replicas: Mapping[int, Group],
        ties: Mapping[int, Tie],
        reduce_op: ReduceOp,
    ) -> None:
        self.shape, self.stages, self.messages = shape, stages, messages
        self.action: Action | None = None
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Any] = {}
        self.recorded: list[Recorded] | None = None
        self._rank = messages.group.rank
        self._loss, self._weighs_rows = loss, weighs_rows
        self._replicas, self._ties, self._reduce_op = replicas, ties, reduce_op
        self._edges = {edge: number for number, edge in enumerate(shape.edges)}
        self._specs: dict[SpecKey, Sequence[TensorSpec]] = {}
        self._receiving: dict[Action, _Receiving] = {}
        # What is there and not used yet, by the action that takes it: kind, stage, micro-batch, peer.
        self._waiting: dict[tuple[Kind, int, int, int], Sequence[Tensor]] = {}
        self._batch = Batch(0, (), (), ())
        self._do: dict[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.RECV_ACTIVATION: self._receive,
            Kind.RECV_GRADIENT: self._receive,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.REDUCE: self._reduce,
            Kind.REDUCE_TIED: self._reduce_tied,
            Kind.UPDATE: self._update,
        }

    def run(self, actions: Sequence[Action], batch: Batch) -> None:
        """Do the actions, with a batch for those that read one."""
        self._batch = batch
        self.losses.clear()
        self.outputs.clear()
        for place, action in enumerate(actions):
            self._start_receives(actions[place : place + LOOK_AHEAD])
            self.action = action
            begin_ns = time.monotonic_ns()
            self._do[action.kind](action)
            self._note(action, begin_ns)
        self.action = None

    def without_replicas(self, shape: PipelineShape) -> "Worker":
        """Return a worker with the same stages that does forwards alone."""
        return Worker(
            shape,
            self.stages,
            self.messages,
            self._loss,
            weighs_rows=False,
            replicas={},
            ties={},
            reduce_op=self._reduce_op,
        )

    def forget_specs(self) -> None:
        """Let the shapes of messages be told anew: the batches have other ones."""
        self._specs.clear()

    def restart(self) -> None:
        """Begin anew, with an empty pipeline."""
        for stage in self.stages.values():
            stage.restart()

    @contextlib.contextmanager
    def earlier_gradients_apart(self) -> Iterator[None]:
        """Within, gradients are those of this step alone, so that none is reduced twice; then they add up."""
        reduced: list[Tensor] = [
            param for number in self._replicas for param in self.stages[number].module.parameters()
        ]
        reduced += [param for tie in self._ties.values() for param in tie.params]
        earlier = {param: param.grad for param in reduced if param.grad is not None}
        for param in earlier:
            param.grad = None
        yield
        for param, gradient in earlier.items():
            param.grad = gradient if param.grad is None else gradient.add_(param.grad)

    def counted_by_others(self) -> set[Tensor]:
        """Return the parameters of this rank that the first rank with a replica or with the tie counts."""
        tied: dict[Tensor, tuple[int, ...]] = {
            param: tie.ranks for tie in self._ties.values() for param in tie.params
        }
        of_stages: dict[Tensor, tuple[int, ...]] = {
            param: self.shape.ranks[number]
            for number, stage in self.stages.items()
            for param in stage.module.parameters()
        }
        return {param for param, ranks in {**of_stages, **tied}.items() if min(ranks) != self._rank}

    def _note(self, action: Action, begin_ns: int) -> None:
        end_ns = time.monotonic_ns()
        if self.recorded is not None:
            self.recorded.append(Recorded(action, begin_ns, end_ns))
        if tracing.sink is not None:
            tracing.sink.span(TRACK, str(action), begin_ns, end_ns, "pipeline", {})

    # -- passes -----------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        stage, micro_batch, batch = self.stages[action.stage], action.micro_batch, self._batch
        place, is_last = micro_batch - batch.first, action.stage == self.shape.num_stages - 1
        sent, result = stage.forward(
            micro_batch,
            action.version,
            self._take(Kind.FORWARD, action, self.shape.sources(action.stage)),
            batch.inputs[place] if action.stage == 0 else None,
            self._weighted_loss(micro_batch, batch.targets[place]) if is_last and batch.targets else None,
            trains=batch.trains,
        )
        if is_last and not batch.targets:
            self.outputs[micro_batch] = result
        for dst, tensors in sent.items():
            self._hand_on(Kind.FORWARD, Kind.SEND_ACTIVATION, action, dst, tensors)

    def _weighted_loss(self, micro_batch: int, targets: Any) -> Callable[[Any], Tensor]:
        weight = self._batch.share(micro_batch) if self._weighs_rows else 1.0

        def weighted(output: Any) -> Tensor:
            loss = self._loss(output, targets)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise InvalidArgument(
                    f"pipeline: loss returned {shown(loss)}; expected a tensor of one element"
                )
            # In memory of its own: that of some of torch's losses is as large as the output.
            self.losses[micro_batch] = loss.detach().clone()
            return loss * weight

        return weighted

    def _backward(self, action: Action) -> None:
        stage, micro_batch = self.stages[action.stage], action.micro_batch
        gradients = self._take(Kind.BACKWARD, action, self.shape.targets(action.stage))
        for src, tensors in stage.backward(micro_batch, gradients).items():
            self._hand_on(Kind.BACKWARD, Kind.SEND_GRADIENT, action, src, tensors)

    def _hand_on(
        self, local: Kind, remote: Kind, action: Action, peer: int, tensors: Sequence[Tensor]
    ) -> None:
        """Put tensors where the pass of another stage of this rank takes them, or the message to another."""
        if self.shape.rank_of(peer, action.micro_batch) == self._rank:
            self._waiting[local, peer, action.micro_batch, action.stage] = tensors
        else:
            self._waiting[remote, action.stage, action.micro_batch, peer] = tensors

    def _take(self, kind: Kind, action: Action, stages: Sequence[int]) -> dict[int, Sequence[Tensor]]:
        """Return the received tensors of a pass, by stage."""
        return {src: self._waiting.pop((kind, action.stage, action.micro_batch, src)) for src in stages}

    # -- messages ---------------------------------------------------------------------------------------

    def _tag(self, action: Action) -> int:
        is_activation = action.kind in (Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION)
        edge = (min(action.stage, action.peer), max(action.stage, action.peer))
        connection = 2 * self._edges[edge] + (not is_activation)
        return FIRST_TAG + connection * TAGS + action.micro_batch % TAGS

    def _peer(self, action: Action) -> int:
        return self.shape.rank_of(action.peer, action.micro_batch)

    def _key(self, action: Action) -> SpecKey:
        """Return the key of an activation's shapes; a batch has two numbers of rows at most."""
        rows = self._batch.rows(action.micro_batch)
        return action.kind, action.stage, action.peer, self._peer(action), rows, self._batch.trains

    def _send_activation(self, action: Action) -> None:
        tensors = self._waiting.pop((action.kind, action.stage, action.micro_batch, action.peer))
        specs = [TensorSpec(tuple(each.shape), each.dtype, each.requires_grad) for each in tensors]
        known = self._specs.setdefault(self._key(action), specs)
        if known is specs:
            self.messages.send_object(specs, self._peer(action), self._tag(action))
        elif known != specs:
            raise ShapeMismatch(
                f"pipeline: stage {action.stage} sends {_text(specs)} for micro-batch {action.micro_batch}, "
                f"and sent {_text(known)} before; outputs keep their shapes while the batch does"
            )
        for tensor in tensors:
            self.messages.send(tensor.detach(), self._peer(action), self._tag(action))

    def _send_gradient(self, action: Action) -> None:
        for tensor in self._waiting.pop((action.kind, action.stage, action.micro_batch, action.peer)):
            self.messages.send(tensor, self._peer(action), self._tag(action))

    def _start_receives(self, actions: Sequence[Action]) -> None:
        """Start the receives among these actions whose shapes are known."""
        for action in actions:
            if action.kind in (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT) and action not in self._receiving:
                specs = self._known_specs(action)
                if specs is not None:
                    self._receiving[action] = self._start_receive(action, specs)

    def _known_specs(self, action: Action) -> Sequence[TensorSpec] | None:
        """Return the shapes that will be received, if known: gradients have those of what was sent."""
        if action.kind is Kind.RECV_ACTIVATION:
            return self._specs.get(self._key(action))
        sent = self.stages[action.stage].sent(action.micro_batch)
        if sent is None:
            return None
        return [TensorSpec(tuple(t.shape), t.dtype, False) for t in with_gradients(sent[action.peer])]

    def _start_receive(self, action: Action, specs: Sequence[TensorSpec]) -> _Receiving:
        device = self.stages[action.stage].device
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs]
        src, tag = self._peer(action), self._tag(action)
        return _Receiving(tensors, specs, [self.messages.receive(tensor, src, tag) for tensor in tensors])

    def _receive(self, action: Action) -> None:
        """Wait for a message; the first one of a connection tells its shapes before."""
        if action not in self._receiving:
            specs = self.messages.receive_object(self._peer(action), self._tag(action))()
            self._specs[self._key(action)] = specs
            self._receiving[action] = self._start_receive(action, specs)
        receiving = self._receiving.pop(action)
        for tensor, spec, work in zip(receiving.tensors, receiving.specs, receiving.works, strict=True):
            self.messages.wait(work)
            tensor.requires_grad_(spec.requires_grad)
        kind = Kind.FORWARD if action.kind is Kind.RECV_ACTIVATION else Kind.BACKWARD
        self._waiting[kind, action.stage, action.micro_batch, action.peer] = receiving.tensors

    # -- updates ----------------------------------------------------------------------------------------

    def _reduce(self, action: Action) -> None:
        tied = {param for tie in self._ties.values() for param in tie.params}
        params = self.stages[action.stage].with_gradients_collected(tied)
        gradients = self._gradients_of_any(params, self.shape.ranks[action.stage])
        all_reduce_coalesced(gradients, self._reduce_op, self._replicas[action.stage])

    def _reduce_tied(self, action: Action) -> None:
        tie = self._ties[action.stage]
        for stage in self.shape.ties[action.stage]:
            if stage in self.stages:
                self.stages[stage].weights.collect_gradients()
        if tie.group is not None:
            all_reduce_coalesced(self._gradients_of_any(tie.params, tie.ranks), ReduceOp.SUM, tie.group)

    def _gradients_of_any(self, params: Sequence[Tensor], ranks: Sequence[int]) -> list[Tensor]:
        """Return the gradients that any of these ranks has, zeros where this one has none. Collective.

        The others stay None, as in one process: momentum and weight decay leave such a parameter alone.
        """
        mine = sum(1 << place for place, param in enumerate(params) if param.grad is not None)
        some = functools.reduce(operator.or_, self.messages.exchange(mine, ranks))
        return [gradient_of(param) for place, param in enumerate(params) if some >> place & 1]

    def _update(self, action: Action) -> None:
        self.stages[action.stage].update(action.version, action.keep_from)


def _text(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{list(spec.shape)} of {spec.dtype}" for spec in specs)
