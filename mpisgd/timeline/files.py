"""The files of a timeline: their names, how one is written while the program runs, and read after a crash.

Chrome's trace format as an array of events, one in a line. It may end anywhere: a process that was killed
leaves no closing bracket, and perhaps half a line.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mpisgd.errors import InvalidArgument

__all__ = ["Names", "as_line", "merge", "names_for", "read_events"]

Event = dict[str, Any]


class Names(NamedTuple):
    """Where a timeline goes.

    Attributes:
        part: this rank's file, written while the program runs.
        whole: the file of all ranks, made of the parts at the end; None: the parts stay.
    """

    part: Path
    whole: Path | None


def names_for(path: str, rank: int) -> Names:
    """Return the files of a rank for what the user gave.

    Args:
        path: a file's name, for one file at the end; with `{rank}` in it, for one of each rank; or a folder.
        rank: whose.
    """
    if "{rank}" in path:
        return Names(Path(path.replace("{rank}", str(rank))), None)
    if path.endswith("/") or Path(path).is_dir():
        return Names(Path(path) / f"rank{rank}.json", None)
    whole = Path(path)
    return Names(whole.with_name(f"{whole.stem}.rank{rank}{whole.suffix or '.json'}"), whole)


def as_line(event: Event) -> str:
    """Return an event as a line of the array."""
    return json.dumps(event, separators=(",", ":")) + ",\n"


def read_events(path: Path) -> Iterator[Event]:
    """Return the events of a file, as many as are whole.

    Raises:
        InvalidArgument: there is no such file, or it is no timeline of ours.
    """
    try:
        with path.open() as file:
            if file.readline().strip() != "[":
                raise InvalidArgument(f"{path}: not a timeline of mpisgd, whose first line is '['")
            for line in file:
                try:
                    event = json.loads(line.rstrip().rstrip(","))
                except ValueError:
                    return  # the closing bracket, or where the process was killed
                yield event
    except OSError as exc:
        raise InvalidArgument(f"{path}: {exc.strerror}") from exc


def merge(events: Iterable[Event], path: Path) -> None:
    """Write events as one whole file."""
    with path.open("w") as file:
        file.write("[\n")
        file.writelines(map(as_line, events))
        file.write(closing_line())


def closing_line() -> str:
    """Return what makes the array whole: an event that says nothing, since a comma precedes it."""
    return '{"name":"end","ph":"M","pid":0,"args":{}}\n]\n'
