"""Values that differ between ranks, such as shards of an optimizer's state, with a replica on a buddy rank.

The buddy of a rank is the next rank or, in a job on several hosts, one on the next host. When a rank is lost,
its value comes from its buddy. Every rank gets the values of all ranks to redistribute them, or those that it
holds, of a `HeldByOne`.
"""

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpisgd.arguments import check_callable
from mpisgd.collectives.objects import all_gather_object, broadcast_object
from mpisgd.collectives.point_to_point import irecv, isend
from mpisgd.errors import StateLost
from mpisgd.job.rank_info import rank, size, topology

__all__ = ["BuddyReplicas", "HeldByOne", "PerRank", "buddy_of"]

TAG = 30_001  # unlikely in a program's own messages


class PerRank:
    """A value of a `State` that differs between ranks and survives the loss of one of them.

    Args:
        get: returns this rank's value: tensors, numbers, and dicts, lists and tuples of them.
        put: called on every rank when the ranks have changed, with the values of all ranks at the last
            commit, by old rank; it redistributes them. `size()` is already the new one.
    """

    def __init__(self, get: Callable[[], Any], put: Callable[[Mapping[int, Any]], Any]) -> None:
        check_callable("PerRank", "get", get)
        check_callable("PerRank", "put", put)
        self.get = get
        self.put = put

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict: the values are saved by replicas on other ranks."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: `put` gets the values from the replicas."""


class HeldByOne(PerRank):
    """A value of which each rank needs a part of everyone's only: `put` sends that.

    `put` is called on every rank, with the values that this one holds; each is held by one rank.
    """


def buddy_of(nodes: Sequence[Sequence[int]], rank: int) -> int:
    """Return the rank that holds the replica of `rank`: the next one, on another host if there are several.

    Args:
        nodes: the ranks of each host.
    """
    if len(nodes) == 1:
        ranks = nodes[0]
        return ranks[(ranks.index(rank) + 1) % len(ranks)]
    host, local_rank = next((h, ranks.index(rank)) for h, ranks in enumerate(nodes) if rank in ranks)
    others = nodes[(host + 1) % len(nodes)]
    return others[local_rank % len(others)]


class _Commit(NamedTuple):
    """What a rank holds of a commit.

    Attributes:
        num_ranks: how many there were.
        replicas: by owner: of this rank, and of those whose buddy it is.
    """

    num_ranks: int
    replicas: dict[int, bytes]


class BuddyReplicas:
    """The committed `PerRank` values of this rank, and the replicas that it holds for other ranks."""

    def __init__(self) -> None:
        self._commits: dict[int, _Commit] = {}

    def save(self, number: int, values: Mapping[str, PerRank]) -> None:
        """Save this rank's values as commit `number` and send a replica to the buddy. Collective.

        Args:
            number: of the commit.
            values: by name, the same names on all ranks.
        """
        if not values:
            return
        mine, nodes = _saved({name: value.get() for name, value in values.items()}), topology().nodes
        owners = [other for other in range(size()) if other != rank() and buddy_of(nodes, other) == rank()]
        replicas = {rank(): mine, **_exchange(mine, buddy_of(nodes, rank()), owners)}
        self._commits[number] = _Commit(size(), replicas)
        for old in sorted(self._commits)[:-2]:
            del self._commits[old]

    def restore(self, number: int, values: Mapping[str, PerRank]) -> None:
        """Give every `PerRank` the values of all ranks at commit `number`. Collective.

        Each rank's values are sent once, by one of those that hold them.

        Raises:
            StateLost: a rank and its buddy are both gone; on all ranks.
        """
        if not values:
            return
        held = self._commits.get(number, _Commit(0, {}))
        gathered: list[Any] = [None] * size()
        all_gather_object(gathered, (sorted(held.replicas), held.num_ranks))
        holders = {owner: holder for holder, (owners, _) in enumerate(gathered) for owner in owners}
        # Of this commit: others may have begun a later one, among more ranks, when one of these was lost.
        num_ranks = max(num_ranks for _, num_ranks in gathered)
        missing = sorted(set(range(num_ranks)) - set(holders))
        if missing:
            raise StateLost(
                f"elastic: the PerRank values of rank {missing[0]} are lost: its buddy, which held their "
                "replica, is lost too; start again from a checkpoint"
            )
        mine = {owner: _loaded(held.replicas[owner]) for owner, by in holders.items() if by == rank()}
        of_all = [name for name, value in values.items() if not isinstance(value, HeldByOne)]
        theirs = {owner: _sent_by(by, mine.get(owner, {}), of_all) for owner, by in sorted(holders.items())}
        for name, value in values.items():
            known = theirs if name in of_all else mine
            value.put({owner: of_one[name] for owner, of_one in known.items()})


def _saved(values: Mapping[str, Any]) -> bytes:
    stream = io.BytesIO()
    torch.save(values, stream)
    return stream.getvalue()


def _loaded(replica: bytes) -> dict[str, Any]:
    values: dict[str, Any] = torch.load(io.BytesIO(replica), weights_only=True)
    return values


def _sent_by(holder: int, values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return some of the values of a rank, which `holder` sends to all. Collective."""
    if not names:
        return {}
    replica = _saved({name: values[name] for name in names}) if rank() == holder else None
    return _loaded(broadcast_object(replica, holder))


def _exchange(mine: bytes, buddy: int, owners: Sequence[int]) -> dict[int, bytes]:
    """Send this rank's values to its buddy and return those of the ranks whose buddy it is."""
    if buddy == rank():
        return {}
    lengths = {owner: torch.zeros(1, dtype=torch.int64) for owner in owners}
    _send_and_receive(torch.tensor([len(mine)]), buddy, lengths)
    contents = {owner: torch.empty(int(length), dtype=torch.uint8) for owner, length in lengths.items()}
    _send_and_receive(torch.frombuffer(bytearray(mine), dtype=torch.uint8), buddy, contents)
    return {owner: content.numpy().tobytes() for owner, content in contents.items()}


def _send_and_receive(out: Tensor, dst: int, into: Mapping[int, Tensor]) -> None:
    works = [irecv(tensor, src, tag=TAG) for src, tensor in into.items()]
    works.append(isend(out, dst, tag=TAG))
    with contextlib.ExitStack() as stack:
        for work in works:
            stack.callback(work.wait)
