"""`PerHost`: what passes between hosts is compressed, once for each host; on a host gradients stay exact."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from mpisgd.arguments import shown
from mpisgd.collectives.broadcast import broadcast
from mpisgd.collectives.objects import broadcast_object
from mpisgd.collectives.reduce import reduce
from mpisgd.compress.compressor import BucketLayout, BucketReducer, Compressor, Traits
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument
from mpisgd.job.groups import open_host_group, open_leader_group
from mpisgd.methods.paper_kit import Paper
from mpisgd.methods.per_host import paper
from mpisgd.methods.top_k.top_k import TopK

__all__ = ["PerHost", "PerHostReducer"]


@dataclass(frozen=True)
class PerHost(Compressor):
    """The ranks of a host average uncompressed gradients; one rank of each host compresses the mean.

    With p ranks on h hosts, of which host j has p_j,

        g_j = mean of the gradients of host j, times p_j h / p     in shared memory
        g   = mean of the h tensors g_j, by `compressor`           between the first ranks of the hosts

    So a host compresses and sends once, for any number of ranks. If all ranks are on one host, nothing is
    compressed. The compressor's state is on the first rank of each host.

    Attributes:
        compressor: the compressor between hosts.

    Raises:
        InvalidArgument: at construction.

    Cost: a reduce and a broadcast on each host, and what the compressor costs among as many ranks as there
        are hosts.
    """

    compressor: Compressor

    @classmethod
    def examples(cls) -> Sequence["PerHost"]:
        """See `Compressor`."""
        return (cls(TopK(ratio=0.5)),)

    def __post_init__(self) -> None:
        if not isinstance(self.compressor, Compressor):
            raise InvalidArgument(f"PerHost: compressor={shown(self.compressor)}; expected a Compressor")

    @cached_property
    def traits(self) -> Traits:
        """Those of the compressor."""
        return self.compressor.traits

    def reducer(self, layout: BucketLayout) -> "PerHostReducer":
        """Return the reducer: on the host, between hosts, and back to the ranks of the host."""
        return PerHostReducer(self.compressor.reducer(layout))

    def paper(self) -> Paper[Any]:
        """See `Compressor`."""
        return paper.PerHost(self.compressor.paper())


class _Levels(NamedTuple):
    """A group by hosts.

    Attributes:
        host: the ranks of this host; None where there is one.
        leaders: the first ranks of all hosts; None on others, and on one host.
        first: the global rank of the first of this host.
        weight: of this host's mean in that of the hosts: 1 where hosts have as many ranks as others.
    """

    host: Group | None
    leaders: Group | None
    first: int
    weight: float


class PerHostReducer(BucketReducer):
    """The working part of `PerHost`.

    What it keeps is what the other reducer keeps, and counts where this rank is the first of its host.

    Args:
        inner: reduces the bucket between hosts.
    """

    leads_alone = True

    def __init__(self, inner: BucketReducer) -> None:
        self._inner, self.state = inner, inner.state
        self._num_hosts = 0

    def reduce(self, bucket: Tensor, group: Group, op: ReduceOp) -> None:
        """Reduce on the host, between hosts, and give the ranks of the host what came out."""
        levels = _levels_of(group)
        self._num_hosts = group.topology.num_nodes
        if levels.host is not None:
            reduce(bucket, levels.first, ReduceOp.AVG, levels.host)
        if levels.leaders is not None:
            self._between_hosts(bucket, levels.leaders, levels.weight)
        if op is ReduceOp.SUM and group.topology.local_rank == 0:
            bucket.mul_(group.size)
        if levels.host is not None:
            broadcast(bucket, levels.first, levels.host)

    def _between_hosts(self, bucket: Tensor, leaders: Group, weight: float) -> None:
        if self.is_fresh:
            self._agree(leaders)
        if weight != 1.0:
            bucket.mul_(weight)
        self._inner.reduce(bucket, leaders, ReduceOp.AVG)

    def _agree(self, leaders: Group) -> None:
        """Take over from the first host what all must have alike: a rank may be a leader for the first time.

        What a compressor keeps for all ranks alike is anything but tensors of elements, see `state_dict`.
        """
        state = self.state_dict()
        own = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        alike = {name: value for name, value in state.items() if name not in own}
        # What the first leader has not begun nobody has: its state has no entry for that.
        self.load_state_dict({**own, **broadcast_object(alike, leaders.ranks[0], leaders)})
        self.is_fresh = False

    def bytes_on_the_wire(self, size: int) -> int:
        """Return the bytes that each host's first rank sends to others, as far as the hosts are known."""
        hosts = self._num_hosts or size
        return self._inner.bytes_on_the_wire(hosts) if hosts > 1 else 0

    def kept_apart(self, start: int, stop: int) -> dict[str, Tensor]:
        """As the other reducer."""
        return self._inner.kept_apart(start, stop)


def _levels_of(group: Group) -> _Levels:
    """Return the groups of a group's hosts; they are made at the first bucket. Collective then."""
    if _Levels not in group.made_for:
        where = group.topology
        first = group.ranks[where.nodes[where.node_rank][0]]
        weight = where.local_size * where.num_nodes / group.size
        group.made_for[_Levels] = _Levels(open_host_group(group), open_leader_group(group), first, weight)
    levels: _Levels = group.made_for[_Levels]
    return levels
