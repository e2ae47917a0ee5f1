"""The newest intact checkpoint of a folder."""

import sys
from collections.abc import Collection
from typing import NamedTuple

from torch import Tensor

from mpisgd.arguments import printable
from mpisgd.checkpoint import format, rng_state
from mpisgd.checkpoint.serialization import WRONG_TREE, decode
from mpisgd.checkpoint.shared_errors import ROOT, gather_at_root
from mpisgd.checkpoint.storage import Location, Storage, checkpoints_in, step_of, storage_at
from mpisgd.collectives.objects import Allocate
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.errors import CheckpointDamaged, CheckpointError

__all__ = ["Found", "newest_intact", "newest_seen", "read_whole"]


class Found(NamedTuple):
    """A checkpoint that was read and is intact."""

    path: Location
    document: format.Document
    tensors: dict[str, Tensor]


class Seen(NamedTuple):
    """The newest checkpoint, damaged or not, that a host sees; step -1 if there is none."""

    host: str
    step: int


def newest_seen(group: Group, kind: str, folder: Location) -> list[Seen] | None:
    """Return what each host sees in the folder, on the root; None elsewhere. Collective."""
    where = group.topology
    step = -1
    if where.local_rank == 0:
        try:
            step = _newest_step(storage_at(folder))
        except OSError:
            step = -1  # the root says what is wrong
    seen = Seen(where.hostnames[where.node_rank], step)
    return gather_at_root(group, Operation(kind, root=ROOT, extra="newest"), seen)


def _newest_step(storage: Storage) -> int:
    return max(map(step_of, checkpoints_in(storage)), default=-1)


def read_whole(storage: Storage, name: str, objects: Collection[str], empty: Allocate | None) -> Found:
    """Read a checkpoint of which everything but the state of the objects is what `save` writes. On the root.

    Args:
        storage: where it is.
        name: of the file.
        objects: as for `format.read`.
        empty: likewise.

    Raises:
        CheckpointDamaged: it is not.
        OSError: it cannot be read.
    """
    path = storage.at(name)
    found = Found(path, *format.read(storage, name, objects, empty))
    try:
        rng_state.check([decode(tree, found.tensors) for tree in found.document.rng])
    except WRONG_TREE as exc:
        raise CheckpointDamaged(
            printable(f"{path} is no checkpoint of mpisgd: generators: {type(exc).__name__}, {exc}")
        ) from exc
    return found


def newest_intact(
    folder: Location, seen: list[Seen], objects: Collection[str], empty: Allocate | None = None
) -> Found | None:
    """Read the newest intact checkpoint; print which ones were skipped, and why. On the root.

    Args:
        folder: with checkpoints, or not there yet.
        seen: the newest checkpoint that each host sees.
        objects: as for `format.read`.
        empty: likewise.

    Raises:
        CheckpointError: another host sees a newer one, so the folder is not shared.
        OSError: the folder cannot be read.
    """
    storage = storage_at(folder)
    _check_shared(folder, storage, seen)
    for name in checkpoints_in(storage):
        try:
            return read_whole(storage, name, objects, empty)
        except CheckpointDamaged as exc:
            reason = str(exc)
        except OSError as exc:
            reason = printable(f"{storage.at(name)} cannot be read: {exc.strerror or exc}")
        print(f"mpisgd: checkpoint passed over: {reason}", file=sys.stderr, flush=True)
    return None


def _check_shared(folder: Location, storage: Storage, seen: list[Seen]) -> None:
    here, newest = seen[ROOT], max(seen, key=lambda one: one.step)
    if newest.step > here.step:  # or it was written after this rank had looked, and before another one did
        here = here._replace(step=max(here.step, _newest_step(storage)))
    if newest.step > here.step:
        ours = f"none newer than step {here.step}" if here.step >= 0 else "none"
        raise CheckpointError(
            f"{folder} on {newest.host} has a checkpoint of step {newest.step}, on {here.host}, where rank 0 "
            f"is now, {ours}: each host has a folder of its own there. Use one that all share, or start "
            "rank 0 where the checkpoints are"
        )
