"""`RankState`: what one rank does at a moment, and its form for travelling.

That form is JSON, of which nothing but what is expected is taken: it lies in memory that `mpisgd top` finds,
and another process of the same user, also one in a sandbox, can have such memory, too.
"""

import dataclasses
import functools
import hashlib
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

MOST_RANKS = 2**20  # in one list of a message; more would only fill the memory of who reads it


def group_key(ranks: Sequence[int], ordinal: int) -> str:
    """Return a key of a group that is the same on all of its ranks, whatever names they have for it."""
    return f"{_digest(tuple(ranks))} {ordinal}"


@functools.lru_cache
def _digest(ranks: tuple[int, ...]) -> str:
    """Return a text for ranks that is not longer where there are more of them."""
    return hashlib.blake2b(",".join(map(str, ranks)).encode(), digest_size=12).hexdigest()


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
    return json.dumps([_entry_of(state) for state in states]).encode()


def _entry_of(state: RankState) -> dict[str, Any]:
    waits = [_entry_of_wait(wait) for wait in state.waits]
    return {**vars(state), "waits": waits, "messages": [_entry_of_message(each) for each in state.messages]}


def _entry_of_wait(wait: Wait) -> dict[str, Any]:
    message = None if wait.message is None else _entry_of_message(wait.message)
    ranks = {name: _rows(getattr(wait, name)) for name in ("awaited", "members")}
    return {**vars(wait), **ranks, "message": message}


def _entry_of_message(message: Message) -> list[Any]:
    return [message.group, message.receives, _rows(tuple(message.partners)), message.tag]


# What all ranks of a job are to each other must not take room for each of them in the state of each.


@functools.lru_cache
def _rows(ranks: tuple[int, ...]) -> list[list[int]]:
    """Return ranks as rows at equal distances, in their order: first, distance and number of each."""
    rows: list[list[int]] = []
    for rank in ranks:
        if rows:
            first, step, count = rows[-1]
            if count == 1 or rank == first + step * count:
                rows[-1] = [first, rank - first if count == 1 else step, count + 1]
                continue
        rows.append([rank, 0, 1])
    return rows


@functools.lru_cache
def _in_rows(rows: tuple[tuple[int, int, int], ...]) -> tuple[int, ...]:
    """Return the ranks of `_rows`; the same object for the same ones."""
    return tuple(first + step * i for first, step, count in rows for i in range(count))


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
    return Message(_line(group), _flag(receives), _ranks(partners), _number(tag))


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


def _ranks(value: Any) -> tuple[int, ...]:
    rows = tuple(_row(entry) for entry in _list(value))
    if sum(count for _, _, count in rows) > MOST_RANKS:
        raise ValueError("more ranks than a job has")
    return _in_rows(rows)


def _row(entry: Any) -> tuple[int, int, int]:
    first, step, count = _numbers(entry)
    if count < 0:
        raise ValueError("expected a number of ranks")
    return first, step, count


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
    **dict.fromkeys(("awaited", "members"), _ranks),
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
