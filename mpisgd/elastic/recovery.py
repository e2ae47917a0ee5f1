"""After a loss: the ranks that are left make a world of their own, with new ones if that was asked for.

    a rank is gone         everyone's waits end (monitor/failure_detector.py)
    give up the old world  threads end, communicators are revoked
    shrink                 the ranks that are left, in their order; waits for all of them
    vote                   may we go on, or are we the smaller half of a cut network?
    grow                   new processes, where wanted
    begin                  communicators, shared memory, hooks
    agree                  has it worked on every rank? otherwise from `shrink` on

Source: Bland, Bouteiller, Herault, Bosilca and Dongarra 2013, "Post-failure recovery of MPI communication
capability".
"""

import gc
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from mpisgd.core import waiting
from mpisgd.elastic.quorum import goes_on, silent_hosts
from mpisgd.elastic.regrow import Terms, grow
from mpisgd.errors import JobError, MpisgdError
from mpisgd.job import lifecycle as jobs
from mpisgd.job import rank_info
from mpisgd.monitor.startup_timeout import within

if TYPE_CHECKING:
    from mpisgd.core.topology import Topology
    from mpisgd.transport.mpi import Communicator

__all__ = ["Recovered", "free_what_is_over", "recover", "tell"]

MINORITY_EXIT_CODE = 75  # as sysexits.h has it for what may work another time
SHRINKING = "the agreement of the ranks that are left on who they are"


class Recovered(NamedTuple):
    """What became of a loss.

    Attributes:
        lost: ranks of the old world that are gone.
        newcomers: how many ranks are new.
        took_s: seconds from this rank's giving up the old world to its being in the new one.
    """

    lost: tuple[int, ...]
    newcomers: int
    took_s: float


def recover(reason: str, terms: Terms) -> Recovered:
    """Leave a world that has lost ranks for one of those that are left. Collective over these.

    Args:
        reason: what the groups of the old world say from now on.
        terms: how many ranks there may be, and whether new ones come.

    Raises:
        JobError: too few are left, or others may go on without us; on all ranks that are left, which are then
            in a world of their own.
    """
    started = time.monotonic()
    old = jobs.give_up(reason)
    assert old.failure_detector is not None
    before, old_wire, end = old.world.known_topology, old.wire, old.failure_detector.abort
    with within(2 * old.timeout_s, "the recovery from the loss of a rank", end=end):
        while True:
            waiting.take_back()
            with within(old.timeout_s, SHRINKING, end=end, exit_code=MINORITY_EXIT_CODE):
                left_wire = old_wire.shrink()
            old_wire.acknowledge()
            outcome = _try_to_begin(old, left_wire, before, terms)
            if old_wire.agree(outcome is not None):
                break
            if outcome is not None and (
                cancel_reason := jobs.give_up("another rank was lost meanwhile").failure_detector
            ):
                cancel_reason.stop()
    old.failure_detector.stop()
    assert outcome is not None
    left, newcomers = outcome
    lost = tuple(sorted({rank for ranks in before.nodes for rank in ranks} - set(left)))
    if silent_hosts(before.nodes, left):
        jobs.current_job().lost_host = True
    recovered = Recovered(lost, newcomers, time.monotonic() - started)
    _judge(before, left, terms)
    return recovered


def _try_to_begin(
    old: jobs.Job, left_wire: "Communicator", before: "Topology", terms: Terms
) -> tuple[list[int], int] | None:
    """Make the new world; None where it did not work since one more rank was lost.

    Returns:
        The old ranks of those that are left, and the number of newcomers.
    """
    try:
        left = left_wire.all_gather_object(before.rank)
        fit = goes_on(before.nodes, left) and len(left) >= terms.min_ranks
        wire, newcomers = grow(left_wire, terms) if fit else (left_wire, 0)
        jobs.begin(wire, old.comm, old.timeout_s, old.gpu)
    except MpisgdError as exc:
        print(f"mpisgd: elastic: {exc}; once more", file=sys.stderr, flush=True)
        jobs.revoke_all()
        return None
    new = jobs.current_job()
    new.lost_ranks, new.lost_host = True, old.lost_host
    return left, newcomers


def _judge(before: "Topology", left: list[int], terms: Terms) -> None:
    """Raise where these ranks must not go on."""
    who = f"{len(left)} of {before.size} ranks are left (of the world before: {_listed(left)})"
    if not goes_on(before.nodes, left):
        hosts = ", ".join(before.hostnames[host] for host in silent_hosts(before.nodes, left))
        raise JobError(
            f"elastic: {who}, and the others, on {hosts}, may be at work behind a cut network: these end, as "
            "the smaller part (of two equal ones: the one without the lowest rank) must",
            MINORITY_EXIT_CODE,
        )
    if len(left) < terms.min_ranks:
        raise JobError(f"elastic: {who}; min_ranks={terms.min_ranks}", MINORITY_EXIT_CODE)


def free_what_is_over() -> None:
    """Give back the memory of worlds that are no more, once nothing of them is in use."""
    jobs.let_go()
    gc.collect()  # it hangs in cycles: some 10 MB for each loss, until Python happens to look, if ever


def tell(recovered: Recovered, speaker: str = "mpisgd") -> None:
    """Let the user know what became of a loss; by rank 0.

    Args:
        recovered: see `recover`.
        speaker: whose the words are.
    """
    if rank_info.rank() == 0:
        lost = recovered.lost
        who = f"rank {lost[0]} is" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))} are"
        joined = f", {recovered.newcomers} of them new" if recovered.newcomers else ""
        print(
            f"{speaker}: elastic: {who} lost; {rank_info.size()} ranks go on from the last commit{joined} "
            f"(recovered in {recovered.took_s:.2f} s)",
            file=sys.stderr,
            flush=True,
        )


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
