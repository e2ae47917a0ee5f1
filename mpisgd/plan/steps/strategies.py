"""One step of each strategy as tasks: what the module of the strategy does, in the same order.

A strategy that meets every k steps is planned as its step without communication, and what the one with it
takes more: (k - 1) of those and one of these are k steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mpisgd.errors import InvalidArgument
from mpisgd.plan.models.model import Gradient, StepProfile
from mpisgd.plan.steps.gossip import add_mixing
from mpisgd.plan.steps.graph import StepGraph
from mpisgd.plan.steps.job import PlannedJob
from mpisgd.plan.steps.layout import divide
from mpisgd.plan.steps.parallel import Parallel
from mpisgd.plan.steps.pipeline_step import plan_pipeline
from mpisgd.plan.steps.planned_step import (
    PlannedStep,
    all_reduce_bytes,
    alone,
    backward,
    every,
    every_step,
    mean_of_parameters,
    train,
    update,
)
from mpisgd.plan.steps.tensor_step import add_traffic, job_of_stage

__all__ = ["plan_step"]


def plan_step(job: PlannedJob, strategy: Any) -> PlannedStep:
    """Return the step of a strategy.

    Raises:
        InvalidArgument: this strategy, or what it was made with, is not planned.
    """
    kind = type(strategy).__name__
    if kind not in STEPS:
        raise InvalidArgument(f"plan: {strategy} is not planned; expected one of {', '.join(STEPS)}")
    if job.cluster.size == 1:
        return every_step(job, alone(job))
    return STEPS[kind](job, strategy)


def _synchronous(job: PlannedJob, strategy: Any) -> PlannedStep:
    """See `mpisgd.gradients`: buckets during backward, or all together at its end."""
    graph = job.graph()
    if job.overlaps:
        backward(job, graph, lambda gradients, place: _send(job, graph, gradients))
    else:
        train(job, graph)
        buckets = [job.gradients_of(bucket) for bucket in job.gradient_buckets()]
        copied = [sum(g.nbytes for g in each) for each in buckets if not job.is_alone(each)]
        copied_at = graph.move("copy", 2 * sum(copied), tensors=len(job.profile.gradients))
        graph.begin_operation([copied_at])
        for gradients in buckets:
            graph.wire(job.wire(gradients))
    graph.wait()
    update(job, graph)
    return every_step(job, graph)


def _send(job: PlannedJob, graph: StepGraph, gradients: list[Gradient]) -> None:
    nbytes = 0 if job.is_alone(gradients) else sum(gradient.nbytes for gradient in gradients)
    graph.begin_operation([graph.move("copy", 2 * nbytes, tensors=len(gradients))])
    graph.wire(job.wire(gradients))


def _with_overlap(job: PlannedJob, strategy: Any) -> PlannedStep:
    return _synchronous(replace(job, overlap=strategy.overlap), strategy)


def _local_sgd(job: PlannedJob, strategy: Any) -> PlannedStep:
    """See `methods.local_sgd.local_sgd`: the mean every `period` steps, on each host maybe more often."""
    graph = alone(job)
    if job.is_compressed():
        graph.move("changes", 3 * job.profile.nbytes, fresh=job.profile.nbytes)
    mean_of_parameters(job, graph)
    if job.is_compressed():
        graph.move("mean", 5 * job.profile.nbytes)
    if strategy.average_state:
        graph.begin_operation()
        graph.collective("all_reduce", job.profile.state_bytes)
        graph.wait()
    found = every(job, strategy.period, graph)
    if strategy.hierarchy is None or job.cluster.ranks_per_host == 1 or job.cluster.hosts == 1:
        return found
    here = replace(job, cluster=job.cluster.at(job.cluster.ranks_per_host))
    on_host = alone(here)
    mean_of_parameters(here, on_host)
    extra = on_host.end_s() - alone(here).end_s()
    share = 1 / strategy.hierarchy["host"] - 1 / strategy.hierarchy["job"]
    return replace(found, step_s=found.step_s + extra * share)


# What an outer step reads and writes, in multiples of the parameters: the difference, SGD with Nesterov's
# momentum, and the copy back.
OUTER_MOVED = 3 + 9 + 2


def _diloco(job: PlannedJob, strategy: Any) -> PlannedStep:
    """See `mpisgd.methods.diloco.diloco`; with fragments as many means of a share of the parameters each."""
    overlap = strategy.overlap_steps
    graph = job.graph()
    train(job, graph)
    update(job, graph)
    graph.move("changes", 3 * job.profile.nbytes, fresh=job.profile.nbytes)
    if overlap:
        graph.begin_operation([len(graph.tasks) - 1])
        for nbytes in job.messages():
            graph.collective("all_reduce", nbytes)
            graph.sent_bytes += all_reduce_bytes(job.cluster, nbytes)
        for _ in range(overlap):
            train(job, graph)
            update(job, graph)
        graph.wait()
    else:
        mean_of_parameters(job, graph)
    outer = (OUTER_MOVED - 3) * job.profile.nbytes
    graph.move("outer step", outer, tensors=len(job.profile.gradients))
    return every(job, strategy.sync_every, graph, 1 + overlap)


def _elastic_averaging(job: PlannedJob, strategy: Any) -> PlannedStep:
    """See `mpisgd.methods.elastic_averaging.elastic_averaging`."""
    graph = alone(job)
    graph.move("differences", 6 * job.profile.nbytes, fresh=job.profile.nbytes)
    mean_of_parameters(job, graph)
    graph.move("centre", 3 * job.profile.nbytes)
    return every(job, strategy.every, graph)


def _sharded(job: PlannedJob, strategy: Any) -> PlannedStep:
    """ZeRO's stages 1 and 2: a reduce-scatter of each bucket, an update of a share, an all-gather."""
    graph, cluster = job.graph(), job.cluster

    def send(gradients: list[Gradient], place: int) -> None:
        nbytes = sum(gradient.nbytes for gradient in gradients)
        graph.begin_operation([graph.move("copy", 0.0, [place], tensors=len(gradients))])
        graph.collective("reduce_scatter", nbytes)
        graph.sent_bytes += all_reduce_bytes(cluster, nbytes) / 2

    if job.overlaps:
        backward(job, graph, send)
    else:
        train(job, graph)
        for bucket in job.gradient_buckets():
            send(job.gradients_of(bucket), len(graph.tasks) - 1)
    graph.wait()
    update(job, graph, 1 / cluster.size)
    graph.begin_operation([len(graph.tasks) - 1])
    graph.collective("all_gather", job.profile.nbytes)
    graph.sent_bytes += all_reduce_bytes(cluster, job.profile.nbytes) / 2
    graph.wait()
    return every_step(job, graph, job.profile.optimizer_s / cluster.size)


