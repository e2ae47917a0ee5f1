"""Timelines as ranks would have recorded them, made up, with numbers that are known."""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]
QUEUE, STEPS, MAIN = 1, 2, 3  # the tracks


def head(rank: int, num_ranks: int, host: str = "a") -> list[Event]:
    def meta(kind: str, tid: int, **args: Any) -> Event:
        return {"name": kind, "ph": "M", "pid": rank, "tid": tid, "args": args}

    return [
        meta("mpisgd", 0, rank=rank, host=host, process=100 + rank, offset_us=0.0, error_us=0.0),
        meta("thread_name", QUEUE, name="group world", ranks=list(range(num_ranks))),
        meta("thread_name", STEPS, name="steps", ranks=[]),
        meta("thread_name", MAIN, name="MainThread", ranks=[]),
    ]


def span(rank: int, tid: int, name: str, cat: str, ts: float, dur: float, **args: Any) -> Event:
    event = {"name": name, "ph": "X", "pid": rank, "tid": tid, "cat": cat, "ts": ts, "dur": dur}
    return {**event, "args": args}


def operation(
    rank: int, number: int, at: float, wait: float, move: float, *, blocking: bool = True, **more: Any
) -> list[Event]:
    """An operation with its two phases; `arrived` microseconds pass before it waits."""
    arrived = more.pop("arrived", 0.0)
    args = {"bytes": 1000, "transport": "node", "number": number, "arrived_us": arrived, "wait_us": wait}
    args |= {"what": f"all_reduce {number}", "blocking": blocking, **more}
    met = at + arrived + wait
    return [
        span(rank, QUEUE, "all_reduce", "collective", at, arrived + wait + move, **args),
        span(rank, QUEUE, "wait for the others", "phase", at + arrived, wait),
        span(rank, QUEUE, "move", "phase", met, move),
    ]


def step(rank: int, number: int, at: float, dur: float) -> Event:
    return span(rank, STEPS, f"step {number}", "step", at, dur, number=number)


def counter(rank: int, name: str, at: float, **args: int) -> Event:
    return {"name": name, "ph": "C", "ts": at, "pid": rank, "tid": 0, "args": args}


def step_us(rank: int, number: int) -> float:
    """How long a step of the run takes: different on every rank and at every step."""
    return 10_000 + 100 * rank + 7 * (number % 13) + (50_000 if number == 700 else 0)


def run(num_ranks: int, num_steps: int, num_operations: int = 4) -> list[Event]:
    """A training run: each step computes, then reduces some buckets that move for a tenth of it in all."""
    events = []
    for rank in range(num_ranks):
        events += head(rank, num_ranks, "ab"[rank * 2 // num_ranks])
        at = 1000.0
        for number in range(2, num_steps + 2):
            took = step_us(rank, number)
            events.append(step(rank, number, at, took))
            for i in range(num_operations):
                move = took / 10 / num_operations
                begin = at + took / 2 + 2 * i * move
                events += operation(rank, number * num_operations + i, begin, 0.5 * move, move)
            at += took
            if number % 20 == 0:
                events.append(counter(rank, "memory", at, own=2**20 * (rank + 1), shared=2**19, device=0))
        events.append(counter(rank, "bytes sent", at, **{f"to rank {(rank + 1) % num_ranks}": 4096}))
    return events
