"""Who can never go on, from states alone: cycles are found, what may only be slow is none."""

from __future__ import annotations

import json

import pytest

from mpisgd.monitor.deadlock_detector import describe_deadlock, encode_notice, fingerprint, stuck_ranks
from mpisgd.monitor.mailbox_pages import NOTICE_BYTES
from mpisgd.monitor.rank_state import (
    GONE,
    LEFT,
    RUNS,
    STOPPED,
    UNRESPONSIVE,
    WAITS,
    RankState,
    Wait,
    decode,
    encode,
    group_key,
)
from mpisgd.threads.wait_registry import Message

ALL = (0, 1, 2)
A, B = group_key(ALL, 0), group_key(ALL, 1)


def at(number: int, ordinal: int = 0, members: tuple[int, ...] = ALL, **more) -> Wait:
    """A wait for all members of a group, in operation `number`."""
    return Wait(
        "barrier()",
        f"group {ordinal}",
        members=members,
        number=number,
        site="x.py:1",
        ordinal=ordinal,
        **more,
    )


def waits(rank: int, *those: Wait, num_begun: dict[str, int], **more) -> RankState:
    return RankState(rank, state=WAITS, waits=those, num_begun=num_begun, **more)


def message(receives: bool, *partners: int, tag: int = 0) -> tuple[Wait, Message]:
    about = Message("group 0", receives, partners, tag)
    return Wait("recv" if receives else "send", "group 0", message=about), about


def in_message(rank: int, receives: bool, *partners: int, tag: int = 0) -> RankState:
    wait, about = message(receives, *partners, tag=tag)
    return waits(rank, wait, num_begun={A: 0}, messages=(about,))


CYCLE = [
    waits(0, at(7), num_begun={A: 7, B: 2}),
    waits(1, at(3, 1), num_begun={A: 6, B: 3}),
    waits(2, at(3, 1), num_begun={A: 6, B: 3}),
]


def test_a_cycle_over_two_groups():
    assert stuck_ranks(CYCLE) == {0, 1, 2}
    text = describe_deadlock(CYCLE, {0, 1, 2})
    assert "rank 0 waits for ranks 1, 2 in barrier(), operation 7 of group 'group 0', at x.py:1" in text
    assert "rank 1 waits for rank 0 in barrier(), operation 3 of group 'group 1'" in text


@pytest.mark.parametrize("state", [RUNS, STOPPED, GONE, UNRESPONSIVE])
def test_a_rank_that_may_move_frees_all_that_wait_for_it(state):
    assert stuck_ranks([RankState(0, state=state), *CYCLE[1:]]) == set()


def test_a_rank_that_has_left_frees_nobody():
    assert stuck_ranks([RankState(0, state=LEFT), *CYCLE[1:]]) == {1, 2}


def test_a_bystander_is_not_needed():
    """Ranks 0 and 1 wait for each other whatever rank 2 does."""
    pair = (0, 1)
    states = [
        waits(0, at(1, 0, pair), num_begun={group_key(pair, 0): 1, group_key(pair, 1): 0}),
        waits(1, at(1, 1, pair), num_begun={group_key(pair, 0): 0, group_key(pair, 1): 1}),
        RankState(2, state=RUNS),
    ]
    assert stuck_ranks(states) == {0, 1}


def test_where_all_have_come_it_may_only_be_slow():
    assert stuck_ranks([waits(rank, at(5), num_begun={A: 5}) for rank in ALL]) == set()


def test_a_rank_inside_mpi_may_come_back():
    inside = waits(0, at(7, mpi_call="Allreduce"), num_begun={A: 7, B: 2})
    assert stuck_ranks([inside, *CYCLE[1:]]) == set()


def test_a_wait_with_a_limit_of_its_own_may_end_by_that():
    """`work.wait(timeout_s=6)` had a `Deadlock` after 4 s in a program that would have gone on after 6."""
    own = waits(0, at(7, own_limit=True, timeout_s=6.0), num_begun={A: 7, B: 2})
    assert stuck_ranks([own, *CYCLE[1:]]) == set()


def test_waits_of_which_nothing_is_known_may_end():
    assert stuck_ranks([waits(0, Wait("other ranks"), num_begun={A: 6, B: 2}), *CYCLE[1:]]) == set()


def test_a_thread_that_may_communicate_keeps_its_rank_able():
    free = waits(0, at(7), num_begun={A: 7, B: 2}, may_communicate=True)
    assert stuck_ranks([free, *CYCLE[1:]]) == set()


