"""The report, from what the ranks say: who waits for whom, alike rows together, stacks of the missing."""

from __future__ import annotations

from mpisgd.monitor.hang_report import hang_report, main_wait, missing
from mpisgd.monitor.rank_state import (
    GONE,
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

WORLD = (0, 1, 2, 3)
SUM = Wait(
    "all_reduce(op=SUM)",
    "world",
    members=WORLD,
    number=7,
    site="train.py:9 in step",
    waited_s=4.0,
    timeout_s=60,
    is_main=True,
)
KEY = group_key(WORLD, 0)


def waits(rank: int, wait: Wait = SUM, host: str = "a", **fields) -> RankState:
    num_begun = {KEY: wait.number} if wait.number else {KEY: 6}
    return RankState(
        rank, host, 100 + rank, WAITS, (wait,), {"MainThread": f"line {rank}"}, num_begun, **fields
    )


def runs(rank: int, number: int = 6, stack: str = "") -> RankState:
    return RankState(rank, "a", 100 + rank, RUNS, (), {"MainThread": stack or f"line {rank}"}, {KEY: number})


def test_a_state_survives_its_text_form():
    state = waits(2, reported=(3, 5), progress=8)
    assert decode(encode([state])) == [state]


def test_missing_are_those_who_have_not_come_to_the_operation():
    states = [waits(0), runs(1), waits(2), runs(3, number=7)]
    assert missing(SUM, states) == [1]
    assert missing(SUM, [waits(0), RankState(1, state=GONE), waits(2), waits(3)]) == [1]


def test_in_the_middle_of_an_operation_it_is_who_does_not_answer():
    stopped = RankState(3, state=STOPPED, num_begun={KEY: 7})
    assert missing(SUM, [waits(0), waits(1), waits(2), stopped]) == [3]


def test_a_message_is_waited_for_from_its_sender():
    message = Wait("recv from rank 3", "world", awaited=(3,), waited_s=1.0, timeout_s=60, is_main=True)
    assert missing(message, [waits(0, message), runs(1), runs(2), runs(3)]) == [3]


def test_where_there_is_no_number_it_is_who_does_not_wait_likewise():
    making = Wait("the making of group 'g'", members=(0, 2, 3), waited_s=1.0, mpi_call="Comm_create_group")
    assert missing(making, [waits(0, making), runs(1), runs(2), waits(3, making)]) == [2]


def test_what_the_main_thread_waits_for_counts_unless_another_thread_does_the_waiting():
    behind = Wait("all_reduce (asynchronous)", waited_s=5.0, is_main=True)
    queue = Wait(
        "all_reduce(op=SUM)", "world", members=WORLD, number=7, waited_s=4.9, timeout_s=60, thread="queue"
    )
    assert main_wait(RankState(0, waits=(behind, queue))) == queue
    assert main_wait(RankState(0, waits=(queue, SUM))) == SUM
    assert main_wait(RankState(0, waits=(behind,))) == behind
    assert main_wait(RankState(0)) is None


def test_alike_rows_come_together_and_hosts_apart():
    states = [
        waits(0),
        waits(1),
        waits(2, host="b"),
        RankState(3, "b", 103, STOPPED, note="its process is stopped"),
    ]
    header, first, second, third = hang_report(states).splitlines()
    assert header.split() == ["ranks", "host", "for", "what", "they", "do"]
    assert first.startswith(
        "  0, 1   a     4.0 s  waits for rank 3: all_reduce(op=SUM), operation 7 of group"
    )
    assert first.endswith("at train.py:9 in step")
    assert second.startswith("  2      b     4.0 s  waits for rank 3")
    assert third.split(None, 2) == ["3", "b", "its process is stopped (process 103)"]


def test_the_missing_show_their_stacks_and_those_who_wait_for_them_do_not():
    text = hang_report([waits(0), runs(1, stack="same"), runs(2, stack="same"), waits(3)])
    assert "has not come to operation 7 of group 'world'" in text
    assert "  ranks 1, 2 are here (the innermost call last):\n    same" in text
    assert "line 0" not in text


def test_long_stacks_and_many_of_them_are_cut():
    long = "\n".join(f"call {i}" for i in range(100))
    text = hang_report([waits(0), runs(1, stack=long), waits(2), waits(3)])
    assert "call 99" in text
    assert "call 1\n" not in text
    many = tuple(range(20))
    wait = Wait("barrier()", "world", members=many, number=2, waited_s=1.0, timeout_s=9, is_main=True)
    states = [RankState(0, waits=(wait,), state=WAITS, num_begun={group_key(many, 0): 2})]
    text = hang_report(states + [RankState(rank, stacks={"MainThread": f"line {rank}"}) for rank in many[1:]])
    assert text.count("is here") == 6
    assert "others elsewhere" in text
    assert "and 7 more" in text


def test_a_thread_that_an_error_has_ended_is_told_of():
    failed = RankState(
        1, "a", 101, RUNS, num_begun={KEY: 6}, failed_threads=("thread 'loader' ended with X",)
    )
    assert "  rank 1: thread 'loader' ended with X" in hang_report([waits(0), failed, waits(2), waits(3)])


def test_a_state_that_is_too_long_loses_stacks_and_in_the_end_says_that_it_is():
    state = RankState(1, "a", stacks={"MainThread": "x" * 500, "other": "y" * 500}, num_begun={KEY: 6})
    (short,) = decode(encode([state], 1200))
    assert list(short.stacks) == ["MainThread"]
    (shorter,) = decode(encode([state], 600))
    assert (shorter.stacks, shorter.num_begun) == ({}, {KEY: 6})
    many = RankState(1, "a", num_begun={group_key((0, i), 0): 1 for i in range(1, 100)})
    (note,) = decode(encode([many], 600))
    assert (note.rank, note.state) == (1, UNRESPONSIVE)
