"""Start and end of a timeline on all ranks, and one file out of theirs."""

import atexit
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpisgd import tracing
from mpisgd.arguments import check_text, shown
from mpisgd.core.consistency import Operation
from mpisgd.core.waiting import Backoff
from mpisgd.errors import CollectiveTimeout, InvalidArgument
from mpisgd.job.lifecycle import current_job, world
from mpisgd.timeline.clock import align
from mpisgd.timeline.files import Names, closing_line, names_for
from mpisgd.timeline.recorder import Recorder

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = ["abandon_timeline", "close_timeline", "open_timeline", "start_timeline", "stop_timeline"]

PIECE_BYTES = 4 * 2**20
LIMIT_S = 600.0
TAG = 2


class Session:
    """A timeline that is being recorded on all ranks."""

    def __init__(self, path: str, wire: "Communicator", mark_cycles: bool) -> None:
        self.path = path
        self.mark_cycles = mark_cycles
        self.wire = wire
        self.names: Names = names_for(path, wire.rank)
        self.recorder = self._open()

    def _open(self) -> Recorder:
        clock = align(self.wire)
        try:
            recorder, wrong = (
                Recorder(self.names.part, self.wire.rank, clock, mark_cycles=self.mark_cycles),
                "",
            )
        except (OSError, ValueError) as exc:  # the latter where a name has a zero byte in it
            recorder, wrong = None, f"{str(self.names.part)!r}: {getattr(exc, 'strerror', exc)}"
        said = self.wire.all_gather_object(wrong)
        if any(said):
            if recorder is not None:
                recorder.close()
            self.wire.free()
            told = "; ".join(f"rank {rank} cannot write {text}" for rank, text in enumerate(said) if text)
            raise InvalidArgument(f"timeline: path={shown(self.path)}: {told}")
        assert recorder is not None
        return recorder

    def close(self) -> None:
        """End the parts, and make one file of them. Collective."""
        self.recorder.close()
        if self.names.whole is not None:
            if self.wire.rank == 0:
                _write_whole(self.wire, self.names.part, self.names.whole)
            else:
                _send_part(self.wire, self.names.part)
            self.wire.barrier()
            self.names.part.unlink(missing_ok=True)
        self.wire.free()


_session: Session | None = None


def start_timeline(path: str) -> None:
    """Record what every rank communicates from now on. Collective over the job.

    Args:
        path: a file's name: written by rank 0 when the timeline or the program ends, of all ranks; until then
            (and after a crash) every rank has a file of its own beside it, NAME.rankN.json. With `{rank}` in
            it, or of a folder: one file of each rank, and no other. Environment: MPISGD_TIMELINE.

    Raises:
        InvalidArgument: a rank cannot write to `path`; on all ranks. Or it is no text; found locally.
        CollectiveMismatch: the ranks gave different paths.

    The files are in Chrome's trace format: open them at https://ui.perfetto.dev, or sum them up by
    `python -m mpisgd trace FILE`.
    """
    check_text("start_timeline", "path", path)
    queue, errors = world().queue, []

    def action() -> None:
        try:
            open_timeline(path, queue.wire)
        except InvalidArgument as exc:  # on all ranks: no reason not to use the queue any more
            errors.append(exc)

    queue.run(Operation("start_timeline", extra=f"path={path}"), action)
    if errors:
        raise errors[0]


def stop_timeline() -> None:
    """End the timeline, and write its file; nothing where none is recorded. Collective over the job."""
    world().queue.run(Operation("stop_timeline"), close_timeline)


def open_timeline(path: str, wire: "Communicator", mark_cycles: bool = False) -> None:
    """Record into `path` from now on, and no longer into another file. Collective over `wire`'s ranks.

    Args:
        path: see `start_timeline`.
        wire: over all ranks; duplicated.
        mark_cycles: whether the moments are noted when the ranks negotiate.
    """
    global _session
    if _session is not None and (_session.path, _session.mark_cycles) == (path, mark_cycles):
        return
    close_timeline()
    _session = Session(path, wire.duplicate(), mark_cycles)
    tracing.sink = _session.recorder
    at_end = current_job().at_end
    if close_timeline not in at_end:
        at_end.append(close_timeline)
    atexit.register(tracing.flush)  # for a program that ends without the others


def close_timeline() -> None:
    """Record no more, and write the file. Collective over the job, in the order of one of its queues."""
    global _session
    session, _session, tracing.sink = _session, None, None
    if session is not None:
        session.close()
        atexit.unregister(tracing.flush)


def abandon_timeline() -> None:
    """Record no more: a rank was lost. What each rank has recorded stays in its own file."""
    global _session
    session, _session, tracing.sink = _session, None, None
    if session is not None:
        session.recorder.close()
        atexit.unregister(tracing.flush)


# -- one file of all parts -------------------------------------------------------------------------------


def _write_whole(wire: "Communicator", part: Path, whole: Path) -> None:
    with whole.open("wb") as out:
        for piece in _pieces_of(part):
            out.write(piece)
        for rank in range(1, wire.size):
            for piece in _received(wire, rank):
                out.write(piece)
        out.write(closing_line().encode())


def _pieces_of(part: Path) -> Iterator[bytes]:
    """Return a part without its end, in pieces; only the first rank's has a beginning, too."""
    end = part.stat().st_size - len(closing_line())
    with part.open("rb") as file:
        while (left := end - file.tell()) > 0:
            yield file.read(min(PIECE_BYTES, left))


def _send_part(wire: "Communicator", part: Path) -> None:
    begin = len("[\n")
    for piece in itertools.chain(_pieces_of(part), [b""]):
        content, begin = bytearray(piece[begin:]), 0
        length = torch.tensor([len(content)])
        _through(wire, lambda length=length: wire.isend(length, 0, TAG))  # type: ignore[misc]
        if content:
            memory = torch.frombuffer(content, dtype=torch.uint8)
            _through(wire, lambda memory=memory: wire.isend(memory, 0, TAG))  # type: ignore[misc]


def _received(wire: "Communicator", rank: int) -> Iterator[bytes]:
    length = torch.zeros(1, dtype=torch.int64)
    while True:
        _through(wire, lambda: wire.irecv(length, rank, TAG))
        if not int(length):
            return
        memory = torch.empty(int(length), dtype=torch.uint8)
        _through(wire, lambda memory=memory: wire.irecv(memory, rank, TAG))  # type: ignore[misc]
        yield memory.numpy().tobytes()


def _through(wire: "Communicator", start: Callable[[], Any]) -> None:
    request = start()
    if not Backoff(LIMIT_S).wait_for(lambda: wire.poll([request])):
        raise CollectiveTimeout(f"timeline: rank {wire.rank} has waited {LIMIT_S:g} s for another's file")
