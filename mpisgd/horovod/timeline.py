"""`start_timeline` and `stop_timeline`."""

from mpisgd.arguments import check_flag, check_text
from mpisgd.horovod import state
from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.engine.recording import start_request, stop_request

__all__ = ["start_timeline", "stop_timeline"]


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record what all ranks do from now on, into one file that is there once the timeline has ended.

    On one rank or on several: the first call counts for all. See `mpisgd.start_timeline`.

    Args:
        file_path: as there.
        mark_cycles: whether to note when the ranks negotiate.

    Raises:
        InvalidArgument: a rank cannot write there.
    """
    check_text("start_timeline", "file_path", file_path)
    check_flag("start_timeline", "mark_cycles", mark_cycles)
    engine = state.engine()
    engine.wait(engine.submit(Entry(start_request(file_path, mark_cycles))))


def stop_timeline() -> None:
    """End the timeline on all ranks, and write its file; nothing where none is recorded."""
    engine = state.engine()
    engine.wait(engine.submit(Entry(stop_request())))
