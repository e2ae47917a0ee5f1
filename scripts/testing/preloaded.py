"""A server that has imported torch, and forks a process for each program.

    python preloaded.py SOCKET EXECUTABLE [MODULE ...]

Most jobs of the tests last a second, and to import torch takes each rank another one. mpirun starts
`preloaded_client.py` as a rank; the program then runs in a child of this server, with the rank's arguments,
environment, working directory, files, cores, priority and namespaces (on an emulated host), and whatever
mpirun does to the rank is done to the child.

Its end leaves torch as it is: to clear its modules and to unload its libraries takes longer than most of
these programs. The program's own modules, objects, threads and libraries end as in any program.

It is not a start of Python: what a test says about imports, memory, the end, or the command line of a process
needs one. So does what hash seeds could hide, which are the same on all ranks here.
"""

import array
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import marshal
import os
import runpy
import select
import signal
import socket
import struct
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

preloaded: dict[str, types.ModuleType] = {}


def leave_preloaded_modules() -> None:
    """Hide what was preloaded from the end of Python, which clears what it finds in `sys.modules`."""
    for name in preloaded:
        sys.modules.pop(name, None)


atexit.register(leave_preloaded_modules)  # what is registered first, before torch's, runs last

import numpy  # noqa: E402
import psutil  # noqa: E402, F401
import sklearn.datasets  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
import torch.distributed.tensor  # noqa: E402
import typer  # noqa: E402

NUM_FILES = 3
MOST_BYTES = 2**20


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return what a client wants run, and its standard files."""
    size = array.array("i").itemsize
    start, ancillary, *_ = connection.recvmsg(8, socket.CMSG_SPACE(NUM_FILES * size))
    files = array.array("i", ancillary[0][2])
    wanted = b""
    while len(wanted) < int.from_bytes(start, "big"):
        wanted += connection.recv(MOST_BYTES)
    return marshal.loads(wanted), list(files)


def become(wanted: dict[str, Any], files: list[int]) -> None:
    """Make this process what the client's would be, as far as a running Python can."""
    os.setpgid(0, 0)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(wanted["cwd"])
    os.environ.clear()
    os.environ.update(wanted["env"])
    os.sched_setaffinity(0, wanted["cores"])
    os.nice(wanted["niceness"] - os.getpriority(os.PRIO_PROCESS, 0))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(wanted["cores"]))))
    if torch._is_device_backend_autoload_enabled():  # else importing torch would do so
        torch._import_device_backends()
    numpy.random.seed()  # each process its own; Python's random sees to that itself
    if "PYTHONUNBUFFERED" in os.environ:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]


def read_options(args: list[str], own_paths: list[str]) -> Callable[[], None]:
    """Take arguments as Python does: module path, `sys.argv`, warnings; return what runs the program."""
    while args[0] == "-W":
        warnings._setoption(args[1])  # type: ignore[attr-defined]
        sys.warnoptions.append(args[1])
        args = args[2:]
    sys.orig_argv = [sys.executable, *args]
    what, *rest = args
    if what == "-m":
        folder, sys.argv = os.getcwd(), rest
        run = functools.partial(runpy.run_module, rest[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        folder, sys.argv = "", ["-c", *rest[1:]]
        run = functools.partial(run_text, rest[0], "<string>")
    else:
        folder, sys.argv = os.path.dirname(os.path.realpath(what)), args
        run = functools.partial(run_text, Path(what).read_text(), what)
    more = os.environ.get("PYTHONPATH", "")
    sys.path[:] = [folder, *(path for path in more.split(os.pathsep) if path), *own_paths]
    return run


def run_text(text: str, file: str) -> None:
    """Run a program as the module `__main__`."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = file
    exec(compile(text, file, "exec"), main.__dict__)


def end_as_python(run: Callable[[], None]) -> None:
    """Run something; what it raises ends this process as in any program, and shows none of our frames."""
    try:
        run()
    except SystemExit:
        raise
    except BaseException as exc:
        trace = exc.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(exc), exc.with_traceback(trace), trace)
        sys.exit(128 + signal.SIGINT if isinstance(exc, KeyboardInterrupt) else 1)


class Namespaces:
    """Those of a client that are not the server's: it is on an emulated host."""

    def __init__(self, connection: socket.socket) -> None:
        size = struct.calcsize("3i")
        client, *_ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        self._others = [
            os.open(f"/proc/{client}/ns/{kind}", os.O_RDONLY)
            for kind in ("ipc", "uts", "net", "mnt")
            if not os.path.samefile(f"/proc/{client}/ns/{kind}", f"/proc/self/ns/{kind}")
        ]
        pids = f"/proc/{client}/ns/pid"
        elsewhere = not os.path.samefile(pids, "/proc/self/ns/pid")
        self._processes = os.open(pids, os.O_RDONLY) if elsewhere else None

    def fork(self) -> int:
        """As os.fork; a namespace of processes is that of children alone."""
        if self._processes is None:
            return os.fork()
        own = os.open("/proc/self/ns/pid", os.O_RDONLY)
        set_namespace(self._processes)
        child = os.fork()
        if child:
            set_namespace(own)
            self._close()
        os.close(own)
        return child

    def enter(self) -> None:
        """Enter them, in the child."""
        for descriptor in self._others:
            set_namespace(descriptor)
        self._close()

    def _close(self) -> None:
        for descriptor in (self._processes, *self._others):
            if descriptor is not None:
                os.close(descriptor)


def set_namespace(descriptor: int) -> None:
    """As os.setns, which Python has from 3.12 on."""
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), "setns failed")


