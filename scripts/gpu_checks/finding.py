"""What a check has found on one rank, and what is made of the findings of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["FAILS", "HOLDS", "LEFT_OUT", "Finding", "LeftOut", "joined"]

HOLDS, FAILS, LEFT_OUT = "holds", "FAILS", "left out"


class LeftOut(Exception):
    """A check cannot show anything here; the text says why. Raised on every rank or on none."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        verdict: HOLDS, FAILS or LEFT_OUT.
        expected: what holds on every rank.
        seen: what was there; for LEFT_OUT, the reason.
        figures: what was measured, by name with its unit.
    """

    verdict: str
    expected: str = ""
    seen: str = ""
    figures: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, holds: bool, expected: str, seen: str, **figures: float) -> Finding:
        """The finding of a check that could be done."""
        return cls(HOLDS if holds else FAILS, expected, seen, figures)


def joined(findings: Sequence[Finding]) -> Finding:
    """The finding of all ranks: of the first that failed, else of the first; largest figures."""
    failed = [rank for rank, each in enumerate(findings) if each.verdict == FAILS]
    first = findings[failed[0]] if failed else findings[0]
    names = list(dict.fromkeys(name for each in findings for name in each.figures))
    figures = {name: max(each.figures[name] for each in findings if name in each.figures) for name in names}
    where = f"rank {failed[0]}: " if failed and len(findings) > 1 else ""
    return Finding(first.verdict, first.expected, where + first.seen, figures)
