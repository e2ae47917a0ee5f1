"""Which way device tensors take in a group: decided by all ranks alike, from what each of them has."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from mpisgd.errors import InvalidArgument

__all__ = ["AWARE", "NCCL", "STAGING", "DeviceFacts", "Verdict", "agree_on_wanted", "choose"]

NCCL = "nccl"
AWARE = "cuda-aware mpi"
STAGING = "pinned host memory"


class DeviceFacts(NamedTuple):
    """Where a rank works, and what it has there.

    Attributes:
        hostname: of its host.
        node: the number of its host in the group; names need not differ.
        gpu: what tells its GPU from the others of the host; "" for none.
        nccl: whether its torch has NCCL.
        aware: whether its MPI takes addresses on a GPU.
    """

    hostname: str
    node: int
    gpu: str
    nccl: bool
    aware: bool


class Verdict(NamedTuple):
    """The way that was chosen.

    Attributes:
        way: NCCL, AWARE or STAGING.
        reason: why it is not NCCL, where that was not asked for; "" otherwise.
    """

    way: str
    reason: str = ""


def agree_on_wanted(wanted: Sequence[str]) -> str:
    """Return what every rank wants.

    Args:
        wanted: of every rank of the job, each one of `mpisgd.config.GPU_CHOICES`.

    Raises:
        InvalidArgument: they want different ways; on every rank.
    """
    wishes = {wish: [r for r, other in enumerate(wanted) if other == wish] for wish in wanted}
    if len(wishes) > 1:
        told = ", ".join(f"{_named(ranks)} gpu={wish!r}" for wish, ranks in wishes.items())
        error = InvalidArgument(f"init: the ranks of the job want different ways for GPU tensors: {told}")
        error.on_every_rank = True
        raise error
    return wanted[0]


def choose(wanted: str, seats: Sequence[DeviceFacts], ranks: Sequence[int]) -> Verdict:
    """Return the way for a group.

    Args:
        wanted: one of `mpisgd.config.GPU_CHOICES`.
        seats: of every member.
        ranks: what to call them.

    Raises:
        InvalidArgument: "nccl" was asked for and cannot be; on every rank, since all see the same.
    """
    if wanted == "mpi":
        return Verdict(AWARE if all(seat.aware for seat in seats) else STAGING)
    obstacle = _obstacle(seats, ranks)
    if not obstacle:
        return Verdict(NCCL)
    if wanted == "nccl":
        error = InvalidArgument(f"gpu='nccl' cannot be: {obstacle}")
        error.on_every_rank = True
        raise error
    return Verdict(STAGING, obstacle)


def _obstacle(seats: Sequence[DeviceFacts], ranks: Sequence[int]) -> str:
    """Say what NCCL lacks, "" if nothing."""
    if without := [rank for rank, seat in zip(ranks, seats, strict=True) if not seat.gpu]:
        return f"no GPU for {_named(without)}"
    if without := [rank for rank, seat in zip(ranks, seats, strict=True) if not seat.nccl]:
        return f"the torch of {_named(without)} has no NCCL"
    users: dict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, seat in zip(ranks, seats, strict=True):
        users[seat.node, seat.gpu].append(rank)
    for (node, gpu), sharing in users.items():
        if len(sharing) > 1:
            host = next(seat.hostname for seat in seats if seat.node == node)
            return f"{_named(sharing)} share one GPU of host {host} ({gpu}), where NCCL needs one for each"
    return ""


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
