"""`FailureScope`: what ends where one of some ranks is lost, and goes on where another rank is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mpisgd
from mpisgd.core.failure_scope import FailureScope
from mpisgd.errors import CollectiveTimeout, LearnerLost, PeerLost
from mpisgd.job.groups import close_group, open_group
from mpisgd.job.lifecycle import current_job
from mpisgd.job.threads_as_ranks import LOST, lose_ranks, run_ranks
from mpisgd.threads import scheduling, waiting
from mpisgd.threads.waiting import Backoff

LOST_S = 0.3  # all have noticed a loss by then


class Members:
    """Ranks 4 and 6 of the job."""

    global_ranks = (4, 6)

    def __init__(self) -> None:
        self.gone: list[int] = []
        self.revocations = 0
        self.was_revoked = False

    def lost(self) -> list[int]:
        return self.gone

    def is_revoked(self) -> bool:
        return self.was_revoked

    def revoke_family(self) -> None:
        self.revocations += 1


def scope_of(members: Members) -> tuple[FailureScope, list[str]]:
    told: list[str] = []
    scope = FailureScope(members.global_ranks, members, lambda who: LearnerLost(f"{who} was lost"))
    scope.at_loss.append(lambda: told.append("lost"))
    return scope, told


def test_the_loss_of_another_rank_is_no_event():
    members = Members()
    scope, told = scope_of(members)
    scope.look([0, 5, 7])
    assert (scope.error, told, members.revocations) == (None, [], 0)


def test_the_loss_of_a_member_ends_the_operations_and_is_told_once():
    members = Members()
    scope, told = scope_of(members)
    members.gone = [1]
    for _ in range(2):
        scope.look([6])
    assert "rank 6 of the job was lost" in str(scope.error)
    assert (told, members.revocations) == (["lost"], 1)
    with pytest.raises(LearnerLost, match="rank 6 of the job"), scope.operation():
        Backoff(5.0).wait_for(lambda: False)


def test_what_another_member_has_found_out_ends_them_too():
    members = Members()
    scope, told = scope_of(members)
    members.was_revoked = True
    scope.look([])
    assert "one of them was lost" in str(scope.error)
    assert told


def test_an_operation_in_which_mpi_tells_of_the_loss_ends_with_the_same_error():
    members = Members()
    scope, told = scope_of(members)
    members.gone = [0]
    with pytest.raises(LearnerLost, match="rank 4 of the job was lost"), scope.operation():
        raise PeerLost("MPI Test: process failed")
    assert told
    with pytest.raises(LearnerLost), scope.operation():  # whatever MPI calls it from then on
        raise mpisgd.errors.MpiFailed("MPI Bcast: other error")


def test_other_errors_of_operations_are_what_they_are():
    scope, told = scope_of(Members())
    with pytest.raises(CollectiveTimeout), scope.operation():
        raise CollectiveTimeout("late")
    assert not told


def test_one_that_is_closed_looks_at_nothing():
    members = Members()
    scope, told = scope_of(members)
    scope.close()
    scope.look([4])
    scope.end(PeerLost("the job"))
    assert (scope.error, told, members.revocations) == (None, [], 0)


def test_what_ends_all_waits_of_the_process_ends_none_of_an_operation():
    scope, _ = scope_of(Members())
    waiting.cancel_all(PeerLost("rank 0 was lost"))
    try:
        with scope.operation():
            assert not Backoff(0.01).wait_for(lambda: False)
        with pytest.raises(PeerLost):
            Backoff(5.0).wait_for(lambda: False)
    finally:
        waiting.allow_waits()


# -- groups of their own -------------------------------------------------------------------------------


def pairs(**options: Any) -> mpisgd.Group:
    """Make groups of ranks 0 and 1, and 2 and 3; return this rank's."""
    first = mpisgd.rank() // 2 * 2
    return open_group(current_job(), [first, first + 1], name=f"pair {first}", **options)


def summed(group: mpisgd.Group) -> float:
    tensor = torch.ones(1000)
    mpisgd.all_reduce(tensor, group=group)
    return float(tensor[0])


@pytest.mark.parametrize("ranks_per_host", [(4,), (2, 2), (1, 3)], ids=repr)
def test_a_group_goes_on_after_the_loss_of_a_rank_that_is_no_member(ranks_per_host):
    def program() -> Any:
        group = pairs(lost=lambda who: LearnerLost(f"{who} was lost"))
        assert summed(group) == 2.0
        if mpisgd.rank() == 3:
            lose_ranks(3)
        if mpisgd.rank() == 2:
            with pytest.raises(LearnerLost, match="rank 3 of the job was lost"):
                summed(group)
            with pytest.raises(LearnerLost):
                summed(group)
            return None
        scheduling.sleep(LOST_S)
        with pytest.raises(PeerLost):
            summed(current_job().world)
        works = [mpisgd.all_reduce(torch.ones(9), group=group, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        return [summed(group) for _ in range(3)]

    for seed in range(3):
        found = run_ranks(4, program, seed=seed, losses=[], ranks_per_host=ranks_per_host)
        assert found == [[2.0] * 3, [2.0] * 3, None, LOST]


def test_what_goes_on_in_one_ends_where_the_job_is_left():
    """As `elastic.run` does after a loss: the group's thread does not wait for its own timeout."""
    works: dict[int, mpisgd.Work] = {}

    def program() -> None:
        group = pairs(lost=lambda who: LearnerLost(who))
        if mpisgd.rank() == 3:
            lose_ranks(3)
        if mpisgd.rank() == 0:
            works[0] = mpisgd.all_reduce(torch.ones(9), group=group, async_op=True)
        scheduling.sleep(LOST_S)

    run_ranks(4, program, losses=[])
    with pytest.raises(PeerLost, match="a rank of the job was lost"):
        works[0].wait()


def test_such_a_group_can_be_closed():
    def program() -> None:
        group = pairs(lost=lambda who: LearnerLost(who))
        summed(group)
        close_group(group)
        with pytest.raises(mpisgd.errors.NotInitialized):
            summed(group)

    run_ranks(4, program, losses=[])


def test_a_mistake_in_one_is_told_as_in_any_group():
    def program() -> None:
        group = pairs(lost=lambda who: LearnerLost(who))
        with pytest.raises(mpisgd.errors.CollectiveMismatch):
            mpisgd.all_reduce(torch.ones(3 + mpisgd.rank() % 2), group=group)
        assert summed(group) == 2.0

    run_ranks(4, program)
