"""The store between hosts, of which one end is another thread here: what torch does with a store."""

from __future__ import annotations

import contextlib
import datetime
import gc
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from mpisgd.transport.tcp_store.links import LocalLink, RemoteLink, Server
from mpisgd.transport.tcp_store.network_store import NetworkStore
from mpisgd.transport.tcp_store.table import Table

SHORT_S = 0.2
WAIT = datetime.timedelta(seconds=20)


def opened() -> tuple[NetworkStore, NetworkStore]:
    """The store as rank 0 and as rank 1 have it."""
    here, there = socket.socketpair()
    table = Table()
    stores = (
        NetworkStore(LocalLink(table, Server(table, {1: here})), "127.0.0.1"),
        NetworkStore(RemoteLink(there), "127.0.0.1"),
    )
    for store in stores:
        store.set_timeout(WAIT)
    return stores


@pytest.fixture
def stores() -> Iterator[tuple[NetworkStore, NetworkStore]]:
    both = opened()
    yield both
    for store in both:
        store.close()


@pytest.fixture(params=[0, 1])
def store(stores, request) -> NetworkStore:
    """Either end."""
    return stores[request.param]


def test_it_does_what_torchs_stores_do(store):
    """The same calls, by torch's C++ too, which look for methods by names of their own."""
    theirs, ours = dist.HashStore(), dist.PrefixStore("p", store)
    for call in (
        lambda s: s.set("a", "1"),
        lambda s: s.get("a"),
        lambda s: s.add("n", 5),
        lambda s: s.add("n", -2),
        lambda s: s.get("n"),
        lambda s: s.compare_set("a", "1", "2"),
        lambda s: s.compare_set("a", "1", "3"),
        lambda s: s.compare_set("new", "", "x"),
        lambda s: s.append("a", "tail"),
        lambda s: s.multi_set(["m1", "m2"], [bytes(range(256)), b""]),
        lambda s: s.multi_get(["a", "m1", "m2"]),
        lambda s: s.check(["a", "m1"]),
        lambda s: s.check(["a", "absent"]),
        lambda s: s.delete_key("a"),
        lambda s: s.delete_key("a"),
        lambda s: s.wait(["m1", "m2"], WAIT),
        lambda s: s.has_extended_api(),
    ):
        assert call(ours) == call(theirs)
    assert ours.num_keys() == 4
    assert store.num_keys() == 4


def test_a_wait_holds_up_no_other_question(stores):
    zero, one = stores
    answers: list[bytes] = []
    thread = threading.Thread(target=lambda: answers.append(one.get("late")))
    thread.start()
    one.set("meanwhile", "x")
    assert zero.get("meanwhile") == b"x"
    assert answers == []
    zero.set("late", "y")
    thread.join()
    assert answers == [b"y"]


def test_a_key_that_nobody_sets_is_an_error_that_names_it(store):
    began_s = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=r"nobody has set 'never' within 0.2 s"):
        store.wait(["never"], datetime.timedelta(seconds=SHORT_S))
    assert SHORT_S * 0.9 < time.monotonic() - began_s < 10
    store.set("never", "x")  # the wait is forgotten
    assert store.get("never") == b"x"


def test_a_clone_works_when_nobody_can_connect_any_more(stores):
    """torch's NCCL group clones its store: a TCPStore connects again for that."""
    zero, one = stores
    cloned = dist.PrefixStore("p", one).clone()
    zero.set("p/nccl_id", "value")
    assert cloned.get("nccl_id") == b"value"


def test_it_outlives_the_python_object_as_torchs_c_plus_plus_uses_it(stores):
    held = dist.PrefixStore("p", opened()[1])
    gc.collect()
    held.set("a", "b")
    assert held.get("a") == b"b"


def test_waits_end_when_rank_0_is_gone(stores):
    zero, one = stores
    failed: list[BaseException] = []

    def wait() -> None:
        with contextlib.suppress(RuntimeError):
            try:
                one.get("never")
            except RuntimeError as exc:
                failed.append(exc)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(SHORT_S / 4)
    zero.close()
    thread.join(10)
    assert len(failed) == 1
    assert "rank 0, which keeps the store, has ended" in str(failed[0])
    with pytest.raises(RuntimeError, match="has ended"):
        one.set("a", "b")


def test_many_threads_ask_at_once(stores):
    zero, one = stores

    def count() -> None:
        for _ in range(50):
            zero.add("n", 1)
            one.add("n", 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert one.add("n", 0) == 400