def test_one_of_two_threads_that_can_go_on_is_enough():
    """The main thread waits for its queue, which is in the middle of an operation to which all have come."""
    own = Wait("all_reduce (asynchronous)", is_local=True, is_main=True)
    states = [waits(rank, own, at(5), num_begun={A: 5}) for rank in ALL]
    assert stuck_ranks(states) == set()
    alone = [
        waits(0, own, at(5), num_begun={A: 5}),
        *(waits(r, at(1, 1), num_begun={A: 4, B: 1}) for r in (1, 2)),
    ]
    assert stuck_ranks(alone) == {0, 1, 2}


def test_groups_of_the_same_ranks_are_kept_apart():
    states = [waits(rank, at(5), num_begun={A: 5, B: rank}) for rank in ALL]
    assert stuck_ranks(states) == set()


def test_all_receive():
    assert stuck_ranks([in_message(rank, True, (rank + 1) % 3) for rank in ALL]) == {0, 1, 2}


def test_a_message_whose_ends_have_met_may_only_be_slow():
    assert stuck_ranks([in_message(0, True, 1), in_message(1, False, 0)]) == set()
    anyone = [in_message(0, True, 1, 2), in_message(1, False, 0), in_message(2, True, 0)]
    assert stuck_ranks(anyone) == set()


def test_another_tag_is_another_message():
    assert stuck_ranks([in_message(0, True, 1, tag=1), in_message(1, False, 0, tag=2)]) == {0, 1}


def test_a_message_started_and_not_waited_for_may_arrive():
    _, sent = message(False, 0)
    elsewhere = waits(1, at(1), num_begun={A: 1}, messages=(sent,))
    assert stuck_ranks([in_message(0, True, 1), elsewhere, waits(2, at(1), num_begun={A: 1})]) == set()


def test_the_making_of_a_group_needs_all_its_members():
    making = Wait("new_group of [0, 1]", members=(0, 1))
    assert stuck_ranks([waits(0, making, num_begun={}), waits(1, making, num_begun={})]) == set()
    other = Wait("new_group of [1, 2]", members=(1, 2))
    assert stuck_ranks(
        [waits(0, making, num_begun={}), waits(1, other, num_begun={}), RankState(2, state=LEFT)]
    ) == {
        0,
        1,
    }


def test_a_rank_that_has_moved_looks_different():
    still = waits(0, at(7, serial=4), num_begun={A: 7}, progress=9)
    assert fingerprint(still) == fingerprint(
        waits(0, at(7, serial=4, waited_s=8.0), num_begun={A: 7}, progress=9)
    )
    assert fingerprint(still) != fingerprint(waits(0, at(7, serial=5), num_begun={A: 7}, progress=9))
    assert fingerprint(still) != fingerprint(waits(0, at(7, serial=4), num_begun={A: 7}, progress=10))


def test_states_survive_the_journey():
    states = [*CYCLE, in_message(0, True, 1, 2, tag=3)]
    assert decode(encode(states)) == states


def for_ranks(*ranks: int) -> Wait:
    """A wait that every one of some ranks must do something for, as those of Horovod's operations."""
    return Wait("hvd.allreduce 'x'", awaited=ranks)


def test_whoever_waits_for_ranks_by_name_needs_all_of_them():
    circle = [waits(0, for_ranks(1, 2), num_begun={}), waits(1, for_ranks(0), num_begun={})]
    assert stuck_ranks([*circle, RankState(2, state=RUNS)]) == {0, 1}
    assert stuck_ranks([*circle, RankState(2, state=LEFT)]) == {0, 1}
    free = waits(1, for_ranks(0), num_begun={}, may_communicate=True)
    assert stuck_ranks([circle[0], free, RankState(2, state=RUNS)]) == set()
    assert stuck_ranks([circle[0], free, waits(2, for_ranks(0), num_begun={})]) == {0, 2}
    text = describe_deadlock([*circle, RankState(2, state=RUNS)], {0, 1})
    assert "rank 0 waits for ranks 1, 2 in hvd.allreduce 'x'" in text


def test_a_notice_of_many_ranks_fits_its_mailbox():
    """Above about 330 ranks it was longer, and was dropped: the waits ended at their timeouts."""
    lines = [f"  rank {rank} waits for rank {rank + 1}, at {'x' * 200}.py:1" for rank in range(512)]
    serials = [(rank, [123456789]) for rank in range(512)]
    notice = encode_notice("\n".join(["ranks 0 to 511 can never go on:", *lines]), serials)
    assert len(notice) <= NOTICE_BYTES
    text, told = json.loads(notice)
    assert text.startswith("ranks 0 to 511 can never go on:\n  rank 0 waits")
    assert text.endswith("... and others")
    assert [tuple(entry) for entry in told] == [(rank, [123456789]) for rank in range(512)]
