"""The program that runs another framework beside a rank: `python -m mpisgd.bench.peers.worker FOLDER`.

It listens on a socket in FOLDER, named after its rank in a job of its own, and serves the rank that connects:
it receives (method, arguments) and returns a value or an exception. Between requests it sleeps, and it exits
when the rank disconnects. It exits abruptly on purpose: torch's gloo sometimes aborts in its own clean-up.
"""

import contextlib
import os
import sys
from collections.abc import Set
from multiprocessing.connection import Listener
from typing import Any

import torch

from mpisgd.bench.measure import Unavailable
from mpisgd.bench.payload import WrongResult
from mpisgd.bench.peers.framework import Framework, Rendezvous
from mpisgd.config import launcher_rank

__all__ = ["Worker"]


class Worker:
    """Answers the requests of one rank."""

    def __init__(self) -> None:
        self._framework: Framework | None = None

    def load(self, name: str, cores: Set[int], num_threads: int, rendezvous: Rendezvous) -> tuple[int, str]:
        """Import a framework, for some cores, and meet the others; return this process's id and a version."""
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(num_threads)
        self._framework = _framework(name)
        version = self._framework.version()
        self._framework.join(rendezvous)
        return os.getpid(), version

    def answer(self, method: str, args: tuple[Any, ...]) -> Any:
        """Return the answer to a request, or the exception that it raised."""
        target = self if method == "load" else self._framework
        try:
            return getattr(target, method)(*args)
        except (Unavailable, WrongResult) as exc:
            return exc
        except Exception as exc:  # the rank reports it, whatever it is, and goes on without
            return Unavailable(f"{type(exc).__name__}: {' '.join(str(exc).split())[:300]}")


def _framework(name: str) -> Framework:
    if name == "gloo":
        from mpisgd.bench.peers.gloo import Gloo

        return Gloo()
    from mpisgd.bench.peers.horovod import Horovod

    return Horovod()


def main(folder: str) -> None:
    """Serve until the rank disconnects."""
    worker = Worker()
    listener = Listener(f"{folder}/{launcher_rank() or 0}")  # never closed: the rank removes the folder
    connection = listener.accept()
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send(worker.answer(*connection.recv()))


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stderr.flush()
    os._exit(0)
