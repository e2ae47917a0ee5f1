"""Metrics of a job of several ranks: beside a timeline of the same run, and their errors."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from verdicts import everyone, raises_everywhere

import mpisgd
from mpisgd import tracing
from mpisgd.metrics import session
from mpisgd.timeline import session as recording
from mpisgd.tools.timeline.report.figures import divisions_of

pytestmark = pytest.mark.processes
PARTS = (
    "computation_seconds_total",
    "exposed_communication_seconds_total",
    "wait_seconds_total",
    "other_wait_seconds_total",
    "hidden_communication_seconds_total",
)


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    mpisgd.metrics.stop()
    names = [thread.name for thread in threading.enumerate()]
    everyone(not any(name.startswith("mpisgd metrics") for name in names), f"{names}")
    everyone(tracing.sink is None and not tracing.under_way and not tracing.at_loss)


def train(num_steps: int) -> None:
    """Steps whose gradients are averaged by operations of several kinds, the last rank being late."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Linear(300, 5))
    mpisgd.broadcast_parameters(model)
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(8, 40)).square().mean().backward()
        time.sleep(0.02 * (mpisgd.rank() == mpisgd.size() - 1))
        optimizer.step()
        work = mpisgd.all_reduce(torch.ones(100_000), async_op=True, algorithm="ring")
        time.sleep(0.001)
        work.wait()


def test_the_sums_are_those_of_a_report_about_the_same_run(tmp_path):
    path, rank = str(mpisgd.broadcast_object(tmp_path / "run.json")), mpisgd.rank()
    mpisgd.start_timeline(path)
    mpisgd.metrics.start()
    began_ns, clock = time.monotonic_ns(), recording._session.recorder._clock
    train(6)
    time.sleep(1.1)  # the thread adds up what there is so far
    train(6)
    mpisgd.barrier()
    ended_ns = time.monotonic_ns()
    measured = mpisgd.metrics.read([rank])
    mpisgd.metrics.stop()
    mpisgd.stop_timeline()
    mpisgd.barrier()
    events = json.loads(Path(path).read_text())
    stretch = np.array([clock.to_us(began_ns)]), np.array([clock.to_us(ended_ns)])
    division = divisions_of(events, {rank: stretch})[rank]
    expected = {
        f"{name}/rank{rank}": float(part[0]) / 1e6 for name, part in zip(PARTS, division, strict=True)
    }
    found = {name: measured[name] for name in expected}
    # The two begin and end apart by a moment, in which the program computes.
    everyone(
        all(
            abs(found[name] - value) < (0.2 if "computation" in name else 2e-3)
            for name, value in expected.items()
        ),
        f"{found}, not {expected}",
    )
    others = mpisgd.size() > 1
    everyone(expected[f"exposed_communication_seconds_total/rank{rank}"] > 2e-3 * others, f"{expected}")
    everyone(measured[f"steps_total/rank{rank}"] == 10, "the first step of an optimizer has no beginning")


@pytest.mark.mpi(min_size=2)
def test_a_port_shows_who_is_late_and_who_has_waited():
    rank, size = mpisgd.rank(), mpisgd.size()
    mpisgd.metrics.start(0)
    mpisgd.metrics.start(0)  # once more: nothing happens
    train(10)
    text = ""
    if rank == size - 1:
        time.sleep(1.3)  # the others add up, and wait
        port = mpisgd.metrics.read()
        waits = [port[f"wait_seconds_total/rank{r}"] for r in range(size)]
        text = "" if min(waits[:-1]) > 0.1 > waits[-1] else f"waits {waits}"
        late = [port[f"awaited_by_ranks/rank{r}"] for r in range(size)]
        text += "" if late == [0] * (size - 1) + [size - 1] else f"late {late}"
        since = [port[f"waiting_seconds/rank{r}"] for r in range(size)]
        text += "" if min(since[:-1]) > 0.5 > since[-1] == 0 else f"since {since}"
    mpisgd.barrier()
    shown = ""
    if session._session.server is not None:
        with urllib.request.urlopen(session._session.server.url, timeout=10) as answer:
            shown = answer.read().decode()
    everyone(not text, text)
    shown = mpisgd.broadcast_object(shown)
    host = session._session.collector.host
    everyone(all(f'mpisgd_step{{host="{host}",rank="{r}"}} 10.0' in shown for r in range(size)), shown)
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        mpisgd.metrics.start(9400)
    everyone("they are served already" in caught.text, caught.text)
    with raises_everywhere(mpisgd.InvalidRank) as caught:
        mpisgd.metrics.read([size])
    everyone(f"this host has the ranks {list(range(size))}" in caught.text, caught.text)


@pytest.mark.mpi(min_size=2)
def test_what_is_wrong_on_one_host_is_raised_by_all_ranks():
    listener = None
    if mpisgd.rank() == 0:
        listener = socket.create_server(("127.0.0.1", 0))
    port = mpisgd.broadcast_object(listener and listener.getsockname()[1])
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        mpisgd.metrics.start(port)
    everyone(f"port {port}: Address already in use" in caught.text, caught.text)
    everyone(tracing.sink is None)
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        mpisgd.metrics.start(None if mpisgd.rank() else 0)
    everyone("port=0" in caught.text, caught.text)
    mpisgd.metrics.stop()  # nothing to stop
    if listener is not None:
        listener.close()
