"""`RankState`: what one rank does at a moment, and its form for travelling.

That form is JSON, of which nothing but what is expected is taken: it lies in memory that `mpisgd top` finds,
and another process of the same user, also one in a sandbox, can have such memory, too.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpisgd.arguments import printable
from mpisgd.threads.wait_registry import Message, WaitReason

__all__ = [
    "GONE",
    "LEFT",
    "RUNS",
    "STOPPED",
    "UNRESPONSIVE",
    "WAITS",
    "RankState",
    "Wait",
    "decode",
    "encode",
    "group_key",
]

# The states of a rank. The first two it has told itself, the others were seen from outside.
RUNS = "runs"  # its main thread is in the program's own code
WAITS = "waits"  # its main thread waits for other ranks
LEFT = "left"  # it has left the job's world in an orderly way
STOPPED = "stopped"  # the process is stopped by a signal
GONE = "gone"  # there is no such process any more
UNRESPONSIVE = "unresponsive"  # it does not answer, and nobody can say more than `note` does


def group_key(ranks: Sequence[int], ordinal: int) -> str:
    """Return a key of a group that is the same on all of its ranks, whatever names they have for it."""
    return f"[{','.join(map(str, ranks))}] {ordinal}"


@dataclass(frozen=True)
class Wait(WaitReason):
    """What one thread of a rank waits for.

    Attributes:
        site: the line of the program that called it.
        waited_s: how long it has waited.
        timeout_s: after how long it raises; None: when the operation does that it waits for.
        thread: name of the thread.
        is_main: whether that is the main thread.
        mpi_call: the MPI call it is blocked in, "" where it is in none.
        serial: tells one wait of a rank from another.
        own_limit: whether the limit is that of one call alone, after which the program may go on.
    """

    site: str = ""
    waited_s: float = 0.0
    timeout_s: float | None = None
    thread: str = ""
    is_main: bool = False
    mpi_call: str = ""
    serial: int = 0
    own_limit: bool = False

    def is_shared_by(self, other: "RankState") -> bool:
        """Return whether another rank waits for the same, of which operations have no number."""
        return any((wait.what, wait.members) == (self.what, self.members) for wait in other.waits)


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
        num_begun: by the `group_key` of each of its groups, how many operations it has begun.
        messages: those that have not arrived.
        may_communicate: whether a thread that is known to communicate, or may, is neither waiting nor idle.
        progress: grows whenever one of its operations begins or a message ends.
        reported: the stalls that it has reported to its user; see `mpisgd.monitor.watchdog`.
        failed_threads: in words, its threads that an uncaught error has ended.
        note: in words, what was seen from outside.
        device_bytes: that its tensors take on its GPU.
    """

    rank: int
    host: str = ""
    pid: int = 0
    state: str = RUNS
    waits: tuple[Wait, ...] = ()
    stacks: dict[str, str] = field(default_factory=dict)
    num_begun: dict[str, int] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    may_communicate: bool = False
    progress: int = 0
    reported: tuple[int, ...] = ()
    failed_threads: tuple[str, ...] = ()
    note: str = ""
    device_bytes: int = 0


def encode(states: Sequence[RankState], max_bytes: int | None = None) -> bytes:
    """Return some ranks' states as one message, with as many stacks as there is room for."""
    states = list(states)
    while len(text := _as_json(states)) > (max_bytes or len(text)):
        longest = max(range(len(states)), key=lambda i: len(_as_json([states[i]])))
        states[longest] = _shortened(states[longest])
    return text


def _as_json(states: Sequence[RankState]) -> bytes:
    return json.dumps([dataclasses.asdict(state) for state in states]).encode()


def _shortened(state: RankState) -> RankState:
    """Return a state without its last stack; without any, one that says next to nothing."""
    if state.stacks:
        return dataclasses.replace(state, stacks=dict(list(state.stacks.items())[:-1]))
    note = "its state is too long for its mailbox"
    return RankState(state.rank, state.host, state.pid, UNRESPONSIVE, note=note)


def decode(text: bytes) -> list[RankState]:
    """Return the states of a message that `encode` has made.

    Raises:
        ValueError: it has made no such message. Control characters of texts are escaped.
    """
    try:
        return [_state(entry) for entry in _list(json.loads(text))]
    except (TypeError, RecursionError) as exc:  # a field is missing or unknown; JSON that is too deep
        raise ValueError(f"no states of ranks: {exc}") from exc


def _state(entry: Any) -> RankState:
    return RankState(**_fields(entry, _OF_STATE))


def _wait(entry: Any) -> Wait:
    return Wait(**_fields(entry, _OF_WAIT))


def _message(entry: Any) -> Message | None:
    if entry is None:
        return None
    group, receives, partners, tag = _list(entry)
    return Message(_line(group), _flag(receives), _numbers(partners), _number(tag))


def _messages(entries: Any) -> tuple[Message, ...]:
    return tuple(message for entry in _list(entries) if (message := _message(entry)) is not None)


def _fields(entry: Any, readers: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Return the fields of an object, each as its reader takes it."""
    if not isinstance(entry, dict) or not entry.keys() <= readers.keys():
        raise ValueError("no object, or with fields that are not known")
    return {name: readers[name](value) for name, value in entry.items()}


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("expected a list")
    return value


def _table(value: Any, reader: Callable[[Any], Any]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("expected an object")
    return {_line(name): reader(entry) for name, entry in value.items()}


def _line(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("expected a text")
    return printable(value)


def _text(value: Any) -> str:
    return "\n".join(map(_line, value.split("\n") if isinstance(value, str) else [value]))


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**64:
        raise ValueError("expected a whole number")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    return tuple(map(_number, _list(value)))


def _seconds(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError("expected a number")
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


_OF_WAIT: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("what", "group", "site", "thread", "mpi_call"), _line),
    **dict.fromkeys(("awaited", "members"), _numbers),
    **dict.fromkeys(("number", "ordinal", "serial"), _number),
    **{each.name: _flag for each in dataclasses.fields(Wait) if isinstance(each.default, bool)},
    "message": _message,
    "waited_s": _seconds,
    "timeout_s": lambda value: None if value is None else _seconds(value),
}

_OF_STATE: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("host", "state"), _line),
    "note": _text,
    **dict.fromkeys(("rank", "pid", "progress", "device_bytes"), _number),
    "waits": lambda value: tuple(map(_wait, _list(value))),
    "stacks": lambda value: _table(value, _text),
    "num_begun": lambda value: _table(value, _number),
    "messages": _messages,
    "may_communicate": _flag,
    "reported": _numbers,
    "failed_threads": lambda value: tuple(map(_line, _list(value))),
}
