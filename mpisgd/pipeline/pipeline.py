"""`Pipeline`: a model in stages on several ranks, trained in micro-batches by any schedule."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpisgd.arguments import check_positive
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument, MpisgdError, NotInitialized, PipelineFailed
from mpisgd.job.groups import close_group, open_group
from mpisgd.job.lifecycle import group_or_world
from mpisgd.pipeline.agreement import BatchSpec, agreed_batch, check_as_before, own_batch
from mpisgd.pipeline.construction import (
    MakeOptimizer,
    Options,
    OwnParts,
    agreed_parts,
    make_stages,
    open_replicas,
    open_ties,
)
from mpisgd.pipeline.messages import PipelineMessages
from mpisgd.pipeline.micro_batches import (
    Batch,
    as_tensors,
    joined,
    row_counts,
    split_rows,
    split_targets,
)
from mpisgd.pipeline.model_parts import Stages
from mpisgd.pipeline.recording import Recording, gather_recording
from mpisgd.pipeline.schedules.action import Action, Kind, described
from mpisgd.pipeline.schedules.plan import Plan, with_messages
from mpisgd.pipeline.schedules.schedule import Schedule
from mpisgd.pipeline.schedules.shape import PipelineShape
from mpisgd.pipeline.worker import Worker
from mpisgd.sharding.grad_norm import clip_factor

__all__ = ["Pipeline"]

MOST_TEXT = 600  # characters of an error that other ranks are told


class Pipeline:
    """Train a model whose stages are on different ranks.

    Collective: all ranks of `group` make it with the same arguments, and call its methods in the same order.

        pipeline = mpisgd.pipeline.Pipeline(
            model,                                   # an nn.Sequential, the same on all ranks
            schedule="1f1b", num_micro_batches=8, loss=torch.nn.functional.cross_entropy,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        )
        for inputs, targets in loader:
            loss = pipeline.step(inputs, targets)    # on ranks with the last stage, else None
        pipeline.flush()

    The flushing schedules ("gpipe", "1f1b", "interleaved") compute the gradients that one process computes.
    With "pipedream" and "pipedream-2bw" no rank waits between steps, and updates use gradients of older
    weights; see `mpisgd.pipeline.PipeDream`. A stage returns a tensor or a tuple of tensors, the inputs of
    the next.

    Args:
        stages: an nn.Sequential, which is divided into one stage per rank (or as `replicas` requires) with
            about equal numbers of parameters; or a module per stage, as from `mpisgd.pipeline.split` or
            `Partition.split`; or a function per stage that makes its module and is called only on the ranks
            of the stage, so that no rank has the whole model. If there are more stages than ranks, ranks have
            several. Parameters that several modules share are tied: they stay equal.
        schedule: a name or a schedule of `mpisgd.pipeline`.
        num_micro_batches: number of parts of each batch; the number of rows need not be a multiple of it.
        loss: a function of the last stage's output and the targets of a micro-batch, which returns a tensor
            of one element.
        optimizer: a function that makes a torch optimizer from the parameters of a stage. None, with a
            flushing schedule: `step` leaves the gradients in the parameters, for clipping and an optimizer
            step in the program.
        replicas: ranks per stage, one number or one for each; they share the micro-batches. The first stage
            has the first ranks, and so on.
        tied: tied parameters, if stages are given by functions: for each parameter its (stage, name) pairs.
        loss_reduction: "mean": `loss` is a mean over rows, so that a smaller micro-batch has less weight; or
            "sum".
        checkpoint: keep the inputs and outputs of stages only, and compute forward again in backward
            (torch.utils.checkpoint).
        loss_on_all_ranks: whether `step` returns the loss everywhere, for which all wait.
        group: the ranks, all of the job by default.

    Attributes:
        schedule: the schedule.
        shape: which ranks have which stage.
        stages: the modules of this rank, by stage.
        optimizers: of this rank's stages with parameters.

    Raises:
        InvalidArgument: an argument is wrong on some rank; raised on all ranks.
        CollectiveMismatch: the ranks' arguments differ; raised on all ranks.

    Cost: per micro-batch and connection one message of the activations, and one of their gradients.
    """

    def __init__(
        self,
        stages: Stages,
        *,
        schedule: Schedule | str = "1f1b",
        num_micro_batches: int,
        loss: Callable[[Any, Any], Tensor],
        optimizer: MakeOptimizer | None = None,
        replicas: int | Sequence[int] | None = None,
        tied: Sequence[Any] = (),
        loss_reduction: str = "mean",
        checkpoint: bool = False,
        loss_on_all_ranks: bool = False,
        group: Group | None = None,
    ) -> None:
        members = group_or_world(group)
        options = Options(
            schedule,
            num_micro_batches,
            loss,
            optimizer,
            replicas,
            tied,
            loss_reduction,
            checkpoint,
            loss_on_all_ranks,
        )
        parts, skips = agreed_parts(stages, options, members)
        self.schedule, self.shape = parts.schedule, parts.shape
        self.stages, self.optimizers = parts.modules, parts.optimizers
        self._options = options
        self._group = open_group(members.job, members.ranks, name="pipeline")
        self._messages = PipelineMessages(self._group)
        self._stages = make_stages(parts, skips, recompute=checkpoint)
        self._groups = [self._group]
        self._worker = self._make_worker(parts)
        self._flushing_actions = self._actions(0) if self.schedule.flushes else None
        rank, ranks = self._group.rank, self.shape.ranks
        self._is_first, self._is_last = rank in ranks[0], rank in ranks[-1]
        self._num_steps = 0  # since the pipeline was empty
        self._num_recorded = 0
        self._agreed = BatchSpec()
        self._forms: Sequence[int] = ()  # of all ranks
        self._used = self._used_params(parts)
        self._unusable: MpisgdError | None = None

    def _make_worker(self, parts: OwnParts) -> Worker:
        """Return the worker, with groups for what it reduces. Collective."""
        replicas, ties = open_replicas(parts, self._group), open_ties(parts, self._group)
        self._groups += [*replicas.values(), *(tie.group for tie in ties.values() if tie.group is not None)]
        is_mean, each = self._options.loss_reduction == "mean", self.schedule.updates_each_micro_batch
        return Worker(
            self.shape,
            self._stages,
            self._messages,
            self._options.loss,
            weighs_rows=is_mean and not each,
            replicas=replicas,
            ties=ties,
            reduce_op=ReduceOp.AVG if each else ReduceOp.SUM,
        )

    def _used_params(self, parts: OwnParts) -> dict[Tensor, str]:
        """Return those parameters that optimizers or ties have, with names."""
        has = {
            param
            for optimizer in parts.optimizers.values()
            for group in optimizer.param_groups
            for param in group["params"]
        }
        has |= {param for params in parts.tied_params for param in params}
        return {
            param: f"{name!r} of stage {number}"
            for number, module in parts.modules.items()
            for name, param in module.named_parameters()
            if param in has
        }

    # -- training ---------------------------------------------------------------------------------------

    def step(self, inputs: Any = None, targets: Any = None) -> float | None:
        """Train on a batch.

        Collective. With a schedule that does not flush, some backward passes of the batch are left to later
        steps or `flush()`.

        Args:
            inputs: inputs of the first stage, a tensor or a tuple of tensors, rows along dimension 0. Used on
                the ranks of that stage, each of which passes the whole batch.
            targets: targets of the loss, in the same way on the ranks of the last stage.

        Returns:
            The loss of the batch, before the update: on ranks with the last stage, or on all if
            `loss_on_all_ranks`; else None.

        Raises:
            InvalidArgument: a batch does not fit; raised on all ranks, which can continue.
            PipelineFailed: another rank has raised an error of its own. The pipeline cannot be used any more.
        """
        batch = self._next_batch(inputs, targets, trains=True)
        with self._telling_failures():
            if not self._num_steps:
                self._worker.restart()  # with the weights that the program may have replaced
            if self._flushing_actions is not None:
                with self._worker.earlier_gradients_apart():
                    self._worker.run(self._flushing_actions, batch)
                self._messages.settle()
            else:
                self._worker.run(self._actions(self._num_steps), batch)
                self._num_steps += 1
            self._num_recorded += 1
            return self._loss_of(batch)

    def flush(self) -> None:
        """Complete the last steps, until the pipeline is empty. Collective.

        Call it before the weights are read: before `forward`, a checkpoint, and at the end. With a flushing
        schedule it does nothing.
        """
        self._check_usable()
        if self._num_steps:
            with self._telling_failures():
                actions = self.schedule.last_actions(self.shape, self._group.rank, self._num_steps)
                self._worker.run(actions, Batch(0, (), (), ()))
                self._messages.settle()
                self._worker.restart()
            self._num_steps = 0

    def forward(self, inputs: Any = None) -> Any:
        """Return the model's output for a batch of any size, on the last stage's first rank; else None.

        Collective; without gradients. Call `eval()` of the modules in `stages` before, if the model needs it.

        Raises:
            InvalidArgument: the pipeline is not empty; call `flush()` first. On all ranks.
        """
        self._check_usable()
        if self._num_steps:
            raise InvalidArgument("pipeline: forward() while backward passes are left; call flush() before")
        batch = self._next_batch(inputs, None, trains=False)
        shape = PipelineShape(
            tuple(ranks[:1] for ranks in self.shape.ranks), len(batch.counts), self.shape.skips
        )
        worker = self._worker.without_replicas(shape)
        with self._telling_failures():
            self._worker.restart()
            worker.run(_forward_actions(shape, self._group.rank), batch)
            self._messages.settle()
        return joined([worker.outputs[number] for number in sorted(worker.outputs)])

    def close(self) -> None:
        """Flush, and free the communicators of the pipeline; the modules stay. Collective.

        At the end of the job all pipelines are closed automatically.
        """
        if self._unusable is None:
            self.flush()
            for group in reversed(self._groups):
                close_group(group)
            self._unusable = NotInitialized("pipeline: it was closed")

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this rank's stages, each once."""
        return list(dict.fromkeys(param for module in self.stages.values() for param in module.parameters()))

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the gradients of all stages such that their norm is at most `max_norm`.

        Collective; with `optimizer=None`, after `step`. As `torch.nn.utils.clip_grad_norm_` with the
        parameters of the whole model, each counted once. torch's own function has the parameters of this rank
        only: it would divide by a different norm on each rank, and tied parameters would drift apart.

        Returns:
            The norm before, in float64, the same on all ranks.

        Raises:
            InvalidArgument: an invalid argument, found locally before anything is sent; or the pipeline has
                optimizers, so that gradients are used and reset before `step` returns.
            RuntimeError: with `error_if_nonfinite`, the norm is not finite; raised on all ranks, nothing is
                scaled.
        """
        check_positive("clip_grad_norm_", "max_norm", max_norm)
        check_positive("clip_grad_norm_", "norm_type", norm_type)
        self._check_usable()
        if self._options.optimizer is not None:
            raise InvalidArgument(
                "pipeline: clip_grad_norm_() where step() updates the weights, so that nothing is left to "
                "clip; make the pipeline with optimizer=None and step an optimizer of your own"
            )
        with self._telling_failures():
            norms = [torch.linalg.vector_norm(grad, norm_type) for grad in self._gradients(counted=True)]
        everyone = range(self._group.size)
        # The group's messages tell whether another rank has raised; its collectives would wait for it.
        self._messages.exchange(None, everyone)
        total, factor = clip_factor(
            norms, everyone, self._group, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )
        for grad in self._gradients(counted=False):
            grad.mul_(factor.to(grad.device))
        return total

    def _gradients(self, *, counted: bool) -> list[Tensor]:
        """Return the gradients of this rank's stages; `counted`: those that no other rank counts."""
        others = self._worker.counted_by_others() if counted else set()
        return [param.grad for param in self.parameters() if param.grad is not None and param not in others]

    @property
    def versions_held(self) -> dict[int, int]:
        """The largest number of versions of the weights that each stage of this rank has kept at a time."""
        return {number: stage.weights.most_held for number, stage in self._stages.items()}

    # -- reports ----------------------------------------------------------------------------------------

    def plan(self, num_steps: int = 1) -> Plan:
        """Return the actions of all ranks in this many steps, to be printed or drawn."""
        return self.schedule.plan_of(self.shape, num_steps)

    def start_recording(self) -> None:
        """Record the begin and the end of each action from now on."""
        self._worker.recorded, self._num_recorded = [], 0

    def stop_recording(self) -> Recording:
        """Return the steps since `start_recording`, of all ranks. Collective.

        The ideal timeline in it has the same number of steps, and begins and ends with an empty pipeline.
        """
        self._check_usable()
        recorded, self._worker.recorded = self._worker.recorded or [], None
        return gather_recording(recorded, self.plan(max(1, self._num_recorded)), self._group)

    # -- within -----------------------------------------------------------------------------------------

    def _actions(self, step: int) -> list[Action]:
        return self.schedule.actions(self.shape, self._group.rank, step)

    def _check_usable(self) -> None:
        if self._unusable is not None:
            raise type(self._unusable)(str(self._unusable))

    def _next_batch(self, inputs: Any, targets: Any, *, trains: bool) -> Batch:
        """Return the batch in micro-batches, once all ranks agree on it where the pipeline is empty."""
        self._check_usable()
        mine = own_batch(
            inputs,
            targets,
            has_inputs=self._is_first,
            has_targets=self._is_last and trains,
            num_micro_batches=self.shape.num_micro_batches if trains else 1,
        )
        mine = mine._replace(problem=mine.problem or self._problem, form=self._form)
        if self._num_steps:
            with self._telling_failures():
                check_as_before(mine, self._agreed)
        else:
            with self._telling_failures():
                told = self._messages.exchange(mine, range(self._group.size))
            agreed = agreed_batch(told, self._group.ranks)
            forms = [spec.form for spec in told]
            if agreed.has_other_inputs(self._agreed) or forms != self._forms:
                self._worker.forget_specs()
            self._agreed, self._forms = agreed, forms
        num_rows, most = self._agreed.num_rows or 0, self.shape.num_micro_batches
        counts = row_counts(num_rows, most if trains else min(most, num_rows))
        return Batch(
            self._num_steps * len(counts),
            counts,
            split_rows(as_tensors("inputs", inputs), counts) if self._is_first else (),
            split_targets(targets, counts) if self._is_last and trains else (),
            trains,
        )

    @property
    def _problem(self) -> str:
        """What is wrong with this rank's parameters, or ""."""
        now = set(self.parameters())
        gone = next((name for param, name in self._used.items() if param not in now), None)
        if gone is None:
            return ""
        return (
            f"pipeline: parameter {gone} is another object than when the pipeline was made, whose "
            "optimizers and ties have the former; copy values into it (load_state_dict without "
            "assign=True), or make the pipeline anew"
        )

    @property
    def _form(self) -> int:
        """What changes with the dtypes of this rank's parameters, and with which are frozen."""
        return hash(tuple((str(param.dtype), param.requires_grad) for param in self.parameters()))

    def _loss_of(self, batch: Batch) -> float | None:
        """Return the loss of the batch, where it is wanted."""
        weighs = self._options.loss_reduction == "mean"
        losses = self._worker.losses.items()
        mine = sum(loss.item() * (batch.share(number) if weighs else 1.0) for number, loss in losses)
        if self._options.loss_on_all_ranks:
            told = self._messages.exchange(mine if self._is_last else None, range(self._group.size))
        elif self._is_last:
            told = self._messages.exchange(mine, self.shape.ranks[-1])
        else:
            return None
        return float(sum(loss for loss in told if loss is not None))

    @contextlib.contextmanager
    def _telling_failures(self) -> Iterator[None]:
        """Tell the other ranks if this one raises within, and give the pipeline up."""
        try:
            yield
        except PipelineFailed as exc:
            self._give_up(exc, str(exc))
            raise
        except BaseException as exc:  # also Ctrl-C: messages and micro-batches are left
            action = self._worker.action
            where = "" if action is None else f", {described(action)}"
            rank = self._group.ranks[self._group.rank]
            text = f"pipeline: rank {rank}{where}: {type(exc).__name__}: {str(exc)[:MOST_TEXT]}"
            self._messages.tell_failure(text)
            self._give_up(exc, text)
            raise

    def _give_up(self, error: BaseException, text: str) -> None:
        """Leave the group: messages of the steps under way are never received."""
        self._unusable = PipelineFailed(f"pipeline: of no use any more: {text}")
        self._group.queue.broken = self._group.queue.broken or PipelineFailed(str(error))
        close_group(self._group)


def _forward_actions(shape: PipelineShape, rank: int) -> list[Action]:
    """Return the forwards of a rank alone: a stage takes micro-batch b in slot b plus its number."""
    passes = [
        Action(Kind.FORWARD, stage, number)
        for stage in shape.stages_of(rank)
        for number in range(shape.num_micro_batches)
    ]
    passes.sort(key=lambda each: (each.micro_batch + each.stage, each.stage))
    return with_messages(passes, rank, shape)