def _fully_sharded(job: PlannedJob, strategy: Any) -> PlannedStep:
    """FSDP2: a layer's parameters are gathered while the one before computes, its gradients scattered."""
    graph, profile = job.graph(), job.profile
    groups = [job.gradients_of(bucket) for bucket in job.gradient_buckets()]
    sizes = [float(sum(gradient.nbytes for gradient in group)) for group in groups]
    seconds = _seconds_of(groups, profile)

    def gather(nbytes: float) -> int:
        graph.begin_operation()
        graph.sent_bytes += all_reduce_bytes(job.cluster, nbytes) / 2
        return graph.collective("all_gather", nbytes)

    share = profile.forward_s / profile.backward_s if profile.backward_s else 0.0
    for nbytes, took in zip(reversed(sizes), reversed(seconds), strict=True):
        graph.compute("forward", took * share, [gather(nbytes)])
    again = strategy.reshard_after_forward
    for nbytes, took in zip(sizes, seconds, strict=True):
        place = graph.compute("backward", took, [gather(nbytes)] if again else [])
        graph.begin_operation([place])
        graph.collective("reduce_scatter", nbytes)
        graph.sent_bytes += all_reduce_bytes(job.cluster, nbytes) / 2
    graph.wait()
    update(job, graph, 1 / job.cluster.size)
    return every_step(job, graph, profile.optimizer_s / job.cluster.size)


