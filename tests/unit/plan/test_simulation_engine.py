"""The simulation: dependencies, shares of a resource, and what they add up to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpisgd.errors import InvalidArgument
from mpisgd.tools.plan.simulation.engine import Task, simulate

LINK = {"link": 1.0}


def ends(tasks, capacities=None):
    return [span.end_s for span in simulate(tasks, capacities or LINK)]


def test_a_task_takes_its_amount_by_the_capacity():
    assert ends([Task("a", {"link": 6.0})], {"link": 4.0}) == [1.5]


def test_a_task_waits_for_others_and_for_its_delay():
    tasks = [Task("a", {"link": 2.0}), Task("b", {"link": 1.0}, after=(0,), delay_s=0.5)]
    spans = simulate(tasks, LINK)
    assert (spans[1].start_s, spans[1].end_s) == (2.5, 3.5)


def test_two_tasks_share_a_resource_until_one_is_done():
    # Half of the link each until 2, then all of it for what b has left.
    assert ends([Task("a", {"link": 1.0}), Task("b", {"link": 2.0})]) == pytest.approx([2.0, 3.0])


def test_who_can_use_less_leaves_the_rest_to_others():
    # a needs a quarter of the core all the time; b has the other three quarters.
    tasks = [Task("a", {"core": 1.0}, seconds=4.0), Task("b", {"core": 3.0})]
    assert ends(tasks, {"core": 1.0}) == pytest.approx([4.0, 4.0])


def test_shares_are_max_min_fair_over_several_links():
    # x crosses both links, y the first, z the second, which is twice as wide: x and y have a half each,
    # and z has the rest, one and a half.
    tasks = [Task("x", {"1": 1.0, "2": 1.0}), Task("y", {"1": 1.0}), Task("z", {"2": 3.0})]
    assert ends(tasks, {"1": 1.0, "2": 2.0}) == pytest.approx([2.0, 2.0, 2.0])


def test_the_link_with_the_smallest_share_is_shared_out_first():
    """x is held to a half by the narrow link, so the four others of the wide one share nine and a half."""
    tasks = [Task("x", {"wide": 1.0, "narrow": 1.0}), Task("z", {"narrow": 1.0})]
    tasks += [Task("y", {"wide": 9.5 / 4 * 2}) for _ in range(4)]
    assert ends(tasks, {"wide": 10.0, "narrow": 1.0}) == pytest.approx([2.0] * 6)


def test_a_task_is_slower_while_others_use_a_resource():
    slow = Task("meets", seconds=2.0, while_used={"link": 8.0})
    computes, nothing, pause = (
        Task("computes", {"link": 4.0}),
        Task("nothing", {"link": 0.0}),
        Task("", {}, seconds=4.0),
    )
    only_then = Task("meets", while_used={"link": 3.0})
    assert ends([only_then, computes]) == pytest.approx([3.0, 4.0])
    assert ends([only_then, pause]) == pytest.approx([0.0, 4.0], abs=1e-9)
    assert ends([slow, computes]) == [5.0, 4.0]  # half of it in 4 s, the other half at 1 / 2 s
    assert ends([slow, nothing, pause]) == [2.0, 0.0, 4.0]
    assert ends([pause, computes, Task("meets", after=(0,), seconds=2.0, while_used={"link": 8.0})])[2] == 6.0


def test_a_task_without_any_demand_takes_no_time():
    assert ends([Task("a"), Task("b", {"link": 0.0}, after=(0,)), Task("c", {"link": 1.0}, after=(1,))]) == [
        0,
        0,
        1,
    ]


@given(st.lists(st.tuples(st.floats(0.01, 10), st.integers(0, 3)), min_size=1, max_size=12))
def test_a_shared_resource_is_never_idle_and_never_carries_more_than_it_can(given):
    """All tasks are ready at once: the last of a link ends when the link has carried everything."""
    tasks = [Task(str(i), {str(link): amount}) for i, (amount, link) in enumerate(given)]
    found = ends(tasks, {str(link): 1.0 + link for link in range(4)})
    for link in {link for _, link in given}:
        total = sum(amount for amount, other in given if other == link)
        last = max(end for end, (_, other) in zip(found, given, strict=True) if other == link)
        assert last == pytest.approx(total / (1.0 + link), rel=1e-9)


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=8), st.floats(0.1, 5))
def test_more_work_never_ends_sooner(amounts, more):
    tasks = [Task(str(i), {"link": a}) for i, a in enumerate(amounts)]
    longer = [Task("0", {"link": amounts[0] + more}), *tasks[1:]]
    for before, after in zip(ends(tasks), ends(longer), strict=True):
        assert after >= before * (1 - 1e-9)


def test_a_task_that_waits_for_a_later_one_is_refused():
    with pytest.raises(InvalidArgument, match="waits for"):
        simulate([Task("a", after=(1,)), Task("b")], LINK)


def test_a_resource_without_capacity_is_refused():
    with pytest.raises(InvalidArgument, match="no capacity"):
        simulate([Task("a", {"other": 1.0})], LINK)
