"""`Worker`: what the asynchronous modes have in common: clocks, bounded staleness, the end of training.

Stale synchronous parallel (Ho et al. 2013), s: the staleness bound, f[p]: the steps that worker p has
pushed, c[p]: its clock, the steps beyond which it may go. Worker p, in its step t = c[p]:

    compute the gradient at the parameters it has read
    wait until c[q] >= t - s for every worker q        nobody still reads what belongs to step t - s
    push the update; f[p] <- t + 1
    wait until f[q] >= t + 1 - s for every worker q    the updates of the first t + 1 - s steps are there
    read the parameters; c[p] <- t + 1

So max c - min f <= s at every moment. With s = 0 all workers read the same parameters in every step: what
plain SGD makes of their updates is synchronous SGD. A worker that was lost, which the kernel knows from a
lock that its process had, or that has finished counts no more. A step that a GradScaler would leave out is
one without an update: the clocks of the others may depend on it.
"""

import abc
from collections.abc import Sequence

import torch
from torch import Tensor

from mpisgd.core.consistency import Operation
from mpisgd.core.owner import owned_by
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument
from mpisgd.event_log import EventLog
from mpisgd.methods.parameter_server.clocks import (
    BEGUN,
    CLOCK,
    DONE,
    FINISHED,
    LEAD,
    PUSHED,
    Clocks,
    Counters,
)
from mpisgd.methods.strategy.local_scaling import LocalScaling
from mpisgd.methods.strategy.strategy import Synchronizer
from mpisgd.methods.strategy.training import Training
from mpisgd.threads.scheduling import sleep

__all__ = ["Worker"]

SERVE_POLL_S = 0.05
NO_LIMIT_S = float("inf")


def _forms_of(named: Sequence[tuple[str, Tensor]]) -> list[tuple[torch.dtype, torch.Size]]:
    return [(param.dtype, param.shape) for _, param in named]


class Worker(Synchronizer, abc.ABC):
    """The working part of a rank that trains, or holds parameters, at its own pace.

    Args:
        training: what it works on.
        staleness: see above; None: no bound.
        servers: global ranks that hold parameters and do not train.

    Attributes:
        is_server: whether this rank is one of them.
        events: what is recorded, if anything: see `mpisgd.event_log`.
    """

    events: EventLog | None = None
    reopens = True

    def __init__(self, training: Training, staleness: int | None, servers: tuple[int, ...]) -> None:
        super().__init__(training)
        self._staleness = staleness
        self._servers = servers
        # An update is of what was pushed, so gradients must be unscaled before.
        self._scaling = LocalScaling(training.optimizer, also_fused=True)

    def open(self) -> None:
        """Make everything that belongs to the group. Collective."""
        group = self.training.group
        self._workers = [rank for rank in group.ranks if rank not in self._servers]
        self.is_server = group.ranks[group.rank] in self._servers
        self._forms = _forms_of(self.training.named)
        self._clocks = Clocks(self._workers, group)

    @property
    def why_fixed(self) -> str:
        """See `Synchronizer`: servers are known by ranks, which may be others now."""
        if self._servers:
            return f"servers={self._servers} are ranks of before; begin anew with another optimizer"
        return super().why_fixed

    @property
    def scale(self) -> float:
        """What a worker's gradient counts: a share of the mean, or all."""
        return 1 / len(self._workers) if self.training.options.op is ReduceOp.AVG else 1.0

    # -- a step ------------------------------------------------------------------------------------

    def _begin_update(self) -> None:
        """Wait until this worker may push."""
        if self.is_server:
            raise InvalidArgument("ParameterServer: a server makes no steps; call synchronizer.serve()")
        if self._clocks.get(DONE):
            raise InvalidArgument("ParameterServer: step() after synchronizer.finish()")
        if _forms_of(self.training.named) != self._forms:
            raise InvalidArgument(
                "ParameterServer: parameters have other dtypes or shapes than when the optimizer was made; "
                "the memory of the servers cannot follow: convert the model before"
            )
        self._publish_once()
        if self._staleness is not None:
            self._clocks.wait(CLOCK, self._clocks.get(CLOCK) - self._staleness, self._limit_s)
        self._clocks.set(LEAD, max(self._clocks.get(LEAD), self._clocks.lead()))

    def before_zero_grad(self) -> None:
        """See `Synchronizer`."""
        self._scaling.forget()

    def _count_push(self, *, complete: bool) -> None:
        word = PUSHED if complete else BEGUN
        self._clocks.set(word, self._clocks.get(word) + 1)

    def _end_update(self) -> None:
        """Tell the others, and wait until this worker may read."""
        finished = self._clocks.get(FINISHED) + 1
        self._clocks.set(FINISHED, finished)
        if self._staleness is not None:
            self._clocks.wait(FINISHED, finished - self._staleness, self._limit_s)

    def _go_on(self) -> None:
        """Tell the others that this worker has read what it needs for its next step."""
        self._clocks.set(CLOCK, self._clocks.get(FINISHED))

    @property
    def _limit_s(self) -> float:
        return self.training.group.queue.consistency.timeout_s

    # -- the beginning and the end -----------------------------------------------------------------

    def _publish_once(self) -> None:
        """Let the first rank of the group give everybody its parameters, the first time. Collective then."""
        if self.is_fresh:
            with owned_by(self.owner):
                self._exchange_first_values()

    def _exchange_first_values(self) -> None:
        group = self.training.group
        if group.rank == 0:
            self._publish()
        group.queue.run(Operation("ParameterServer", extra="first values"), lambda: None)
        self.is_fresh = False
        self.pull()
        # Who is fast must not change what others still read as the first values.
        group.queue.run(Operation("ParameterServer", extra="first values read"), lambda: None)

    @abc.abstractmethod
    def _publish(self) -> None:
        """Write this rank's parameters and the optimizer's state to where all find them."""

    @abc.abstractmethod
    def pull(self) -> None:
        """Read the parameters as they are now."""

    def finish(self) -> None:
        """Tell the others that this worker makes no more steps; return with the last parameters of all.

        Waits until every other worker that is not lost has called it, too.
        """
        self._publish_once()
        self._clocks.set(DONE, 1)
        self._clocks.wait(DONE, 1, NO_LIMIT_S)
        self.pull()

    def serve(self) -> None:
        """Hold parameters until all workers have finished; return with the last ones. Sleeps meanwhile."""
        if not self.is_server:
            raise InvalidArgument("ParameterServer: this rank is a worker; only the servers= serve")
        self._publish_once()
        while self._clocks.behind(DONE, 1):
            self._clocks.check()
            sleep(SERVE_POLL_S)
        self.pull()

    def counters(self) -> Counters:
        """Return the counts of all ranks, clocks first: they can only look too old."""
        ranks = self.training.group.ranks
        clocks = [self._clocks.of(rank)[CLOCK] for rank in ranks]
        pushed = [self._clocks.of(rank)[PUSHED] for rank in ranks]
        applied = self._applied()
        words = [self._clocks.of(rank) for rank in ranks]
        finished, begun, lead = ([row[word] for row in words] for word in (FINISHED, BEGUN, LEAD))
        return Counters(clocks, finished, begun, pushed, lead, applied)

    def _applied(self) -> list[list[int]]:
        """Return the updates of each rank in each shard; here there is one, in which all of them are."""
        return [[self._clocks.of(rank)[PUSHED] for rank in self.training.group.ranks]]
