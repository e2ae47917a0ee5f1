"""The style of `Gossip` in which nobody waits: pairs of ranks average while the ranks compute (AD-PSGD).

x[i] is the parameters of rank i, z[i] what the model computes with, f[i] its loss, g the step size:

    z[i] <- x[i],                  a copy, between two steps
    x[i] <- x[i] - g grad f[i](z[i]),
    x[i], x[j] <- (x[i] + x[j]) / 2,  for a neighbour j by chance, at any time

The optimizer turns z into z', by which x becomes x + (z' - z). Half of the ranks ask for a mean after each
step; where the last one has not come back yet, they go on without. How often ranks meet depends on how fast
they are, so two runs differ. What the sum of all x is does not depend on it.

It needs an MPI at thread level MULTIPLE: a helper thread answers while the program computes, and asks MPI at
least every 5 ms whether somebody has come. A rank has five more copies of its parameters in host memory.

Source: Lian and others 2018, "Asynchronous decentralized parallel stochastic gradient descent".
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.errors import InvalidArgument, MpisgdError
from mpisgd.event_log import Entry, EventLog, grads_of
from mpisgd.gossip.graph import Graph
from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.methods.gossip.ad_psgd.bipartite import roles_of
from mpisgd.methods.gossip.ad_psgd.pairwise_averaging import PairwiseAveraging
from mpisgd.methods.gossip.mixer import NAME, Mixer
from mpisgd.methods.strategy.flat_copy import FlatCopy
from mpisgd.methods.strategy.training import Training

__all__ = ["Asynchronous"]


class Asynchronous(Mixer):
    """Gives the model a copy of x, and adds to x what the optimizer has done to the copy.

    The exchanges end in `shutdown()`, or when ranks or parameters change; both are collective. A rank whose
    optimizer is gone answers until then.

    Attributes:
        events: what is recorded, if anything: see `mpisgd.event_log`. Of one rank alone there is nothing.
    """

    doubly = False  # the weights are 1/2
    reopens = True

    def __init__(self, training: Training, graph: Graph, every: int) -> None:
        super().__init__(training, graph, every)
        self._averaging: PairwiseAveraging | None = None
        self.events: EventLog | None = None
        self._grads: dict[str, Tensor] = {}  # that are recorded

    def derive(self) -> None:
        """Begin to exchange what the parameters are now, from all ranks. Collective.

        x and z are derived: whatever an exchange has begun with before is over then.
        """
        self.close()
        self._begin()

    def has_changed(self) -> bool:
        """Return False: x is a copy of frozen parameters, too."""
        return False

    def _begin(self) -> None:
        """Start the helper thread. Collective."""
        group, self.is_fresh = self.training.group, False
        if group.size == 1:
            return
        made: list[GroupCommunicator] = []
        operation = Operation("gossip", extra="start of the exchanges")
        group.queue.run(operation, lambda: made.append(group.queue.communicator.duplicate()))
        self._group, self._keys = group, list(self.replica())
        covered = self._covered()
        start = FlatCopy(covered)
        start.load(covered)
        self._seen, self._now = start.new_like(), start.new_like()  # z, and z'
        self._seen.copy_(start)
        averaging = PairwiseAveraging(made[0], roles_of(self._graph, group.size), start, self.events)
        self._finish: Callable[[], None] = partial(averaging.finish, group.queue.consistency.timeout_s)
        group.job.at_end.append(self._finish)
        self._averaging = averaging

    def _covered(self) -> list[Tensor]:
        """Return the parameters that x is a copy of: also frozen ones, which may be trained later."""
        tensors = self.replica()
        return [tensors[key] for key in self._keys]

    def close(self) -> None:
        """End the exchanges. Collective over the ranks so far, unless one of them is lost."""
        averaging = self._averaging
        if averaging is None:
            return
        if not self.is_fresh:
            self._check_form()
        self._averaging = None
        self._group.job.at_end.remove(self._finish)
        if _is_lost(self._group):
            averaging.abandon()
        else:
            self._finish()
        if not self.is_fresh:  # else a state was loaded: the parameters count, and not x
            self._exchange_with_model(averaging)

    def _exchange_with_model(self, averaging: PairwiseAveraging) -> None:
        """Add to x what has become of the copy that the model had, and give it another one."""
        self._check_form()
        covered = self._covered()
        self._now.load(covered)
        with averaging.lock:
            averaging.x.add_difference_(self._now, self._seen, 1.0)
            self._seen.copy_(averaging.x)
            if self.events is not None:
                self.events.add(Entry("step", (self._group.rank,), self._grads))
        self._grads = {}
        self._seen.unload(covered)

    def _check_form(self) -> None:
        if not self._now.fits(self._covered()):
            raise InvalidArgument(
                f"{NAME}: parameters have other dtypes or shapes than when their exchanges began; "
                'style="asynchronous" cannot follow: convert the model before the optimizer is made'
            )

    def before_step(self) -> None:
        """See `LocalSynchronizer`."""
        super().before_step()
        if self.events is not None:
            self._grads = grads_of(self.training.named)

    def synchronize(self) -> None:
        """Give the step to x, and ask for a mean with a neighbour. Waits for nobody."""
        if self._averaging is not None:
            self._exchange_with_model(self._averaging)
            if self.num_steps % self._every == 0:
                self._averaging.want_exchange()


def _is_lost(group: Group) -> bool:
    """Return whether a group cannot be used any more."""
    try:
        return group.resources.queue.broken is not None
    except MpisgdError:
        return True
