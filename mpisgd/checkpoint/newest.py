"""The newest intact checkpoint of a folder, and which others come before it."""

import contextlib
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from mpisgd.arguments import printable
from mpisgd.checkpoint import format, rng_state
from mpisgd.checkpoint.at_root import ROOT, gather_at_root
from mpisgd.checkpoint.serialization import WRONG_TREE, decode
from mpisgd.checkpoint.storage import Location, Storage, checkpoints_in, find, step_of, storage_at
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.errors import CheckpointDamaged, CheckpointError

__all__ = ["Candidates", "Found", "Seen", "candidates_at", "newest_intact", "newest_seen"]


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
    """Gather the checkpoints that each host sees in the folder, on the root; None elsewhere. Collective."""
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


class Candidates:
    """The checkpoints that may be loaded, the newest first: a file, or those of a folder. On the root.

    A damaged one of a folder is skipped, with a line on stderr that says why.

    Args:
        storage: where they are.
        names: of the files.
        skips: whether what is damaged is skipped; otherwise it is an error.
        objects: as for `format.Opened`.
    """

    def __init__(
        self, storage: Storage, names: Sequence[str], objects: Collection[str], *, skips: bool
    ) -> None:
        self._storage, self._objects, self._skips = storage, objects, skips
        self._names = iter(names)

    def open_next(self) -> format.Opened | None:
        """Open the next one whose header is intact; None if there are no more.

        Raises:
            CheckpointDamaged: it is not what `save` writes.
            OSError: it cannot be read.
        """
        for name in self._names:
            with self._skipping(self._storage.at(name)):
                return format.Opened(self._storage, name, self._objects)
        return None

    def is_intact(self, opened: format.Opened, tensors: Mapping[str, Tensor]) -> bool:
        """Close a checkpoint; return whether everything but the state of the objects is what `save` writes.

        Args:
            opened: of which all tensors have been read.
            tensors: those that were kept, the generators' among them.

        Raises:
            CheckpointDamaged: it is not.
            OSError: it could not be read.
        """
        with self._skipping(opened.path):
            opened.close()
            try:
                rng_state.check([decode(tree, tensors) for tree in opened.document.rng])
            except WRONG_TREE as exc:
                raise CheckpointDamaged(
                    printable(
                        f"{opened.path} is no checkpoint of mpisgd: generators: {type(exc).__name__}, {exc}"
                    )
                ) from exc
            return True
        return False

    @contextlib.contextmanager
    def _skipping(self, path: Location) -> Iterator[None]:
        try:
            yield
        except CheckpointDamaged as exc:
            if not self._skips:
                raise
            reason = str(exc)
        except OSError as exc:
            if not self._skips:
                raise
            reason = printable(f"{path} cannot be read: {exc.strerror or exc}")
        else:
            return
        print(f"mpisgd: checkpoint passed over: {reason}", file=sys.stderr, flush=True)


def candidates_at(location: Location, seen: list[Seen], objects: Collection[str]) -> Candidates:
    """Return the checkpoints at a location, a file or a folder. On the root; see `candidates_in`."""
    storage, name = find(location)
    if name is not None:
        return Candidates(storage, [name], objects, skips=False)
    return candidates_in(location, seen, objects)


def candidates_in(folder: Location, seen: list[Seen], objects: Collection[str]) -> Candidates:
    """Return the checkpoints of a folder. On the root.

    Args:
        folder: may not be there yet.
        seen: the newest checkpoint that each host sees.
        objects: as for `format.Opened`.

    Raises:
        CheckpointError: another host sees a newer one, so the folder is not shared.
        OSError: the folder cannot be read.
    """
    storage = storage_at(folder)
    _check_shared(folder, storage, seen)
    return Candidates(storage, checkpoints_in(storage), objects, skips=True)


def newest_intact(folder: Location, seen: list[Seen], objects: Collection[str]) -> Found | None:
    """Read the newest intact checkpoint, None if there is none. On the root; see `candidates_in`."""
    candidates = candidates_in(folder, seen, objects)
    while (opened := candidates.open_next()) is not None:
        tensors = format.read_all(opened)
        if candidates.is_intact(opened, tensors):
            return Found(opened.path, opened.document, tensors)
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
