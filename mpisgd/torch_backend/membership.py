"""`Membership`: which ranks a process group has, and how `reconfigure` gives it others.

A handle names a process, not a rank: after a loss the job counts its ranks anew, and handles that were
exchanged before still name the same processes. All ranks of the job know all handles, from the making of the
default group on.

Without a loss the members alone make the new group; the others need not know of it. After a loss all ranks
that are left come together first (`mpisgd.job.recovery`), as members of a new job, and make the group there.
"""

import functools
import uuid as uuids
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from mpisgd.arguments import shown
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.errors import InvalidArgument, MpisgdError, UnsupportedOp
from mpisgd.job.groups import close_group, leave_group, open_group
from mpisgd.job.lifecycle import current_job
from mpisgd.job.recovery import is_loss, outlives_losses, recover, wait_for_notice
from mpisgd.job.world import Job
from mpisgd.threads import waiting

__all__ = ["Membership", "are_handles_known", "handle_of_process", "keep_handles"]

HANDLES = "handles of torch.distributed's reconfigure"  # in `made_for` of the job's world


@functools.cache
def handle_of_process() -> str:
    """Return the handle of this process; the same as long as it lives."""
    return f"mpisgd:{uuids.uuid4().hex}"


def keep_handles(job: Job, handles: Sequence[str]) -> None:
    """Note the handles of all ranks of a job, by rank."""
    job.world.made_for[HANDLES] = tuple(handles)


def are_handles_known() -> bool:
    """Return whether the handles of all ranks of the job are known: whether groups can be reconfigured."""
    return HANDLES in current_job().world.made_for


class Membership:
    """The members of a process group, from one `reconfigure` to the next.

    Attributes:
        name: of its groups.
        timeout_s: how long operations of its groups wait; None: as long as those of the job.
        pg_options: of NCCL, for its groups.
        uuid: of the last `reconfigure`; None before.
    """

    def __init__(self, name: str, timeout_s: float | None, pg_options: Any) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.pg_options = pg_options
        self.uuid: int | None = None
        self._used: set[int] = set()

    def renew(self, old: Group | None, opts: Any) -> Group:
        """Return a group of the processes of `opts.handles`. Collective over these.

        If a rank of the job was lost, also collective over all ranks that are left.

        Args:
            old: the group so far, which is given up at the end; it stays as it is where this raises.
            opts: torch's ReconfigureOptions: `uuid`, `handles`, `timeout`.

        Raises:
            InvalidArgument: see `ProcessGroupMpisgd.reconfigure`.
            CollectiveMismatch, CollectiveTimeout, JobError: likewise.
        """
        self._check(opts)
        self._used.add(opts.uuid)
        while True:
            job = current_job()
            _wait_for_notice_of_loss(job, opts.handles)
            if waiting.cancelled_by_loss():
                job = _go_on_without_lost(job)
            members = _ranks_of(opts.handles, job)
            try:
                group = self._open(job, members, opts, old)
            except MpisgdError as exc:
                if not is_loss(exc):
                    raise
            else:
                self.uuid = opts.uuid
                return group

    def _check(self, opts: Any) -> None:
        """Raise InvalidArgument for what is wrong, before anything is sent."""
        if opts.uuid in self._used:
            raise InvalidArgument(
                f"reconfigure: uuid={opts.uuid} was already used in this group; give all members the same "
                "fresh one"
            )
        if opts.timeout is not None and opts.timeout <= timedelta(0):
            raise InvalidArgument(f"reconfigure: timeout={opts.timeout}; expected a positive one, or None")
        if not waiting.cancelled_by_loss():  # else the ranks that are left come together first
            _ranks_of(opts.handles, current_job())

    def _open(self, job: Job, members: Sequence[int], opts: Any, old: Group | None) -> Group:
        """Make the group, agree on its uuid, and give up the old one."""
        own_s = self.timeout_s or job.timeout_s
        group = open_group(
            job,
            members,
            name=self.name,
            timeout_s=own_s if opts.timeout is None else opts.timeout.total_seconds(),
            runs_inline=True,
            pg_options=self.pg_options,
            attempt=f"reconfigure(uuid={opts.uuid})",
        )
        mine = self._shared_name(old)
        told: list[Any] = []
        queue = group.queue
        agreeing = Operation("reconfigure", extra=f"uuid={opts.uuid}")
        try:
            queue.run(agreeing, lambda: told.extend(queue.communicator.all_gather_object(mine)))
        except MpisgdError:
            leave_group(group)
            raise
        queue.consistency.timeout_s = group.point_to_point.timeout_s = own_s
        if old is not None and old in old.job.groups:
            _give_up(old, all_are_here=mine is not None and told.count(mine) == old.size)
        return group

    def _shared_name(self, old: Group | None) -> Any:
        """Return what all members call the old group; None if this rank cannot end it with them."""
        if old is None or old.broken is not None or old not in old.job.groups:
            return None
        return (self.uuid, old.ranks)


def _give_up(old: Group, *, all_are_here: bool) -> None:
    """Close a group if all its members do so at this moment; else leave it, and its memory."""
    if not all_are_here:
        leave_group(old)
        return
    try:
        close_group(old)
    except MpisgdError:  # something is still in flight there, for which nobody waits any more
        old.leave()


def _ranks_of(handles: Any, job: Job) -> list[int]:
    """Return the job's rank of each handle: in the order of a list, of a set in that of the job."""
    known = _known_handles(job)
    named = list(handles) if isinstance(handles, (list, tuple)) else sorted(handles)
    places = {handle: rank for rank, handle in enumerate(known)}
    unknown = [handle for handle in named if handle not in places]
    if unknown:
        raise InvalidArgument(
            f"reconfigure: handles has {shown(unknown[0])}, which names none of the {len(known)} ranks of "
            "the job, or one that was lost; give what get_reconfigure_handle() returns on each member"
        )
    if not named or len(set(named)) != len(named):
        raise InvalidArgument(
            f"reconfigure: handles has {len(named)} entries, {len(set(named))} different ones; expected at "
            "least one, and none twice"
        )
    if handle_of_process() not in named:
        raise InvalidArgument("reconfigure: handles lacks that of this rank; only the members call it")
    ranks = [places[handle] for handle in named]
    return ranks if isinstance(handles, (list, tuple)) else sorted(ranks)


def _known_handles(job: Job) -> tuple[str, ...]:
    known: tuple[str, ...] | None = job.world.made_for.get(HANDLES)
    if known is None:
        raise UnsupportedOp(
            "reconfigure: the handles of this job are not known, since its default group is not one of "
            "'mpisgd', or since mpisgd.elastic has begun the job anew; make the groups again instead"
        )
    return known


def _wait_for_notice_of_loss(job: Job, handles: Any) -> None:
    """Return when a loss that the caller may know of has been noticed here too."""
    known = _known_handles(job)
    if len(known) > len(handles) and outlives_losses() and job.communicator.lost():
        wait_for_notice(lambda: True)


def _go_on_without_lost(job: Job) -> Job:
    """Leave a job that has lost ranks for one of those that are left. Collective over these."""
    before = _known_handles(job)
    recovered = recover(str(waiting.cancel_reason()), caller="reconfigure")
    found = current_job()
    keep_handles(found, [handle for rank, handle in enumerate(before) if rank not in recovered.lost])
    return found
