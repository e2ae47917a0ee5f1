"""Schedules by name."""

from mpisgd.arguments import shown
from mpisgd.errors import InvalidArgument
from mpisgd.pipeline.schedules.flushing import GPipe, Interleaved, OneForwardOneBackward
from mpisgd.pipeline.schedules.schedule import Schedule
from mpisgd.pipeline.schedules.stashing import PipeDream, PipeDream2BW

__all__ = ["NAMED_SCHEDULES", "as_schedule"]

NAMED_SCHEDULES: dict[str, Schedule] = {
    "gpipe": GPipe(),
    "1f1b": OneForwardOneBackward(),
    "pipedream-flush": OneForwardOneBackward(),  # the same, as PipeDream-2BW's paper calls it
    "interleaved": Interleaved(),
    "pipedream": PipeDream(),
    "pipedream-2bw": PipeDream2BW(),
}


def as_schedule(schedule: Schedule | str) -> Schedule:
    """Return a schedule, or the one of that name.

    Raises:
        InvalidArgument: it is none.
    """
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, str) and schedule in NAMED_SCHEDULES:
        return NAMED_SCHEDULES[schedule]
    raise InvalidArgument(
        f"pipeline: schedule={shown(schedule)}; expected one of {', '.join(NAMED_SCHEDULES)}, or a schedule "
        "of mpisgd.pipeline"
    )
