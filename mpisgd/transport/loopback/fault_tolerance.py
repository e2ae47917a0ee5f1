"""`LoopbackFaultTolerance`: what the failure detector asks of the network between ranks that are threads."""

import threading
from typing import Any

from mpisgd.transport.loopback.network import Network

__all__ = ["LoopbackFaultTolerance"]

FOREVER = float("inf")


class LoopbackFaultTolerance:
    """Of one rank; see `mpisgd.monitor.failure_detector.FaultTolerance`.

    Args:
        network: of the run.
        process: the rank of the job at its start.
    """

    overdue = "no call of this network is blocked for ever"

    def __init__(self, network: Network, process: int) -> None:
        self._network = network
        self._process = process
        self._seen = network.news[process]

    def wait_for_news(self, stopped: threading.Event, limit_s: float) -> bool:
        """Wait until this rank has noticed something, which takes the place of looking again and again."""
        network, process = self._network, self._process
        network.scheduler.wait(lambda: stopped.is_set() or network.news[process] > self._seen, FOREVER)
        self._seen = network.news[process]
        return stopped.is_set()

    def revoke_all(self) -> None:
        """End whatever goes on over any communicator of this rank."""
        self._network.revoke_all(self._process)

    def set_apart(self, communicator: Any) -> None:
        """Nothing: no call is blocked where its timeout does not count."""

    def free_abandoned(self) -> None:
        """Nothing: requests keep their memory."""
