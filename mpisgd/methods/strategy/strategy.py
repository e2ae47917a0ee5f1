"""`Strategy` and `Synchronizer`: what the ranks exchange, and how often.

A strategy is what the user writes: a small frozen description, which prints, compares, and is agreed on by
all ranks. `DistributedOptimizer` makes a synchronizer of it, the working part, and calls it at the moments
below; everything else (accumulation windows, `no_sync`, hooks, agreement on parameters) is the optimizer's.

    once        open; again after close where the ranks change, and where parameters are added if it `reopens`
    backward    gradients.begin, ready ..., reduce at the end of the pass that fills the window
    step        around, if there is a closure | begin, derive where due | before_step
                | the wrapped optimizer's update | after_step

What it keeps from step to step it declares in a dataclass, `state`: see `mpisgd.method_state`.
"""

import abc
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mpisgd.arguments import as_written
from mpisgd.collectives.coalesced import all_reduce_coalesced
from mpisgd.compress.compressor import Compressor
from mpisgd.core.group import Group
from mpisgd.core.owner import current_owner
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument, PeerLost
from mpisgd.gradients.compression_state import CompressionState
from mpisgd.gradients.gradient_sync import GradientSync
from mpisgd.method_state import mean_of, parts_of
from mpisgd.methods.paper_kit import Paper
from mpisgd.methods.strategy.example_counts import StepExamples
from mpisgd.methods.strategy.goes_with import UNDECLARED, GoesWith
from mpisgd.methods.strategy.training import Training, continuous_by_key
from mpisgd.sharding.layerwise.in_files import check_in_memory
from mpisgd.sharding.needed_parts import NeededPart

__all__ = ["Strategy", "Synchronizer"]


