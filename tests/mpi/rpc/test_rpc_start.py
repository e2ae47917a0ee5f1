"""How RPC starts and ends: who gets in, what is left, and how often."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from verdicts import everyone, raises_everywhere, referee

import mpisgd
from mpisgd import rpc
from mpisgd.rpc.admission import listening_endpoints
from mpisgd.rpc.worker import Worker

SHORT_S = 0.3


@pytest.fixture(scope="module", autouse=True)
def _ended(job):
    """Other files have RPC running."""
    rpc.shutdown()


@contextlib.contextmanager
def running() -> Iterator[list[list]]:
    """RPC, with the places where each rank listens for it."""
    before = listening_endpoints()
    rpc.init_rpc()
    try:
        yield referee().allgather(sorted(listening_endpoints() - before))
    finally:
        rpc.shutdown()


def works() -> bool:
    """Whether every rank answers this one."""
    ranks = range(mpisgd.size())
    answers = [rpc.rpc_async(rank, torch.add, (torch.tensor(rank), 1)) for rank in ranks]
    return [int(answer.wait()) for answer in answers] == [rank + 1 for rank in ranks]


def open_things() -> dict[str, int]:
    """What this process holds that could be left behind."""
    kinds = [
        os.readlink(entry) for entry in map(str, Path("/proc/self/fd").iterdir()) if os.path.islink(entry)
    ]
    return {
        "sockets": sum(kind.startswith("socket:") for kind in kinds),
        "files": sum(kind.startswith("/") for kind in kinds),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "python threads": threading.active_count(),
        "shared memory": Path("/proc/self/maps").read_text().count("/dev/shm"),
    }


def start_and_end(times: int) -> dict[str, int]:
    for _ in range(times):
        with running():
            everyone(works())
    referee().barrier()
    return open_things()


@pytest.mark.parametrize("times", [2, pytest.param(100, marks=pytest.mark.long)])
def test_starts_and_ends_leave_nothing(times):
    first = start_and_end(1)  # torch keeps some things from the first start on
    last = start_and_end(times)
    everyone(all(last[kind] <= first[kind] for kind in first), f"{first} -> {last}")


def test_it_listens_on_loopback_alone_and_after_the_end_nowhere():
    before = listening_endpoints()
    with running() as places:
        assert all(places)
        assert {endpoint.address for there in places for endpoint in there} == {"127.0.0.1"}
        everyone(works())
    everyone(listening_endpoints() == before)


STRANGER = """
import os, socket, sys
if os.getuid() == 0:
    os.setuid(65534)
with socket.socket() as connection:
    connection.settimeout(float(sys.argv[3]))
    try:
        connection.connect((sys.argv[1], int(sys.argv[2])))
    except TimeoutError:
        print("refused")
    else:
        print("connected", flush=True)
        connection.settimeout(20)
        try:
            print("closed" if sys.argv[4] == "stay" and connection.recv(1) == b"" else "")
        except ConnectionResetError:
            print("closed")
"""


def start_stranger(address: str, port: int, then: str) -> subprocess.Popen[str]:
    """Start another process, of another user where that can be, that connects."""
    command = [sys.executable, "-S", "-c", STRANGER, address, str(port), str(SHORT_S), then]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def stranger(address: str, port: int) -> str:
    """What becomes of its connection."""
    said, _ = start_stranger(address, port, "go").communicate(timeout=30)
    return said.strip()


def test_a_stranger_is_refused():
    with running() as places:
        there = places[(mpisgd.rank() + 1) % mpisgd.size()]
        everyone({stranger(*endpoint) for endpoint in there} == {"refused"})
        everyone(works())


def test_the_stranger_is_heard_where_nothing_refuses_it():
    with socket.create_server(("127.0.0.1", 0)) as open_to_all:
        everyone(stranger(*open_to_all.getsockname()) == "connected")


def test_who_slips_in_before_all_ranks_are_connected_is_closed(monkeypatch):
    """A process of one of the job's hosts could, for some milliseconds."""
    before, slipped = listening_endpoints(), []
    connect = Worker._call_everyone

    def slip_in(worker: Worker) -> list[torch.futures.Future[None]]:
        for endpoint in listening_endpoints() - before:
            slipped.append(start_stranger(*endpoint, "stay"))
            assert slipped[-1].stdout.readline() == "connected\n"
        return connect(worker)

    monkeypatch.setattr(Worker, "_call_everyone", slip_in)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with running():
            everyone(works())
    ends = [process.communicate(timeout=30)[0].strip() for process in slipped]
    everyone(bool(ends) and set(ends) == {"closed"}, f"{ends}")
    everyone(any("came from no rank of the job" in str(one.message) for one in said))


