"""`start`, `stop` and `read`, and how metrics follow a job from one world to the next.

They begin in `init()` where the environment asks for it, by `start()`, and again in the world that follows
the loss of a rank, where another rank may be the first of its host. What a world's ranks want is agreed when
it is made (`mpisgd.job.world`), so a joiner does as the others.
"""

import functools
import os
from collections.abc import Iterable
from typing import Any

from mpisgd import config, tracing
from mpisgd.arguments import check_text, shown, texts_with_ranks
from mpisgd.config import LAST_PORT, Endpoint
from mpisgd.core.consistency import Operation
from mpisgd.errors import InvalidArgument, InvalidRank
from mpisgd.job.lifecycle import is_initialized, world
from mpisgd.metrics.meter import Meter
from mpisgd.metrics.numbers import Number, as_dict, numbers_of_host
from mpisgd.monitor.state_collector import StateCollector
from mpisgd.standard_error import print_to_user

__all__ = ["begin", "end", "read", "start", "stop"]


class _Session:
    """The metrics of this rank in one world.

    Args:
        job: the world's.
        endpoint: where they are served.

    Raises:
        InvalidArgument: the first rank of a host cannot listen there, or the host's ranks share no memory.
    """

    def __init__(self, job: Any, endpoint: Endpoint) -> None:
        topology, collector = job.world.known_topology, job.monitor.collector
        here, host = topology.nodes[topology.node_rank], topology.hostnames[topology.node_rank]
        if set(collector.domain) != set(here):
            raise InvalidArgument(
                f"metrics: the ranks of host {host} share no memory, through which they tell their numbers "
                "(MPISGD_SHARED_MEMORY=0, or there is none)"
            )
        self.endpoint = endpoint
        self.collector: StateCollector = collector
        self.meter = Meter(collector.shm.meter_words(topology.rank), here)
        self.server = None
        if endpoint.port is not None and topology.local_rank == 0:
            self.server = _listen(endpoint, host, self.numbers)
            if topology.rank == 0 or endpoint.port == 0:
                print_to_user(f"metrics of host {host}: {self.server.url}")
        self.meter.start()
        tracing.add_sink(self.meter)

    def numbers(self) -> list[Number]:
        """Return those of all ranks of this host."""
        self.meter.add_up()
        return numbers_of_host(self.collector)

    def close(self, *, wait: bool = True) -> None:
        """Neither measure nor serve any more. Sends nothing."""
        tracing.remove_sink(self.meter)
        if self.server is not None:
            self.server.close(wait=wait)
        self.meter.close()

    def forget(self) -> None:
        """Leave it to the parent process: this is a child."""
        tracing.remove_sink(self.meter)
        if self.server is not None:
            self.server.forget()


def _listen(endpoint: Endpoint, host: str, numbers: Any) -> Any:
    """Return a server; raise InvalidArgument where there can be none."""
    try:
        from mpisgd.metrics.server import MetricsServer
    except ImportError as exc:
        raise InvalidArgument(
            f"metrics: a port needs prometheus_client, which host {host} lacks: pip install "
            f'"mpisgd[metrics]" ({exc})'
        ) from exc
    try:
        return MetricsServer(endpoint, host, numbers)
    except OSError as exc:
        raise InvalidArgument(
            f"metrics: host {host} cannot listen at address {endpoint.address}, port {endpoint.port}: "
            f"{exc.strerror or exc}; choose another one, or stop what uses it"
        ) from exc


_session: _Session | None = None


def begin(job: Any) -> str | None:
    """Measure and serve what a world's ranks have agreed to; return what went wrong. Not collective."""
    global _session
    end()
    try:
        _session = _Session(job, job.metrics)
    except InvalidArgument as exc:
        return f"{exc}"
    tracing.metrics = job.metrics
    tracing.at_loss.append(_end_after_loss)
    if end not in job.at_end:
        job.at_end.append(end)
    _forget_in_children()
    return None


def end() -> None:
    """Neither measure nor serve any more; do nothing without it. Sends nothing."""
    tracing.metrics = None
    _close(wait=True)


def _end_after_loss() -> None:
    """End this world's: `tracing.metrics` keeps what the next one has."""
    _close(wait=False)


def _close(*, wait: bool) -> None:
    global _session
    session, _session = _session, None
    if session is not None:
        tracing.at_loss.remove(_end_after_loss)
        session.close(wait=wait)


