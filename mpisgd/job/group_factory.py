"""`make_group`: opens what the members of a group communicate through, and makes the `Group` of it."""

from collections.abc import Sequence

from mpisgd.core.failure_scope import FailureScope
from mpisgd.core.group import Group, GroupResources
from mpisgd.core.operation_queue import OperationQueue
from mpisgd.core.topology import Topology, discover
from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.transport.members import Members
from mpisgd.transport.messages.point_to_point import PointToPoint
from mpisgd.transport.transports import open_transports
from mpisgd.tuning import CostModel

__all__ = ["make_group"]


def make_group(
    name: str,
    ranks: Sequence[int],
    communicator: GroupCommunicator | None,
    *,
    timeout_s: float,
    threads_allowed: bool,
    topology: Topology | None = None,
    costs: CostModel | None = None,
    scope: FailureScope | None = None,
) -> Group:
    """Make a group of the ranks of `communicator`, which it owns from now on. Collective over them.

    Args:
        name: for messages.
        ranks: the members' global ranks, in the order of the group's ranks.
        communicator: their communicator; None on a rank that is no member.
        timeout_s: how long its operations wait for the other ranks.
        threads_allowed: whether MPI runs at THREAD_MULTIPLE.
        topology: which of them share a host; None: found out.
        costs: the job's measurements, of which those for such a group are taken.
        scope: whose loss ends its operations; None: that of any rank of the job.
    """
    costs = costs or CostModel("none", ())
    if communicator is None:
        return Group(name, ranks, None, costs=costs)
    topology = topology or discover(communicator)
    costs = costs.at(topology.ranks_per_host)
    transports, digest_exchange = open_transports(
        Members(communicator, topology, costs.num_leaders, name, timeout_s)
    )

    def revoke() -> None:
        for transport in transports:
            transport.revoke()

    queue = OperationQueue(
        communicator,
        digest_exchange,
        name=name,
        timeout_s=timeout_s,
        threads_allowed=threads_allowed,
        ranks=tuple(ranks),
        # The host's ranks learn that this one has left an operation that they may still come to.
        on_failure=revoke,
        scope=scope,
    )
    messages = PointToPoint(communicator.duplicate(), timeout_s=timeout_s, threads_allowed=threads_allowed)
    messages.group = (name, tuple(ranks))
    return Group(name, ranks, GroupResources(queue, messages, transports, topology), costs=costs)
