"""Which transports a group has: the table of those there are, and how they are opened."""

import warnings
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from mpisgd import config
from mpisgd.interfaces.communicator import DigestExchange
from mpisgd.interfaces.host_transport import HostTransport
from mpisgd.transport.cma.transport import CmaTransport
from mpisgd.transport.internode.digest_exchange import InternodeDigestExchange
from mpisgd.transport.internode.transport import InternodeTransport
from mpisgd.transport.members import Members
from mpisgd.transport.messages.dissemination import Dissemination
from mpisgd.transport.shm.transport import ShmTransport

__all__ = ["TRANSPORTS", "OpenTransports", "open_transports"]


class OpenableTransport(HostTransport, Protocol):
    """A class of the table."""

    @classmethod
    def open(cls, members: Members, opened: Sequence[HostTransport]) -> HostTransport | None:
        """Open one between the ranks of a group; None on all of them where there is none. Collective.

        Args:
            members: the ranks.
            opened: what comes before it in the table and was opened between them.
        """


# In the order in which they are opened and preferred where nobody has measured. A new transport is a folder
# beside the others and a line here.
TRANSPORTS: tuple[type[OpenableTransport], ...] = (
    ShmTransport,
    CmaTransport,
    InternodeTransport,
)


class OpenTransports(NamedTuple):
    """What a group communicates through, besides MPI itself.

    Attributes:
        transports: what there is, in the order of the table.
        digest_exchange: how the ranks compare what they are about to do.
    """

    transports: tuple[HostTransport, ...]
    digest_exchange: DigestExchange


def open_transports(members: Members) -> OpenTransports:
    """Open what a group can have. Collective. One rank warns where ranks of a host cannot share memory."""
    communicator = members.communicator
    shares = any(len(ranks) > 1 for ranks in members.topology.nodes)
    allowed = all(communicator.all_gather_object(config.shared_memory()))
    if communicator.size == 1 or (shares and not allowed):
        return OpenTransports((), _by_messages(members))
    opened: list[HostTransport] = []
    for kind in TRANSPORTS:
        if (transport := kind.open(members, opened)) is not None:
            opened.append(transport)
    if not opened:
        _warn(members)
    exchanges = (transport.digest_exchange for transport in opened)
    exchange = next((exchange for exchange in exchanges if exchange is not None), None)
    return OpenTransports(tuple(opened), exchange or _by_messages(members))


def _by_messages(members: Members) -> InternodeDigestExchange:
    communicator = members.communicator
    return InternodeDigestExchange(None, Dissemination(communicator), communicator.global_ranks[0])


def _warn(members: Members) -> None:
    if members.communicator.rank == 0:
        warnings.warn(
            f"ranks of group '{members.name}' share a host but no memory (separate containers?); everything "
            "goes through MPI instead, which is slower. MPISGD_SHARED_MEMORY=0 asks for that in silence",
            RuntimeWarning,
            stacklevel=2,
        )
