"""`new_group`, `open_group`, `close_group`: groups of some ranks of the job."""

import threading
import zlib
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

from torch import Tensor

from mpisgd.arguments import as_index, check_text, shown
from mpisgd.core.consistency import Operation
from mpisgd.core.failure_scope import FailureScope
from mpisgd.core.group import Group
from mpisgd.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    InvalidArgument,
    InvalidRank,
    NcclFailed,
    PeerLost,
)
from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.interfaces.job import Job
from mpisgd.job.group_factory import make_group
from mpisgd.job.lifecycle import current_job
from mpisgd.job.quiesce import end_operations
from mpisgd.threads.wait_registry import WaitReason, waiting_for
from mpisgd.threads.waiting import Backoff
from mpisgd.transport.device.nccl_options import describe, disagreement
from mpisgd.transport.device.transport import can_be_split, split_from
from mpisgd.transport.messages.rendezvous import NUM_TAGS, Rendezvous

__all__ = ["close_group", "leave_group", "new_group", "open_group", "open_host_group", "open_leader_group"]

# The world's messages before the first operation of a group: above all tags of its own operations.
FIRST_TAG = 1024


def new_group(
    ranks: Sequence[int] | None = None, *, name: str | None = None, pg_options: Any = None
) -> Group:
    """Make a group of some ranks of the job. Collective over the whole job, members or not.

    Args:
        ranks: global ranks; their order is the order of the group's ranks. None: all.
        name: for messages; by default a number.
        pg_options: options of NCCL, see `mpisgd.init`; default: the job's.

    Returns:
        The group. On a rank that is no member its `rank` is -1, and using it raises NotInGroup. If the world
        has used NCCL before, the group's NCCL communicator is split from the world's; otherwise it is made at
        the group's first operation on a GPU.

    Raises:
        InvalidRank: a rank twice, none at all, or one the job does not have; before anything is sent.
        InvalidArgument: `pg_options` are wrong, or differ; on every rank.
        CollectiveMismatch: the ranks of the job asked for different groups.
        NcclFailed: the world's communicator cannot be split on some rank; on every rank of the job.
    """
    job = current_job()
    members = _check_members(range(job.world.size) if ranks is None else ranks, job.world.size)
    if name is not None:
        check_text("new_group", "name", name)
    made: list[GroupCommunicator | None] = []
    told: list[tuple[bool, tuple[str, str]]] = []
    world, described = job.world.queue.communicator, describe(pg_options)

    def action() -> None:
        told.extend(world.all_gather_object((can_be_split(job.world), described)))
        if disagreement("new_group", [options for _, options in told]) is None:
            made.append(world.subset(members))

    operation = Operation("new_group", extra=f"ranks={members}" + (f", name={name!r}" if name else ""))
    job.world.queue.run(operation, action)
    if (error := disagreement("new_group", [options for _, options in told])) is not None:
        raise error
    group = make_group(
        name or f"group {next(job.names)}",  # counted by all ranks alike: they have agreed
        members,
        made[0],
        timeout_s=job.timeout_s,
        threads_allowed=job.threads_allowed,
        costs=job.world.costs,
    )
    group.pg_options = pg_options
    job.add(group)
    if all(can for can, _ in told):
        try:
            split_from(job.world, group)
        except NcclFailed:  # on all of them
            if group in job.groups:
                job.groups.remove(group)
            group.free()
            raise
    return group


def open_group(
    job: Job,
    ranks: Sequence[int],
    *,
    name: str,
    timeout_s: float | None = None,
    runs_inline: bool = False,
    pg_options: Any = None,
    attempt: str = "",
    lost: Callable[[str], PeerLost] | None = None,
) -> Group:
    """Make a group of some ranks of a job, this one among them. Collective over these ranks alone.

    Args:
        job: that of this rank.
        ranks: global ranks; their order is the order of the group's ranks.
        name: for messages; ranks may have different ones, as torch's are where some have made more groups.
        timeout_s: how long its operations wait; default the job's timeout.
        runs_inline: where all members share a host, asynchronous operations run in the caller's thread when
            the members come to them at about the same time; see `OperationQueue.runs_inline`.
        pg_options: of NCCL, see `mpisgd.init`; default: the job's.
        attempt: the same on all members. Messages of an attempt that has failed are no part of another one.
        lost: the loss of a rank that is no member is then no event for the group's operations, and that of a
            member ends them with the error that this makes of who was lost, in words.

    Raises:
        InvalidRank: a rank twice, none at all, or one the job does not have; before anything is sent.
        InvalidArgument: `pg_options` are wrong; on all members.
        CollectiveMismatch: the members asked for different groups; on all of them.
    """
    members = _check_members(ranks, job.world.size)
    _wait_for_members(job.world.queue.communicator, members, name, timeout_s or job.timeout_s, attempt)
    tag = _checksum(members) % 2**15  # differs between overlapping groups, as a rule; every MPI takes it
    with waiting_for(WaitReason(f"the making of group '{name}'", members=tuple(members))):
        apart = lost is not None
        communicator = job.world.queue.communicator.create_group(members, tag, apart=apart)
    scope = None if lost is None else FailureScope(members, communicator, lost)
    if scope is not None and job.failure_detector is not None:
        job.failure_detector.scopes.append(scope)
    where = job.world.topology.subset(members)
    group = make_group(
        name,
        members,
        communicator,
        timeout_s=timeout_s or job.timeout_s,
        threads_allowed=job.threads_allowed,
        topology=where,
        costs=job.world.costs,
        scope=scope,
    )
    group.queue.runs_inline = runs_inline and where.num_nodes == 1
    chosen, wrong = describe(pg_options)
    options = f", pg_options={wrong or chosen!r}" if pg_options is not None else ""
    group.queue.run(Operation("new_group", extra=f"ranks={members}{options}"), lambda: None)
    if wrong:  # of all members: they have agreed
        group.free()
        raise InvalidArgument(f"new_group: {wrong}")
    group.pg_options = pg_options
    job.add(group)
    return group


