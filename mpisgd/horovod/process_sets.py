"""Process sets: some ranks of the job with operations of their own, in the one order of all sets."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from mpisgd.arguments import shown
from mpisgd.horovod import state
from mpisgd.horovod.arguments import as_ranks
from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.engine.request import Request
from mpisgd.job import lifecycle, rank_info
from mpisgd.job.job_of_thread import job_place

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set", "serial_of_new"]


class ProcessSet:
    """Some ranks of the job, for the argument `process_set` of operations.

    Args:
        ranks_or_comm: global ranks, or an mpi4py communicator of them.

    Attributes:
        process_set_id: its number, None until it is added.
        ranks: its global ranks, ascending.
        mpi_comm: the communicator from which it was made, if any.
    """

    process_set_id: int | None = None

    def __init__(self, ranks_or_comm: Any) -> None:
        self.mpi_comm: Any = None
        self.ranks: list[int] | None = None
        if isinstance(ranks_or_comm, Sequence) and not isinstance(ranks_or_comm, str | bytes):
            self.ranks = sorted(as_ranks("ProcessSet", "ranks_or_comm", ranks_or_comm))
        elif hasattr(type(ranks_or_comm), "Get_group"):
            self.mpi_comm = ranks_or_comm
        else:
            raise ValueError(
                f"ProcessSet: ranks_or_comm={shown(ranks_or_comm)}; expected a list of ranks, or an mpi4py "
                "communicator"
            )

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def __deepcopy__(self, memo: object) -> "ProcessSet":
        return self  # a copied layer talks to the same ranks

    def size(self) -> int:
        """Return the number of its ranks."""
        return len(self.members())

    def rank(self) -> int:
        """Return this process's rank within the set.

        Raises:
            ValueError: this rank is not in it.
        """
        members = self.members()
        if rank_info.rank() not in members:
            raise ValueError(f"rank {rank_info.rank()} is not in {self!r}")
        return members.index(rank_info.rank())

    def included(self) -> bool:
        """Return whether this rank is in it."""
        return rank_info.rank() in self.members()

    def members(self) -> list[int]:
        """Return its ranks; it must have been added."""
        if self.process_set_id is None or self.ranks is None:
            raise ValueError(f"{self!r} has not been added; use hvd.add_process_set()")
        return self.ranks

    def settle(self, set_id: int | None, ranks: Sequence[int]) -> None:
        """Set the number and the ranks; None: it was removed."""
        self.process_set_id, self.ranks = set_id, list(ranks)


class _GlobalProcessSet(ProcessSet):
    """All ranks; known before `init()`, whose ranks it then has."""

    process_set_id = 0

    def __init__(self) -> None:
        super().__init__([])

    def members(self) -> list[int]:
        """Return all ranks."""
        state.engine()
        return list(range(rank_info.size()))

    def __reduce__(self) -> str:
        return "global_process_set"  # a saved layer finds that of the job it is loaded in


global_process_set = _GlobalProcessSet()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set. Collective over all ranks, in the same order, at any time.

    Args:
        process_set: a `ProcessSet`, global ranks, or an mpi4py communicator. Communicators may differ by
            rank, as those of `Split`: each rank then gets the set that it belongs to.

    Raises:
        ValueError: there is a process set of these ranks already, or the job has no such rank.
        HorovodInternalError: the ranks gave different sets; raised on all of them.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if added.mpi_comm is not None:
        return _add_those_of_communicators(added)
    ranks = _checked(added.ranks or [])
    if state.engine().process_sets.find(ranks) is not None:
        raise ValueError(f"Attempted to add a duplicate process set: {ranks}")
    added.settle(_change("add_process_set", ranks), ranks)
    return added


def _change(kind: str, ranks: Sequence[int], set_id: int = -1) -> int:
    """Add or remove a process set, and return its number. What is pending in one that is removed fails."""
    request = Request(f"{kind}.sets", kind, root=set_id, ranks=tuple(ranks))
    changed: int = state.engine().perform(Entry(request))
    return changed


def _checked(ranks: list[int]) -> list[int]:
    if not ranks or ranks[0] < 0 or ranks[-1] >= rank_info.size() or len(set(ranks)) < len(ranks):
        raise ValueError(f"add_process_set: ranks {ranks}; the job has the ranks 0 to {rank_info.size() - 1}")
    return ranks


def _add_those_of_communicators(added: ProcessSet) -> ProcessSet:
    """Add the sets of all ranks' communicators that there are not yet. Collective."""
    mine: list[int] = []
    if added.mpi_comm:  # which counts the ranks of the job in its own way; a rank may have none
        from mpisgd.transport.mpi import as_mpi

        ours = as_mpi(lifecycle.world().queue.communicator).comm.Get_group()
        theirs = added.mpi_comm.Get_group()
        mine = sorted(theirs.Translate_ranks(list(range(theirs.Get_size())), ours))
    row = torch.zeros(1, rank_info.size(), dtype=torch.bool)
    row[0, mine] = True
    request = Request("allgather.process_sets", "allgather", dtypes=("bool",), shapes=((rank_info.size(),),))
    (rows,) = state.engine().perform(Entry(request, [row]))
    everyones = [ranks for row in rows if (ranks := row.nonzero().view(-1).tolist())]
    if not everyones:
        raise ValueError("add_process_set: no rank is in its communicator")
    for ranks in everyones:
        if state.engine().process_sets.find(ranks) is None:
            _change("add_process_set", _checked(ranks))
    ranks = mine or everyones[0]  # a rank that is in none of them knows the first one
    added.settle(state.engine().process_sets.find(ranks), ranks)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; False if it does not exist or is the global one. Collective over all ranks."""
    set_id = process_set.process_set_id
    if not set_id or process_set.ranks is None:
        return False
    if state.engine().process_sets.find(process_set.ranks) is None:
        return False
    _change("remove_process_set", process_set.ranks, set_id)
    process_set.settle(None, process_set.ranks)
    return True


class _NumMade(Counter[tuple[int, ...]]):
    """How many optimizers a rank has made, by the ranks of their process set."""


def serial_of_new(process_set: ProcessSet) -> int:
    """Return the number of a new optimizer among those of a process set, whose ranks make them in one order.

    Two optimizers may have operations under way at once, of parameters of the same names and shapes.
    """
    num_made, members = job_place().own(_NumMade), tuple(process_set.members())
    serial = num_made[members]
    num_made[members] += 1
    return serial
