"""What only one rank has, such as its shard of an optimizer's state: a copy of it lies on another rank.

The other rank is the next one, or, where the job has several hosts, the next one on another host. When a
rank is lost, its piece comes from there, and every rank gets all pieces to share out anew.
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

__all__ = ["PerRank", "Pieces", "guardian_of"]

TAG = 30_001  # of messages that the program itself will hardly send


class PerRank:
    """A value of a `State` that differs between ranks and must not be lost with one of them.

    Args:
        get: returns this rank's piece: tensors, numbers, and dicts, lists and tuples of them.
        put: takes all pieces of the last commit, by the ranks that had them, when the ranks have changed; it
            is called on every rank and shares them out as it likes. `size()` is already the new one.
    """

    def __init__(self, get: Callable[[], Any], put: Callable[[Mapping[int, Any]], Any]) -> None:
        check_callable("PerRank", "get", get)
        check_callable("PerRank", "put", put)
        self.get = get
        self.put = put

    def state_dict(self) -> dict[str, Any]:
        """Nothing: see `Pieces`."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: see `Pieces`."""


def guardian_of(nodes: Sequence[Sequence[int]], rank: int) -> int:
    """Return the rank that keeps a copy for `rank`: the next one, on another host if there are several.

    Args:
        nodes: the ranks of each host.
    """
    if len(nodes) == 1:
        ranks = nodes[0]
        return ranks[(ranks.index(rank) + 1) % len(ranks)]
    host, place = next((h, ranks.index(rank)) for h, ranks in enumerate(nodes) if rank in ranks)
    others = nodes[(host + 1) % len(nodes)]
    return others[place % len(others)]


class Pieces:
    """The pieces of all `PerRank` values of a state, with the copies that this rank keeps for others.

    Args:
        values: in the same order on all ranks.
    """

    def __init__(self, values: Sequence[PerRank]) -> None:
        self._values = values
        self._kept: dict[int, dict[int, bytes]] = {}  # by commit and rank
        self._num_ranks = 0  # that had a part in the last commit

    def save(self, number: int) -> None:
        """Keep this rank's pieces as commit `number`, and hand a copy to the guardian. Collective."""
        if not self._values:
            return
        mine = _pack([value.get() for value in self._values])
        nodes = topology().nodes
        wards = [other for other in range(size()) if other != rank() and guardian_of(nodes, other) == rank()]
        copies = _exchange(mine, guardian_of(nodes, rank()), wards)
        self._kept[number] = {rank(): mine, **copies}
        self._num_ranks = size()
        for old in sorted(self._kept)[:-2]:
            del self._kept[old]

    def restore(self, number: int) -> None:
        """Give every value all pieces of commit `number`. Collective.

        Raises:
            StateLost: a rank and the one that kept its copy are both gone; on all ranks.
        """
        if not self._values:
            return
        pieces, num_ranks = _gather(self._kept.get(number, {}), self._num_ranks)
        missing = sorted(set(range(num_ranks)) - set(pieces))
        if missing:
            raise StateLost(
                f"elastic: what only rank {missing[0]} had is lost with it and the rank that kept the copy; "
                "start again from a checkpoint"
            )
        whole = {owner: _unpack(piece) for owner, piece in sorted(pieces.items())}
        for place, value in enumerate(self._values):
            value.put({owner: parts[place] for owner, parts in whole.items()})


def _gather(found: dict[int, bytes], num_ranks: int) -> tuple[dict[int, bytes], int]:
    everyones: list[Any] = [None] * size()
    all_gather_object(everyones, (found, num_ranks))
    pieces = {owner: piece for found, _ in everyones for owner, piece in found.items()}
    return pieces, max(number for _, number in everyones)


def _pack(values: list[Any]) -> bytes:
    stream = io.BytesIO()
    torch.save(values, stream)
    return stream.getvalue()


def _unpack(piece: bytes) -> list[Any]:
    values: list[Any] = torch.load(io.BytesIO(piece), weights_only=True)
    return values


def _exchange(mine: bytes, guardian: int, wards: Sequence[int]) -> dict[int, bytes]:
    """Send this rank's piece to its guardian and return those of its wards."""
    if guardian == rank():
        return {}
    lengths = {ward: torch.zeros(1, dtype=torch.int64) for ward in wards}
    _messages(torch.tensor([len(mine)]), guardian, lengths)
    contents = {ward: torch.empty(int(length), dtype=torch.uint8) for ward, length in lengths.items()}
    _messages(torch.frombuffer(bytearray(mine), dtype=torch.uint8), guardian, contents)
    return {ward: content.numpy().tobytes() for ward, content in contents.items()}


def _messages(out: Tensor, dst: int, into: Mapping[int, Tensor]) -> None:
    works = [irecv(tensor, src, tag=TAG) for src, tensor in into.items()]
    works.append(isend(out, dst, tag=TAG))
    with contextlib.ExitStack() as stack:
        for work in works:
            stack.callback(work.wait)
