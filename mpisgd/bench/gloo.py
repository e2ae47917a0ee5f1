"""torch.distributed on gloo, in a process of its own beside each rank."""

import datetime
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its type stubs forget it

from mpisgd.bench.cases import Case
from mpisgd.bench.measure import Timed, Unavailable, Variant
from mpisgd.bench.network import Meeting
from mpisgd.bench.parallel import torch_step
from mpisgd.bench.payload import Payload
from mpisgd.bench.training import StepTask

__all__ = ["Gloo"]


class Gloo:
    """See `Framework`."""

    def __init__(self) -> None:
        if not (dist.is_available() and dist.is_gloo_available()):
            raise Unavailable("this torch is built without gloo")
        self._store: TCPStore | None = None

    def version(self) -> str:
        """See `Framework`."""
        return f"torch {torch.__version__}"

    def host(self, address: str) -> int:
        """See `Framework`."""
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def join(self, meeting: Meeting) -> None:
        """See `Framework`."""
        timeout = datetime.timedelta(seconds=meeting.timeout_s)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", meeting.interface)
        store = self._store or TCPStore(meeting.address, meeting.port, is_master=False, timeout=timeout)
        dist.init_process_group(
            "gloo", store=store, rank=meeting.rank, world_size=meeting.size, timeout=timeout
        )

    def make(self, task: Any) -> Variant:
        """See `Framework`."""
        return torch_step("torch", task) if isinstance(task, StepTask) else _collective(task)


def _collective(case: Case) -> Variant:
    payload = Payload(case, dist.get_rank())
    return Timed(
        "gloo",
        _calls(payload)[case.collective],
        reset=payload.reset,
        verify=payload.verify,
        start=dist.barrier,
        clock=time.perf_counter,
    )


def _calls(payload: Payload) -> dict[str, Callable[[], Any]]:
    """Return what does each collective on `payload`."""
    given, out, next_root = payload.input, payload.output, payload.next_root
    inputs, outputs = list(given.chunk(payload.case.size)), list(out.chunk(payload.case.size))

    def gather() -> None:
        root = next_root()
        dist.gather(given, outputs if root == payload.rank else None, root)

    def scatter() -> None:
        root = next_root()
        dist.scatter(out, inputs if root == payload.rank else None, root)

    return {
        "all_reduce": lambda: dist.all_reduce(out),
        "reduce": lambda: dist.reduce(out, next_root()),
        "broadcast": lambda: dist.broadcast(out, next_root()),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, given),
        "all_gather": lambda: dist.all_gather_into_tensor(out, given),
        "all_to_all": lambda: dist.all_to_all_single(out, given),
        "gather": gather,
        "scatter": scatter,
    }