def _seconds_of(groups: Sequence[Sequence[Gradient]], profile: StepProfile) -> list[float]:
    """Return what of backward belongs to each group of gradients."""
    ends = [max(gradient.ready_s for gradient in group) - profile.forward_s for group in groups]
    ends[-1] = profile.backward_s
    return [max(0.0, end - before) for before, end in zip([0.0, *ends], ends, strict=False)]


def _parameter_server(job: PlannedJob, strategy: Any) -> PlannedStep:
    """See `mpisgd.methods.parameter_server`: all ranks hold a shard of the parameters and their state."""
    if strategy.mode == "sync":
        return _shared(job)
    if strategy.servers is not None or not strategy.locked:
        raise InvalidArgument(f"plan: {strategy} is not planned; expected servers=None and locked=True")
    graph, cluster = job.graph(), job.cluster
    train(job, graph)
    version = job.profile.nbytes + job.profile.state_bytes
    # A push reads a version of every shard and writes the next one, a pull reads it.
    pulls = strategy.push_every / (strategy.pull_every or strategy.push_every)
    passes = 2 + pulls
    far = (cluster.hosts - 1) / cluster.hosts
    graph.move("push and pull", (1 - far) * 2 * passes * version)
    through = passes * version * far * cluster.ranks_per_host
    seconds = (
        through / cluster.between.bytes_per_s + passes * cluster.size * 2 * cluster.between.latency_s * far
    )
    if far:
        graph.carry("host out", through)
        graph.carry("host in", through)
    graph.compute("wait for the servers", seconds)
    update(job, graph)
    graph.sent_bytes += passes * version * far
    found = every_step(job, graph)
    alone_s = alone(job).end_s()
    return replace(found, step_s=alone_s + (found.step_s - alone_s) / strategy.push_every)


def _shared(job: PlannedJob) -> PlannedStep:
    """One copy of the parameters for each host, of which each rank updates its pieces."""
    graph, cluster = job.graph(), job.cluster
    share = 1 / cluster.ranks_per_host
    train(job, graph)
    graph.begin_operation([len(graph.tasks) - 1])
    # On one host nothing has to come back: the parameters are there for all.
    what = "all_reduce" if cluster.hosts > 1 else "reduce_scatter"
    for nbytes in job.messages():
        graph.collective(what, nbytes)
        graph.sent_bytes += all_reduce_bytes(cluster, nbytes) * (1.0 if cluster.hosts > 1 else 0.5)
    graph.wait()
    update(job, graph, share)
    graph.begin_operation([len(graph.tasks) - 1])
    graph.wait()
    return every_step(job, graph, job.profile.optimizer_s * share)


def _gossip(job: PlannedJob, strategy: Any) -> PlannedStep:
    if strategy.style == "asynchronous":
        graph = alone(job)
        graph.move("exchange with the model", 6 * job.profile.nbytes)
        return every_step(job, graph)
    graph = alone(job)
    add_mixing(job, graph, strategy.graph)
    return every(job, strategy.every, graph)


def _parallel(job: PlannedJob, layout: Parallel) -> PlannedStep:
    """A pipeline by its schedule; without one, blocks divided over tp, and gradients over dp as always."""
    if layout.pp > 1:
        return plan_pipeline(job, layout)
    model = divide(job, layout)
    (stage,), passes = model.stages, model.shape.num_micro_batches
    found = _synchronous(job_of_stage(job, model), None)
    sums = all_reduce_bytes(model.grid.tensor_group, stage.summed_bytes * passes)
    return replace(
        found,
        communication_s=found.communication_s + stage.sums_s * passes,
        alpha_s=found.alpha_s + stage.sums_alpha_s * passes,
        sent_bytes=found.sent_bytes + sums,
        traffic=add_traffic(found.traffic, model, stage.summed_bytes * passes),
    )


STEPS: dict[str, Callable[[PlannedJob, Any], PlannedStep]] = {
    "Synchronous": _synchronous,
    "Overlap": _with_overlap,
    "LocalSGD": _local_sgd,
    "DiLoCo": _diloco,
    "ElasticAveraging": _elastic_averaging,
    "Gossip": _gossip,
    "ParameterServer": _parameter_server,
    "Sharded": _sharded,
    "FullyShard": _fully_sharded,
    "Parallel": _parallel,
}
