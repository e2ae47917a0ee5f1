"""`RequestTable`: nothing lost, nothing twice, nothing too early, whatever the ranks submit when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpisgd.horovod.engine.request import Request
from mpisgd.horovod.engine.request_table import JOIN, WORLD, RequestTable

MEMBERS = {WORLD: (0, 1, 2, 3), 1: (0, 2), 2: (1, 2, 3), 3: (2,)}


def request(number: int, set_id: int = WORLD, kind: str = "allreduce", **more) -> Request:
    return Request(f"{kind}.{number}", kind, set_id, **more)


def table() -> RequestTable:
    return RequestTable(MEMBERS)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[Request], list[dict[int, list[Request]]]]:
    """Operations, and who submits which of them in which cycle."""
    sets = draw(st.lists(st.sampled_from(sorted(MEMBERS)), max_size=8))
    operations = [request(number, set_id) for number, set_id in enumerate(sets)]
    num_cycles = draw(st.integers(1, 5))
    cycles: list[dict[int, list[Request]]] = [
        {rank: [] for rank in MEMBERS[WORLD]} for _ in range(num_cycles)
    ]
    for rank in MEMBERS[WORLD]:
        own = [operation for operation in operations if rank in MEMBERS[operation.set_id]]
        for operation in draw(st.permutations(own)):
            cycles[draw(st.integers(0, num_cycles - 1))][rank].append(operation)
    return operations, cycles


@given(schedules())
def test_every_operation_is_decided_once_when_its_last_member_has_submitted(schedule):
    operations, cycles = schedule
    known, submitted, decided = table(), set(), []
    for cycle in cycles:
        for rank, requests in cycle.items():
            for each in requests:
                known.submit(rank, each)
                submitted.add((rank, each))
        decisions = known.decide()
        complete = {o for o in operations if all((rank, o) in submitted for rank in MEMBERS[o.set_id])}
        decided += [decision.request for decision in decisions]
        assert set(decided) == complete
        assert all(decision.error is None and not decision.absent for decision in decisions)
    assert sorted(decided) == sorted(operations)
    assert known.waiting() == []


@given(schedules())
def test_what_is_waiting_names_who_is_missing(schedule):
    _, cycles = schedule
    known, has = table(), {}
    for rank, requests in cycles[0].items():
        for each in requests:
            known.submit(rank, each)
            has.setdefault(each, set()).add(rank)
    known.decide()
    partly = {o: frozenset(MEMBERS[o.set_id]) - ranks for o, ranks in has.items()}
    assert dict(known.waiting()) == {o: missing for o, missing in partly.items() if missing}


@given(schedules(), st.permutations(MEMBERS[WORLD]), st.integers(1, 3))
def test_ranks_that_have_joined_are_not_waited_for(schedule, order, num_joined):
    """Their own operations they must have submitted before."""
    operations, cycles = schedule
    joined = set(order[:num_joined])
    known = table()
    for rank in joined:
        known.submit(rank, JOIN)
    decided = []
    for cycle in cycles:
        for rank, requests in cycle.items():
            for each in requests:
                if each.set_id != WORLD or rank not in joined:
                    known.submit(rank, each)
        decided += known.decide()
    assert sorted(decision.request for decision in decided) == sorted(operations)
    for decision in decided:
        assert decision.absent == (joined if decision.request.set_id == WORLD else frozenset())
    assert known.all_joined() is None


def test_joining_does_not_complete_what_nobody_has_submitted():
    known = table()
    known.submit(0, JOIN)
    assert known.decide() == []


def test_who_joined_last_and_a_new_beginning():
    known = table()
    for rank in (2, 0, 3):
        known.submit(rank, JOIN)
        assert known.all_joined() is None
    known.submit(1, JOIN)
    assert known.all_joined() == 1
    assert known.all_joined() is None
    known.submit(0, request(0))
    assert known.decide() == []


def test_a_rank_may_join_with_operations_of_its_own_pending():
    known = table()
    known.submit(0, request(7))
    known.submit(0, JOIN)
    for rank in (1, 2):
        known.submit(rank, request(7))
    assert known.decide() == []
    known.submit(3, request(7))
    (decision,) = known.decide()
    assert decision.absent == frozenset()


def test_a_process_set_cannot_be_joined():
    known = table()
    known.submit(2, JOIN)
    known.submit(0, request(0, set_id=1))
    assert known.decide() == []


@pytest.mark.parametrize(
    ("kind", "op", "fails"),
    [
        ("allgather", "", True),
        ("allgather", "Sum", False),  # of which a reduction is made
        ("allreduce", "Max", False),
        ("alltoall", "", True),
        ("barrier", "", False),
        ("broadcast", "", True),
        ("reducescatter", "Sum", True),
        ("reduce", "Sum", True),  # a new one, of which nothing is known
    ],
)
def test_only_reductions_can_do_without_a_rank_that_has_joined(kind, op, fails):
    known = table()
    known.submit(1, JOIN)
    dtypes = () if kind == "barrier" else ("float32",)
    for rank in (0, 2, 3):
        known.submit(rank, request(0, kind=kind, op=op, dtypes=dtypes))
    (decision,) = known.decide()
    said = f"tensor '0': {kind.capitalize()} is not supported with Join at this time: rank 1 has joined"
    assert decision.error == (said if fails else None)


def test_a_mismatch_is_decided_once_and_forgotten():
    known = table()
    for rank in MEMBERS[WORLD]:
        known.submit(rank, request(0, shapes=((rank // 2,),)))
    (decision,) = known.decide()
    assert "ranks 0, 1 gave [0], ranks 2, 3 gave [1]" in decision.error
    for rank in MEMBERS[WORLD]:
        known.submit(rank, request(0))
    assert [d.error for d in known.decide()] == [None]


def test_a_mismatch_among_those_that_have_not_joined():
    known = table()
    known.submit(3, JOIN)
    for rank in (0, 1, 2):
        known.submit(rank, request(0, op="Sum" if rank else "Max"))
    (decision,) = known.decide()
    assert "rank 0 gave Max, ranks 1, 2 gave Sum" in decision.error


@pytest.mark.parametrize("set_id", [WORLD, 2])
def test_one_name_for_different_kinds_on_the_ranks_is_an_error_for_all_once_it_is_settled(set_id):
    """Names begin with the kind: neither would ever be complete."""
    known = table()
    for rank in MEMBERS[set_id]:
        assert (known.name_conflicts(), known.resolve(set_id, "0")) == ({}, [])
        known.submit(rank, request(0, set_id, "allreduce" if rank == 2 else "allgather"))
    assert known.decide() == []
    assert list(known.name_conflicts()) == [(set_id, "0")]
    decisions = known.resolve(set_id, "0")
    assert {decision.request.kind for decision in decisions} == {"allreduce", "allgather"}
    others = ", ".join(str(rank) for rank in MEMBERS[set_id] if rank != 2)
    for decision in decisions:
        assert f"ranks {others} gave allgather" in decision.error
        assert "rank 2 gave allreduce" in decision.error
    assert known.waiting() == []


@pytest.mark.parametrize("other_way_round", [(), (2,), (0, 1)])
def test_one_name_for_different_kinds_one_after_the_other_is_none(other_way_round):
    known = table()
    for turn in (0, 1):
        assert known.decide() == []
        for rank in MEMBERS[WORLD]:
            first = (rank in other_way_round) == turn
            known.submit(rank, request(0, kind="allreduce" if first else "allgather"))
        decided = known.decide() if not other_way_round else []
        assert [decision.error for decision in decided] == [None] * len(decided)
    assert known.name_conflicts() == {}
    assert [decision.error for decision in known.decide()] == [None, None][: 2 * bool(other_way_round)]


def test_the_same_name_in_two_process_sets_are_two_operations():
    known = table()
    for rank in MEMBERS[1]:
        known.submit(rank, request(0, 1))
    known.submit(1, request(0, 2))
    (decision,) = known.decide()
    assert decision.request.set_id == 1
    assert known.waiting() == [(request(0, 2), frozenset({2, 3}))]


def test_process_sets_come_and_go():
    members = dict(MEMBERS)
    known = RequestTable(members)
    members[9] = (1, 3)
    known.submit(1, request(0, 9))
    known.submit(1, request(1, 2))
    del members[9]
    (decision,) = known.decide()
    assert decision.request == request(0, 9)
    assert decision.error == "tensor '0': its process set was removed"
    known.submit(3, request(2, 9))
    assert len(known.decide()) == 1
    assert [each for each, _ in known.waiting()] == [request(1, 2)]


def test_withdrawn():
    known = table()
    known.submit(1, request(0))
    assert known.waiting_for(0, WORLD, request(0).name[:3]) == [request(0)]
    assert known.waiting_for(1, WORLD, request(0).name[:3]) == known.waiting_for(0, WORLD, "other") == []
    known.drop(request(0))
    assert known.waiting_for(0, WORLD, "") == []
    known.drop(request(0))
    assert known.waiting() == []


def test_who_is_missing_has_neither_submitted_nor_joined():
    """Who has joined takes part in what all ranks do, and in nothing else."""
    known = table()
    world, some = request(0), request(0, 1)
    known.submit(1, world)
    known.submit(0, some)
    known.submit(2, JOIN)
    assert known.missing(world.key) == {0, 3}
    assert known.missing(some.key) == {2}
    assert known.missing(JOIN.key) == {0, 1, 3}
    assert known.missing(request(5).key) == frozenset()
    assert known.missing(request(5, 77).key) == frozenset()


def test_what_one_rank_takes_back_is_still_the_others():
    known = table()
    for rank in (0, 2):
        known.submit(rank, request(0))
    known.submit(1, JOIN)
    known.withdraw(0, request(0).key)
    known.withdraw(3, request(0).key)
    assert known.missing(request(0).key) == {0, 3}
    known.withdraw(2, request(0).key)
    known.withdraw(2, request(0).key)
    known.withdraw(1, JOIN.key)
    assert known.waiting() == []
    assert not known.joined
    for rank in MEMBERS[WORLD]:
        known.submit(rank, request(0))
    (decision,) = known.decide()
    assert (decision.error, decision.absent) == (None, frozenset())
