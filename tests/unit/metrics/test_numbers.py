"""The numbers of a host's ranks, their names, and the port that shows them."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator

import pytest

from mpisgd import config
from mpisgd.config import Endpoint
from mpisgd.errors import InvalidArgument
from mpisgd.job.threads_as_ranks import RankFailed, run_ranks
from mpisgd.metrics import session
from mpisgd.metrics.numbers import FAMILIES, Number, as_dict, awaited_by, numbers_of
from mpisgd.metrics.server import MetricsServer
from mpisgd.monitor.mailbox_pages import Meters, Steps
from mpisgd.monitor.rank_state import STOPPED, WAITS, RankState, Wait, group_key
from mpisgd.threads import wait_registry

SECOND = 10**9
SUM = Wait(
    "all_reduce", "world", (), (0, 1, 2), 7, timeout_s=60.0, waited_s=3.25, is_main=True, site="t.py:4"
)
STATES = [
    RankState(rank, "here", 100 + rank, num_begun={group_key((0, 1, 2), 0): 6 + waits}, **more)
    for rank, waits, more in [
        (0, 1, {"state": WAITS, "waits": (SUM,)}),
        (1, 0, {}),
        (2, 1, {"state": WAITS, "waits": (SUM,)}),
    ]
]
METERS = Meters(4, SECOND, 2 * SECOND, 3 * SECOND, 4 * SECOND, 5 * SECOND, 6, 7, 8, 9, 10)


def test_the_late_rank_is_the_one_that_others_wait_for():
    assert awaited_by(STATES) == {1: 2}


def test_a_rank_has_these_numbers():
    steps = Steps(1234, 100 * SECOND, SECOND // 25)
    found = as_dict([*numbers_of(STATES[0], steps, METERS, 0, 101 * SECOND, 5000.0)])
    assert found == pytest.approx(
        {
            "rank_up/rank0": 1,
            "step/rank0": 1234,
            "last_step_timestamp_seconds/rank0": 4999,
            "step_seconds/rank0": 0.04,
            "steps_per_second/rank0": 25,
            "steps_total/rank0": 4,
            "computation_seconds_total/rank0": 1,
            "exposed_communication_seconds_total/rank0": 2,
            "wait_seconds_total/rank0": 3,
            "other_wait_seconds_total/rank0": 4,
            "hidden_communication_seconds_total/rank0": 5,
            "waiting_seconds/rank0": 3.25,
            "awaited_by_ranks/rank0": 0,
            "bytes_total/messages_same_host/rank0": 6,
            "bytes_total/messages_other_hosts/rank0": 7,
            "bytes_total/shared_memory/rank0": 8,
            "bytes_total/cross_memory_attach/rank0": 9,
            "bytes_total/mpi_collectives/rank0": 10,
        }
    )


def test_a_stopped_rank_before_its_first_step_has_no_rate():
    stopped = RankState(3, "here", 103, STOPPED)
    found = as_dict([*numbers_of(stopped, Steps(0, 0, 0), Meters(), 2, 0, 0.0)])
    assert (found["rank_up/rank3"], found["awaited_by_ranks/rank3"]) == (0, 2)
    assert not {"step/rank3", "step_seconds/rank3", "steps_per_second/rank3"} & found.keys()


# -- the port ----------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    numbers = [Number("mpisgd_job_ranks", 3)]
    for state in STATES:
        numbers += numbers_of(state, Steps(9, SECOND, SECOND), METERS, 0, SECOND, 5.0)
    server = MetricsServer(Endpoint(0), "node1", lambda: numbers)
    yield server
    server.close(wait=True)


def test_prometheus_can_read_it_and_names_follow_its_conventions(server):
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(server.url, timeout=10) as answer:
        text = answer.read().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    kinds = {name.removesuffix("_total"): kind for name, (kind, _) in FAMILIES.items()}
    assert {name: family.type for name, family in families.items()} == kinds
    for name, (kind, _) in FAMILIES.items():
        assert name.endswith("_total") == (kind == "counter")
        assert not re.search(r"_(ms|us|ns|kb|minutes)\b", name)
    waits = families["mpisgd_wait_seconds"].samples
    assert [(sample.name, sample.labels, sample.value) for sample in waits] == [
        ("mpisgd_wait_seconds_total", {"host": "node1", "rank": str(rank)}, 3.0) for rank in range(3)
    ]
    media = {sample.labels["medium"] for sample in families["mpisgd_bytes"].samples}
    assert "messages_other_hosts" in media
    assert families["mpisgd_job_ranks"].samples[0].labels == {"host": "node1"}


def test_it_listens_on_loopback_alone_and_its_port_is_free_again(server):
    port = int(re.search(r":(\d+)/", server.url)[1])
    assert server._listener.socket.getsockname() == ("127.0.0.1", port)
    # Else nobody would be told of a deadlock: a thread that waits for a socket may communicate next.
    assert server._thread.ident in wait_registry.workers
    with pytest.raises(InvalidArgument, match=f"node2 cannot listen at address 127.0.0.1, port {port}: "):
        session._listen(Endpoint(port), "node2", list)
    server.close(wait=True)
    assert server._listener.socket.fileno() == -1
    session._listen(Endpoint(port), "node2", list).close(wait=True)
    with pytest.raises(InvalidArgument, match=r"cannot listen at address nowhere\.invalid"):
        session._listen(Endpoint(port, "nowhere.invalid"), "node2", list)


def test_without_prometheus_client_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mpisgd.metrics.server", None)
    with pytest.raises(InvalidArgument, match=r'host node1 lacks: pip install "mpisgd\[metrics\]"'):
        session._listen(Endpoint(0), "node1", list)


@pytest.mark.parametrize("port", [-1, 2**16, True, "9400", 1.5])
def test_a_port_that_is_none_is_refused(port):
    with pytest.raises(InvalidArgument, match=r"metrics.start: port=.*; expected 0 to 65535, or None"):
        session.start(port)


def test_who_waits_to_join_a_job_leaves_the_port_to_that(monkeypatch):
    monkeypatch.setenv(config.JOINER_VARIABLE, config.TO_JOIN)
    session.start(9400)
    assert session._session is None


def test_ranks_that_are_threads_have_none():
    with pytest.raises(RankFailed, match="the ranks are threads of one process"):
        run_ranks(2, lambda: session.start())


def test_nothing_is_read_where_nothing_is_measured():
    with pytest.raises(InvalidArgument, match=r"metrics\.read: nothing is measured"):
        session.read()


def test_the_environment_says_where(monkeypatch):
    assert config.metrics({}) is None
    assert config.metrics({"MPISGD_METRICS_PORT": "9400"}) == Endpoint(9400, "127.0.0.1")
    assert config.metrics({"MPISGD_METRICS_PORT": "9400", config.JOINER_VARIABLE: "1"}) is None
    for text in ("x", "-1", "65536", "²"):
        with pytest.raises(InvalidArgument, match="expected a port, 0 to 65535"):
            config.metrics({"MPISGD_METRICS_PORT": text})
