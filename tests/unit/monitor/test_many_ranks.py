"""What the monitor computes and sends grows with the number of ranks, and not with its square."""

from __future__ import annotations

from functools import partial

import pytest
from growth.runs import instructions_of

from mpisgd.monitor.deadlock_detector import DeadlockDetector, describe_deadlock, stuck_ranks
from mpisgd.monitor.hang_report import hang_report
from mpisgd.monitor.mailbox_pages import NOTICE_BYTES
from mpisgd.monitor.rank_state import RUNS, WAITS, RankState, Wait, decode, encode, group_key

FEW, MANY = 32, 256
PER_HOST = 50
SLACK = 1.5  # logarithms, and parts that do not grow


def in_operation(size: int, number: int, ordinal: int) -> Wait:
    return Wait(
        "barrier()",
        f"group {ordinal}",
        members=tuple(range(size)),
        number=number,
        site="train.py:1",
        ordinal=ordinal,
        waited_s=3.0,
        timeout_s=60.0,
        is_main=True,
        serial=2**50,
    )


def deadlocked(size: int) -> list[RankState]:
    """Half of the ranks wait for the other half, and these for them."""
    keys = [group_key(range(size), ordinal) for ordinal in (0, 1)]
    states = []
    for rank in range(size):
        wait = in_operation(size, 3, rank % 2)
        begun = {key: 2 + (ordinal == rank % 2) for ordinal, key in enumerate(keys)}
        stacks = {"MainThread": "line"}
        states.append(RankState(rank, f"host{rank // PER_HOST}", 9, WAITS, (wait,), stacks, begun))
    return states


def late(size: int) -> list[RankState]:
    """Every fourth rank has not come."""
    key = group_key(range(size), 0)
    return [
        RankState(rank, f"host{rank // PER_HOST}", 9, RUNS, (), {"MainThread": f"line {rank % 3}"}, {key: 2})
        if rank % 4 == 1
        else RankState(rank, f"host{rank // PER_HOST}", 9, WAITS, (in_operation(size, 3, 0),), {}, {key: 3})
        for rank in range(size)
    ]


def read(states: list[RankState]) -> list[RankState]:
    return decode(encode(states))


ACTS = {
    "encode": (encode, deadlocked),
    "decode": (read, deadlocked),
    "stuck_ranks": (stuck_ranks, deadlocked),
    "describe_deadlock": (lambda states: describe_deadlock(states, {*range(len(states))}), deadlocked),
    "hang_report of waits": (hang_report, deadlocked),
    "hang_report of late ranks": (hang_report, late),
}


@pytest.mark.parametrize("name", ACTS)
def test_work_grows_with_the_ranks(name):
    act, states_of = ACTS[name]
    few, many = (instructions_of(partial(act, read(states_of(size)))) for size in (FEW, MANY))
    assert many < SLACK * MANY / FEW * few


def test_the_state_of_a_rank_takes_no_room_for_each_other_rank():
    few, many = (len(encode(deadlocked(size))) / size for size in (FEW, MANY))
    assert many < 1.05 * few


def test_a_state_with_more_ranks_than_there_can_be_is_refused():
    text = encode([late(8)[0]]).replace(b"[[0, 1, 8]]", b"[[0, 1, 800000000]]")
    with pytest.raises(ValueError, match="more ranks"):
        decode(text)


class Collector:
    """Every rank waits; what is told to whom is kept."""

    def __init__(self, size: int) -> None:
        self.rank = 0
        self.domains = [tuple(range(first, first + PER_HOST)) for first in range(0, size, PER_HOST)]
        self.states = read(deadlocked(size))
        self.told: list[tuple[bytes, set[int]]] = []

    def collect(self) -> list[RankState]:
        return self.states

    def notify(self, text: bytes, ranks: set[int]) -> None:
        self.told.append((text, ranks))


def test_a_deadlock_of_thousands_is_told_to_each_in_a_notice_that_has_room():
    size = 3000
    collector = Collector(size)
    detector = DeadlockDetector(collector)  # type: ignore[arg-type]
    for _ in range(2):  # seen twice, it is sure
        detector._analyse()
    assert set().union(*(ranks for _, ranks in collector.told)) == {*range(1, size)}
    assert max(len(text) for text, _ in collector.told) < NOTICE_BYTES // 4