def test_workers_have_the_names_and_the_options_they_are_given():
    rpc.init_rpc(
        f"part-{mpisgd.rank()}:x",
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(num_worker_threads=3, rpc_timeout=17.0),
    )
    last = mpisgd.size() - 1
    info = rpc.get_worker_info(f"part-{last}:x")
    own, timeout_s = rpc.get_worker_info().id, torch.distributed.rpc.get_rpc_timeout()
    rpc.shutdown()
    everyone((info.name, info.id, own) == (f"part-{last}:x", last, mpisgd.rank()), f"{info}, {own}")
    everyone(timeout_s == 17.0, f"{timeout_s}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "two words"}, "name='two words'; expected up to 127 letters"),
        ({"rank": 77}, "but MPI says rank"),
        ({"world_size": 77}, "world_size=77"),
        ({"backend": "gloo"}, "expected BackendType.TENSORPIPE"),
        ({"rpc_backend_options": 3}, "expected mpisgd.rpc.TensorPipeRpcBackendOptions"),
    ],
)
def test_a_mistake_of_one_rank_is_said_on_all(options, said):
    last = mpisgd.size() - 1
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        rpc.init_rpc(**(options if mpisgd.rank() == last else {}))
    everyone(said in caught.text, caught.text)
    everyone(mpisgd.size() == 1 or f"(rank {last})" in caught.text, caught.text)


@pytest.mark.mpi(min_size=2)
def test_names_that_are_not_distinct_are_refused():
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        rpc.init_rpc("same" if mpisgd.rank() in (0, mpisgd.size() - 1) else None)
    everyone(f"ranks 0, {mpisgd.size() - 1} have the name 'same'" in caught.text, caught.text)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_cannot_start_stops_all(monkeypatch):
    def fails(worker: Worker) -> None:
        raise OSError("no more sockets")

    if mpisgd.rank() == 1:
        monkeypatch.setattr(Worker, "_call_everyone", fails)
    with raises_everywhere(mpisgd.Unreachable) as caught:
        rpc.init_rpc()
    everyone("cannot connect: rank 1: no more sockets" in caught.text, caught.text)
    monkeypatch.undo()
    with running():
        everyone(works())


def test_without_rpc_every_call_says_what_to_do():
    for call in (lambda: rpc.rpc_sync(0, max), lambda: rpc.remote(0, max), rpc.get_worker_info):
        with pytest.raises(mpisgd.NotInitialized, match=r"call mpisgd\.rpc\.init_rpc"):
            call()
    rpc.shutdown()


def test_a_torch_without_rpc_is_named(monkeypatch):
    monkeypatch.setattr(torch.distributed.rpc, "is_available", lambda: False)
    with raises_everywhere(mpisgd.UnsupportedTorch) as caught:
        rpc.init_rpc()
    everyone(f"torch {torch.__version__} was built without" in caught.text, caught.text)
    with pytest.raises(mpisgd.UnsupportedTorch):
        rpc.RRef  # noqa: B018


def test_references_after_a_second_start_are_refused():
    """They would be lost on the way: torch sends them by its first agent."""
    with running():  # the first start, where this test is the only one
        everyone(works())
    with running():
        for call in (
            lambda: rpc.remote(0, torch.ones, (1,)),
            lambda: rpc.rpc_sync(0, id, (rpc.RRef(1),)),
            lambda: rpc.rpc_async(0, dict, (), {"reference": rpc.RRef(1)}),
        ):
            with pytest.raises(mpisgd.UnsupportedTorch, match="the first start only"):
                call()


def outlive(seconds: float) -> int:
    import time

    time.sleep(seconds)
    return mpisgd.rank()


def test_the_end_waits_for_calls_that_nobody_waits_for():
    with running():
        last = mpisgd.size() - 1
        answers = [rpc.rpc_async(last, outlive, (0.3,)) for _ in range(2)]
    everyone([answer.done() for answer in answers] == [True, True])
