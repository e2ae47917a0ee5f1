"""The checks of `./scripts/gpu_check` hold, and each fails when the fault that it looks for is put in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from gpu_checks import endings, streams, trainings
from gpu_checks.catalog import CHECKS
from gpu_checks.gpu import FAILS, HOLDS, Finding, Gpu, LeftOut
from gpu_under_test import IS_SIMULATED
from simulated_gpu.nccl import SimulatedWork
from torch import Tensor
from verdicts import everyone, referee

import mpisgd
from mpisgd.accelerator.runtime import Cuda, runtime
from mpisgd.gradients.launcher import BucketLauncher
from mpisgd.gradients.reducer import GradientReducer
from mpisgd.job.lifecycle import world
from mpisgd.methods.sharded import synchronizer as sharded_synchronizer
from mpisgd.transport.device import device_work
from mpisgd.transport.device.channel import Channel
from mpisgd.transport.device.nccl import Nccl, NcclWork
from mpisgd.transport.device.stream_guard import StreamGuard

Run = Callable[[Gpu], Finding]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    monkeypatch.setattr(Gpu, "_simulate", lambda self: None)  # tests/gpu has done that
    if IS_SIMULATED:
        runtime().device.used.clear()  # other tests have used GPUs of other ranks
    return Gpu(simulated=IS_SIMULATED, quick=True)


def verdict(check: Run, gpu: Gpu) -> tuple[str, str]:
    """What all ranks have found: FAILS where one of them has."""
    try:
        finding = check(gpu)
        found = (finding.verdict, f"expected {finding.expected}; seen {finding.seen}")
    except (mpisgd.MpisgdError, RuntimeError) as exc:  # a check's rank then ends its job
        found = (FAILS, repr(exc))
    gpu.synchronize()
    found_by = referee().allgather(found)
    return next((each for each in found_by if each[0] == FAILS), found_by[0])


# Those of which a fault ends the process are in tests/launch.
IN_PROCESS = {
    "future": streams.by_mpisgd,
    "future-backend": streams.by_backend,
    "future-nccl": streams.by_nccl_of_torch,
    "hook": streams.by_hook,
    "ddp-hook": streams.by_ddp_hook,
    "packed-memory": streams.of_packed_tensors,
    "horovod-memory": streams.of_horovod,
    "cpu-and-gpu": trainings.embedding_below_gpu,
    "wait-again": endings.limit_of_a_wait,
    "reopen": endings.abort_and_reopen,
    "messages": streams.crossing,
    "contexts": streams.own_gpu_only,
    "scaler": trainings.overflow_with_offload,
    "graph": trainings.operation_in_a_graph,
    "compile": trainings.compiled_model,
    "profile": trainings.large_model,
}


class Mutation(NamedTuple):
    """A fault of mpisgd.

    Attributes:
        check: what must find it.
        owner: where it is.
        name: what is changed there.
        wrong: what is made of what is there.
        by: the transport that it concerns; None: all.
        min_size: ranks that show it.
    """

    check: str
    owner: Any
    name: str
    wrong: Callable[[Any], Any]
    by: str | None = None
    min_size: int = 1


def _orders_no_stream(_: Any) -> Any:
    return lambda stream: torch.futures.Future()


def _completes_at_once(_: Any) -> Any:
    def get_future(self: Any) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future

    return get_future


def _uses_the_limit_of_torch(follow: Any) -> Any:
    """NCCL's communicator ends with the first wait that does."""

    def follows(self: NcclWork, timeout_s: float | None = None) -> None:
        if timeout_s is None:
            follow(self)
        elif not _waits(self._works, timeout_s):
            raise mpisgd.CollectiveTimeout("not in time")

    return follows


def _waits(works: Any, timeout_s: float) -> bool:
    import datetime

    try:
        return all(work.wait(datetime.timedelta(seconds=timeout_s)) for work in works)
    except dist.DistBackendError:
        return False


def _waits_for_the_gpu(begin: Any) -> Any:
    def begins(self: Any, *arguments: Any, **options: Any) -> Any:
        runtime().module.current_stream().synchronize()
        return begin(self, *arguments, **options)

    return begins


def _does_not_wait_for_the_fill(launch: Any) -> Any:
    def launches(self: Any, transfer: Any) -> None:
        transfer.ready = runtime().new_stream(self.device).record_event()
        launch(self, transfer)

    return launches


def _launches_twice(launch: Any) -> Any:
    """As two threads that find a bucket complete at the same time."""

    def launches(self: Any, in_flight: Any, place: int) -> None:
        launch(self, in_flight, place)
        launch(self, in_flight, place)

    return launches