class Server:
    """Accepts clients, forks, tells them how their program ended, and ends it where they are gone."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._poll = select.poll()
        self._children: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of the process
        self._clients: dict[int, int] = {}  # by that of the connection: the process

    def serve(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return what to run in each child, and None here, once standard input is closed."""
        for file in (0, self._listener.fileno()):
            self._poll.register(file, select.POLLIN)
        while True:
            for file, _ in self._poll.poll():
                if file == 0:
                    return None
                if file == self._listener.fileno():
                    if (job := self._start()) is not None:
                        return job
                elif file in self._children:
                    self._tell_the_end(file)
                elif file in self._clients:
                    self._pass_on(file)

    def _start(self) -> tuple[dict[str, Any], list[int]] | None:
        """Fork for a new client; return its wishes in the child."""
        connection, _ = self._listener.accept()
        wanted, files = receive(connection)
        namespaces = Namespaces(connection)
        if (child := namespaces.fork()) == 0:
            namespaces.enter()
            self._listener.close()
            for other in (connection, *(client for _, client in self._children.values())):
                other.close()
            for descriptor in self._children:
                os.close(descriptor)
            return wanted, files
        for file in files:
            os.close(file)
        descriptor = os.pidfd_open(child)
        self._children[descriptor] = child, connection
        self._clients[connection.fileno()] = child
        self._poll.register(descriptor, select.POLLIN)
        self._poll.register(connection, select.POLLIN)
        return None

    def _tell_the_end(self, descriptor: int) -> None:
        child, connection = self._children.pop(descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        self._poll.unregister(descriptor)
        os.close(descriptor)
        if self._clients.pop(connection.fileno(), None) is not None:
            self._poll.unregister(connection)
        with contextlib.suppress(OSError):
            connection.sendall(code.to_bytes(4, "big", signed=True))
        connection.close()

    def _pass_on(self, file: int) -> None:
        """Send the child the signals that the client was sent; one that is gone was killed."""
        connection = next(c for _, c in self._children.values() if c.fileno() == file)
        try:
            signals = connection.recv(64)
        except OSError:
            signals = b""
        for number in signals or [signal.SIGKILL]:
            os.kill(self._clients[file], number)
        if not signals:
            self._poll.unregister(file)
            del self._clients[file]


def load_typer() -> None:
    """Run a command, so that what typer loads for the first one is loaded."""
    app = typer.Typer()
    app.command()(lambda: None)
    typer.main.get_command(app).main([], standalone_mode=False)


def keep_preloaded() -> None:
    """Let the modules outlive Python, and their libraries the process; Python's own end as ever."""
    own = {*sys.stdlib_module_names, "__main__"}
    preloaded.update((name, m) for name, m in sys.modules.items() if name.partition(".")[0] not in own)
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # each of torch's would take an operator out of its tables
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(preloaded))
    c = ctypes.CDLL(None)
    # Each runs before what was registered earlier, and after what the program's libraries register.
    c.on_exit(c._exit, None)
    c.on_exit(c.fcloseall, None)


def main(path: str, executable: str, *modules: str) -> None:
    """Serve at a socket; in a child, run its program."""
    load_typer()
    for module in modules:
        importlib.import_module(module)
    keep_preloaded()
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.executable = executable  # where it is that of this server, what a program starts is preloaded, too
    own_paths = [place for place in sys.path[1:] if place not in given]
    gc.collect()
    gc.freeze()  # else each program's collections go through torch, and copy its memory page by page
    server = Server(path)
    print("ready", flush=True)
    if (job := server.serve()) is not None:
        wanted, files = job
        become(wanted, files)
        end_as_python(read_options(wanted["args"], own_paths))


if __name__ == "__main__":
    main(*sys.argv[1:])
