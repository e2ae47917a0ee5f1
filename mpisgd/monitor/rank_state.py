"""`RankState`: what one rank does at a moment, and its text form, in which it travels."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

__all__ = [
    "GONE",
    "LEFT",
    "RUNS",
    "SILENT",
    "STOPPED",
    "WAITS",
    "Message",
    "RankState",
    "Wait",
    "decode",
    "encode",
]

# The states of a rank. The first two it has told itself, the others were seen from outside.
RUNS = "runs"  # its main thread is in the program's own code
WAITS = "waits"  # its main thread waits for other ranks
LEFT = "left"  # it has left the job's world in an orderly way
STOPPED = "stopped"  # the process is stopped by a signal
GONE = "gone"  # there is no such process any more
SILENT = "silent"  # it does not answer, and nobody can say more than `note` does


class Message(NamedTuple):
    """A message that a rank sends or receives and that is not through.

    Attributes:
        group: name of its group.
        receives: whether the rank is at the receiving end.
        partners: global ranks of whom one is at the other end.
        tag: as the program gave it.
    """

    group: str
    receives: bool
    partners: tuple[int, ...]
    tag: int


@dataclass(frozen=True)
class Wait:
    """What one thread of a rank waits for.

    Attributes:
        what: the operation.
        group: name of its group, or "".
        members: global ranks of that group.
        number: of the operation among those of its group; 0 for what has none, such as messages.
        whom: global ranks that it knows to wait for; empty where only the others' views tell.
        site: the line of the program that called it.
        waited_s: how long it has waited.
        limit_s: after how long it gives up; None: when the operation does that it waits for.
        thread: name of the thread.
        main: whether that is the main thread.
        inside: the MPI call it is blocked in, "" where it is in none.
        serial: tells one wait of a rank from another.
        ordinal: of the group among those of the same ranks.
        own: whether it is for another thread of this rank, which waits itself or works.
        message: the one that it waits for, if it is for one.
    """

    what: str
    group: str = ""
    members: tuple[int, ...] = ()
    number: int = 0
    whom: tuple[int, ...] = ()
    site: str = ""
    waited_s: float = 0.0
    limit_s: float | None = None
    thread: str = ""
    main: bool = False
    inside: str = ""
    serial: int = 0
    own: bool = False
    ordinal: int = 0
    message: Message | None = None


@dataclass(frozen=True)
class RankState:
    """What one rank does.

    Attributes:
        rank: its global rank.
        host: name of its host.
        pid: its process.
        state: one of the constants above.
        waits: what its threads wait for, the longest wait first.
        stacks: by name of the thread, the main thread's first, the innermost call last.
        numbers: by the `group_key` of each of its groups, how many operations it has begun.
        messages: those that are not through.
        is_free: whether a thread that is known to communicate, or may, is neither waiting nor idle.
        moves: grows whenever one of its operations begins or a message ends.
        told: the stalls that it has told its user about; see `mpisgd.monitor.reporter`.
        note: in words, what was seen from outside.
    """

    rank: int
    host: str = ""
    pid: int = 0
    state: str = RUNS
    waits: tuple[Wait, ...] = ()
    stacks: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    is_free: bool = False
    moves: int = 0
    told: tuple[int, ...] = ()
    note: str = ""


def encode(view: RankState) -> bytes:
    """Return the text form of a view."""
    return json.dumps(asdict(view)).encode()


def _message(entries: list[Any] | None) -> Message | None:
    if entries is None:
        return None
    group, receives, partners, tag = entries
    return Message(group, receives, tuple(partners), tag)


def decode(text: bytes) -> RankState:
    """Return the view of a text form."""
    fields: dict[str, Any] = json.loads(text)
    waits = tuple(
        Wait(
            **{
                **wait,
                "members": tuple(wait["members"]),
                "whom": tuple(wait["whom"]),
                "message": _message(wait["message"]),
            }
        )
        for wait in fields.pop("waits")
    )
    fields["messages"] = tuple(map(_message, fields["messages"]))
    return RankState(**{**fields, "waits": waits, "told": tuple(fields["told"])})
