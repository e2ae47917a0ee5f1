"""The store that torch's process groups are brought up with: on one host in a file, between hosts by TCP."""

from __future__ import annotations

import datetime
import os
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
    store.wait([f"mine {r}" for r in range(mpisgd.size())])  # FileStore's set() may come later elsewhere
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
def test_between_hosts_nothing_listens_either_once_the_store_is_open():
    """Rank 0 listened as long as the store lived, and any user of the job's hosts could read and write it."""
    before = sockets_that_listen()
    store = open_store(world().queue.communicator, several_hosts(), WAIT_S)
    everyone(sockets_that_listen() == before)
    copy = dist.PrefixStore("p", store).clone()  # as torch's NCCL group does: a TCPStore connects anew
    copy.set(f"from {mpisgd.rank()}", "x")
    everyone(all(store.get(f"p/from {rank}") == b"x" for rank in range(mpisgd.size())))
    referee().barrier()
    store.close()


@pytest.mark.mpi(min_size=2)
def test_an_address_that_not_all_ranks_reach_is_not_taken(monkeypatch):
    """The last rank cannot connect to the first of rank 0's addresses, as behind a firewall."""
    addresses = ["127.0.0.2", "127.0.0.3"]
    monkeypatch.setattr(rendezvous, "local_addresses", lambda: addresses)
    probe, last = rendezvous._probe, mpisgd.rank() == mpisgd.size() - 1
    monkeypatch.setattr(
        rendezvous, "_probe", lambda endpoints, secret, rank: probe(endpoints[last:], secret, rank)
    )
    listener = rendezvous.find_listener(world().queue.communicator)
    everyone(listener.endpoint.address == "127.0.0.3", f"{listener}")
    if listener.socket is not None:
        listener.socket.close()


@pytest.mark.mpi(min_size=2)
def test_hosts_that_cannot_reach_each_other_are_told_so(monkeypatch):
    monkeypatch.setattr(rendezvous, "local_addresses", lambda: ["127.0.0.2"])
    if mpisgd.rank() == 1:
        monkeypatch.setattr(rendezvous, "_probe", lambda endpoints, secret, rank: {})
    with raises_everywhere(mpisgd.Unreachable) as caught:
        open_store(world().queue.communicator, several_hosts(), WAIT_S)
    others = mpisgd.size() - 1
    everyone(f"127.0.0.2 ({others - 1} of {others})" in caught.text, caught.text)


@pytest.mark.mpi(min_size=2)
def test_a_stranger_at_the_door_is_not_counted(monkeypatch):
    """Somebody else's host may have the address: who does not know the secret has reached nobody."""
    monkeypatch.setattr(rendezvous, "local_addresses", lambda: ["127.0.0.2"])
    probe = rendezvous._probe
    if mpisgd.rank() == 1:
        monkeypatch.setattr(
            rendezvous, "_probe", lambda endpoints, secret, rank: probe(endpoints, bytes(len(secret)), rank)
        )
    with raises_everywhere(mpisgd.Unreachable):
        rendezvous.find_listener(world().queue.communicator)
