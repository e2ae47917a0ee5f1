"""The report, from what the ranks say: who waits for whom, alike rows together, stacks of the missing."""

from __future__ import annotations

from mpisgd.monitor.hang_report import main_wait, missing, table
from mpisgd.monitor.rank_snapshot import group_key
from mpisgd.monitor.rank_state import GONE, RUNS, STOPPED, WAITS, RankState, Wait, decode, encode

WORLD = (0, 1, 2, 3)
SUM = Wait(
    "all_reduce(op=SUM)", "world", WORLD, 7, site="train.py:9 in step", waited_s=4.0, limit_s=60, main=True
)
KEY = group_key(WORLD, 0)


def waits(rank: int, wait: Wait = SUM, host: str = "a", **fields) -> RankState:
    numbers = {KEY: wait.number} if wait.number else {KEY: 6}
    return RankState(
        rank, host, 100 + rank, WAITS, (wait,), {"MainThread": f"line {rank}"}, numbers, **fields
    )


def runs(rank: int, number: int = 6, stack: str = "") -> RankState:
    return RankState(rank, "a", 100 + rank, RUNS, (), {"MainThread": stack or f"line {rank}"}, {KEY: number})


def test_a_view_survives_its_text_form():
    view = waits(2, told=(3, 5), moves=8)
    assert decode(encode(view)) == view


def test_missing_are_those_who_have_not_come_to_the_operation():
    views = [waits(0), runs(1), waits(2), runs(3, number=7)]
    assert missing(SUM, views) == [1]
    assert missing(SUM, [waits(0), RankState(1, state=GONE), waits(2), waits(3)]) == [1]


def test_in_the_middle_of_an_operation_it_is_who_does_not_answer():
    stopped = RankState(3, state=STOPPED, numbers={KEY: 7})
    assert missing(SUM, [waits(0), waits(1), waits(2), stopped]) == [3]


def test_a_message_is_waited_for_from_its_sender():
    message = Wait("recv from rank 3", "world", whom=(3,), waited_s=1.0, limit_s=60, main=True)
    assert missing(message, [waits(0, message), runs(1), runs(2), runs(3)]) == [3]


def test_where_there_is_no_number_it_is_who_does_not_wait_likewise():
    making = Wait("the making of group 'g'", members=(0, 2, 3), waited_s=1.0, inside="Comm_create_group")
    assert missing(making, [waits(0, making), runs(1), runs(2), waits(3, making)]) == [2]


def test_what_the_main_thread_waits_for_counts_unless_another_thread_does_the_waiting():
    behind = Wait("all_reduce (asynchronous)", waited_s=5.0, main=True)
    queue = Wait("all_reduce(op=SUM)", "world", WORLD, 7, waited_s=4.9, limit_s=60, thread="queue")
    assert main_wait(RankState(0, waits=(behind, queue))) == queue
    assert main_wait(RankState(0, waits=(queue, SUM))) == SUM
    assert main_wait(RankState(0, waits=(behind,))) == behind
    assert main_wait(RankState(0)) is None


def test_alike_rows_come_together_and_hosts_apart():
    views = [
        waits(0),
        waits(1),
        waits(2, host="b"),
        RankState(3, "b", 103, STOPPED, note="its process is stopped"),
    ]
    header, first, second, third = table(views).splitlines()
    assert header.split() == ["ranks", "host", "for", "what", "they", "do"]
    assert first.startswith(
        "  0, 1   a     4.0 s  waits for rank 3: all_reduce(op=SUM), operation 7 of group"
    )
    assert first.endswith("at train.py:9 in step")
    assert second.startswith("  2      b     4.0 s  waits for rank 3")
    assert third.split(None, 2) == ["3", "b", "its process is stopped (process 103)"]


def test_the_missing_show_their_stacks_and_those_who_wait_for_them_do_not():
    text = table([waits(0), runs(1, stack="same"), runs(2, stack="same"), waits(3)])
    assert "has not come to operation 7 of group 'world'" in text
    assert "  ranks 1, 2 are here (the innermost call last):\n    same" in text
    assert "line 0" not in text


def test_long_stacks_and_many_of_them_are_cut():
    long = "\n".join(f"call {i}" for i in range(100))
    text = table([waits(0), runs(1, stack=long), waits(2), waits(3)])
    assert "call 99" in text
    assert "call 1\n" not in text
    many = tuple(range(20))
    wait = Wait("barrier()", "world", many, 2, waited_s=1.0, limit_s=9, main=True)
    views = [RankState(0, waits=(wait,), state=WAITS, numbers={group_key(many, 0): 2})]
    text = table(views + [RankState(rank, stacks={"MainThread": f"line {rank}"}) for rank in many[1:]])
    assert text.count("is here") == 6
    assert "others elsewhere" in text
    assert "and 7 more" in text
