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
from mpisgd.methods.strategy.training import Training
from mpisgd.sharding.layerwise.offload_parameters import check_in_memory
from mpisgd.sharding.needed_parts import NeededPart

__all__ = ["Strategy", "Synchronizer"]


class Synchronizer:
    """The working part of a strategy. This one exchanges nothing; subclasses override its methods.

    Args:
        training: the optimizer, parameters, ranks and options.
        strategy: whose working part it is; what it `keeps` is `state`.

    Attributes:
        training: as given, and kept up to date.
        strategy: as given.
        num_steps: number of steps so far, including those before the state was saved and loaded.
        step_examples: numbers of examples of this rank's steps; see `ExampleCounts`.
        state: what is kept from step to step, a dataclass marked by `mpisgd.method_state`; None: nothing.
        replicas_differ: whether parameters and the wrapped optimizer's state differ by rank between steps, so
            that each rank's must be saved.
        owner: identifies this optimizer in the checks of its operations; see `mpisgd.core.owner`.
        gradients: combines gradients at the end of a backward pass; by default they stay on their rank.
        is_fresh: whether parameters and the optimizer's state count as they are: at the beginning, after a
            load, and after `open`. A working part that has a copy of them elsewhere sets it to False.
        reopens: whether what `open` makes is of these parameters only, so that it is made again for more.
        has_whole_state: whether this rank has the optimizer state of all parameters.
        gathers_state: whether `state_dict` brings together what lies elsewhere; see `contribute_state`.
        commits_shards: whether each rank commits its part of the state when training is elastic, and another
            rank a replica of it.
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
        """Make what belongs to the ranks, and is no state, such as a reducer of gradients. Collective."""

    def close(self) -> None:
        """End what belongs to the ranks so far, of which some may be lost; parameters and state stay."""

    def bring_home(self) -> None:
        """Let the parameters and the optimizer's state be those that count, if these are elsewhere.

        Not collective, and maybe on some ranks only.
        """

    @property
    def why_fixed(self) -> str:
        """Why it cannot go on with other ranks now, "" if it can; the same on all ranks."""
        if self.has_whole_state:
            return ""
        return (
            "each rank has the optimizer's state of its own part of the parameters only; call "
            "load_state_dict() with that of all of them before"
        )

    # -- what is kept from step to step -------------------------------------------------------------

    @property
    def method(self) -> str:
        """The method's name in a saved state; the state of another method is not loaded."""
        return type(self).__name__.removesuffix("Synchronizer")

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors for which `state` has entries, as they are now, by key.

        By default the memory of all parameters that a step can change: "0", "1", ... by their places in the
        optimizer.
        """
        return self.parameters_by_key()

    def begin(self, tensors: Mapping[str, Tensor]) -> None:
        """Make the entries of `state` for these. Collective; before a step, without autograd.

        Args:
            tensors: those of `tensors()` that have no entry yet: all before the first step, later those that
                were added, and all again if the ranks begin anew.
        """

    def derive(self) -> None:
        """Compute what depends on parameters, ranks and `state`. Collective; before a step, without autograd.

        Called after `begin`: before the first step, and after parameters, ranks or the state have changed.
        """

    def has_changed(self) -> bool:
        """Return whether `begin` and `derive` are due for a further reason; the same on all ranks."""
        return False

    def arrive(self) -> None:
        """Wait until `state` can be read: no part of it is still being received."""

    # -- a step -------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Do what must be done before the wrapped optimizer updates parameters; gradients are reduced."""

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the function that is called in place of the closure. Called before `before_step`."""
        return closure

    def after_step(self, num_steps: int) -> None:
        """Do what must be done after an update, such as to average parameters.

        Args:
            num_steps: number of steps so far, including this one; the same on all ranks.
        """

    def end_failed_step(self) -> None:
        """Clean up after a step that raised in `before_step`, in `after_step` or between them."""

    def before_zero_grad(self) -> None:
        """Do what must be done before gradients are reset."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Clip the gradients of the optimizer by their norm; return the norm."""
        return torch.nn.utils.clip_grad_norm_(self.training.params, max_norm, norm_type, error_if_nonfinite)

    def consensus(self) -> Sequence[Tensor]:
        """Return the consensus of the ranks' parameters and buffers, in new memory. Collective.

        By default their mean.
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
        """Return the consensus of saved replicas, as `consensus` does of those of a job.

        Args:
            replicas: what `replica` has returned on all ranks.
            entries: what was saved of `state` with each.
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
        return _continuous("", [param for _, param in self.training.named])

    def _buffers_by_key(self) -> dict[str, Tensor]:
        return _continuous("buffer ", self.training.buffers)

    # -- other states, other parameters, other ranks ------------------------------------------------

    def state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the optimizer's state; `make` returns what the optimizer has now."""
        return make()

    def contribute_state(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Do on this rank what `state_dict` needs of it on another one, which saves what that returns.

        Collective where `state_dict` is. Called where `gathers_state` is True.

        Returns:
            The optimizer's state, without what lies elsewhere.
        """
        return make()

    def loaded(self, state_dict: Mapping[str, Any]) -> None:
        """Note that a state has been loaded into the optimizer, and `state` with it. Not collective."""
        self.is_fresh = True

    def needed_parts(self) -> Mapping[int, NeededPart] | None:
        """Return the parts that this rank needs of a state that is loaded, by the places of parameters.

        None: all of it.
        """
        return None

    def load_parts(self) -> None:
        """Note that a state has been loaded of which this rank has what it needs. Not collective."""

    def shard_state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return this rank's part of the optimizer's state; `make` returns what the optimizer has now.

        Raises:
            InvalidArgument: the ranks do not divide it.
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
        """Load the parts that all ranks of a run had, as `shard_state_dict` has returned them.

        Args:
            shards: of all ranks.
            load: the wrapped optimizer's own function that loads a state dict.
            held: whether each rank gives those that it holds, each held by one of them; collective then.

        Raises:
            InvalidArgument: the ranks do not divide it, or some are missing.
        """
        raise InvalidArgument(
            "load_shard_state_dicts: every rank has the whole state of this optimizer; use load_state_dict()"
        )

    def extend(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Take over a list of parameters that has grown at its end. Collective."""
        if self.reopens:
            self.close()
        self.training = self.training._replace(named=named)
        if self.reopens:
            self.is_fresh = True
            self.open()

    def use_compression(self, compression: Compressor) -> None:
        """Use another compressor, from the call of `move_to` on that follows."""
        options = self.training.options._replace(compression=compression)
        self.training = self.training._replace(options=options)

    def move_to(self, group: Group) -> None:
        """Continue with other ranks, which have the same parameters. Collective over `group`.

        What compressors keep stays this rank's own, and what ranks had kept that are gone is lost.
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


def _continuous(prefix: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the memory that those with a fraction have now, by key: not to be kept."""
    return {
        f"{prefix}{place}": tensor.detach()
        for place, tensor in enumerate(tensors)
        if tensor.is_floating_point() or tensor.is_complex()
    }


@dataclass(frozen=True)
class Strategy(abc.ABC):
    """What the ranks exchange, and how often. Base class; a subclass is a frozen dataclass.

    Its fields must be the same on all ranks: `repr(strategy)` is compared at construction.

    Attributes:
        starts_together: whether all ranks take part in the first step, with the same parameters.
        keeps: the dataclass of what the working part keeps from step to step, see `mpisgd.method_state`. What
            it is of each parameter is counted before the first step, where a strategy has a `cost`.
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
        """The options it can be combined with; others raise an error before `check` is called.

        By default none that change what a strategy has to do: `op`, `compression`, `named_buffers` and so on.
        """
        return UNDECLARED

    @property
    def own_compression(self) -> Compressor | None:
        """What the ranks send by where that is a part of the strategy; None: `compression=` says it."""
        return None

    def check(self, training: Training) -> None:
        """Raise if the strategy cannot train these parameters with these ranks; before anything is sent.

        Raises:
            InvalidArgument: says why.
        """
        if not self.updates_files(training):
            check_in_memory("DistributedOptimizer", training.named)
        self.check_ranks(training)

    def check_ranks(self, training: Training) -> None:  # noqa: B027  # few have anything to check
        """Raise if the strategy cannot train with these ranks; at construction, and whenever they change.

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

        None: what one process computes with the gradients of all ranks.

        Args:
            size: how many ranks there are.
            lengths: names of the parameters, and their bytes, for strategies that divide them.

        Raises:
            InvalidArgument: there is none.
        """
        raise InvalidArgument(f"there is no paper of {self}")
