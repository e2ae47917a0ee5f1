"""`Action`: one thing that a rank of a pipeline does. A schedule is, for each rank, a list of these."""

import enum
from typing import NamedTuple

__all__ = ["LOOK_AHEAD", "Action", "Kind", "described"]

LOOK_AHEAD = 8  # actions whose receives a rank has started


class Kind(enum.Enum):
    """The kinds of actions; the value is the printed form."""

    FORWARD = "F"
    BACKWARD = "B"
    RECV_ACTIVATION = "recvA"
    SEND_ACTIVATION = "sendA"
    RECV_GRADIENT = "recvG"
    SEND_GRADIENT = "sendG"
    REDUCE = "R"  # gradients of a stage over its replicas
    REDUCE_TIED = "T"  # gradients of tied parameters over the stages that have them
    UPDATE = "U"  # the optimizer's step

    @property
    def is_compute(self) -> bool:
        """Whether it computes, and so appears in tables."""
        return self in (Kind.FORWARD, Kind.BACKWARD)

    @property
    def is_joint(self) -> bool:
        """Whether several ranks execute it together."""
        return self in (Kind.REDUCE, Kind.REDUCE_TIED)


class Action(NamedTuple):
    """One action of one rank.

    Attributes:
        kind: the kind of the action.
        stage: the stage it belongs to; of REDUCE_TIED, the number of the tie.
        micro_batch: counted from 0 through all steps until the pipeline is empty; -1 if the action belongs to
            none.
        version: of the stage's weights, counted in updates: the one that FORWARD and BACKWARD read, that
            UPDATE makes, and that the gradients of REDUCE are for.
        peer: the stage at the other end of a message.
        keep_from: for UPDATE, the oldest version that will still be read; older ones can be freed before the
            update.
    """

    kind: Kind
    stage: int
    micro_batch: int = -1
    version: int = 0
    peer: int = -1
    keep_from: int = 0

    def __str__(self) -> str:
        text = f"{self.kind.value}{self.stage}"
        if self.micro_batch >= 0:
            text += f".{self.micro_batch}"
        if self.peer >= 0:
            return text + f" ({'from' if 'recv' in self.kind.value else 'to'} stage {self.peer})"
        return text + f"v{self.version}"


def described(action: Action) -> str:
    """Describe an action for an error."""
    names = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.UPDATE: "update"}
    name = names.get(action.kind, action.kind.name.lower())
    of = f" of micro-batch {action.micro_batch}" if action.micro_batch >= 0 else ""
    return f"stage {action.stage}, {name}{of}"
