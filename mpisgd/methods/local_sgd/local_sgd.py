"""`LocalSGD`: every rank trains by itself, and every few steps the parameters become their mean.

With x_i the parameters of rank i of p, and u_i the update of its optimizer (Stich 2019):

    x_i <- x_i - u_i                           every step
    x_i <- (x_1 + ... + x_p) / p               after every `sync_every` steps

Post-local SGD (Lin et al. 2020) begins with `warmup_steps` synchronous steps, and its hierarchical form takes
the mean over the ranks of a host more often than that over all.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mpisgd.arguments import check_count, check_flag, check_positive
from mpisgd.collectives.coalesced import all_reduce_coalesced
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument
from mpisgd.gradients.compression_state import CompressionState
from mpisgd.gradients.gradient_sync import GradientSync
from mpisgd.job.groups import open_host_group
from mpisgd.method_state import alike, part
from mpisgd.methods.local_sgd import paper
from mpisgd.methods.local_sgd.inner_state import complete_states
from mpisgd.methods.paper_kit import Paper
from mpisgd.methods.strategy.example_counts import ExampleCounts, mean_in_place
from mpisgd.methods.strategy.goes_with import Compressions, GoesWith, needs_magnitudes, no, no_momentum, yes
from mpisgd.methods.strategy.kept_tensors import follow
from mpisgd.methods.strategy.local_training import LOCAL_STEPS, WEIGHTED, LocalSynchronizer
from mpisgd.methods.strategy.replicated import reducer_of
from mpisgd.methods.strategy.strategy import Strategy
from mpisgd.methods.strategy.tensor_mean import TensorMean
from mpisgd.methods.strategy.training import Training

__all__ = ["LocalSGD"]

LEVELS = ("host", "job")
MEAN = "mean"


@dataclass(frozen=True)
class LocalSGD(Strategy):
    """Ranks train independently; every `sync_every` steps their parameters are averaged.

    Nothing is sent in the steps between, so that a step sends on average 1 / sync_every of what synchronous
    SGD sends. Each rank keeps its own optimizer state, such as momentum, unless `average_state` is set.

    Args:
        sync_every: steps from one mean to the next; 1: synchronous SGD, for plain SGD.
        warmup_steps: number of synchronous steps at the beginning.
        hierarchy: instead of `sync_every`; `{"host": 4, "job": 32}` averages over the ranks of each host
            every 4 steps and over all ranks every 32 steps. The second number must be a multiple of the
            first.
        average_state: whether the floating-point state of the optimizer is averaged with the parameters. If a
            rank has no state of a parameter yet, since the parameter had no gradient there, its state counts
            as zero, and it gets the mean, too.
        growth: factor from one period to the next, which is rounded up; at least 1.
        max_sync_every: the longest period, with `growth` above 1.

    Compression applies to the change since the last mean, and needs a copy of the parameters. Module buffers
    (`named_buffers`) are averaged together with the parameters, and never compressed.
    """

    sync_every: int | None = None
    warmup_steps: int = 0
    hierarchy: Mapping[str, int] | None = None
    average_state: bool = False
    growth: float = 1.0
    max_sync_every: int | None = None

    @classmethod
    def examples(cls) -> Sequence["LocalSGD"]:
        """See `Strategy`."""
        return (
            cls(sync_every=2),
            cls(sync_every=1),
            cls(sync_every=3),
            cls(sync_every=2, average_state=True),
            cls(sync_every=2, warmup_steps=2),
            cls(sync_every=1, growth=2.0, max_sync_every=3),
            cls(hierarchy={"host": 1, "job": 3}),
        )

    def __post_init__(self) -> None:
        if (self.sync_every is None) == (self.hierarchy is None):
            raise InvalidArgument(
                "LocalSGD: expected either sync_every=, or hierarchy={'host': 4, 'job': 32}"
            )
        if self.sync_every is not None:
            check_positive("LocalSGD", "sync_every", self.sync_every, whole=True)
        check_count("LocalSGD", "warmup_steps", self.warmup_steps)
        if self.max_sync_every is not None:
            check_positive("LocalSGD", "max_sync_every", self.max_sync_every, whole=True)
        check_flag("LocalSGD", "average_state", self.average_state)
        check_positive("LocalSGD", "growth", self.growth)
        if not 1 <= self.growth < math.inf:
            raise InvalidArgument(f"LocalSGD: growth={self.growth}; expected a finite number, at least 1")
        if self.hierarchy is not None:
            self._check_hierarchy(self.hierarchy)

    def _check_hierarchy(self, periods: Mapping[str, int]) -> None:
        if not isinstance(periods, Mapping) or sorted(periods) != sorted(LEVELS):
            raise InvalidArgument(f"LocalSGD: hierarchy={periods!r}; expected {{'host': 4, 'job': 32}}")
        for level in LEVELS:
            check_positive("LocalSGD", f"hierarchy[{level!r}]", periods[level], whole=True)
        if periods["job"] % periods["host"]:
            raise InvalidArgument(
                f"LocalSGD: hierarchy={periods!r}; the period of the job must be a multiple of the host's"
            )
        if self.growth != 1:
            raise InvalidArgument("LocalSGD: growth goes with sync_every, not with hierarchy")

    @property
    def period(self) -> int:
        """Steps from one mean over all ranks to the next, at first."""
        period = self.sync_every if self.hierarchy is None else self.hierarchy["job"]
        assert period is not None
        return period

    def next_period(self, period: int) -> int:
        """Return the period that follows `period`."""
        longest = math.inf if self.max_sync_every is None else max(self.max_sync_every, self.period)
        return int(min(math.ceil(period * self.growth), longest))

    def period_after(self, num_means: int) -> int:
        """Return the period after this number of means over all ranks."""
        period = self.period
        for _ in range(num_means):
            before, period = period, self.next_period(period)
            if period == before:  # for good
                break
        return period

    def is_due_on_host(self, since_mean: int) -> bool:
        """Return whether a host's ranks average now, this many steps after the mean over all ranks."""
        return self.hierarchy is not None and since_mean % self.hierarchy["host"] == 0

    @property
    def goes_with(self) -> GoesWith:
        """See `GoesWith`."""
        compression = Compressions("of changes", (no_momentum, needs_magnitudes))
        uneven = yes(WEIGHTED) if self.hierarchy is None else no("means over hosts count all ranks alike")
        return replace(LOCAL_STEPS, compression=compression, uneven_data=uneven)

    def synchronizer(self, training: Training) -> "LocalSGDSynchronizer":
        """Return the working part, which averages the parameters. Collective."""
        return LocalSGDSynchronizer(training, self)

    def paper(self, size: int, lengths: Sequence[tuple[str, int]] = ()) -> Paper[Any]:
        """See `Strategy`."""
        return paper.LocalSGD(
            H=self.period,
            H_host=(self.hierarchy or {}).get("host", 0),
            warmup=self.warmup_steps,
            growth=self.growth,
            H_max=math.inf if self.max_sync_every is None else self.max_sync_every,
            averages_state=self.average_state,
        )


