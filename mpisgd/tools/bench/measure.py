"""Measure variants of one thing side by side: in turns, all ranks together, the slowest rank counts.

All variants have one turn in every round, so a machine that is busy for a while slows all of them alike.
Each round begins with another variant, since what ran before leaves its traces in the caches.

    round 0    mpisgd  MPI     gloo    limit      (not counted)
    round 1    MPI     gloo    limit   mpisgd
    round 2    gloo    limit   mpisgd  MPI

Where a variant may choose its number of torch threads, a short trial before the rounds finds the fastest one.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

import mpisgd
from mpisgd.accelerator.runtime import runtime

__all__ = [
    "Measured",
    "OnDevice",
    "Pace",
    "Subject",
    "Timed",
    "Unavailable",
    "Variant",
    "WrongResult",
    "calls_per_turn",
    "first_reason",
    "goes_on",
    "measure",
    "slowest",
    "turns",
]

T = TypeVar("T")

# Turns that each number of threads has before the rounds, and the calls of a turn. One that is not counted is
# before these, see `Timed.time`: after another number of threads the first call is slower.
TRIALS, TRIAL_CALLS = 5, 3


@dataclass(frozen=True)
class Pace:
    """How long to measure.

    Attributes:
        rounds: that are counted, unless the budget ends them before.
        min_rounds: even where the budget is used up.
        budget_s: for all rounds of all variants of one case.
        turn_s: what the calls of one turn should take together.
        max_calls: of one turn.
    """

    rounds: int
    min_rounds: int
    budget_s: float
    turn_s: float
    max_calls: int


class Unavailable(Exception):
    """A variant cannot be had here; the text says why."""


class WrongResult(Exception):
    """A variant does not compute what it should."""


class Variant(Protocol):
    """One way of doing what is measured.

    Attributes:
        name: in tables.
        ours: whether a wrong result is a defect of mpisgd, which ends the program.
        threads: numbers of torch threads to choose from; empty: the process's own number, whatever it is.
        num_threads: the number to take, 0 for the process's own.
    """

    name: str
    ours: bool
    threads: Sequence[int]
    num_threads: int

    def check(self) -> None:
        """Raise WrongResult unless it computes the right thing. All ranks together."""

    def time(self, calls: int) -> float:
        """Return the seconds of one of `calls` calls on this rank. All ranks together."""

    def release(self) -> None:
        """Give its memory back."""


@dataclass
class Measured:
    """What came out.

    Attributes:
        seconds: of one call, one number for each round, by variant.
        threads: the number of threads that was chosen, by variant.
        left_out: variants that could not be measured, and why.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    threads: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def left_out_of(self, **what: Any) -> list[dict[str, Any]]:
        """Return the rows of what was left out, each with its reason."""
        return [{**what, "variant": name, "reason": reason} for name, reason in self.left_out.items()]


class Subject:
    """What a variant works on; this one needs no preparation, and nothing of it can be wrong."""

    def reset(self) -> None:
        """Make everything ready for a call."""

    def verify(self) -> None:
        """Raise WrongResult unless one call after `reset()` did the right thing."""

    def finish(self) -> None:
        """Wait until what calls have begun is done."""


class OnDevice(Subject):
    """A subject whose memory lies on a device, where calls may return before their work is done.

    Args:
        device: what torch calls its kind.
    """

    def __init__(self, device: str) -> None:
        self._device = device

    def finish(self) -> None:
        """See `Subject`."""
        if self._device != "cpu":
            runtime().module.synchronize()


