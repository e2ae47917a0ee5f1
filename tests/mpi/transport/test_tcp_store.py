"""The store that torch's process groups are brought up with: on one host in a file, between hosts by TCP."""

from __future__ import annotations

import datetime
import os
import socket
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from verdicts import everyone, raises_everywhere, referee

import mpisgd
from mpisgd.core.topology import arrange
from mpisgd.job.lifecycle import world
from mpisgd.transport.tcp_store import rendezvous
from mpisgd.transport.tcp_store.store import open_store

WAIT_S = 20.0
SHORT_S = 0.3


def several_hosts():
    """Where the ranks live, if each had a host of its own."""
    names = [f"host{rank}" for rank in range(mpisgd.size())]
    return arrange(mpisgd.rank(), list(range(mpisgd.size())), names)


def one_host():
    return arrange(mpisgd.rank(), [0] * mpisgd.size(), ["here"])


@pytest.fixture(scope="module", params=["one host", "several hosts"])
def opened(request, job):
    where = one_host() if request.param == "one host" else several_hosts()
    if mpisgd.size() == 1 and request.param != "one host":
        pytest.skip("one rank is on one host")
    store = open_store(world().queue.communicator, where, WAIT_S)
    yield request.param, store
    referee().barrier()  # the ranks must not lose their server


@pytest.fixture
def store(opened, request):
    """The store, with keys of this test's own."""
    return dist.PrefixStore(request.node.name, opened[1])


def test_every_rank_reads_what_every_other_has_set(store):
    rank, size = mpisgd.rank(), mpisgd.size()
    store.set(f"from {rank}", f"value {rank * rank}")
    seen = [store.get(f"from {other}").decode() for other in range(size)]
    everyone(seen == [f"value {other * other}" for other in range(size)], f"{seen}")


def test_get_waits_for_a_key_that_comes_late(store):
    last = mpisgd.size() - 1
    if mpisgd.rank() == last:
        time.sleep(SHORT_S)
        store.set("late", bytes(range(256)))
    started = time.monotonic()
    everyone(store.get("late") == bytes(range(256)))
    waited = mpisgd.rank() == last or time.monotonic() - started > SHORT_S / 3
    everyone(waited, "the value was there before it was set")


