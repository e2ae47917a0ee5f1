"""`Parallel`: tensor, context and pipeline parallelism beside data parallelism; `Grid`: which ranks do what.

Ranks that send most are neighbours (`scripts/training/layout.py`): tp counts fastest, then cp, dp, pp. Eight
ranks of Parallel(tp=2, pp=2), and so dp = 2:

              pp 0                pp 1
            tp 0  tp 1          tp 0  tp 1
    dp 0     0     1             4     5
    dp 1     2     3             6     7

A rank's tp group shares the work of each block, its dp group means the gradients of the same parameters, and
the rank of the same place at the next pp takes the activations. All groups of a kind send at the same time,
so each has its share of what they use together, and is planned as a cluster of its own with that. Ranks of cp
have parts of the same sequences, and so other parts of a batch: they mean gradients as those of dp do.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mpisgd.arguments import call_text, check_flag, check_positive, shown
from mpisgd.errors import InvalidArgument
from mpisgd.pipeline.schedules.named import as_schedule
from mpisgd.pipeline.schedules.schedule import Schedule
from mpisgd.tools.plan.cluster import Cluster
from mpisgd.tools.plan.simulation.messages import Round

__all__ = ["Grid", "Parallel", "grid_of", "lies_evenly"]

MICRO_BATCHES = 4  # of each stage where no number is given: a bubble of a fifth and less


@dataclass(frozen=True)
class Parallel:
    """Ranks along the axes tp, cp and pp, and as many as are left along dp; the model's blocks are known.

    The batch is that of all ranks: what data parallelism alone would compute in a step.

    Attributes:
        tp: ranks that divide each block (Shoeybi and others 2019, "Megatron-LM").
        pp: ranks of a pipeline.
        schedule: of `mpisgd.pipeline`, by its name: "1f1b", "gpipe" or "interleaved".
        micro_batches: of each pipeline and step; None: up to four times as many as stages.
        stages_per_rank: for "interleaved".
        recompute: whether activations are computed again in the backward pass.
        cp: ranks of a ring, which have a part of each sequence (Liu and others 2023); without pp. They
            compute the sequences of all of them, in `micro_batches` where that is given.
    """

    tp: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    micro_batches: int | None = None
    stages_per_rank: int = 1
    recompute: bool = False
    cp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "stages_per_rank", "cp"):
            check_positive("Parallel", name, getattr(self, name), whole=True)
        if self.micro_batches is not None:
            check_positive("Parallel", "micro_batches", self.micro_batches, whole=True)
        check_flag("Parallel", "recompute", self.recompute)
        if self.cp > 1 and self.pp > 1:
            raise InvalidArgument(
                f"Parallel: cp={self.cp} with pp={self.pp}; expected cp beside dp and tp alone"
            )
        if not self.table.flushes:
            raise InvalidArgument(
                f"Parallel: schedule={shown(self.schedule)} ends no step with an empty pipeline; expected "
                "1f1b, gpipe or interleaved"
            )

    @property
    def table(self) -> Schedule:
        """The schedule, which gives the order of each rank's passes."""
        return as_schedule(self.schedule)

    @property
    def text(self) -> str:
        """As it is written, without what is as by default."""
        return call_text(self)

    @property
    def num_stages(self) -> int:
        """Parts of the model."""
        return self.pp * self.stages_per_rank

    def micro_batches_of(self, examples: float) -> int:
        """Return how many micro-batches the examples of a pipeline make.

        Raises:
            InvalidArgument: a micro-batch would not have a whole number of them.
        """
        if self.micro_batches is not None:
            if examples % self.micro_batches:
                raise InvalidArgument(
                    f"plan: {examples:g} examples of a pipeline in micro_batches={self.micro_batches}"
                )
            return self.micro_batches
        if self.pp == 1:
            return 1
        factors = range(MICRO_BATCHES, 0, -1)
        return next(self.pp * each for each in factors if examples % (self.pp * each) == 0 or each == 1)


@dataclass(frozen=True)
class Grid:
    """The ranks of a cluster along dp, cp, tp and pp.

    Attributes:
        cluster: all of them.
        tp: ranks that divide each block.
        pp: ranks of a pipeline.
        cp: ranks of a ring.
    """

    cluster: Cluster
    tp: int
    pp: int
    cp: int = 1

    @property
    def replicas(self) -> int:
        """Ranks that have the same parameters: those of dp and of cp."""
        return self.cluster.size // (self.tp * self.pp)

    @property
    def width(self) -> int:
        """Ranks at each place of the pipelines."""
        return self.replicas * self.tp

    @property
    def sequences(self) -> int:
        """How many times the examples of a rank those of a pipeline are, or of the ranks of a ring."""
        return self.tp * self.cp * self.pp

    @cached_property
    def tensor_group(self) -> Cluster:
        """Ranks that divide a block, and what they have of what joins them."""
        here = min(self.tp, self.cluster.ranks_per_host)
        return self.cluster.share(self.tp // here, here)

    @cached_property
    def data_group(self) -> Cluster:
        """Ranks that have the same parameters."""
        return self._alike(self.replicas)

    @cached_property
    def context_group(self) -> Cluster:
        """Ranks of a ring."""
        return self._alike(self.cp)

    def _alike(self, number: int) -> Cluster:
        """Return so many neighbours among the ranks that have the same parameters."""
        k = self.cluster.ranks_per_host
        if number * self.tp <= k:
            return self.cluster.share(1, number)
        here = max(1, k // self.tp)
        return self.cluster.share(number // here, here)

    def host_of(self, place: int) -> int:
        """Return the host of the first rank at a place of the pipelines."""
        return place * self.width // self.cluster.ranks_per_host

    def messages(self, src: int, dst: int) -> Round:
        """Return the messages from one place of the pipelines to another, of one byte each."""
        ranks = np.arange(self.width)
        return Round(ranks + src * self.width, ranks + dst * self.width, 1.0)


def grid_of(cluster: Cluster, layout: Parallel) -> Grid:
    """Return the ranks of a layout.

    Raises:
        InvalidArgument: there is no such number of ranks, or groups would lie across hosts unevenly.
    """
    each = layout.tp * layout.cp * layout.pp
    if cluster.size % each:
        axes = "tp x cp x pp" if layout.cp > 1 else "tp x pp"
        raise InvalidArgument(f"plan: expected a multiple of {axes} = {each} ranks")
    if not lies_evenly(cluster, layout.tp, layout.pp, layout.cp):
        raise InvalidArgument("plan: the ranks of tp, of a ring or of a stage would be on some hosts in part")
    return Grid(cluster, layout.tp, layout.pp, layout.cp)


def lies_evenly(cluster: Cluster, tp: int, pp: int, cp: int = 1) -> bool:
    """Return whether the ranks can be divided so, and no group has more ranks on one host than on another."""
    size, k = cluster.size, cluster.ranks_per_host
    width = size // pp
    groups = (tp, tp * cp, width)
    return size % (tp * cp * pp) == 0 and all(k % ranks == 0 or ranks % k == 0 for ranks in groups)
