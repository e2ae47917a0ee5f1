"""The end of groups: nobody leaves while another rank is in the middle of something."""

from collections.abc import Mapping, Sequence

from mpisgd.core.consistency import ConsistencyCheck, Operation
from mpisgd.core.group import Group
from mpisgd.core.wait_registry import WaitReason
from mpisgd.core.waiting import Backoff
from mpisgd.errors import MpisgdError

__all__ = ["end_operations"]


def end_operations(groups: Sequence[Group], timeout_s: float) -> list[Group]:
    """Return when nothing is under way any more, here and on all other ranks.

    Returns:
        The groups that can be closed: without those that another member has left.
    """
    for group in groups:
        group.queue.drain()
    ended = _part([group for group in groups if group.queue.broken is None], timeout_s)
    for group in groups:
        if group.queue.broken is not None:  # MPI would wait for ever for what was given up
            raise group.queue.broken
    awaited = [group.queue.wire.all_gather_object(group.point_to_point.in_flight()) for group in ended]
    for group, messages in zip(ended, awaited, strict=True):
        group.point_to_point.drain(messages)
    return ended


def _part(groups: Sequence[Group], timeout_s: float) -> list[Group]:
    """Agree with everyone, in all groups at once, that nothing comes any more.

    Returns:
        The groups that no member has left.
    """
    patience = Backoff(timeout_s)
    farewells = {
        group: group.queue.consistency.begin(Operation("shutdown"), lambda: "the end of the program")
        for group in groups
    }
    patience.wait_for(lambda: _is_settled(farewells), about=lambda: _about(groups))
    for group, farewell in sorted(farewells.items(), key=lambda pair: not pair[1].differs()):
        try:
            if not _is_left(group):
                farewell.wait(patience)
                farewell.verify()
        except MpisgdError as exc:
            if not _is_left(group):
                group.queue.broken = exc
                raise
    return [group for group in groups if not _is_left(group)]


def _is_left(group: Group) -> bool:
    """Return whether a member has left the group: it sends no farewell, so none is complete there."""
    return group.queue.consistency.somebody_left()


def _about(groups: Sequence[Group]) -> WaitReason:
    """Tell who asks that this rank is at the end: of its program, or of one group."""
    group = groups[0]
    return WaitReason("shutdown", group.name, (), group.ranks, group.queue.consistency.number, group.ordinal)


def _is_settled(farewells: Mapping[Group, ConsistencyCheck]) -> bool:
    """Move every one along; return whether all are over, or one of them has met somebody who stays.

    Whoever stays waits there for this rank to say what it wanted, and comes to no other group's end.
    """
    over = [farewell.advance() or _is_left(group) for group, farewell in farewells.items()]
    return all(over) or any(farewell.differs() for farewell in farewells.values())