def open_host_group(group: Group) -> Group | None:
    """Return the members of `group` on this rank's host as a group, None if it is alone. Collective there."""
    here = group.topology.node_rank
    members = [group.ranks[rank] for rank in group.topology.nodes[here]]
    return open_group(group.job, members, name=f"host {here} of {group.name}") if len(members) > 1 else None


def open_leader_group(group: Group) -> Group | None:
    """Return the first member of each host as a group. Collective over these.

    None on other ranks, and where all share a host.
    """
    leads = group.topology.local_rank == 0 and group.topology.num_nodes > 1
    members = [group.ranks[ranks[0]] for ranks in group.topology.nodes]
    return open_group(group.job, members, name=f"leaders of {group.name}") if leads else None


def _wait_for_members(
    communicator: GroupCommunicator, members: Sequence[int], name: str, timeout_s: float, attempt: str
) -> None:
    """Return when all members are about to make the group: a wait for them inside MPI has no timeout."""
    ordered = sorted(members)
    room = (communicator.tag_limit - FIRST_TAG) // NUM_TAGS
    place = _checksum([*ordered, attempt] if attempt else ordered) % room
    order = _checksum(members)
    rendezvous = Rendezvous(communicator, ordered, FIRST_TAG + place * NUM_TAGS, order)
    called = f"{attempt}, ranks={list(members)}" if attempt else f"new_group(ranks={list(members)})"
    text = f"{called}, group '{name}'"
    reason = WaitReason(f"{attempt or 'new_group'} of {ordered}", members=tuple(ordered))

    def have_come() -> bool:
        return Backoff(timeout_s).wait_for(rendezvous.advance, about=lambda: reason)

    try:
        # Once all have come some may have gone on already: they are not given up at the last moment.
        if not have_come() and not (rendezvous.all_have_come and have_come()):
            missing = rendezvous.missing()
            raise CollectiveTimeout(
                f"{text}: waited {timeout_s:.1f} s for {missing}; every member must call it"
            )
    finally:
        rendezvous.close()
    if rendezvous.extremes() != (order, order):
        raise CollectiveMismatch(f"{text}: other members named the ranks in another order")


def _checksum(members: Sequence[object]) -> int:
    return zlib.crc32(f"{members}".encode())


def close_group(group: Group) -> None:
    """Close a group of `new_group` before the end of the job. Collective over its members.

    Does nothing on a rank that is no member, and for a closed group. `shutdown()` closes what is left.
    Where an operation of it has failed on this rank, the others need not come: this rank leaves the group,
    and those that close it learn of that and leave it too. What trains in the group cannot go on.

    Raises:
        InvalidArgument: it is no group, or that of the whole job.
        CollectiveMismatch: another member is not closing it but in the middle of an operation.
        CollectiveTimeout: another member did not come, now or at an earlier operation.
    """
    if not isinstance(group, Group):
        raise InvalidArgument(f"close_group: group={shown(group)}; expected one of mpisgd.new_group()'s")
    if group not in group.job.groups:  # of which this rank is none, or which is closed
        return
    if group is group.job.world:
        raise InvalidArgument("close_group: this is the group of the whole job; call mpisgd.shutdown()")
    group.queue.drain()
    try:
        if group.queue.broken is None and end_operations([group], group.queue.consistency.timeout_s):
            group.free()
        else:
            group.leave()
    finally:
        group.job.groups.remove(group)  # not before: others must see that this rank has come to its end


def leave_group(group: Group) -> None:
    """Leave a group that was aborted on this rank; from any thread that may call MPI.

    Those that close it, or end the program, do not wait for this rank, nor this rank for them.
    """
    communicator = group.queue.communicator
    if group in group.job.groups and communicator.only_thread in (None, threading.get_ident()):
        group.queue.drain()
        group.job.groups.remove(group)
        group.queue.consistency.leave()
        communicator.keep(group)


def _check_members(ranks: Sequence[int], size: int) -> list[int]:
    if not isinstance(ranks, Iterable) or isinstance(ranks, (str, bytes, Set, Tensor)):
        raise InvalidRank(f"new_group: ranks={shown(ranks)}; expected a list of ranks, whose order counts")
    members = [_as_member(rank, size) for rank in ranks]
    if not members or len(set(members)) != len(members):
        raise InvalidRank(f"new_group: ranks={shown(members)}; expected at least one rank, and none twice")
    return members


def _as_member(rank: object, size: int) -> int:
    try:
        member = as_index(rank)
    except TypeError:
        member = -1
    if not 0 <= member < size:
        raise InvalidRank(f"new_group: ranks has {shown(rank)} in it, which is not a rank of a job of {size}")
    return member
