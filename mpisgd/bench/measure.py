"""Measure variants of one thing side by side: in turns, all ranks together, the slowest rank counts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

import mpisgd
from mpisgd.bench.payload import WrongResult
from mpisgd.bench.schedule import Pace, calls_per_turn, goes_on, turns

__all__ = ["Measured", "Timed", "Unavailable", "Variant", "measure"]


class Unavailable(Exception):
    """A variant cannot be had here; the text says why."""


class Variant(Protocol):
    """One way of doing what is measured.

    Attributes:
        name: in tables.
        ours: whether a wrong result is a defect of mpisgd, which ends the program.
    """

    name: str
    ours: bool

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
        left_out: variants that could not be measured, and why.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


class Timed:
    """A variant that is a function in this process.

    Args:
        name: in tables.
        call: does it once.
        reset: makes ready for a call.
        verify: raises WrongResult unless a call after `reset` did the right thing.
        start: brings all ranks together.
        clock: seconds now.
        ours: whether it is mpisgd's.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[], object],
        *,
        reset: Callable[[], object],
        verify: Callable[[], None],
        start: Callable[[], object],
        clock: Callable[[], float],
        ours: bool = False,
    ) -> None:
        self.name = name
        self.ours = ours
        self._call, self._reset, self._verify = call, reset, verify
        self._start, self._clock = start, clock

    def check(self) -> None:
        """See `Variant`."""
        self._reset()
        self._call()
        self._verify()

    def time(self, calls: int) -> float:
        """See `Variant`. Short calls are preceded by one that is not counted: it aligns the ranks."""
        self._reset()
        self._start()
        if calls > 1:
            self._call()
        started = self._clock()
        for _ in range(calls):
            self._call()
        return (self._clock() - started) / calls

    def release(self) -> None:
        """See `Variant`."""
        self._call = self._reset = self._verify = _nothing


def _nothing() -> None:
    """Stand in for functions that held memory."""


def measure(variants: Sequence[Variant], pace: Pace) -> Measured:
    """Check every variant, then time all of them in turns. Collective.

    Raises:
        JobError: a variant that is `ours` computes something wrong.
    """
    found = Measured({variant.name: [] for variant in variants})
    running = [variant for variant in variants if _passes(variant, found)]
    calls: dict[str, int] = {}
    for variant in list(running):
        if (seconds := _turn(variant, 1, found)) is None:
            running.remove(variant)
        else:
            calls[variant.name] = calls_per_turn(seconds, pace)
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
    return not _left_out(variant, reason, found)


def _turn(variant: Variant, calls: int, found: Measured) -> float | None:
    """Return the seconds of a call on the slowest rank, None where the variant broke down on some rank."""
    reason, mine = "", float("inf")
    try:
        mine = variant.time(calls)
    except Unavailable as exc:
        reason = str(exc)
    slowest = torch.tensor(mine, dtype=torch.float64)
    mpisgd.all_reduce(slowest, mpisgd.ReduceOp.MAX)
    if slowest == float("inf"):
        _left_out(variant, reason, found)
        return None
    return float(slowest)


def _left_out(variant: Variant, reason: str, found: Measured) -> bool:
    """Note on all ranks why the first of them cannot go on with a variant; return whether one cannot."""
    reasons: list[str] = [""] * mpisgd.size()
    mpisgd.all_gather_object(reasons, reason)
    first = next((text for text in reasons if text), "")
    if first:
        found.left_out[variant.name] = first
        found.seconds.pop(variant.name, None)
    return bool(first)