MUTATIONS = {
    "two threads send a bucket": Mutation(
        "cpu-and-gpu", BucketLauncher, "launch", _launches_twice, min_size=2
    ),
    "threads begin on GPU 0": Mutation(
        "contexts", Cuda, "inherit_device", lambda _: lambda self, number: None, min_size=2
    ),
    "a future orders no streams": Mutation("future", device_work, "future_on", _orders_no_stream, "nccl"),
    "a future of the backend orders no streams": Mutation(
        "future-backend", device_work, "future_on", _orders_no_stream, "nccl"
    ),
    "a future of torch's NCCL orders no streams": Mutation(
        "future-nccl", SimulatedWork, "get_future", _completes_at_once, "nccl"
    ),
    "DDP's hook reads a bucket in flight": Mutation(
        "hook", device_work, "future_on", _orders_no_stream, "nccl"
    ),
    "DDP reads a bucket in flight": Mutation(
        "ddp-hook", device_work, "future_on", _orders_no_stream, "nccl", min_size=2
    ),
    "a message does not wait for what produces it": Mutation(
        "messages", Channel, "_launch", _does_not_wait_for_the_fill, "nccl", min_size=2
    ),
    "gradients of a compiled model stay as they are": Mutation(
        "compile", GradientReducer, "reduce", lambda _: lambda *arguments, **options: None, min_size=2
    ),
    "a capture goes unnoticed": Mutation(
        "graph", Cuda, "is_capturing", lambda _: lambda self: False, "nccl", min_size=2
    ),
    "nobody tells the allocator of a second stream": Mutation(
        "packed-memory", Tensor, "record_stream", lambda _: lambda self, stream: None, "nccl"
    ),
    "Horovod does not tell the allocator of a second stream": Mutation(
        "horovod-memory", Tensor, "record_stream", lambda _: lambda self, stream: None, "nccl"
    ),
    "a wait with a limit ends NCCL": Mutation(
        "wait-again", NcclWork, "follow", _uses_the_limit_of_torch, "nccl"
    ),
    "a copy does not wait for what produces the tensor": Mutation(
        "future",
        StreamGuard,
        "through",
        lambda _: lambda self, part: lambda: _on(self.stream, part),
        "mpi",
        min_size=2,
    ),
    "a closed group keeps NCCL's communicator": Mutation(
        "reopen", Nccl, "close", lambda _: lambda self: None, "nccl"
    ),
    # By NCCL the ranks would then wait for each other for ever.
    "an overflow of pieces is not told": Mutation(
        "scaler", sharded_synchronizer, "all_reduce", lambda _: lambda *arguments: None, "mpi", min_size=2
    ),
    "a step waits for the GPU": Mutation(
        "profile", GradientReducer, "reduce", _waits_for_the_gpu, "nccl", min_size=2
    ),
}


def _on(stream: Any, part: Callable[[], Any]) -> None:
    with runtime().on(stream):
        part()


def is_by(transport: str) -> bool:
    """Whether the world's tensors travel so."""
    return world().device is not None and (world().device.selection.name == "nccl") == (transport == "nccl")


@pytest.fixture(autouse=True)
def no_group_of_torch_is_left() -> Any:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("name", IN_PROCESS)
def test_a_check_holds(gpu, name):
    if mpisgd.size() < CHECKS[name].min_size:
        pytest.skip("takes more ranks")
    found, text = verdict(IN_PROCESS[name], gpu)
    everyone(found == HOLDS, f"{found}: {text}")


@pytest.mark.mpi(min_size=2)
def test_contexts_are_not_looked_for_where_none_can_be_seen(gpu, monkeypatch):
    """The control has left one on GPU 0."""
    monkeypatch.setattr(Gpu, "has_context", lambda self, number: number == self.module.current_device())
    with pytest.raises(LeftOut, match="the control"):
        streams.own_gpu_only(gpu)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_check_fails_with_its_fault(gpu, name, request, monkeypatch):
    mutation = MUTATIONS[name]
    if mutation.by == "mpi":
        request.getfixturevalue("staged")
        mpisgd.all_reduce(gpu.zeros(1))
    if mpisgd.size() < mutation.min_size or (mutation.by is not None and not is_by(mutation.by)):
        pytest.skip("shows on more ranks, or by another transport")
    if mutation.owner is SimulatedWork and not IS_SIMULATED:
        pytest.skip("torch's own cannot be changed")
    right = getattr(mutation.owner, mutation.name)
    monkeypatch.setattr(mutation.owner, mutation.name, mutation.wrong(right))
    found, text = verdict(IN_PROCESS[mutation.check], gpu)
    world().queue.on_mismatch()  # a fault may have ended the NCCL of the world, from which groups are split
    mpisgd.all_reduce(gpu.zeros(1))
    everyone(found == FAILS, f"{found}: {text}")
