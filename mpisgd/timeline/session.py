"""The recording session: start and end of a timeline on all ranks."""

import atexit

from mpisgd import tracing
from mpisgd.arguments import check_text, shown
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.errors import InvalidArgument
from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.job.lifecycle import world
from mpisgd.timeline.clock import align
from mpisgd.timeline.files import Names, names_for
from mpisgd.timeline.recorder import Recorder
from mpisgd.timeline.transfer import send_part, write_whole

__all__ = ["abandon_timeline", "close_timeline", "open_timeline", "start_timeline", "stop_timeline"]


class Session:
    """A timeline that all ranks are recording."""

    def __init__(self, path: str, communicator: GroupCommunicator, mark_cycles: bool) -> None:
        self.path = path
        self.mark_cycles = mark_cycles
        self.communicator = communicator
        self.names: Names = names_for(path, communicator.rank)
        self.recorder = self._open()

    def _open(self) -> Recorder:
        clock = align(self.communicator)
        recorder, problem = None, ""
        try:
            recorder = Recorder(self.names.part, self.communicator.rank, clock, mark_cycles=self.mark_cycles)
        except (OSError, ValueError) as exc:  # ValueError: a zero byte in the name
            problem = f"{str(self.names.part)!r}: {getattr(exc, 'strerror', exc)}"
        problems = self.communicator.all_gather_object(problem)
        if recorder is not None and not any(problems):
            return recorder
        if recorder is not None:
            recorder.close()
        self.communicator.free()
        text = "; ".join(f"rank {rank} cannot write {line}" for rank, line in enumerate(problems) if line)
        raise InvalidArgument(f"timeline: path={shown(self.path)}: {text}")

    def close(self) -> None:
        """Close the files of all ranks and merge them into one. Collective."""
        self.recorder.close()
        if self.names.whole is not None:
            if self.communicator.rank == 0:
                write_whole(self.communicator, self.names.part, self.names.whole)
            else:
                send_part(self.communicator, self.names.part)
            self.communicator.barrier()
            self.names.part.unlink(missing_ok=True)
        self.communicator.free()


_session: Session | None = None


def start_timeline(path: str) -> None:
    """Record the communication of every rank from now on. Collective over the job.

    Args:
        path: the file into which rank 0 writes the recordings of all ranks when the timeline or the program
            ends. Until then, and after a crash, each rank has its own file beside it, NAME.rankN.json. If
            `path` contains `{rank}` or is a folder, there are only the files of the ranks. Environment:
            MPISGD_TIMELINE.

    Raises:
        InvalidArgument: `path` is not a str; found locally. Or a rank cannot write to it; on all ranks.
        CollectiveMismatch: the ranks gave different paths.

    The files are in Chrome's trace format: open them at https://ui.perfetto.dev, or summarize them with
    `python -m mpisgd trace FILE`.
    """
    check_text("start_timeline", "path", path)
    group, errors = world(), []

    def action() -> None:
        try:
            open_timeline(path, group)
        except InvalidArgument as exc:  # on all ranks: no reason not to use the queue any more
            errors.append(exc)

    group.queue.run(Operation("start_timeline", extra=f"path={path}"), action)
    if errors:
        raise errors[0]


def stop_timeline() -> None:
    """End the timeline and write its file; do nothing without one. Collective over the job."""
    world().queue.run(Operation("stop_timeline"), close_timeline)


def open_timeline(path: str, group: Group, mark_cycles: bool = False) -> None:
    """Record into `path` from now on, and close an earlier timeline. Collective, in the group's order.

    Args:
        path: see `start_timeline`.
        group: of all ranks of the job.
        mark_cycles: whether to mark the cycles of Horovod's negotiation.
    """
    global _session
    if _session is not None and (_session.path, _session.mark_cycles) == (path, mark_cycles):
        return
    close_timeline()
    _session = Session(path, group.queue.communicator.duplicate(), mark_cycles)
    tracing.add_sink(_session.recorder)
    tracing.at_loss.append(abandon_timeline)
    if close_timeline not in group.job.at_end:
        group.job.at_end.append(close_timeline)
    atexit.register(tracing.flush)  # for a program that ends without the others


def close_timeline() -> None:
    """Stop recording and write the file. Collective over the job, in the order of one of its queues."""
    if (session := _stop_recording()) is not None:
        session.close()


def abandon_timeline() -> None:
    """Stop recording after the loss of a rank: each rank's recording stays in its own file."""
    if (session := _stop_recording()) is not None:
        session.recorder.close()


def _stop_recording() -> Session | None:
    global _session
    session, _session = _session, None
    if session is not None:
        tracing.remove_sink(session.recorder)
        tracing.at_loss.remove(abandon_timeline)
    atexit.unregister(tracing.flush)
    return session