@functools.cache  # once, however often the job begins anew
def _forget_in_children() -> None:
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    global _session
    session, _session = _session, None
    if session is not None:
        session.forget()


# -- what a program calls ----------------------------------------------------------------------------------


def start(port: int | None = None, *, address: str = "127.0.0.1") -> None:
    """Measure what the ranks of the job do, and serve it to Prometheus. Collective over the job.

    The first rank of each host serves the numbers of its host's ranks, at the same port on each host.
    Calls `init()` if necessary. Measuring ends with `shutdown()` or `stop()`. After the loss of a
    rank it continues, and all sums begin at 0 again. A second call with the same arguments does nothing, and
    so does a call in a process that replaces a lost one and has not joined the job yet.

    Args:
        port: 1 to 65535; 0: each host takes a free port and prints it; None: measure for `read()` only, and
            do not serve. Environment: MPISGD_METRICS_PORT, or `python -m mpisgd run --metrics-port`.
        address: the address at which each host listens. With the default, only processes of the same host
            can connect, those of other users included. `0.0.0.0`: all addresses of the host. There is no
            authentication. Environment: MPISGD_METRICS_ADDRESS.

    Raises:
        InvalidArgument: an argument is wrong; found locally. Or, on all ranks: a host cannot listen at the
            address or has no `prometheus_client`, the ranks of a host share no memory, or metrics are
            already served at another address.
        CollectiveMismatch: the ranks gave different arguments.

    Cost: each operation appends its times to a list, which a thread sums once per second. For an
        answer the ranks of the host are asked for their state. Nothing is sent between ranks.
    """
    wrong_type = port is not None and (isinstance(port, bool) or not isinstance(port, int))
    if wrong_type or not 0 <= (port or 0) <= LAST_PORT:
        raise InvalidArgument(f"metrics.start: port={shown(port)}; expected 0 to {LAST_PORT}, or None")
    check_text("metrics.start", "address", address)
    if config.waits_to_join():  # the job may be served on this host already
        return
    job, problems = world().job, list[str]()
    if job.monitor is None:
        raise InvalidArgument(
            "metrics.start: the ranks are threads of one process, which has no such numbers"
        )

    def action() -> None:
        problems.append(_start_together(job, Endpoint(port, address)))

    job.world.queue.run(Operation("metrics.start", extra=f"port={port}, address={address}"), action)
    if problems[0]:
        raise InvalidArgument(problems[0])


def _start_together(job: Any, endpoint: Endpoint) -> str:
    """Begin on all ranks or on none; return what went wrong, the same on all. Collective."""
    if _session is not None and _session.endpoint != endpoint:
        return f"metrics.start: they are served already, at {_session.endpoint}: call metrics.stop() before"
    if _session is not None:
        return ""
    job.metrics = endpoint
    problems = job.world.queue.communicator.all_gather_object(begin(job))
    if text := texts_with_ranks(job.world.ranks, problems):
        job.metrics = None
        end()
    return text


def stop() -> None:
    """Stop measuring and serving; do nothing if `start()` was not called. Collective over the job."""
    if is_initialized():
        world().queue.run(Operation("metrics.stop"), end)


def read(ranks: Iterable[int] | None = None) -> dict[str, float]:
    """Return the numbers of this host's ranks as they are now. Not collective: any rank may call it.

    Args:
        ranks: those that are wanted, of this host; default all of this host.

    Returns:
        By name and rank, such as `step_seconds/rank0`, `wait_seconds_total/rank3` or
        `bytes_total/shared_memory/rank0`; a name is that of Prometheus without `mpisgd_`. What is not known
        yet is missing, such as the time of a step before the second one. Sums of other ranks are a second
        old at most.

    Raises:
        InvalidArgument: nothing is measured: `start()` was not called.
        InvalidRank: a rank is not of this host.

    Cost: milliseconds; two seconds where a rank does not answer.
    """
    if _session is None:
        raise InvalidArgument("metrics.read: nothing is measured; call metrics.start() on all ranks before")
    numbers, here = _session.numbers(), _session.collector.domain
    if ranks is None:
        return as_dict(numbers)
    wanted = set(ranks)
    if wanted - set(here):
        raise InvalidRank(f"metrics.read: ranks={sorted(wanted)}; this host has the ranks {list(here)}")
    return as_dict([each for each in numbers if each.rank is None or each.rank in wanted])