@dataclass
class _State:
    """What is kept from step to step.

    Attributes:
        num_means: how many means over all ranks there were.
        since_mean: steps since the last one.
        last: the mean before, by tensor, where its changes are compressed.
        examples: what each rank has stepped with.
        compression: what compressors keep of these changes.
        warm_up: what they keep of the gradients of the warm-up.
    """

    num_means: int = alike(0)
    since_mean: int = alike(0)
    last: dict[str, Tensor] = alike(default_factory=dict)
    examples: ExampleCounts = part(ExampleCounts)
    compression: CompressionState = part(CompressionState)
    warm_up: CompressionState = part(CompressionState)


class LocalSGDSynchronizer(LocalSynchronizer):
    """Averages the parameters after the steps that `LocalSGD` names."""

    def __init__(self, training: Training, strategy: LocalSGD) -> None:
        super().__init__(training)
        self._strategy = strategy
        self.state = _State()
        self._host: tuple[Group, Group | None] | None = None  # of which group, and its ranks of this host

    # -- what is derived -----------------------------------------------------

    def derive(self) -> None:
        """Make what takes the means, and note what changes are counted from. Collective."""
        group, strategy = self.training.group, self._strategy
        if strategy.hierarchy and (self._host is None or self._host[0] is not group):
            self._host = group, open_host_group(group)
        compression = self.state.compression
        compression.move_to([])
        self._mean = TensorMean(self.tensors(), group, self.training.options, compression)
        self._note_last(again=False)

    def _note_last(self, *, again: bool) -> None:
        """Note what changes are counted from, if they are compressed. Collective then.

        Args:
            again: also where that is known.
        """
        last = self.state.last
        if again or not self._mean.compresses:
            last.clear()
        if self._mean.compresses:
            new = {key: tensor for key, tensor in self.tensors().items() if key not in last}
            last.update(self.common_copies(new))

    def open(self) -> None:
        """Make what reduces gradients during the warm-up."""
        warm_up = self._strategy.warmup_steps > 0
        self._reducer = reducer_of(self.training, self.state.warm_up) if warm_up else None

    def extend(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """See `Synchronizer`; a state that is loaded later may be one of the warm-up."""
        super().extend(named)
        if self._reducer is not None:
            self._reducer.cover(named)

    @property
    def gradients(self) -> GradientSync:  # type: ignore[override]  # what others say once
        """Reduces gradients during the warm-up, and leaves them on their rank afterwards."""
        is_warm = self.num_steps < self._strategy.warmup_steps
        return self._reducer if is_warm and self._reducer is not None else LocalSynchronizer.gradients

    @property
    def _period(self) -> int:
        return self._strategy.period_after(self.state.num_means)

    # -- a step -------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Take the mean that is due, if one is. Collective then."""
        state, warmup_steps = self.state, self._strategy.warmup_steps
        state.examples.note(self.step_examples)
        if self.num_steps <= warmup_steps:
            if self.num_steps == warmup_steps:
                state.examples.begin(MEAN)
                self._note_last(again=True)
            return
        state.since_mean += 1
        if state.since_mean >= self._period:
            state.since_mean, state.num_means = 0, state.num_means + 1
            self._average()
        elif self._host is not None and self._strategy.is_due_on_host(state.since_mean):
            host = self._host[1]
            if host is not None:
                all_reduce_coalesced([*self.averaged, *self._inner_state(host)], ReduceOp.AVG, host)

    def _average(self) -> None:
        """Take the mean over all ranks: of the parameters, or of what they have changed by.

        Buffers and state travel as they are: a variance to which an error of before is added, say, may become
        negative, and what buffers have changed by has no base that all ranks have.
        """
        tensors, group = self.tensors(), self.training.group
        params, counts = list(tensors.values()), self.state.examples.of_mean(MEAN, group)
        if self.state.last:
            last = [self.state.last[key] for key in tensors]
            follow(last, params, "LocalSGD")
            changes = torch._foreach_sub(params, last)
            self._mean.start(changes, counts)
            torch._foreach_add_(last, changes)
            torch._foreach_copy_(params, last)
        else:
            self._mean.start(params, counts)
        mean_in_place([*self.buffers, *self._inner_state(group)], counts, group)

    def _inner_state(self, group: Group) -> list[Tensor]:
        """Return the tensors of the optimizer's state that are averaged, alike on all ranks. Collective."""
        if not self._strategy.average_state:
            return []
        return complete_states(self.training.optimizer, self.training.params, group)