def test_additions_of_all_ranks_are_counted_once_each(store):
    for _ in range(25):
        store.add("count", mpisgd.rank() + 1)
    referee().barrier()
    size = mpisgd.size()
    everyone(store.add("count", 0) == 25 * size * (size + 1) // 2)


def test_of_all_who_compare_and_set_one_wins(store):
    mine = f"rank {mpisgd.rank()}".encode()
    if mpisgd.rank() == 0:
        store.set("seat", "free")
    store.wait(["seat"])
    referee().barrier()
    winner = store.compare_set("seat", "free", mine.decode())
    winners = referee().allgather(winner)
    everyone(len(set(winners)) == 1 and winners[0] in [f"rank {r}".encode() for r in range(mpisgd.size())])


def test_a_deleted_key_is_gone_for_all(store):
    store.set(f"mine {mpisgd.rank()}", "x")
    store.wait([f"mine {r}" for r in range(mpisgd.size())])  # TCPStore's set() does not wait for the server
    referee().barrier()
    everyone(store.delete_key(f"mine {mpisgd.rank()}"))
    referee().barrier()
    everyone(not any(store.check([f"mine {r}"]) for r in range(mpisgd.size())))


def test_a_key_that_nobody_sets_is_an_error_at_the_time_limit(store):
    started = time.monotonic()
    with raises_everywhere(RuntimeError):
        store.wait(["never"], datetime.timedelta(seconds=SHORT_S))
    everyone(SHORT_S / 2 < time.monotonic() - started < WAIT_S / 2)


def test_two_stores_share_nothing(opened):
    where = one_host() if opened[0] == "one host" else several_hosts()
    other = open_store(world().queue.communicator, where, WAIT_S)
    opened[1].set(f"only here {mpisgd.rank()}", "x")
    referee().barrier()
    everyone(not any(other.check([f"only here {r}"]) for r in range(mpisgd.size())))
    referee().barrier()


def sockets_that_listen() -> set[str]:
    """This process's listening sockets: their local addresses, as the kernel writes them."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(entry))
        except OSError:  # the descriptor of the listing itself
            continue
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own}


def test_on_one_host_nothing_listens_and_the_file_is_private():
    before = sockets_that_listen()
    store = open_store(world().queue.communicator, one_host(), WAIT_S)
    everyone(sockets_that_listen() == before)
    modes = [
        os.stat(entry).st_mode & 0o777
        for entry in Path("/proc/self/fd").iterdir()
        if entry.is_symlink() and "memfd:mpisgd" in os.readlink(entry)
    ]
    everyone(bool(modes) and set(modes) == {0o600}, f"{modes}")
    store.set(f"used {mpisgd.rank()}", "x")


@pytest.mark.mpi(min_size=2)
def test_between_hosts_rank_0_listens_on_one_address_and_no_longer_than_the_store_lives():
    before = sockets_that_listen()
    store = open_store(world().queue.communicator, several_hosts(), WAIT_S)
    new = sockets_that_listen() - before
    any_address = {"00000000", "0" * 32}
    everyone(len(new) == (mpisgd.rank() == 0), f"{new}")
    everyone(not any(address.partition(":")[0] in any_address for address in new), f"{new}")
    referee().barrier()
    del store
    everyone(sockets_that_listen() == before)


def is_heard(endpoint: rendezvous.Endpoint, source: str) -> bool:
    """Whether somebody with this address gets through to the store."""
    with socket.socket() as connection:
        connection.settimeout(SHORT_S)
        connection.bind((source, 0))
        try:
            connection.connect(endpoint)
        except OSError:
            return False
        return True


@pytest.mark.mpi(min_size=2)
def test_a_host_that_is_not_of_the_job_is_not_heard(monkeypatch):
    monkeypatch.setattr(rendezvous, "local_addresses", lambda: ["127.0.0.2"])
    store = open_store(world().queue.communicator, several_hosts(), WAIT_S)
    assert isinstance(store, dist.TCPStore)
    endpoint = rendezvous.Endpoint(store.host, store.port)
    everyone(not is_heard(endpoint, "127.0.0.9"), "a stranger was")
    everyone(is_heard(endpoint, "127.0.0.1"), "a rank's second connection was not")
    referee().barrier()


@pytest.mark.mpi(min_size=2)
def test_an_address_that_not_all_ranks_reach_is_not_taken(monkeypatch):
    """The last rank cannot connect to the first of rank 0's addresses, as behind a firewall."""
    addresses = ["127.0.0.2", "127.0.0.3"]
    monkeypatch.setattr(rendezvous, "local_addresses", lambda: addresses)
    probe, last = rendezvous._probe, mpisgd.rank() == mpisgd.size() - 1
    monkeypatch.setattr(rendezvous, "_probe", lambda endpoints, token: probe(endpoints[last:], token))
    listener = rendezvous.find_listener(world().queue.communicator)
    everyone(listener.endpoint.address == "127.0.0.3", f"{listener}")
    if listener.socket is not None:
        listener.socket.close()


@pytest.mark.mpi(min_size=2)
def test_hosts_that_cannot_reach_each_other_are_told_so(monkeypatch):
    monkeypatch.setattr(rendezvous, "local_addresses", lambda: ["127.0.0.2"])
    if mpisgd.rank() == 1:
        monkeypatch.setattr(rendezvous, "_probe", lambda endpoints, token: {})
    with raises_everywhere(mpisgd.Unreachable) as caught:
        open_store(world().queue.communicator, several_hosts(), WAIT_S)
    others = mpisgd.size() - 1
    everyone(f"127.0.0.2 ({others - 1} of {others})" in caught.text, caught.text)


@pytest.mark.mpi(min_size=2)
def test_a_stranger_at_the_door_is_not_counted(monkeypatch):
    """Somebody else's host may have the address: who does not know the token has reached nobody."""
    monkeypatch.setattr(rendezvous, "local_addresses", lambda: ["127.0.0.2"])
    monkeypatch.setattr(rendezvous, "CONNECT_TIMEOUT_S", SHORT_S)
    probe = rendezvous._probe
    if mpisgd.rank() == 1:
        monkeypatch.setattr(
            rendezvous, "_probe", lambda endpoints, token: probe(endpoints, bytes(len(token)))
        )
    with raises_everywhere(mpisgd.Unreachable):
        rendezvous.find_listener(world().queue.communicator)
