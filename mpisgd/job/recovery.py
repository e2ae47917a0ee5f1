"""Recovery from a loss: the survivors make a new world, with joiners if the caller has some started.

    a rank is gone         all waits end (monitor/failure_detector.py)
    abandon the old world  threads end, communicators are revoked
    shrink                 to the survivors, in their order; waits for all of them
    quorum                 may we continue, or are we the smaller part of a partitioned network?
    grow                   joiners, if wanted
    begin                  communicators, shared memory, hooks
    agree                  has it worked on every rank? otherwise from `shrink` on

A killed rank is gone. A host that does not answer may be alive behind a network partition, and its ranks may
take all others for lost. Then only one part may continue: the one with more ranks or, of two equal parts, the
one with the lowest rank.

Source: Bland, Bouteiller, Herault, Bosilca and Dongarra 2013, "Post-failure recovery of MPI communication
capability".
"""

import gc
import sys
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mpisgd.errors import JobError, MpisgdError, PeerLost
from mpisgd.job import lifecycle as jobs
from mpisgd.job.startup_timeout import within
from mpisgd.job.world import Job
from mpisgd.threads import scheduling, waiting

if TYPE_CHECKING:
    from mpisgd.core.topology import Topology
    from mpisgd.transport.mpi import Communicator

__all__ = [
    "Recovered",
    "agree_on_end",
    "free_old_worlds",
    "has_quorum",
    "is_loss",
    "outlives_losses",
    "recover",
    "silent_hosts",
    "wait_for_notice",
]

MINORITY_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h
NOTICE_S = 0.5  # the failure detector needs less; an error may come before it has looked
SHRINKING = "the agreement of the remaining ranks"


Grow = Callable[["Communicator"], tuple["Communicator", int]]


class Recovered(NamedTuple):
    """The result of a recovery.

    Attributes:
        lost: ranks of the old world that are gone.
        num_joiners: how many ranks are new.
        took_s: seconds between leaving the old world and entering the new one, on this rank.
    """

    lost: tuple[int, ...]
    num_joiners: int
    took_s: float


def outlives_losses() -> bool:
    """Return whether the job goes on where a rank is lost."""
    return jobs.is_initialized() and jobs.current_job().failure_detector is not None


def is_loss(exc: Exception) -> bool:
    """Return whether a lost rank has caused this error, which torch may have wrapped.

    A late rank is not lost. The others cannot continue without it, since it may still come.
    """
    if isinstance(exc, JobError) or not outlives_losses():
        return False
    wait_for_notice(lambda: not isinstance(exc, PeerLost))
    return waiting.cancelled_by_loss() or (isinstance(exc, PeerLost) and waiting.cancel_reason() is None)


def wait_for_notice(is_likely: Callable[[], bool]) -> None:
    """Return when the loss of a rank has been noticed, or is not likely any more, or after a while."""
    deadline = scheduling.now_s() + NOTICE_S
    while is_likely() and waiting.cancel_reason() is None and scheduling.now_s() < deadline:
        scheduling.sleep(0.01)


def agree_on_end() -> None:
    """Return when all ranks come here: one that had left could not help the others after a loss.

    Raises:
        PeerLost: a rank was lost before.
    """
    if outlives_losses():
        job = jobs.current_job()
        job.asked_for_end = True
        if not job.communicator.agree(True):
            raise PeerLost("a rank of the job was lost at the end of elastic.run")


def silent_hosts(nodes: Sequence[Sequence[int]], left: Collection[int]) -> list[int]:
    """Return the hosts without a survivor: they may be dead, or only unreachable.

    Args:
        nodes: the ranks of each host before the loss.
        left: the ranks that are left.
    """
    return [host for host, ranks in enumerate(nodes) if not set(ranks) & set(left)]


def has_quorum(nodes: Sequence[Sequence[int]], left: Collection[int]) -> bool:
    """Return whether the ranks that are `left` may continue; arguments as above."""
    unreachable = {rank for host in silent_hosts(nodes, left) for rank in nodes[host]}
    if len(left) != len(unreachable):
        return len(left) > len(unreachable)
    return min(left) < min(unreachable)


