"""`end_operations`: no rank leaves a group while another one is in the middle of an operation."""

from collections.abc import Mapping, Sequence

from mpisgd.core.consistency import ConsistencyCheck, Operation
from mpisgd.core.group import Group
from mpisgd.core.wait_registry import WaitReason
from mpisgd.core.waiting import Backoff
from mpisgd.errors import MpisgdError

__all__ = ["end_operations"]


def end_operations(groups: Sequence[Group], timeout_s: float) -> list[Group]:
    """Return when nothing is in flight any more, on any rank. Collective over all groups.

    Returns:
        The groups that can be closed: without those that another member has left.
    """
    for group in groups:
        group.queue.drain()
    ended = _agree_on_end([group for group in groups if group.queue.broken is None], timeout_s)
    for group in groups:
        if group.queue.broken is not None:  # MPI would wait for ever for what has failed
            raise group.queue.broken
    awaited = [group.queue.wire.all_gather_object(group.point_to_point.in_flight()) for group in ended]
    for group, messages in zip(ended, awaited, strict=True):
        group.point_to_point.drain(messages)
    return ended


def _agree_on_end(groups: Sequence[Group], timeout_s: float) -> list[Group]:
    """Agree with all ranks, in all groups at once, that no operation follows.

    Returns:
        The groups that no member has left.
    """
    backoff = Backoff(timeout_s)
    checks = {
        group: group.queue.consistency.begin(Operation("shutdown"), lambda: "the end of the program")
        for group in groups
    }
    backoff.wait_for(lambda: _is_settled(checks), about=lambda: _reason(groups))
    for group, check in sorted(checks.items(), key=lambda pair: not pair[1].differs()):
        try:
            if not _is_left(group):
                check.wait(backoff)
                check.verify()
        except MpisgdError as exc:
            if not _is_left(group):
                group.queue.broken = exc
                raise
    return [group for group in groups if not _is_left(group)]


def _is_left(group: Group) -> bool:
    """Return whether a member has left the group: then the agreement cannot be complete there."""
    return group.queue.consistency.somebody_left()


def _reason(groups: Sequence[Group]) -> WaitReason:
    """Tell the monitor that this rank is at the end of its program, or of one group."""
    group = groups[0]
    return WaitReason("shutdown", group.name, (), group.ranks, group.queue.consistency.number, group.ordinal)


def _is_settled(checks: Mapping[Group, ConsistencyCheck]) -> bool:
    """Poll all checks; return whether all are over, or one of them has found a rank at another operation.

    That rank waits there for this one to compare, and comes to no other group's end.
    """
    over = [check.advance() or _is_left(group) for group, check in checks.items()]
    return all(over) or any(check.differs() for check in checks.values())
