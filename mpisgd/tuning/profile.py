"""A profile: what `python -m mpisgd tune` has measured, as a JSON file.

Between its first and last line stand `command`, `when`, `machine` and `versions`, for people:

    {"format": "mpisgd profile", "version": 2,
    "measured": [{"ranks_per_host": [2, 2], "curves": [
        {"collective": "all_reduce", "algorithm": "ring", "half": false, "speakers": 1,
        "segments": [[up to bytes, alpha in s, beta in s/byte], ..., [null, alpha in s, beta in s/byte]],
        "points": [[bytes, s], ...]}, ...]}, ...]}
"""

import json
import math
import os
import re
import secrets
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from mpisgd import config
from mpisgd.errors import InvalidArgument
from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.tuning.curve import Curve, LineSegment
from mpisgd.tuning.model import CostModel, MeasuredCurves

__all__ = [
    "ProfileError",
    "as_profile",
    "built_in",
    "default_path",
    "find_costs",
    "read",
    "topology_name",
    "write",
]

FORMAT = "mpisgd profile"
VERSION = 2
# Measured on one machine with two cores, and on two hosts pretended there; each file holds its command. The
# first one with a kind of ranks has the say: on those hosts two ranks share a core, as they should not.
BUILT_IN = Path(__file__).with_name("built_in")
# From here on a run of equal hosts is counted: a file's name must stay short on a large cluster.
LONG_RUN = 4


class ProfileError(Exception):
    """A file is no profile that this version understands; the text says why."""


def topology_name(ranks_per_host: Sequence[int]) -> str:
    """Return `2+2` for two hosts of two ranks, `3+1` for uneven ones, `64x8` for 64 hosts of 8 ranks."""
    runs = [(ranks, len(list(run))) for ranks, run in groupby(sorted(ranks_per_host, reverse=True))]
    return "+".join(
        f"{hosts}x{ranks}" if hosts >= LONG_RUN else "+".join([str(ranks)] * hosts) for ranks, hosts in runs
    )


def default_path(ranks_per_host: Sequence[int]) -> Path:
    """Return where the profile of these ranks is looked for."""
    return config.cache_folder() / f"profile-{topology_name(ranks_per_host)}.json"


def as_profile(measured: Sequence[MeasuredCurves], header: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a profile file; `header`: machine, versions, command."""
    return {
        "format": FORMAT,
        "version": VERSION,
        **header,
        "measured": [
            {"ranks_per_host": list(one.ranks_per_host), "curves": [_curve_as_json(c) for c in one.curves]}
            for one in measured
        ],
    }


def _curve_as_json(curve: Curve) -> dict[str, Any]:
    segments = [
        [None if math.isinf(end) else round(end), _rounded(alpha), _rounded(beta)]
        for end, alpha, beta in curve.segments
    ]
    points = [[round(nbytes), _rounded(seconds)] for nbytes, seconds in curve.points]
    fields = {**vars(curve), "segments": segments, "points": points}
    fields["speakers"] = fields.pop("num_leaders")  # the name in the file
    return fields


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def write(path: Path, profile: dict[str, Any]) -> None:
    """Write a profile; whoever reads meanwhile sees the old file or the new one, never a part.

    Raises:
        OSError: it cannot be written; an old file is unchanged then.
    """
    # A line for each point and segment.
    text = re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), json.dumps(profile, indent=1))
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name that nobody knows before: what lay there would be overwritten, through a link too.
    draft = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)  # less the user's umask
    try:
        with open(fd, "w") as file:
            file.write(f"{text}\n")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def read(path: Path) -> CostModel:
    """Return the model in a profile.

    Raises:
        FileNotFoundError: there is no such file.
        ProfileError: it cannot be read, is damaged or of another version.
    """
    try:
        page = json.loads(path.read_text())
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as exc:  # ValueError: no JSON, or no text at all
        raise ProfileError(str(exc)) from exc
    if not isinstance(page, dict) or page.get("format") != FORMAT:
        raise ProfileError(f"it is no {FORMAT}")
    if page.get("version") != VERSION:
        raise ProfileError(f"it is of version {page.get('version')!r}, this mpisgd reads version {VERSION}")
    try:
        measured = tuple(_measured(entry) for entry in page["measured"])
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise ProfileError(f"damaged: {type(exc).__name__}: {exc}") from exc
    return CostModel(str(path), measured)


def _measured(entry: dict[str, Any]) -> MeasuredCurves:
    ranks_per_host = tuple(_whole(ranks) for ranks in entry["ranks_per_host"])
    if sum(ranks_per_host) < 2:
        raise ValueError(f"ranks_per_host={list(ranks_per_host)}: expected two ranks or more")
    return MeasuredCurves(ranks_per_host, tuple(_curve(curve) for curve in entry["curves"]))


def _curve(entry: dict[str, Any]) -> Curve:
    return Curve(
        algorithm=str(entry["algorithm"]),
        half=bool(entry["half"]),
        segments=_segments(entry["segments"]),
        num_leaders=_whole(entry["speakers"]),
        points=tuple((_number(nbytes), _number(seconds)) for nbytes, seconds in entry["points"]),
        collective=str(entry["collective"]),
    )


def _segments(entries: Sequence[Any]) -> tuple[LineSegment, ...]:
    """Return the segments, of which the last is open, so that every size has one."""
    segments = tuple(
        LineSegment(math.inf if end is None else _number(end), _number(alpha), _number(beta))
        for end, alpha, beta in entries
    )
    ends = [segment.up_to_bytes for segment in segments]
    if not segments or ends[-1] != math.inf or any(end >= after for end, after in pairwise(ends)):
        raise ValueError(f"segments end at {ends}: expected ascending sizes, the last one open")
    return segments


def _whole(value: Any) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r}: expected a whole number above zero")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r}: expected a number, not below zero")
    return float(value)


def built_in() -> CostModel:
    """Return the model for where nobody has measured."""
    model = CostModel("built-in", ())
    for path in sorted(BUILT_IN.glob("*.json")):
        model = model.completed(read(path))
    return model


def find_costs(communicator: GroupCommunicator, ranks_per_host: Sequence[int]) -> tuple[CostModel, str]:
    """Return the model of the job; and on rank 0 what to warn of, if anything.

    Collective: rank 0 reads, so that hosts with other files agree. The warning is left to the caller: where
    warnings are errors it may only come once a rank that fails ends the job.

    Raises:
        InvalidArgument: rank 0's MPISGD_PROFILE names a file that is not there; on every rank.
    """
    found: CostModel | InvalidArgument | None = None
    complaint = ""
    if communicator.rank == 0:
        found, complaint = _look(ranks_per_host)
    found = communicator.broadcast_object(found, 0)
    if isinstance(found, InvalidArgument):
        raise found
    assert found is not None
    return found, complaint


def _look(ranks_per_host: Sequence[int]) -> tuple[CostModel | InvalidArgument, str]:
    """Return the model, or what is wrong with what was asked for; and what to warn of."""
    named = config.profile()
    fallback = built_in().at(ranks_per_host)
    if named == config.BUILT_IN_PROFILE:
        return fallback, ""
    path = Path(named) if named else default_path(ranks_per_host)
    try:
        return read(path).completed(fallback).at(ranks_per_host), ""
    except FileNotFoundError:
        if named:
            return InvalidArgument(f"MPISGD_PROFILE={named!r}: rank 0 finds no such file"), ""
        return fallback, ""
    except ProfileError as exc:
        return fallback, (
            f"the profile {path} cannot be used ({exc}); built-in values are used instead. Measure again "
            "with `python -m mpisgd tune`, or remove the file"
        )
