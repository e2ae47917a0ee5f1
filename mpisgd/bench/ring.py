"""Plain TCP from each host to the next one: what the network carries with nothing in between.

MPI sends one message after the other through a connection that both directions share with the process's own
progress; under load that takes up to twice the link's time, which is no limit. Here the kernel sends while
it receives.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator

import mpisgd
from mpisgd.bench.peers import places
from mpisgd.job.rank_info import topology

__all__ = ["Ring", "open_ring"]

RECEIVE_BYTES = 2**20
CONNECT_LIMIT_S = 30.0


class Ring:
    """The connections of one host's leader.

    Args:
        after: to the next host.
        before: from the one before.
    """

    def __init__(self, after: socket.socket, before: socket.socket) -> None:
        self._after, self._before = after, before

    def pass_on(self, give: memoryview, take: memoryview) -> None:
        """Send `give` to the next host while as much comes in from the one before."""
        sender = threading.Thread(target=self._after.sendall, args=(give,))
        sender.start()
        got = 0
        while got < len(take):
            got += self._before.recv_into(take[got : got + RECEIVE_BYTES])
        sender.join()


@contextlib.contextmanager
def open_ring() -> Iterator[Ring | None]:
    """Connect the hosts' leaders; None in the other ranks, and where hosts share no network. Collective."""
    place, here = places(), topology()
    leads = here.local_rank == 0
    if here.num_nodes == 1 or place is None:
        yield None
        return
    with contextlib.ExitStack() as stack:
        listener, address = None, ("", 0)
        if leads:
            listener = stack.enter_context(socket.create_server((place[mpisgd.rank()].address, 0)))
            listener.settimeout(CONNECT_LIMIT_S)
            address = listener.getsockname()
        addresses: list[tuple[str, int]] = [address] * mpisgd.size()
        mpisgd.all_gather_object(addresses, address)
        if listener is None:
            yield None
            return
        next_leader = here.nodes[(here.node_rank + 1) % here.num_nodes][0]
        after = stack.enter_context(socket.create_connection(addresses[next_leader], CONNECT_LIMIT_S))
        before = stack.enter_context(listener.accept()[0])
        for connection in (after, before):
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield Ring(after, before)
