"""`PlannedStep`: what a step takes on average; and the parts of which the steps of strategies are made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mpisgd.plan.cluster import Cluster
from mpisgd.plan.models.model import Gradient
from mpisgd.plan.simulation.engine import Span, Task
from mpisgd.plan.steps.graph import COMMUNICATION, StepGraph
from mpisgd.plan.steps.job import PlannedJob

__all__ = [
    "PlannedStep",
    "all_reduce_bytes",
    "alone",
    "backward",
    "every",
    "every_step",
    "mean_of_parameters",
    "train",
    "update",
]


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


def train(job: PlannedJob, graph: StepGraph) -> None:
    """Add forward and backward in one."""
    graph.compute("forward, backward", job.profile.compute_s)


def update(job: PlannedJob, graph: StepGraph, share: float = 1.0) -> None:
    """Add the optimizer, of a share of the parameters."""
    graph.compute("optimizer", job.profile.optimizer_s * share)


def alone(job: PlannedJob) -> StepGraph:
    """Return the step without communication."""
    graph = job.graph()
    train(job, graph)
    update(job, graph)
    return graph


def backward(job: PlannedJob, graph: StepGraph, send: Callable[[list[Gradient], int], None]) -> None:
    """Add forward and backward, and what is to be done with each bucket as it becomes complete."""
    now = 0.0
    graph.compute("forward", job.profile.forward_s)
    now = job.profile.forward_s
    for bucket in job.gradient_buckets():
        gradients = job.gradients_of(bucket)
        ready = max(gradient.ready_s for gradient in gradients)
        place = graph.compute("backward", max(0.0, ready - now))
        now = max(now, ready)
        send(gradients, place)
    graph.compute("backward", max(0.0, job.profile.compute_s - now))


def mean_of_parameters(job: PlannedJob, graph: StepGraph) -> int:
    """Add the mean of all parameters, or of what they have changed by; return the place of its end."""
    if job.is_compressed():
        for bucket in job.parameter_buckets():
            gradients = job.gradients_of(bucket)
            packed = graph.move("copy", 2 * sum(gradient.nbytes for gradient in gradients))
            graph.begin_operation([packed])
            graph.wire(job.wire(gradients))
            end = graph.wait()
            graph.move("copy", 2 * sum(gradient.nbytes for gradient in gradients), [end])
        return graph.wait()
    messages = job.messages()
    copied = graph.move("copy", 2 * job.small_bytes(), tensors=len(job.profile.gradients))
    begun = graph.begin_operation([copied])
    for nbytes in messages:
        graph.collective("all_reduce", nbytes, [begun])
        graph.sent_bytes += all_reduce_bytes(job.cluster, nbytes)
    return graph.move("copy", 2 * job.small_bytes(), [graph.wait()])


def all_reduce_bytes(cluster: Cluster, nbytes: float) -> float:
    """Return what each rank sends in an all-reduce."""
    return 2 * (cluster.size - 1) / cluster.size * nbytes


def every_step(job: PlannedJob, graph: StepGraph, optimizer_s: float | None = None) -> PlannedStep:
    """Return a step that is the same every time."""
    spans = graph.run()
    return PlannedStep(
        step_s=max(span.end_s for span in spans),
        optimizer_s=job.profile.optimizer_s if optimizer_s is None else optimizer_s,
        communication_s=_busy(graph, spans),
        alpha_s=graph.alpha_s,
        compression_s=graph.compression_s,
        sent_bytes=graph.sent_bytes,
        traffic=dict(graph.traffic),
        tasks=graph.tasks,
        spans=spans,
    )


def _busy(graph: StepGraph, spans: Sequence[Span]) -> float:
    both = zip(graph.tasks, spans, strict=True)
    return sum(span.end_s - span.start_s for task, span in both if task.track == COMMUNICATION)


def every(job: PlannedJob, period: float, graph: StepGraph, num_steps: int = 1) -> PlannedStep:
    """Return the mean over `period` steps, of which the graph has `num_steps` and the rest sends nothing."""
    alone_s = alone(job).end_s()
    found = every_step(job, graph)
    more_s = found.step_s - num_steps * alone_s
    return replace(
        found,
        step_s=alone_s + more_s / period,
        communication_s=found.communication_s / period,
        alpha_s=found.alpha_s / period,
        compression_s=found.compression_s / period,
        sent_bytes=found.sent_bytes / period,
        traffic={level: nbytes / period for level, nbytes in found.traffic.items()},
    )
