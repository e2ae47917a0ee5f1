"""The end of groups: nobody leaves while another rank is in the middle of something."""

from collections.abc import Sequence

from mpisgd.comm.diagnosis.waits import Hint
from mpisgd.comm.group import Group
from mpisgd.comm.handshake import Exchange, Operation
from mpisgd.comm.waiting import Patience
from mpisgd.errors import MpisgdError

__all__ = ["end_operations"]


def end_operations(groups: Sequence[Group], timeout_s: float) -> None:
    """Return when nothing is under way any more, here and on all other ranks."""
    for group in groups:
        group.lane.drain()
    _part([group for group in groups if group.lane.broken is None], timeout_s)
    for group in groups:
        if group.lane.broken is not None:  # MPI would wait for ever for what was given up
            raise group.lane.broken
    awaited = [group.lane.wire.all_gather_object(group.mailbox.under_way()) for group in groups]
    for group, messages in zip(groups, awaited, strict=True):
        group.mailbox.drain(messages)


def _part(groups: Sequence[Group], timeout_s: float) -> None:
    """Agree with everyone, in all groups at once, that nothing comes any more."""
    patience = Patience(timeout_s)
    farewells = [
        group.lane.handshake.begin(Operation("shutdown"), lambda: "the end of the program")
        for group in groups
    ]
    patience.wait_for(lambda: _is_settled(farewells), about=lambda: _about(groups))
    pairs = zip(groups, farewells, strict=True)
    for group, farewell in sorted(pairs, key=lambda pair: not pair[1].differs()):
        try:
            farewell.wait(patience)
            farewell.verify()
        except MpisgdError as exc:
            group.lane.broken = exc
            raise


def _about(groups: Sequence[Group]) -> Hint:
    """Tell who asks that this rank is at the end: of its program, or of one group."""
    group = groups[0]
    return Hint("shutdown", group.name, (), group.ranks, group.lane.handshake.number, group.ordinal)


def _is_settled(farewells: Sequence[Exchange]) -> bool:
    """Move every one along; return whether all are over, or one of them has met somebody who stays.

    Whoever stays waits there for this rank to say what it wanted, and comes to no other group's end.
    """
    over = [farewell.advance() for farewell in farewells]
    return all(over) or any(farewell.differs() for farewell in farewells)
