"""Values that differ between ranks, such as shards of an optimizer's state, with a replica on a buddy rank.

The buddy of a rank is the next rank or, in a job on several hosts, one on the next host. When a rank is lost,
its value comes from its buddy, and every rank gets the values of all ranks to redistribute them.
"""

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.arguments import check_callable
from mpisgd.collectives.objects import all_gather_object
from mpisgd.collectives.point_to_point import irecv, isend
from mpisgd.errors import StateLost
from mpisgd.job.rank_info import rank, size, topology

__all__ = ["BuddyReplicas", "PerRank", "buddy_of"]

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
        """Nothing: see `BuddyReplicas`."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: see `BuddyReplicas`."""


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


class BuddyReplicas:
    """The committed `PerRank` values of this rank, and the replicas that it holds for other ranks.

    Args:
        values: in the same order on all ranks.
    """

    def __init__(self, values: Sequence[PerRank]) -> None:
        self._values = values
        self._commits: dict[int, dict[int, bytes]] = {}  # by number and rank
        self._num_ranks = 0  # at the last commit

    def save(self, number: int) -> None:
        """Save this rank's values as commit `number` and send a replica to the buddy. Collective."""
        if not self._values:
            return
        stream = io.BytesIO()
        torch.save([value.get() for value in self._values], stream)
        mine, nodes = stream.getvalue(), topology().nodes
        owners = [other for other in range(size()) if other != rank() and buddy_of(nodes, other) == rank()]
        self._commits[number] = {rank(): mine, **_exchange(mine, buddy_of(nodes, rank()), owners)}
        self._num_ranks = size()
        for old in sorted(self._commits)[:-2]:
            del self._commits[old]

    def restore(self, number: int) -> None:
        """Give every `PerRank` the values of all ranks at commit `number`. Collective.

        Raises:
            StateLost: a rank and its buddy are both gone; on all ranks.
        """
        if not self._values:
            return
        gathered: list[Any] = [None] * size()
        all_gather_object(gathered, (self._commits.get(number, {}), self._num_ranks))
        replicas = {owner: replica for found, _ in gathered for owner, replica in found.items()}
        missing = sorted(set(range(max(num_ranks for _, num_ranks in gathered))) - set(replicas))
        if missing:
            raise StateLost(
                f"elastic: the PerRank values of rank {missing[0]} are lost: its buddy, which held their "
                "replica, is lost too; start again from a checkpoint"
            )
        values_of: dict[int, list[Any]] = {
            owner: torch.load(io.BytesIO(replica), weights_only=True)
            for owner, replica in sorted(replicas.items())
        }
        for i, value in enumerate(self._values):
            value.put({owner: values[i] for owner, values in values_of.items()})


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
