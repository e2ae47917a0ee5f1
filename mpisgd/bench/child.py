"""The program that runs another framework beside a rank.

    python -m mpisgd.bench.child WHERE FRAMEWORK THREADS

WHERE is the number of an open socket, or a folder in which each rank has a socket for the process that is
the same rank of a second job. The rank is obeyed over it: (method, arguments) come, ("done", value),
("wrong", text) or ("failed", text) go back. Between commands this program sleeps, and it ends with the rank,
however that ends. The end is abrupt on purpose: torch's gloo sometimes aborts in its own clean-up.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from mpisgd.bench.measure import Unavailable, Variant
from mpisgd.bench.network import Meeting
from mpisgd.bench.payload import WrongResult
from mpisgd.config import launcher_rank

__all__ = ["Framework", "Servant"]

PR_SET_PDEATHSIG = 1


class Framework(Protocol):
    """Another framework, in a process of its own for each rank."""

    def version(self) -> str:
        """Return what it is called in the record."""

    def host(self, address: str) -> int:
        """Listen for the others on `address`, on rank 0 only; return the port."""

    def join(self, meeting: Meeting) -> None:
        """Meet the others."""

    def make(self, task: Any) -> Variant:
        """Return what does `task`: a `Case` or a `StepTask`."""


class Servant:
    """Answers the commands of one rank."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework
        self._variants: dict[str, Variant] = {}

    def answer(self, method: str, *args: Any) -> Any:
        """Do what `method` says."""
        if method in ("version", "host", "join"):
            return getattr(self._framework, method)(*args)
        name, *rest = args
        if method == "make":
            self._variants[name] = self._framework.make(*rest)
            return None
        if method == "release":
            self._variants.pop(name).release()
            return None
        return getattr(self._variants[name], method)(*rest)


def load(name: str) -> Framework:
    """Import the framework called `name`."""
    if name == "gloo":
        from mpisgd.bench.gloo import Gloo

        return Gloo()
    from mpisgd.bench.hvd import Horovod

    return Horovod()


def reply(servant: Servant, method: str, args: tuple[Any, ...]) -> tuple[str, Any]:
    """Return the answer to a command, or what went wrong."""
    try:
        return "done", servant.answer(method, *args)
    except WrongResult as exc:
        return "wrong", str(exc)
    except Unavailable as exc:
        return "failed", str(exc)
    except Exception as exc:  # whatever it is, the rank says it and goes on without
        return "failed", f"{type(exc).__name__}: {' '.join(str(exc).split())[:300]}"


def meet(where: str) -> Connection:
    """Return the connection to this process's rank."""
    if where.isdigit():
        return Connection(int(where))
    meeting = socket.socket(socket.AF_UNIX)
    meeting.connect(f"{where}/rank-{launcher_rank() or 0}")
    return Connection(meeting.detach())


def main(where: str, name: str, num_threads: int) -> None:
    """Serve until the rank hangs up."""
    _die_with_parent()
    os.dup2(2, 1)  # what libraries print must not reach the terminal
    torch.set_num_threads(num_threads)
    with meet(where) as connection, contextlib.suppress(EOFError, OSError):
        try:
            servant = Servant(load(name))
        except Exception as exc:
            connection.send(("failed", f"{type(exc).__name__}: {exc}"))
            return
        connection.send(("done", None))
        while True:
            method, args = connection.recv()
            connection.send(reply(servant, method, args))


def _die_with_parent() -> None:
    """Ask Linux to end this process with its parent, even while it is stopped."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    sys.stderr.flush()
    os._exit(0)