class Timed:
    """A variant that is a function in this process.

    Args:
        name: in tables.
        call: does it once.
        subject: what it works on.
        start: brings all ranks together.
        ours: whether it is mpisgd's.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[], object],
        subject: Subject | None = None,
        *,
        start: Callable[[], object] = mpisgd.barrier,
        ours: bool = False,
    ) -> None:
        self.name = name
        self.ours = ours
        self.threads: Sequence[int] = ()
        self.num_threads = 0
        self._call, self._subject, self._start = call, subject or Subject(), start

    def check(self) -> None:
        """See `Variant`."""
        self._subject.reset()
        self._call()
        self._subject.verify()

    def time(self, calls: int) -> float:
        """See `Variant`. Short calls are preceded by one that is not counted: it aligns the ranks."""
        if self.num_threads:
            torch.set_num_threads(self.num_threads)
        self._subject.reset()
        self._subject.finish()
        self._start()
        if calls > 1:
            self._call()
            self._subject.finish()
        started_s = time.perf_counter()
        for _ in range(calls):
            self._call()
        self._subject.finish()
        return (time.perf_counter() - started_s) / calls

    def release(self) -> None:
        """See `Variant`."""
        self._subject = Subject()
        self._call = self._subject.reset


def turns(variants: Sequence[T], round_number: int) -> list[T]:
    """Return the order of one round."""
    if not variants:
        return []
    first = round_number % len(variants)
    return [*variants[first:], *variants[:first]]


def calls_per_turn(seconds: float, pace: Pace) -> int:
    """Return how many calls of `seconds` each make up a turn."""
    if seconds * pace.max_calls <= pace.turn_s:
        return pace.max_calls
    return max(1, round(pace.turn_s / seconds))


def goes_on(rounds_done: int, used_s: float, pace: Pace) -> bool:
    """Return whether there is another round. Depends only on what all ranks have agreed on."""
    if rounds_done < min(pace.min_rounds, pace.rounds):
        return True
    return rounds_done < pace.rounds and used_s < pace.budget_s


def measure(variants: Sequence[Variant], pace: Pace) -> Measured:
    """Check every variant, then time all of them in turns. Collective.

    Raises:
        JobError: a variant that is `ours` computes something wrong.
    """
    found = Measured()
    running: list[Variant] = []
    calls: dict[str, int] = {}
    for variant in variants:
        if _passes(variant, found) and (seconds := _trial(variant, found)) is not None:
            running.append(variant)
            calls[variant.name] = calls_per_turn(seconds, pace)
            found.seconds[variant.name] = []
    rounds, used_s = 0, 0.0
    while running and goes_on(rounds, used_s, pace):
        for variant in turns(running, rounds):
            seconds = _turn(variant, calls[variant.name], found)
            if seconds is None:
                running.remove(variant)
                continue
            found.seconds[variant.name].append(seconds)
            used_s += seconds * calls[variant.name]
        rounds += 1
    for variant in variants:
        variant.release()
    return found


def _passes(variant: Variant, found: Measured) -> bool:
    """Return whether `variant` computes the right thing on every rank; note the reason where not."""
    reason = ""
    try:
        variant.check()
    except (Unavailable, WrongResult, mpisgd.UnsupportedOp, mpisgd.UnsupportedTensor) as exc:
        reason = str(exc)
        if variant.ours and isinstance(exc, WrongResult):
            raise mpisgd.JobError(f"{variant.name}: {exc}", exit_code=1) from exc
    return _goes_on_everywhere(variant, reason, found)


def _trial(variant: Variant, found: Measured) -> float | None:
    """Choose the number of threads by medians; return the seconds of a call with it, None as `_turn`."""
    numbers = variant.threads or [variant.num_threads]
    trials, calls = (TRIALS, TRIAL_CALLS) if len(numbers) > 1 else (1, 1)
    tried: dict[int, list[float]] = {}
    for variant.num_threads in list(numbers) * trials:
        seconds = _turn(variant, calls, found)
        if seconds is None:
            return None
        tried.setdefault(variant.num_threads, []).append(seconds)
    medians = {number: statistics.median(every) for number, every in tried.items()}
    variant.num_threads = min(medians, key=lambda number: medians[number])
    if variant.threads:
        found.threads[variant.name] = variant.num_threads
    return medians[variant.num_threads]


def _turn(variant: Variant, calls: int, found: Measured) -> float | None:
    """Return the seconds of a call on the slowest rank, None where the variant broke down on some rank."""
    reason, mine = "", float("inf")
    try:
        mine = variant.time(calls)
    except Unavailable as exc:
        reason = str(exc)
    seconds = slowest(mine)
    if seconds < float("inf"):
        return seconds
    _goes_on_everywhere(variant, reason, found)
    return None


def _goes_on_everywhere(variant: Variant, reason: str, found: Measured) -> bool:
    """Return whether no rank has a reason to give up a variant; note the first reason on all of them."""
    if first := first_reason(reason):
        found.left_out[variant.name] = first
        found.seconds.pop(variant.name, None)
    return not first


def slowest(seconds: float) -> float:
    """Return the seconds of the slowest rank. Collective."""
    clock = torch.tensor(seconds, dtype=torch.float64)
    mpisgd.all_reduce(clock, mpisgd.ReduceOp.MAX)
    return float(clock)


def first_reason(reason: str) -> str:
    """Return the reason of the first rank that has one, "" where none has. Collective."""
    reasons: list[str] = [""] * mpisgd.size()
    mpisgd.all_gather_object(reasons, reason)
    return next((text for text in reasons if text), "")
