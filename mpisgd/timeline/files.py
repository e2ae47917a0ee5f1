"""The files of a timeline: their names and their format, readable after a crash.

An array of events in Chrome's trace format, one event per line. A killed process leaves no closing bracket
and perhaps an incomplete last line.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mpisgd.arguments import shown
from mpisgd.errors import InvalidArgument

__all__ = ["CLOSING", "OPENING", "Names", "as_line", "merge", "names_for", "read_events"]

Event = dict[str, Any]

OPENING = "[\n"
CLOSING = '{"name":"end","ph":"M","pid":0,"args":{}}\n]\n'  # an event first, since a comma precedes it


class Names(NamedTuple):
    """The files of a timeline.

    Attributes:
        part: this rank's file, written while the program runs.
        whole: the file of all ranks, merged from the parts at the end; None: the parts stay.
    """

    part: Path
    whole: Path | None


def names_for(path: str, rank: int) -> Names:
    """Return the files of a rank for what the user gave.

    Args:
        path: a file, for one file of all ranks; a name with `{rank}`, or a folder, for one file per rank.
        rank: of this process.
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
    """Return the complete events of a file.

    Raises:
        InvalidArgument: no such file, or not a timeline of mpisgd.
    """
    try:
        with path.open(errors="replace") as file:  # where a host has crashed there may be anything
            if file.readline().rstrip() != OPENING.rstrip():
                raise InvalidArgument(f"{path}: not a timeline of mpisgd, whose first line is '['")
            for line in file:
                try:
                    event = json.loads(line.rstrip().rstrip(","))
                except ValueError:
                    return  # the closing bracket, or where the process was killed
                if not isinstance(event, dict) or not {"name", "ph", "pid"} <= event.keys():
                    raise InvalidArgument(f"{path}: {shown(event)} is no event of a timeline")
                yield event
    except OSError as exc:
        raise InvalidArgument(f"{path}: {exc.strerror}") from exc


def merge(events: Iterable[Event], path: Path) -> None:
    """Write events into one file."""
    with path.open("w") as file:
        file.writelines([OPENING, *map(as_line, events), CLOSING])
