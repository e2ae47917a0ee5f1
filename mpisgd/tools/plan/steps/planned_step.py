"""`PlannedStep`: what a step takes on average."""

from collections.abc import Sequence
from dataclasses import dataclass

from mpisgd.tools.plan.simulation.engine import Span, Task

__all__ = ["PlannedStep"]


@dataclass(frozen=True)
class PlannedStep:
    """What a step takes on average, and the one that is drawn.

    Attributes:
        step_s: from one step to the next.
        optimizer_s: of it, what updates parameters.
        communication_s: in which something is sent, hidden or not.
        alpha_s: of this, what does not depend on bytes.
        compression_s: what compressing and decompressing computes.
        sent_bytes: of each rank, by the formulas of what travels.
        traffic: bytes on the busiest link of each level.
        tasks: of the step that communicates most.
        spans: when they run.
        waiting_s: in which a rank of a pipeline has nothing to do, on average.
    """

    step_s: float
    optimizer_s: float
    communication_s: float
    alpha_s: float
    compression_s: float
    sent_bytes: float
    traffic: dict[str, float]
    tasks: Sequence[Task]
    spans: Sequence[Span]
    waiting_s: float = 0.0
