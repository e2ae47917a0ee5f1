"""What mpirun starts instead of Python: `preloaded_client.py SOCKET PROGRAM ARGS`; see preloaded.py."""

import contextlib
import marshal
import os
import signal
import socket
import sys

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


def main() -> None:
    """Have the program run, pass on signals, and end as it ends."""
    wanted = {
        "args": sys.argv[2:],
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "cores": sorted(os.sched_getaffinity(0)),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
    }
    text = marshal.dumps(wanted)
    server = socket.socket(socket.AF_UNIX)
    server.connect(sys.argv[1])
    socket.send_fds(server, [len(text).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(text)

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # the program has just ended, and its code is on the way
            server.sendall(bytes([number]))

    for number in SIGNALS:
        signal.signal(number, pass_on)
    answer = server.recv(4)
    if len(answer) < 4:  # not an exit code of 0: nobody knows how the program ended
        sys.exit("preloaded_client: the server has ended before the program")
    code = int.from_bytes(answer, "big", signed=True)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