def recover(
    reason: str, *, min_ranks: int = 1, grow: Grow | None = None, caller: str = "elastic"
) -> Recovered:
    """Leave a world that has lost ranks for one of the survivors. Collective over these.

    Args:
        reason: the error of the groups of the old world from now on.
        min_ranks: with fewer left the job ends.
        grow: makes of the survivors' communicator one with joiners, and counts these; None: no joiners.
        caller: what the program has called, for messages.

    Raises:
        JobError: too few are left, or they have no quorum; on all survivors, which are then in a new world.
    """
    started = scheduling.now_s()
    old = jobs.abandon(reason)
    assert old.failure_detector is not None
    before, old_communicator, end = old.world.known_topology, old.communicator, old.failure_detector.abort
    with within(old.timeout_s, "the recovery from the loss of a rank", parts=2, end=end):
        while True:
            waiting.allow_waits()
            with within(old.timeout_s, SHRINKING, end=end, exit_code=MINORITY_EXIT_CODE):
                if not old.asked_for_end:  # another rank may be asking, and must not wait for an answer
                    old_communicator.agree(False)
                    old.asked_for_end = True
                left_communicator = old_communicator.shrink()
            old_communicator.acknowledge()
            outcome = _try_to_begin(old, left_communicator, before, min_ranks, grow, caller)
            if old_communicator.agree(outcome is not None):
                break
            if outcome is not None:
                begun = jobs.abandon("another rank was lost meanwhile")
                if begun.failure_detector is not None:
                    begun.failure_detector.stop()
    old.failure_detector.stop()
    assert outcome is not None
    left, num_joiners = outcome
    lost = tuple(sorted({rank for ranks in before.nodes for rank in ranks} - set(left)))
    _check_left(before, left, min_ranks, caller)
    return Recovered(lost, num_joiners, scheduling.now_s() - started)


def _try_to_begin(
    old: Job,
    left_communicator: "Communicator",
    before: "Topology",
    min_ranks: int,
    grow: Grow | None,
    caller: str,
) -> tuple[list[int], int] | None:
    """Make the new world; return None if another rank was lost meanwhile.

    Returns:
        The old ranks of the survivors, and the number of joiners.
    """
    try:
        left = left_communicator.all_gather_object(before.rank)
        fit = has_quorum(before.nodes, left) and len(left) >= min_ranks
        communicator, num_joiners = grow(left_communicator) if fit and grow else (left_communicator, 0)
        new = jobs.begin_next(old, communicator)
    except MpisgdError as exc:
        print(f"mpisgd: {caller}: {exc}; once more", file=sys.stderr, flush=True)
        assert old.fault_tolerance is not None
        old.fault_tolerance.revoke_all()
        return None
    new.lost_ranks, new.lost_host = True, old.lost_host or bool(silent_hosts(before.nodes, left))
    return left, num_joiners


def _check_left(before: "Topology", left: list[int], min_ranks: int, caller: str) -> None:
    """Raise JobError where the survivors must not continue."""
    listed = ", ".join(map(str, left[:8])) + (", ..." if len(left) > 8 else "")
    left_text = f"{len(left)} of {before.size} ranks are left (of the world before: {listed})"
    if not has_quorum(before.nodes, left):
        hosts = ", ".join(before.hostnames[host] for host in silent_hosts(before.nodes, left))
        raise JobError(
            f"{caller}: {left_text}, and the others, on {hosts}, may be alive behind a network "
            "partition: this part ends, since it is the smaller one (of two equal parts: the one without the "
            "lowest rank)",
            MINORITY_EXIT_CODE,
        )
    if len(left) < min_ranks:
        raise JobError(f"{caller}: {left_text}; min_ranks={min_ranks}", MINORITY_EXIT_CODE)


def free_old_worlds() -> None:
    """Free the memory of earlier worlds, once nothing of them is in use."""
    if (fault_tolerance := jobs.current_job().fault_tolerance) is not None:
        fault_tolerance.free_abandoned()
    gc.collect()  # reference cycles hold some 10 MB for each loss
