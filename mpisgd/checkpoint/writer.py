"""`Writer`: checkpoints of one run, written in the background."""

import operator
import os
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from mpisgd.accelerator.host_copy import copy_tree
from mpisgd.arguments import check_flag, shown
from mpisgd.checkpoint.at_root import ROOT, at_root
from mpisgd.checkpoint.saving import Content, check_mode, check_save_arguments, collect, to_disk
from mpisgd.checkpoint.storage import Location, storage_at
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.errors import CheckpointError, InvalidArgument
from mpisgd.job.lifecycle import group_or_world
from mpisgd.threads.scheduling import join, runs
from mpisgd.threads.service_thread import InheritingThread

__all__ = ["Writer"]

WHEN_BUSY = ("wait", "skip")


class Writer:
    """Writes checkpoints into a folder, one at a time, on a thread of the first rank. Collective.

        with checkpoint.Writer("runs/a", keep_last=3) as writer:
            for step in range(start, 10_000):
                ...
                if (step + 1) % 500 == 0:
                    writer.save(step + 1, model=model, optimizer=optimizer)

    `save` copies the state and returns; the thread computes the checksums and writes. The memory of the copy,
    as large as the state, is reused. The thread prints an error at once, and the next `save` or `wait` raises
    it on every rank. The end of the program waits for the thread.

    Args:
        folder: as for `checkpoint.save`.
        keep_last: as for `checkpoint.save`.
        when_busy: what `save` does while an earlier checkpoint is being written: `wait` for it or `skip`
            this one, on all ranks.
        rng: as for `checkpoint.save`.
        mode: as for `checkpoint.save`.
        group: defaults to all processes of the job when `save` is called.

    Raises:
        InvalidArgument: an invalid argument; found locally, before anything is sent.
        CheckpointError: the folder cannot be made or is not writable; on every rank.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        when_busy: str = "wait",
        rng: bool = True,
        mode: int | None = None,
        group: Group | None = None,
    ) -> None:
        self.folder = check_save_arguments("checkpoint.Writer", folder, 0, keep_last, {"nothing": None})
        check_flag("checkpoint.Writer", "rng", rng)
        check_mode("checkpoint.Writer", mode, self.folder)
        if not isinstance(when_busy, str) or when_busy not in WHEN_BUSY:
            raise InvalidArgument(f"checkpoint.Writer: when_busy={shown(when_busy)}; expected wait or skip")
        self.keep_last = keep_last
        self.when_busy = when_busy
        self._rng = rng
        self._mode = mode
        self._group = group
        self._snapshot: dict[str, Tensor] = {}  # its memory is reused
        self._thread: InheritingThread | None = None
        self._failure: Exception | None = None
        self._newest: Location | None = None
        probe = Operation("checkpoint.Writer", root=ROOT)
        at_root(group_or_world(group), probe, lambda: storage_at(self.folder).check_writable())

    def save(self, step: int, **state: Any) -> bool:
        """Copy the state and start writing it. Collective.

        Args:
            step: as for `checkpoint.save`.
            state: as for `checkpoint.save`; it may change once this returns.

        Returns:
            Whether it will be written: False if it is skipped.

        Raises:
            CheckpointError: also if an earlier one could not be written; then this one is not written either.
            InvalidArgument, CollectiveMismatch: as for `checkpoint.save`.

        Cost: one copy of the state in memory, on the first rank.
        """
        check_save_arguments("checkpoint.save", self.folder, step, self.keep_last, state)
        group = group_or_world(self._group)
        asked = Operation("checkpoint.save", root=ROOT, extra=f"may begin, step {operator.index(step)}")
        if not at_root(group, asked, self._may_begin):
            return False
        content = collect(group, step, state, rng=self._rng)
        if content is not None:
            self._snapshot = copy_tree(content.tensors, self._snapshot)
            held = content._replace(tensors=self._snapshot)
            self._thread = InheritingThread(target=self._write, args=(held,), name="mpisgd checkpoint")
            self._thread.start()
        return True

    def wait(self) -> Path | str | None:
        """Wait until nothing is being written; return the newest file, None if there is none. Collective.

        Raises:
            CheckpointError: it could not be written; on every rank.
        """
        return at_root(group_or_world(self._group), Operation("checkpoint.wait", root=ROOT), self._join)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written; only the first rank knows."""
        return self._thread is not None and runs(self._thread)

    def _may_begin(self) -> bool:
        if self.when_busy == "skip" and self.busy:
            return False
        self._join()
        return True

    def _join(self) -> Location | None:
        """Wait for the thread; return the newest file, or raise the thread's error, once."""
        if self._thread is not None:
            join(self._thread, None)
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(f"an earlier checkpoint could not be written: {failure}") from failure
        return self._newest

    def _write(self, content: Content) -> None:
        try:
            self._newest = to_disk(self.folder, content, self.keep_last, self._mode)
        except Exception as exc:
            self._failure = exc
            text = f"mpisgd: the checkpoint of step {content.document.step} could not be written: {exc}"
            print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: object, exc: object, trace: object) -> None:
        if exc is None:  # otherwise the other ranks may not come here
            self.wait()
