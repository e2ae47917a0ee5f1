"""A stranger that speaks torch's RPC: it calls functions of whoever listens, as soon as a port opens.

    python scripts/stranger_rpc.py FOLDER NAME STARTS

It has an agent of its own ready, whose table of addresses is one that it fills in itself. What it calls
leaves a file in FOLDER if it is done: `pickled` by a pickled call, `operator` by one of torch's operators.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.autograd
import torch.distributed.rpc as api
from stranger_meeting import LIMIT_S, announce, await_all, leave_root

ANSWER_S = 0.5
LISTENS = "0A"


def open_ports() -> set[int]:
    """The ports of this host's loopback on which somebody listens."""
    with open("/proc/net/tcp") as table:
        entries = [line.split() for line in table.readlines()[1:]]
    return {
        int(entry[1][-4:], 16) for entry in entries if entry[3] == LISTENS and entry[1].startswith("0100007F")
    }


class Agent:
    """An agent that believes what it is told: that `worker0` is where the stranger wants to call."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        for key, value in (("names/0", "worker0"), ("names/1", "worker1")):
            self._store.set(key, value)
        options = api.TensorPipeRpcBackendOptions(
            rpc_timeout=ANSWER_S, _transports=["uv"], _channels=["basic"]
        )
        self._agent = api.TensorPipeAgent(self._store, "worker1", 1, 2, options, {}, [])
        self._starting = threading.Thread(target=lambda: api.api._init_rpc_states(self._agent))
        self._starting.start()
        self._store.get("addrs/worker1")  # it listens by now

    def call(self, port: int, marks: Path) -> bool:
        """Call functions there; whether anything of it was done."""
        self._store.set("addrs/worker0", f"uv://127.0.0.1:{port}")
        self._starting.join()
        calls = [
            api.rpc_async("worker0", os.mkdir, (f"{marks}-pickled",)),
            api.rpc_async("worker0", torch.from_file, (f"{marks}-operator", True, 1)),
        ]
        answered = False
        for call in calls:
            try:
                call.wait()
                answered = True
            except Exception as exc:
                answered |= "FileExistsError" in str(exc)
        return answered or Path(f"{marks}-pickled").exists() or Path(f"{marks}-operator").exists()

    def end(self) -> None:
        """End the agent."""
        if self._starting.is_alive():
            self._store.set("addrs/worker0", "uv://127.0.0.1:1")
            self._starting.join()
        api.shutdown(graceful=False)


def new_port(known: set[int], done: Path) -> int | None:
    """The first port that opens, None where the start is over and none has."""
    deadline = time.monotonic() + LIMIT_S
    while not done.exists() and time.monotonic() < deadline:
        for _ in range(50):
            if found := open_ports() - known:
                return min(found)
    return None


def main() -> None:
    """Watch and call, as often as the job starts."""
    folder, name, starts = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    if name.startswith("other"):
        leave_root()
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    torch.distributed.autograd._init(1)
    for start in range(starts):
        agent = Agent()
        announce(folder, f"{name} ready {start}")
        await_all(folder, [f"watch {start}"])  # by now all strangers have ports of their own
        known = open_ports()
        announce(folder, f"{name} watches {start}")
        port = new_port(known, folder / f"done {start}")
        if port is not None:
            got_in = agent.call(port, folder / f"{name}-{start}")
            announce(folder, f"{name} {'got in' if got_in else 'refused'} {start}")
        else:
            announce(folder, f"{name} saw nothing {start}")
        agent.end()


if __name__ == "__main__":
    main()
