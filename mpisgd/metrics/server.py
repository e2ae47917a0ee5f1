"""The port at which a host shows its metrics to Prometheus; alone loads `prometheus_client`."""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from mpisgd.config import Endpoint
from mpisgd.metrics.numbers import FAMILIES, Number
from mpisgd.threads import wait_registry
from mpisgd.threads.service_thread import ServiceThread

__all__ = ["MetricsServer"]

REQUEST_S = 5.0  # who sends its request more slowly is not waited for: requests are answered one by one


class _Handler(WSGIRequestHandler):
    """A request, of which nothing is logged."""

    timeout = REQUEST_S

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


class _Listener(WSGIServer):
    """The socket. Its name is not looked up, for which a host without a name server would wait."""

    allow_reuse_port = False  # else another job could take a part of the requests

    def server_bind(self) -> None:
        """Bind it."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever asked has gone."""


class MetricsServer:
    """Answers requests with the numbers of this host, on a thread of its own.

    Args:
        endpoint: where.
        host: name of this host, a label of each number.
        numbers: returns them.

    Raises:
        OSError: it cannot listen there.

    Attributes:
        url: of the metrics.
    """

    def __init__(self, endpoint: Endpoint, host: str, numbers: Callable[[], Sequence[Number]]) -> None:
        self._host = host
        self._numbers = numbers
        self._closed = False
        found = socket.getaddrinfo(
            endpoint.address, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = found[0]
        listener = type("_Listener", (_Listener,), {"address_family": family})
        self._listener: WSGIServer = listener(address[:2], _Handler)
        registry = CollectorRegistry()
        registry.register(self)
        self._listener.set_app(make_wsgi_app(registry))
        name = f"[{endpoint.address}]" if ":" in endpoint.address else endpoint.address
        shown = host if endpoint.address in ("0.0.0.0", "::") else name
        self.url = f"http://{shown}:{self._listener.server_port}/metrics"
        self._thread = ServiceThread("mpisgd metrics port", self._serve)
        self._thread.start()

    def _serve(self) -> bool:
        """Answer a request; close the socket once it is shut."""
        ident = threading.get_ident()
        wait_registry.workers[ident] = lambda: False  # it begins no operation
        try:
            self._listener.handle_request()
        finally:
            wait_registry.workers.pop(ident, None)
        if self._closed:
            self._listener.server_close()
        return not self._closed

    def close(self, *, wait: bool) -> None:
        """Answer no more; `wait` for the answer under way, if there is one."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if wait:
            self._thread.join_from_others(REQUEST_S)

    def forget(self) -> None:
        """Close the socket of a child process, which has none of the threads."""
        self._listener.socket.close()

    def collect(self) -> Iterator[Any]:
        """Return the numbers as `prometheus_client` has them; called for each request."""
        families = {}
        for number in self._numbers():
            if number.name not in families:
                families[number.name] = self._family(number)
            of_rank = [] if number.rank is None else [str(number.rank)]
            labels = [self._host, *of_rank, *([number.medium] if number.medium else [])]
            families[number.name].add_metric(labels, number.value)
        yield from families.values()

    def _family(self, number: Number) -> Any:
        kind, meaning = FAMILIES[number.name]
        labels = ["host", *([] if number.rank is None else ["rank"]), *(["medium"] if number.medium else [])]
        family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
        return family(number.name, meaning, labels=labels)
