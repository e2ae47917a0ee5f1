"""The metrics of a host's ranks as numbers with names: what a port shows and what `read()` returns.

They are those of `mpisgd top`: steps and sums lie in the memory that the ranks of a host share, and what each
one waits for it says when it is asked.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mpisgd.monitor.hang_report import main_wait, missing
from mpisgd.monitor.mailbox_pages import Meters, Steps
from mpisgd.monitor.rank_state import RUNS, WAITS, RankState
from mpisgd.monitor.state_collector import StateCollector

__all__ = ["FAMILIES", "Family", "Number", "as_dict", "numbers_of", "numbers_of_host"]

S = 1e-9  # of a nanosecond


class Family(NamedTuple):
    """What is said of all numbers of a name: `counter` or `gauge`, and its meaning."""

    kind: str
    meaning: str


FAMILIES = {
    "mpisgd_job_ranks": Family("gauge", "Ranks of the whole job."),
    "mpisgd_rank_up": Family(
        "gauge", "1: the rank runs or waits; 0: it is stopped, gone or does not answer."
    ),
    "mpisgd_step": Family("gauge", "Steps of the optimizer that made the last step."),
    "mpisgd_step_seconds": Family("gauge", "Time of a step, a mean over the last few."),
    "mpisgd_steps_per_second": Family("gauge", "Its inverse; 0 when the last step ended long ago."),
    "mpisgd_last_step_timestamp_seconds": Family("gauge", "Unix time at which the last step ended."),
    "mpisgd_steps_total": Family("counter", "Steps of all optimizers, from the second one of each on."),
    "mpisgd_computation_seconds_total": Family(
        "counter", "Time in which the program did not wait for mpisgd."
    ),
    "mpisgd_exposed_communication_seconds_total": Family(
        "counter", "Time in which the program waited while data moved."
    ),
    "mpisgd_wait_seconds_total": Family("counter", "Time in which the program waited for other ranks."),
    "mpisgd_other_wait_seconds_total": Family(
        "counter", "Time in which the program waited for the turn of its operation, or another thread."
    ),
    "mpisgd_hidden_communication_seconds_total": Family(
        "counter", "Time in which data moved while the program computed."
    ),
    "mpisgd_waiting_seconds": Family("gauge", "How long the rank has waited in the operation it is in now."),
    "mpisgd_awaited_by_ranks": Family("gauge", "Ranks of this host that wait for this rank now."),
    "mpisgd_bytes_total": Family("counter", "Bytes that the rank gave to be moved, by medium."),
}


class Number(NamedTuple):
    """A value of one rank; `rank` is None where it is of the job, `medium` is "" where it is not bytes."""

    name: str
    value: float
    rank: int | None = None
    medium: str = ""


def numbers_of_host(collector: StateCollector) -> list[Number]:
    """Return the numbers of this host's ranks; takes milliseconds where they answer, two seconds at most."""
    pages, states = collector.shm, collector.collect_host()
    now_ns, now_s = time.monotonic_ns(), time.time()
    awaited = awaited_by(states)
    found = [Number("mpisgd_job_ranks", len(collector.processes))]
    for state in sorted(states, key=lambda state: state.rank):
        steps, meters = pages.steps(state.rank), pages.meters(state.rank)
        found += numbers_of(state, steps, meters, awaited[state.rank], now_ns, now_s)
    return found


def awaited_by(states: Sequence[RankState]) -> Counter[int]:
    """Return for each rank how many others wait for it, as far as their states tell."""
    waits = [(state.rank, wait) for state in states if (wait := main_wait(state)) is not None]
    return Counter(other for rank, wait in waits for other in set(missing(wait, states)) - {rank})


def numbers_of(
    state: RankState, steps: Steps, meters: Meters, awaited: int, now_ns: int, now_s: float
) -> Iterator[Number]:
    """Return the numbers of one rank.

    Args:
        state: of the rank.
        steps: of its program.
        meters: its sums.
        awaited: how many ranks wait for it.
        now_ns: by `time.monotonic_ns`.
        now_s: the same moment by `time.time`.
    """
    rank, wait = state.rank, main_wait(state)
    yield Number("mpisgd_rank_up", float(state.state in (RUNS, WAITS)), rank)
    if steps.number:
        yield Number("mpisgd_step", steps.number, rank)
        yield Number("mpisgd_last_step_timestamp_seconds", now_s - (now_ns - steps.last_ns) * S, rank)
    if (per_s := steps.per_s(now_ns)) is not None:
        yield Number("mpisgd_step_seconds", steps.mean_ns * S, rank)
        yield Number("mpisgd_steps_per_second", per_s, rank)
    yield Number("mpisgd_steps_total", meters.num_steps, rank)
    yield Number("mpisgd_computation_seconds_total", meters.computation_ns * S, rank)
    yield Number("mpisgd_exposed_communication_seconds_total", meters.communication_ns * S, rank)
    yield Number("mpisgd_wait_seconds_total", meters.wait_ns * S, rank)
    yield Number("mpisgd_other_wait_seconds_total", meters.other_ns * S, rank)
    yield Number("mpisgd_hidden_communication_seconds_total", meters.hidden_ns * S, rank)
    yield Number("mpisgd_waiting_seconds", 0.0 if wait is None else wait.waited_s, rank)
    yield Number("mpisgd_awaited_by_ranks", awaited, rank)
    yield Number("mpisgd_bytes_total", meters.to_host_bytes, rank, "messages_same_host")
    yield Number("mpisgd_bytes_total", meters.to_others_bytes, rank, "messages_other_hosts")
    yield Number("mpisgd_bytes_total", meters.shared_bytes, rank, "shared_memory")
    yield Number("mpisgd_bytes_total", meters.attached_bytes, rank, "cross_memory_attach")
    yield Number("mpisgd_bytes_total", meters.collective_bytes, rank, "mpi_collectives")


def as_dict(numbers: Sequence[Number]) -> dict[str, float]:
    """Return numbers by names that trackers of experiments put in groups: `wait_seconds_total/rank3`."""
    return {
        "/".join(
            [
                number.name.removeprefix("mpisgd_"),
                *([number.medium] if number.medium else []),
                *([] if number.rank is None else [f"rank{number.rank}"]),
            ]
        ): float(number.value)
        for number in numbers
    }
