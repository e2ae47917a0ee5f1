"""What carries a group's device tensors: selected by all ranks alike, from what each of them has."""

import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from mpisgd.arguments import ranks_text
from mpisgd.errors import InvalidArgument

__all__ = [
    "AWARE",
    "NCCL",
    "STAGING",
    "DeviceFacts",
    "Selection",
    "agree_on_wanted",
    "choose",
    "warn_of_host_memory",
]

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


class Selection(NamedTuple):
    """What carries device tensors.

    Attributes:
        name: NCCL, AWARE or STAGING.
        reason: why it is not NCCL, where that was not asked for; "" otherwise.
    """

    name: str
    reason: str = ""


def agree_on_wanted(wanted: Sequence[str]) -> str:
    """Return the backend that every rank wants.

    Args:
        wanted: of every rank of the job, each one of `mpisgd.config.GPU_CHOICES`.

    Raises:
        InvalidArgument: they want different ones; on every rank.
    """
    wishes = {wish: [rank for rank, other in enumerate(wanted) if other == wish] for wish in wanted}
    if len(wishes) > 1:
        told = ", ".join(f"{ranks_text(ranks)} gpu={wish!r}" for wish, ranks in wishes.items())
        error = InvalidArgument(
            f"init: the ranks of the job want different transports for GPU tensors: {told}"
        )
        error.on_every_rank = True
        raise error
    return wanted[0]


def choose(wanted: str, facts: Sequence[DeviceFacts], ranks: Sequence[int]) -> Selection:
    """Choose the backend that carries device tensors in a group.

    Args:
        wanted: one of `mpisgd.config.GPU_CHOICES`.
        facts: of every member.
        ranks: what to call them.

    Raises:
        InvalidArgument: "nccl" was asked for and cannot be; on every rank, since all see the same.
    """
    if wanted == "mpi":
        return Selection(AWARE if all(each.aware for each in facts) else STAGING)
    obstacle = _obstacle(facts, ranks)
    if not obstacle:
        return Selection(NCCL)
    if wanted == "nccl":
        error = InvalidArgument(f"gpu='nccl' cannot be: {obstacle}")
        error.on_every_rank = True
        raise error
    return Selection(STAGING, obstacle)


def _obstacle(facts: Sequence[DeviceFacts], ranks: Sequence[int]) -> str:
    """Say what NCCL lacks, "" if nothing."""
    if without := [rank for rank, each in zip(ranks, facts, strict=True) if not each.gpu]:
        return f"no GPU for {ranks_text(without)}"
    if without := [rank for rank, each in zip(ranks, facts, strict=True) if not each.nccl]:
        return f"the torch of {ranks_text(without)} has no NCCL"
    users: dict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, each in zip(ranks, facts, strict=True):
        users[each.node, each.gpu].append(rank)
    for (node, gpu), sharing in users.items():
        if len(sharing) > 1:
            host = next(each.hostname for each in facts if each.node == node)
            return (
                f"{ranks_text(sharing)} share one GPU of host {host} ({gpu}), where NCCL needs one for each"
            )
    return ""


_warned = False


def warn_of_host_memory(reason: str) -> None:
    """Warn that tensors of a GPU go through host memory, once."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"GPU tensors go through host memory, which is slower: {reason}. "
            "mpisgd.init(gpu='mpi') or MPISGD_GPU=mpi asks for that in silence",
            RuntimeWarning,
            stacklevel=2,
        )
