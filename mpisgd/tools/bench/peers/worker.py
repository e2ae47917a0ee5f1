"""The program that runs another framework beside a rank: `python -m mpisgd.tools.bench.peers.worker FOLDER`.

It listens on a socket in FOLDER, named after its rank in a job of its own, and serves the rank that connects:
it sends its process id, then receives (method, arguments) and returns a value or an exception. Between
requests it sleeps, and it exits when the rank disconnects. It exits abruptly on purpose: torch's gloo
sometimes aborts in its own clean-up.
"""

import contextlib
import os
import pkgutil
import sys
from collections.abc import Set
from multiprocessing.connection import Listener
from typing import Any

import torch

from mpisgd.accelerator.runtime import runtime
from mpisgd.config import launcher_rank
from mpisgd.tools.bench.measure import Unavailable, Variant, WrongResult
from mpisgd.tools.bench.peers.framework import FRAMEWORKS, REFERENCES, Framework, Rendezvous

__all__ = ["Worker"]


class Worker:
    """Answers the requests of one rank: its methods are what can be requested."""

    _framework: Framework  # once it is loaded

    def __init__(self) -> None:
        self._variants: dict[str, Variant] = {}

    def load(self, name: str, cores: Set[int], num_threads: int, rendezvous: Rendezvous) -> str:
        """Import a framework, for some cores, and meet the others; return its version."""
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(num_threads)
        runtime().take_device(rendezvous.topology.local_rank)  # that of the rank, as `mpisgd.init` does
        self._framework = pkgutil.resolve_name({**FRAMEWORKS, **REFERENCES}[name])(rendezvous)
        return self._framework.version

    def check(self, name: str, task: Any) -> None:
        """Make the variant `name`, and check it; see `Variant`."""
        self._variants[name] = self._framework.make(task)
        self._variants[name].check()

    def time(self, name: str, calls: int, num_threads: int) -> float:
        """See `Variant`."""
        self._variants[name].num_threads = num_threads
        return self._variants[name].time(calls)

    def release(self, name: str) -> None:
        """Give the memory of a variant back, if there is one."""
        self._variants.pop(name, None)


def answer(worker: Worker, method: str, args: tuple[Any, ...]) -> Any:
    """Return the answer to a request, or the exception that it raised."""
    try:
        return getattr(worker, method)(*args)
    except (Unavailable, WrongResult) as exc:
        return exc
    except Exception as exc:  # the rank reports it, whatever it is, and goes on without
        return Unavailable(f"{type(exc).__name__}: {' '.join(str(exc).split())[:300]}")


def main(folder: str) -> None:
    """Serve until the rank disconnects."""
    worker = Worker()
    listener = Listener(f"{folder}/{launcher_rank() or 0}")  # never closed: the rank removes the folder
    connection = listener.accept()
    with contextlib.suppress(EOFError, OSError):
        connection.send(os.getpid())
        while True:
            connection.send(answer(worker, *connection.recv()))


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stderr.flush()
    os._exit(0)
