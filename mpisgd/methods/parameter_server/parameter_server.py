"""`ParameterServer`: each rank trains at its own pace on parameters that all of them read and update."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mpisgd.arguments import as_index, check_flag, check_positive, shown
from mpisgd.errors import InvalidArgument
from mpisgd.methods.paper_kit import Paper
from mpisgd.methods.parameter_server.lock_free import LockFree
from mpisgd.methods.parameter_server.locked_shards import LockedShards
from mpisgd.methods.sharded.synchronizer import ShardedSynchronizer
from mpisgd.methods.strategy.goes_with import Compressions, GoesWith, needs_none, no, yes
from mpisgd.methods.strategy.strategy import Strategy, Synchronizer
from mpisgd.methods.strategy.training import Training
from mpisgd.sharding.shared_parameters import check_shareable

__all__ = ["ParameterServer"]

MODES = ("sync", "async", "ssp")
WHOLE = no("it computes its direction from all gradients together, and a server has its shard")
SYNC = GoesWith(
    of="ParameterServer(sync)",
    share_parameters=no("they are shared anyway"),
    named_buffers=no("buffers stay on their rank"),
    whole_gradients=WHOLE,
    uneven_data=yes("as one process"),
)
AS_THEY_COME = no("each rank pushes gradients of its own, which count as they come")
OWN_PACE = replace(
    SYNC,
    of="ParameterServer(async, ssp)",
    compression=Compressions("no", (needs_none,)),
    gradient_predivide_factor=AS_THEY_COME,
    error_if_nonfinite=AS_THEY_COME,
    check_in_sync_every=no("ranks are at different steps"),
    backward_passes_per_step=yes("local"),
    clip_grad_norm_=yes("of the own gradients"),
    grad_scaler=yes("yes, a rank's overflow skips its own update"),
    sparse_gradients=yes(),
    repeats=no("the result depends on timing"),
    uneven_data=no(
        "each rank has its own pace, and nobody waits for one that has no more data: leave it out"
    ),
    context_parallel=no("ranks are at different steps"),
    elastic=yes("yes, on one host"),
    checkpoint=yes("one for all ranks, after `finish()`"),
)


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Ranks push gradients to servers of the parameters, and pull parameters from them.

    `sync` is synchronous SGD: each rank updates its part of the parameters with the gradients of all, and the
    others read it. `async` (Downpour SGD, Dean et al. 2012): no rank waits for another. `ssp` (stale
    synchronous parallel, Ho et al. 2013): a rank waits when it is `staleness_steps` ahead of the slowest.

    Update rule of `async` and `ssp`: for each gradient g of a rank, in the order of arrival, the wrapped
    optimizer takes a step on the parameters x with g. With op=AVG, g is divided by the number of workers, so
    that with plain SGD one gradient of each rank together moves x as far as one synchronous step; with op=SUM
    it is not divided, as in the papers. Momentum, weight decay and adaptive methods act on each push, so tune
    the learning rate. With plain SGD, staleness 0 equals synchronous SGD.

    After its last step a worker calls `optimizer.synchronizer.finish()`. When it returns, all updates are
    applied, and the parameters are the final ones, the same on all ranks. Ranks may take different numbers of
    steps. `optimizer.synchronizer.counters()` returns what was pushed and applied, and how far ranks were
    ahead. In the first step the parameters take the values of the group's first rank. Buffers of modules stay
    on their rank.

    On one host, if the job survives lost ranks (`mpirun --with-ft ulfm`), the others continue when a worker
    is killed: its locks are released, its unfinished update does not count, and no rank waits for it any
    longer. Between hosts the loss of a worker ends the training of all ranks, with `PeerLost`; the job ends
    if MPI does not return from a one-sided call to the lost rank.

    Args:
        mode: "sync", "async" or "ssp".
        staleness_steps: with `ssp`, how many steps the fastest worker may be ahead of the slowest.
        servers: global ranks that hold the parameters and do not train: their program calls
            `optimizer.synchronizer.serve()` instead of training. None: all ranks hold a part and train.
        push_every: with `async`, push accumulated gradients every this many steps.
        pull_every: with `async`, pull parameters every this many steps; in between, the worker's copy moves
            by its own gradient times the learning rate. By default `push_every`.
        locked: whether updates are serialized by locks. False, on one host only: all ranks read and update
            one copy of the parameters without any lock (Hogwild, Recht et al. 2011), each with the state of
            its own optimizer.

    Raises:
        InvalidArgument: at construction; or by `DistributedOptimizer`, on every rank, for options that cannot
            be combined with it.

    Cost: on one host a push copies the parameters and the optimizer's state once, and a pull copies the
        parameters once. Between hosts both are sent to the worker and back.
    """

    mode: str = "sync"
    staleness_steps: int | None = None
    servers: tuple[int, ...] | None = None
    push_every: int = 1
    pull_every: int | None = None
    locked: bool = True

    starts_together: ClassVar[bool] = False  # from the values of the first rank, and servers make no steps

    @classmethod
    def examples(cls) -> Sequence["ParameterServer"]:
        """See `Strategy`."""
        return (cls("sync"), cls("async"), cls("ssp", staleness_steps=1))

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InvalidArgument(f"ParameterServer: mode={shown(self.mode)}; expected one of {MODES}")
        self._check_staleness()
        check_positive("ParameterServer", "push_every", self.push_every, whole=True)
        if self.pull_every is not None:
            check_positive("ParameterServer", "pull_every", self.pull_every, whole=True)
        check_flag("ParameterServer", "locked", self.locked)
        if self.servers is not None:
            object.__setattr__(self, "servers", _as_ranks(self.servers))
        if (self.push_every, self.pull_every or 1) != (1, 1) and (self.mode != "async" or not self.locked):
            raise InvalidArgument(
                'ParameterServer: push_every and pull_every go with mode="async" and locked=True'
            )
        if not self.locked and (self.mode == "sync" or self.servers is not None):
            raise InvalidArgument(
                'ParameterServer: locked=False goes with mode="async" or "ssp", and with servers=None'
            )
        if self.mode == "sync" and self.servers is not None:
            raise InvalidArgument(
                'ParameterServer: mode="sync" has no dedicated servers; leave servers=None, each rank then '
                "updates a part of the parameters"
            )

    def _check_staleness(self) -> None:
        bound = self.staleness_steps
        if (bound is not None) != (self.mode == "ssp"):
            raise InvalidArgument(
                f'ParameterServer: staleness_steps={shown(bound)} with mode={self.mode!r}; "ssp" needs it, '
                "the others have none"
            )
        if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool) or bound < 0):
            raise InvalidArgument(
                f"ParameterServer: staleness_steps={shown(bound)}; expected a number of steps"
            )

    @property
    def goes_with(self) -> GoesWith:
        """See `GoesWith`."""
        return SYNC if self.mode == "sync" else OWN_PACE

    def check(self, training: Training) -> None:
        """Raise for parameters and optimizers that a parameter server does not support."""
        super().check(training)
        check_shareable(training.named)
        if self.pull_every not in (None, 1) and any("lr" not in o for o in training.optimizer.param_groups):
            raise InvalidArgument("ParameterServer: pull_every needs an optimizer with a learning rate `lr`")

    def check_ranks(self, training: Training) -> None:
        """Raise if `locked=False` spans hosts, if a server is not in the group, or if no worker is left."""
        group = training.group
        if not self.locked and group.shared_memory is None and group.size > 1:
            raise InvalidArgument(
                f"ParameterServer: locked=False needs memory that all ranks of group '{group.name}' share: "
                "one host"
            )
        outside = [rank for rank in self.servers or () if rank not in group.ranks]
        if outside or len(self.servers or ()) >= group.size:
            raise InvalidArgument(
                f"ParameterServer: servers={self.servers}; expected some ranks of group '{group.name}', "
                f"{list(group.ranks)}, and at least one left to train"
            )

    def synchronizer(self, training: Training) -> Synchronizer:
        """Return the working part. Collective."""
        if self.mode == "sync":
            return ShardedSynchronizer(training)
        if not self.locked:
            return LockFree(training, self.staleness_steps, ())
        pull_every = self.pull_every or self.push_every
        return LockedShards(training, self.staleness_steps, self.servers or (), self.push_every, pull_every)

    def paper(self, size: int, lengths: Sequence[tuple[str, int]] = ()) -> Paper[Any] | None:
        """See `Strategy`."""
        if self.mode != "sync":  # its events are repeated, see `mpisgd.tools.verification.replay`
            return super().paper(size, lengths)
        return None


def _as_ranks(servers: object) -> tuple[int, ...]:
    try:
        ranks = tuple(as_index(rank) for rank in servers)  # type: ignore[attr-defined]
    except TypeError:
        ranks = ()
    if not ranks or len(set(ranks)) != len(ranks):
        raise InvalidArgument(
            f"ParameterServer: servers={shown(servers)}; expected different ranks, at least one, or None"
        )
    return ranks
