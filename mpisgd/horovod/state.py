"""The one engine of this rank, its process sets, and its start and end."""

import atexit
import sys
from typing import Any

from mpisgd.errors import MpisgdError
from mpisgd.horovod.engine.engine import Engine
from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.engine.settings import read_settings
from mpisgd.horovod.engine.timeline import request_of_environment
from mpisgd.horovod.exceptions import HorovodInternalError
from mpisgd.job import lifecycle
from mpisgd.job.job_of_thread import job_place

__all__ = ["engine", "is_initialized", "restart", "start", "stop"]


def _running() -> Engine | None:
    """Return this rank's engine, None where there is none."""
    found: Engine | None = job_place().kept.get(Engine)
    return found


def start(comm: Any = None) -> None:
    """Start the job's world and the engine, unless they run. Collective."""
    if _running() is not None:
        return
    lifecycle.init(comm)
    job_place().kept[Engine] = engine = Engine(lifecycle.current_job(), read_settings(), _say)
    if (request := request_of_environment()) is not None:
        engine.perform(Entry(request))
    atexit.unregister(_leave)
    atexit.register(_leave)  # before the job's own end, which was registered earlier


def stop(lost: MpisgdError | None = None) -> None:
    """Let what was submitted run, and end the engine when all ranks do; where one was lost, at once."""
    running: Engine | None = job_place().kept.pop(Engine, None)
    if running is not None:
        running.close(lost)


def restart() -> None:
    """End the engine, if one runs, and start another on the ranks that there are. Collective.

    Raises:
        HorovodInternalError: a rank is lost, or does not answer; there is no way on without it.
    """
    if (running := _running()) is not None and (broken := running.queue.broken) is not None:
        raise HorovodInternalError(
            f"the ranks cannot start over, since one of them is lost: {broken}; start the job again, from a "
            "checkpoint, or with `mpirun --with-ft ulfm`, where the others go on"
        ) from broken
    stop()
    start()


def _leave() -> None:
    if lifecycle.is_initialized() and not lifecycle.world().queue.broken:
        hooks = lifecycle.current_job().hooks
        try:
            stop()
        except HorovodInternalError as exc:  # the others would wait for this rank, and this one for them
            assert hooks is not None  # this is the end of a process
            hooks.fail(exc)


def _say(text: str) -> None:
    print(f"mpisgd.horovod: {text}", file=sys.stderr, flush=True)


def is_initialized() -> bool:
    """Return whether `init()` was called, and `shutdown()` not since."""
    return _running() is not None


def engine() -> Engine:
    """Return the engine.

    Raises:
        ValueError: it does not run.
    """
    if (running := _running()) is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return running
