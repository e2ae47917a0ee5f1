"""`OneModel`: the ranks of a learner of `DiLoCo(quorum=, learners=)`, which have one model among them.

They average their gradients in every step, count examples together, and do what their first rank decides:

    first rank                                    the others
    is an outer step due?  ------ count ------    count
    sends the parameters, and is told   ...       wait for it
    passes on what it was told    ----- led ---   go on from that, too

The loss of one of them ends the learner, and is no event for others; nor is the loss of a rank of theirs.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.arguments import ranks_text
from mpisgd.collectives.all_reduce import all_reduce
from mpisgd.collectives.coalesced import all_reduce_coalesced, broadcast_coalesced
from mpisgd.collectives.objects import broadcast_object
from mpisgd.core.consistency import Operation
from mpisgd.core.failure_scope import FailureScope
from mpisgd.core.group import Group
from mpisgd.core.topology import Topology
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument, LearnerLost, MpisgdError, afresh
from mpisgd.job.groups import open_group
from mpisgd.methods.diloco.quorum.messages import TAKE, Told
from mpisgd.methods.strategy.flat_copy import FlatCopy

__all__ = ["OneModel", "Step", "learners_of"]


def learners_of(topology: Topology, learners: int | str) -> list[tuple[int, ...]]:
    """Return the group ranks of each learner, in the order of their first ones.

    Args:
        topology: of the group.
        learners: "rank", "host", or how many ranks of a host are one.

    Raises:
        InvalidArgument: some host has a number of ranks that cannot be divided so; on every rank.
    """
    found: list[tuple[int, ...]] = []
    for number, ranks in enumerate(topology.nodes):
        count = 1 if learners == "rank" else len(ranks) if isinstance(learners, str) else learners
        if len(ranks) % count:
            raise InvalidArgument(
                f"DiLoCo: learners={learners}, and host {topology.hostnames[number]} has {len(ranks)} ranks, "
                "which is no multiple of that"
            )
        found += [tuple(ranks[start : start + count]) for start in range(0, len(ranks), count)]
    return sorted(found)


class Step(NamedTuple):
    """What a learner knows of a step.

    Attributes:
        examples: of all its ranks; 0: none has said how many.
        is_due: whether it comes to an outer step.
    """

    examples: int
    is_due: bool


class OneModel:
    """Of one of the ranks. Collective over these, as are the methods; a rank alone calls nobody.

    Args:
        group: of all learners.
        learners: see `learners_of`.

    Attributes:
        firsts: the first rank of each learner, as ranks of the group.
        leads: whether this rank is one of these.
        group: the ranks of this learner; None where each rank is one.
    """

    def __init__(self, group: Group, learners: int | str) -> None:
        each = learners_of(group.topology, learners)
        (mine,) = (ranks for ranks in each if group.rank in ranks)
        self.firsts = [ranks[0] for ranks in each]
        self.leads = group.rank == mine[0]
        self.group: Group | None = None
        self._first = group.ranks[mine[0]]
        if learners == "rank":
            return
        members = [group.ranks[rank] for rank in mine]

        def lost(who: str) -> LearnerLost:
            return LearnerLost(
                f"DiLoCo(learners={learners!r}): {ranks_text(members)} of the job are one learner, and {who} "
                "was lost: the learner ends, and the others go on"
            )

        self.group = open_group(group.job, members, name=f"learner of rank {self._first}", lost=lost)

    @property
    def scope(self) -> FailureScope | None:
        """What ends where a rank of this learner is lost."""
        return None if self.group is None else self.group.queue.scope

    def check(self) -> None:
        """Raise where a rank of this learner was lost.

        Raises:
            LearnerLost: then.
        """
        if self.scope is not None and (error := self.scope.error) is not None:
            raise afresh(error)

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Let all ranks begin with what the first one has."""
        if self.group is not None:
            broadcast_coalesced(tensors, self._first, self.group)

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Take the means of what differs by rank."""
        if self.group is not None and tensors:
            all_reduce_coalesced(tensors, ReduceOp.AVG, self.group)

    def count(self, examples: int, is_due: bool) -> Step:
        """Count a step.

        Args:
            examples: of this rank; 0: nobody has said how many.
            is_due: whether an outer step is due, as the first rank has it.

        Raises:
            InvalidArgument: some ranks have a number of examples, and others have none; on all of them.
        """
        if self.group is None:
            return Step(examples, is_due)
        sums = torch.tensor([examples, examples > 0, self.leads and is_due], dtype=torch.int64)
        all_reduce(sums, ReduceOp.SUM, self.group)
        total, counted, due = sums.tolist()
        if counted not in (0, self.group.size):
            raise InvalidArgument(
                f"DiLoCo(quorum=): next_batch(examples=) was called on {counted} of the {self.group.size} "
                "ranks of a learner; call it on all of them before each step, or on none"
            )
        return Step(total, bool(due))

    def led(self, ask: Callable[[], Told], form: FlatCopy, limit_s: float) -> Told:
        """Let the first rank ask; return what it is told, with the outer parameters in `form` if it is TAKE.

        Args:
            ask: what the first rank does.
            form: where the outer parameters come.
            limit_s: how long the others wait for it, which should be longer than it waits itself.

        Raises:
            MpisgdError: what the first rank has raised.
        """
        if self.group is None:
            return ask()
        heard: Told | MpisgdError = Told()
        if self.leads:
            try:
                heard = ask()
            except LearnerLost:  # there is nobody to be told
                raise
            except MpisgdError as exc:
                heard = exc
        self.group.queue.run(Operation("DiLoCo", extra="its first rank"), lambda: None, timeout_s=limit_s)
        heard = broadcast_object(heard, self._first, self.group)
        if isinstance(heard, MpisgdError):
            raise heard
        if heard.kind == TAKE:
            broadcast_coalesced([form.memory], self._first, self.group)
        return heard
