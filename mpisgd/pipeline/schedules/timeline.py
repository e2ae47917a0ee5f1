"""`PipelineTimeline`: when each rank did what, simulated in time slots or measured in seconds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpisgd.pipeline.schedules.action import Action, Kind

__all__ = ["PipelineTimeline", "Span"]

WORK = (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)


class Span(NamedTuple):
    """An action with its begin and its end."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class PipelineTimeline:
    """What every rank did and when.

    Attributes:
        spans: the actions of each rank, in order; a rank waits in the time between them.
        title: title of the picture.
    """

    spans: tuple[tuple[Span, ...], ...]
    title: str = ""

    @property
    def begin(self) -> float:
        """The first begin of a forward, a backward or an update."""
        return min((span.begin for span in self._work()), default=0.0)

    @property
    def duration(self) -> float:
        """The time from `begin` to the end of the last action."""
        return max((span.end for span in self._work()), default=0.0) - self.begin

    @property
    def idle_share(self) -> float:
        """The share of all ranks' time without a forward, a backward or an update; at least the bubble."""
        total = self.duration * len(self.spans)
        return 1.0 - sum(span.end - span.begin for span in self._work()) / total if total else 0.0

    def idle_share_of(self, rank: int) -> float:
        """Return the share of one rank's time without a forward, a backward or an update."""
        busy = sum(span.end - span.begin for span in self.spans[rank] if span.action.kind in WORK)
        return 1.0 - busy / self.duration if self.duration else 0.0

    def mean_costs(self, kind: Kind, num_stages: int) -> list[float]:
        """Return the mean duration of the actions of a kind, for each stage."""
        times: list[list[float]] = [[] for _ in range(num_stages)]
        for span in self._work():
            if span.action.kind is kind:
                times[span.action.stage].append(span.end - span.begin)
        return [sum(each) / len(each) if each else 0.0 for each in times]

    def _work(self) -> Sequence[Span]:
        return [span for spans in self.spans for span in spans if span.action.kind in WORK]