class Synchronizer:
    """The working part of a strategy. This one exchanges nothing; subclasses override its methods.

    Args:
        training: the optimizer, parameters, ranks and options.
        strategy: the strategy whose working part it is; an instance of its `keeps` becomes `state`.

    Attributes:
        training: as given; replaced when parameters are added or the ranks change.
        strategy: as given.
        num_steps: number of steps so far, including those before the state was saved and loaded.
        step_examples: numbers of examples of this rank's steps; see `ExampleCounts`.
        state: what is kept from step to step, a dataclass whose fields are marked by `mpisgd.method_state`;
            None: nothing is kept.
        replicas_differ: whether parameters and the wrapped optimizer's state differ by rank between steps, so
            that each rank's must be saved.
        owner: identifies this optimizer in the checks of its operations; see `mpisgd.core.owner`.
        gradients: combines gradients at the end of a backward pass; by default they stay on their rank.
        is_fresh: whether the parameters and the optimizer's state on this rank are the current ones. True at
            the beginning, after a load, and after `open`; a working part that keeps the current ones in other
            memory, such as on a server, sets it to False.
        reopens: whether `close` and `open` are called when parameters are added.
        has_whole_state: whether this rank has the optimizer state of all parameters.
        gathers_state: whether `state_dict` collects state from other ranks or other memory; see
            `contribute_state`.
        commits_shards: whether in elastic training each rank commits only its part of the state, of which
            another rank has a replica.
    """

    gradients = GradientSync()
    state: Any = None
    replicas_differ = False
    has_whole_state = True
    gathers_state: ClassVar[bool] = False
    commits_shards = False
    is_fresh: bool = True
    reopens: ClassVar[bool] = False

    def __init__(self, training: Training, strategy: "Strategy | None" = None) -> None:
        self.training = training
        if strategy is not None and strategy.keeps is not None:
            self.state = strategy.keeps()
        self.strategy = strategy
        self.owner = current_owner()
        self.num_steps = 0
        self.step_examples = StepExamples()

    # -- what belongs to ranks and parameters -------------------------------------------------------

    def open(self) -> None:
        """Make what depends on the ranks and is not saved, such as a reducer of gradients. Collective."""

    def close(self) -> None:
        """Release what `open` has made; some ranks may be lost. Parameters and state are unchanged."""

    def bring_home(self) -> None:
        """Copy the current parameters and optimizer state to this rank, if they are in other memory.

        Not collective: it may be called on some ranks only.
        """

    @property
    def why_fixed(self) -> str:
        """Why the training cannot continue on other ranks now, "" if it can; the same on all ranks."""
        if self.has_whole_state:
            return ""
        return (
            "each rank has the optimizer's state of its own part of the parameters only; call "
            "load_state_dict() with that of all of them before"
        )

    @property
    def model_group(self) -> Group:
        """The ranks that combine their gradients, and so have one model, where any do."""
        return self.training.group

    # -- what is kept from step to step -------------------------------------------------------------

    @property
    def method(self) -> str:
        """The method's name in a saved state; the state of another method is not loaded."""
        return type(self).__name__.removesuffix("Synchronizer")

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors for which `state` has entries, as they are now, by key.

        By default they are the memory of all parameters that a step can change; the keys "0", "1", ... are
        their indices in the optimizer.
        """
        return self.parameters_by_key()

    def begin(self, tensors: Mapping[str, Tensor]) -> None:
        """Make the entries of `state` for `tensors`. Collective; called before a step, without autograd.

        Args:
            tensors: those of `tensors()` that have no entry yet: all of them before the first step and after
                a restart of the ranks, otherwise those that were added.
        """

    def derive(self) -> None:
        """Compute what is derived from parameters, ranks and `state`, and not saved. Collective.

        Called without autograd, after `begin`: before the first step, and before a step if parameters, ranks
        or the state have changed.
        """

    def has_changed(self) -> bool:
        """Return whether `begin` and `derive` must be called for another reason; the same on all ranks."""
        return False

    def arrive(self) -> None:
        """Wait until `state` can be read: no part of it is still being received."""

    # -- a step -------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Do what must be done before the wrapped optimizer updates parameters; gradients are reduced."""

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the function that is called in place of the closure; directly before `before_step`."""
        return closure

    def after_step(self, num_steps: int) -> None:
        """Do what must be done after an update, such as to average parameters.

        Args:
            num_steps: number of steps so far, including this one; the same on all ranks.
        """

    def end_failed_step(self) -> None:
        """Clean up after a step that has raised, in `before_step`, in `after_step`, between them or before.

        Not collective. Called again where there is nothing left to do.
        """

    def before_zero_grad(self) -> None:
        """Do what must be done before gradients are reset."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Clip the gradients of the optimizer by their norm; return the norm."""
        return torch.nn.utils.clip_grad_norm_(self.training.params, max_norm, norm_type, error_if_nonfinite)

    def consensus(self) -> Sequence[Tensor]:
        """Return the consensus of the ranks' parameters and buffers, in new memory. Collective.

        By default it is their mean.
        """
        values = [tensor.detach().clone() for tensor in self.averaged]
        all_reduce_coalesced(values, ReduceOp.AVG, self.training.group)
        return values

    def replica(self) -> dict[str, Tensor]:
        """Return the tensors that differ by rank between steps, by key; not copied."""
        return {**self.parameters_by_key(), **self._buffers_by_key()}

    def consensus_of(
        self, replicas: Sequence[Mapping[str, Tensor]], entries: Sequence[Mapping[str, Any]]
    ) -> dict[str, Tensor]:
        """Return the consensus of saved replicas, by key; what `consensus` returns for those of a job.

        Args:
            replicas: what `replica` has returned, for each rank.
            entries: the saved `state`, for each rank.
        """
        return mean_of(replicas)

    def finish(self) -> None:
        """End the training: wait until the updates of all ranks are applied."""

    @property
    def averaged(self) -> list[Tensor]:
        """The tensors whose values may differ by rank: floating-point parameters and buffers."""
        return [*self.trainable, *self.buffers]

    @property
    def trainable(self) -> list[Tensor]:
        """The tensors of the parameters that a step can change, as they are now; do not keep them."""
        return list(self.parameters_by_key().values())

    @property
    def buffers(self) -> list[Tensor]:
        """The floating-point buffers, as they are now; do not keep them."""
        return list(self._buffers_by_key().values())

    def parameters_by_key(self) -> dict[str, Tensor]:
        """Return `trainable` by key; see `tensors`."""
        return continuous_by_key("", [param for _, param in self.training.named])

    def _buffers_by_key(self) -> dict[str, Tensor]:
        return continuous_by_key("buffer ", self.training.buffers)

    # -- other states, other parameters, other ranks ------------------------------------------------

    def state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the optimizer's state; `make` returns what the optimizer has now."""
        return make()

    def contribute_state(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Take part in the `state_dict` of another rank, which saves its result.

        Collective where `state_dict` is. Called on the other ranks if `gathers_state` is True.

        Returns:
            The optimizer's state that this rank has, without what `state_dict` collects.
        """
        return make()

    def loaded(self, state_dict: Mapping[str, Any]) -> None:
        """Called after a state was loaded into the optimizer and into `state`. Not collective."""
        self.is_fresh = True

    def needed_parts(self) -> Mapping[int, NeededPart] | None:
        """Return the parts that this rank needs of a state that is loaded, by index of the parameter.

        None: this rank needs all of it.
        """
        return None

    def load_parts(self) -> None:
        """Called after this rank has loaded the parts of `needed_parts`. Not collective."""

    def shard_state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return this rank's part of the optimizer's state; `make` returns what the optimizer has now.

        Raises:
            InvalidArgument: this strategy does not divide the state among the ranks.
        """
        raise InvalidArgument(
            "shard_state_dict: every rank has the whole state of this optimizer; use state_dict(), or "
            "strategy=mpisgd.Sharded()"
        )

    def load_shards(
        self,
        shards: Sequence[Mapping[str, Any]],
        load: Callable[[dict[str, Any]], Any],
        *,
        held: bool = False,
    ) -> None:
        """Load the state of an earlier run, of any number of ranks, from the parts that its ranks had.

        Args:
            shards: what `shard_state_dict` has returned on the ranks of that run.
            load: the wrapped optimizer's own function that loads a state dict.
            held: False: each rank passes the parts of all ranks. True: each part is passed by one rank only;
                the call is then collective.

        Raises:
            InvalidArgument: this strategy does not divide the state among the ranks, or a part is missing.
        """
        raise InvalidArgument(
            "load_shard_state_dicts: every rank has the whole state of this optimizer; use load_state_dict()"
        )

    def extend(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Continue with a list of parameters that has further ones at its end. Collective."""
        if self.reopens:
            self.close()
        self.training = self.training._replace(named=named)
        if self.reopens:
            self.is_fresh = True
            self.open()

    def use_compression(self, compression: Compressor) -> None:
        """Set another compressor, which is used from the next call of `move_to` on."""
        options = self.training.options._replace(compression=compression)
        self.training = self.training._replace(options=options)

    def move_to(self, group: Group) -> None:
        """Continue with other ranks, which have the same parameters. Collective over `group`.

        This rank's compressors keep their state, such as residuals; that of lost ranks is lost.
        """
        with contextlib.suppress(PeerLost):  # what was on its way when a rank was lost never arrives
            self.arrive()
        self.close()
        self.training = self.training._replace(group=group)
        self.owner = current_owner()
        for kept in parts_of(self.state, CompressionState):
            kept.move_to(())  # lets go of the buckets, whose memory is that of the ranks before
        self.is_fresh = True
        self.open()


@dataclass(frozen=True)
class Strategy(abc.ABC):
    """What the ranks exchange, and how often. Base class; a subclass is a frozen dataclass.

    Its fields must be the same on all ranks: `repr(strategy)` is compared at construction.

    Attributes:
        starts_together: whether all ranks take part in the first step, with the same parameters.
        keeps: the dataclass of the working part's state, see `mpisgd.method_state`; None: it has no state.
            If the strategy has a `cost`, `plan` and `estimate_memory` count the memory of its fields.
    """

    starts_together: ClassVar[bool] = True
    keeps: ClassVar[type | None] = None

    def __str__(self) -> str:
        return as_written(self)

    @classmethod
    def examples(cls) -> Sequence["Strategy"]:
        """Return the instances that the fuzzer, `verify` and the documentation use; the simplest first."""
        return (cls(),)

    @property
    def goes_with(self) -> GoesWith:
        """The options that the strategy supports; all others raise an error before `check` is called.

        By default it supports none that a strategy must act upon, such as `op`, `compression` and
        `named_buffers`.
        """
        return UNDECLARED

    @property
    def own_compression(self) -> Compressor | None:
        """The compressor, if it is a part of the strategy; None: the argument `compression` decides."""
        return None

    def check(self, training: Training) -> None:
        """Raise if the strategy cannot train these parameters on these ranks. Sends nothing.

        Raises:
            InvalidArgument: says why.
        """
        if not self.updates_files(training):
            check_in_memory("DistributedOptimizer", training.named)
        self.check_ranks(training)

    def check_ranks(self, training: Training) -> None:  # noqa: B027  # few have anything to check
        """Raise if the strategy cannot train on these ranks. Called at construction and when ranks change.

        Raises:
            InvalidArgument: says why.
        """

    def updates_files(self, training: Training) -> bool:
        """Return whether parameters that `mpisgd.offload_parameters` has moved to files are updated there."""
        return False

    @abc.abstractmethod
    def synchronizer(self, training: Training) -> Synchronizer:
        """Return the working part for an optimizer. Collective over `training.group`."""

    def paper(self, size: int, lengths: Sequence[tuple[str, int]] = ()) -> Paper[Any] | None:
        """Return the algorithm with these settings, which `verify` and the fuzzer compare the strategy with.

        None means that the strategy must equal one process with the gradients of all ranks.

        Args:
            size: number of ranks.
            lengths: (name, bytes) of each parameter, for strategies that divide the parameters.

        Raises:
            InvalidArgument: there is no algorithm to compare with.
        """
        raise InvalidArgument(f"there is no paper of {self}")
