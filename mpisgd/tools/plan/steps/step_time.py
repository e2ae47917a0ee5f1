"""`plan_step`: the seconds of a method's step on a cluster, by the operations of its cost.

Steps that stand for all are added to one graph after the other: a graph ends with the first step after which
nothing is under way. Operations of the program follow each other there, and so do those of the queue; see
`StepGraph`. Buckets, overlap, links, algorithms and what ranks take of a core are the planner's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from mpisgd.errors import InvalidArgument
from mpisgd.gossip.graph import Graph
from mpisgd.methods.cost_kit import (
    ALL,
    HOST,
    LEADERS,
    Bucket,
    Check,
    Collective,
    Compute,
    Disk,
    Move,
    Op,
    Wait,
)
from mpisgd.methods.costs import MethodCost
from mpisgd.methods.wire_bytes import sent_bytes
from mpisgd.tools.plan.cluster import Cluster
from mpisgd.tools.plan.simulation.collectives import cost_of_rounds
from mpisgd.tools.plan.simulation.costs import Costs
from mpisgd.tools.plan.simulation.engine import Span
from mpisgd.tools.plan.simulation.messages import Round, neighbours, shift
from mpisgd.tools.plan.steps.graph import COMMUNICATION, PlannedStep, StepGraph
from mpisgd.tools.plan.steps.job import PlannedJob

__all__ = ["plan_step", "rounds_of_graph", "steps_between_meetings"]

# Of the core for which `Coding.element_s` is estimated. Compressors read and write more than they compute.
REFERENCE_BYTES_PER_S = 1e10
# What decompressing and adding up takes for each byte that arrives from another rank.
ARRIVED_S_PER_BYTE = 2e-9
# Each rank sends as many bytes to each other one, whether they are the same for all or not.
PRICED_AS = {"all_to_all": "all_gather"}
# Of more ranks the neighbours of every rank are not listed, unless all have theirs at the same distances.
MAX_RANKS = 1024


def plan_step(job: PlannedJob, method: MethodCost) -> PlannedStep:
    """Return the step of a method on average.

    Raises:
        InvalidArgument: it is not planned, or not on this cluster.
    """
    sizes, world = job.sizes, job.world
    first, length = method.cycle(world)
    found: list[PlannedStep] = []
    segment = _Segment(job)
    for step in range(first + 1, first + length + 1):
        for op in method.cost(sizes, world, step):
            segment.add(op)
        if not segment.under_way or step == first + length:
            found.append(segment.planned())
            segment = _Segment(job)
    return _mean(found, length)


def _mean(found: Sequence[PlannedStep], length: int) -> PlannedStep:
    """Return the mean of `length` steps; what is drawn is the part that communicates most."""
    drawn = max(found, key=lambda each: each.communication_s)
    traffic: dict[str, float] = {}
    for each in found:
        for level, nbytes in each.traffic.items():
            traffic[level] = traffic.get(level, 0.0) + nbytes / length
    names = ("step_s", "optimizer_s", "communication_s", "alpha_s", "compression_s", "sent_bytes")
    sums = {name: sum(getattr(each, name) for each in found) / length for name in names}
    return replace(drawn, traffic=traffic, **sums)


def steps_between_meetings(job: PlannedJob, method: MethodCost) -> float | None:
    """Return after how many steps the ranks wait for each other, on average; None: never."""
    first, length = method.cycle(job.world)
    steps = [method.cost(job.sizes, job.world, step) for step in range(first + 1, first + length + 1)]
    number = sum(any(map(_meets, step)) for step in steps)
    return length / number if number else None


def _meets(op: Op) -> bool:
    return isinstance(op, Collective) and op.meets and op.group != HOST


class _Segment:
    """Some steps, of which the last leaves nothing under way.

    Attributes:
        under_way: keys of collectives that nobody has waited for yet.
    """

    def __init__(self, job: PlannedJob) -> None:
        self._job, self._cluster, self._graph = job, job.cluster, StepGraph(job.cluster, job.algorithm)
        self._places: dict[Op, int] = {}
        self._last_of: dict[str, int] = {}
        self._sent: list[Op] = []
        self._updates = 0.0
        self._now = 0.0  # of backward
        self.under_way: set[str] = set()

    def add(self, op: Op) -> None:
        """Add an operation behind those before."""
        add = ADD.get(type(op))
        if add is not None:
            self._places[op] = add(self, op, self._before(op))

    def _before(self, op: Op) -> list[int]:
        """Return the places in the graph of the operations that an operation waits for."""
        if op.after is not None:
            return [self._places[each] for each in op.after]
        begins = isinstance(op, (Check, Collective)) or (isinstance(op, Compute) and op.what == "compress")
        return self._graph.program_so_far if begins else []

    def planned(self) -> PlannedStep:
        """Return these steps together."""
        graph, spans = self._graph, self._graph.run()
        sent = sent_bytes(self._sent, self._job.world)
        return PlannedStep(
            step_s=max((span.end_s for span in spans), default=0.0),
            optimizer_s=self._updates * self._job.profile.optimizer_s,
            communication_s=_busy_s(graph, spans),
            alpha_s=graph.alpha_s,
            compression_s=graph.compression_s,
            sent_bytes=sum(sent.values()) - sent[HOST],
            traffic=dict(graph.traffic),
            tasks=graph.tasks,
            spans=spans,
        )

    def _members(self, op: Check | Collective) -> Cluster:
        here = self._cluster
        if op.ranks:
            return here.group_of(op.ranks)
        return {ALL: here, HOST: here.at(here.ranks_per_host), LEADERS: here.leaders}[op.group]

    # -- what each operation is ---------------------------------------------------------------------

    def compute(self, op: Compute, after: list[int]) -> int:
        if op.what == "compress":
            return self._compress(op, after)
        if op.what == "optimizer":
            self._updates += op.share
        return self._graph.compute(op.what, self._seconds(op), after)

    def _seconds(self, op: Compute) -> float:
        profile = self._job.profile
        if op.what == "optimizer":
            return profile.optimizer_s * op.share
        if op.what in ("forward, backward", "products"):
            return profile.compute_s * op.share
        if op.what == "forward":
            self._now = 0.0
            share = profile.forward_s / profile.backward_s if profile.backward_s else 0.0
            return profile.forward_s if op.bucket is None else share * self._backward_of(op.bucket)
        until = profile.backward_s if op.bucket is None else self._complete_at(op.bucket)
        seconds, self._now = max(0.0, until - self._now), max(self._now, until)
        return seconds

    def _complete_at(self, bucket: Bucket) -> float:
        """Return when the gradients of a bucket are complete, since backward has begun."""
        ready = self._job.ready_s
        return max(ready[each.place] for each in bucket.parameters) - self._job.profile.forward_s

    def _backward_of(self, bucket: Bucket) -> float:
        """Return the part of backward before a bucket is full; the last one has the rest."""
        buckets = self._job.sizes.buckets
        begun = self._complete_at(buckets[bucket.number - 1]) if bucket.number else 0.0
        is_last = bucket.number == len(buckets) - 1
        end = self._job.profile.backward_s if is_last else self._complete_at(bucket)
        return max(0.0, end - begun)

    def _compress(self, op: Compute, after: list[int]) -> int:
        slower = REFERENCE_BYTES_PER_S / self._cluster.memory_bytes_per_s
        measured = self._job.measured_s(op.by)
        seconds = op.elements * (op.element_s * slower if measured is None else measured)
        return self._graph.compress(
            seconds + op.arrived_bytes * ARRIVED_S_PER_BYTE * slower, op.num_collectives, after
        )

    def move(self, op: Move, after: list[int]) -> int:
        return self._graph.move(op.what, op.nbytes, after, op.tensors, op.fresh_bytes)

    def check(self, op: Check, after: list[int]) -> int:
        return self._graph.begin_operation(after, self._members(op))

    def collective(self, op: Collective, after: list[int]) -> int:
        self._sent.append(op)
        if op.kind == "pairs":  # by a thread that nobody waits for
            return self._graph.compute("pairs", 0.0)
        self.under_way.add(op.key)
        if op.kind == "access":
            return self._access(op, after)
        if op.kind == "exchange":
            place = self._exchange(op, after)
        else:
            members = self._members(op)
            sharers = partial(self._cluster.sharers, members) if op.ranks else lambda level: 1
            nbytes = op.nbytes * self._wider(op, members)
            place = self._graph.collective(PRICED_AS.get(op.kind, op.kind), nbytes, after, members, sharers)
        self._last_of[op.key] = place
        return place

    def _wider(self, op: Collective, members: Cluster) -> float:
        """Return by what more bytes count: a host's sum of 16-bit floats goes to others as float32."""
        if op.kind != "all_reduce" or op.itemsize != 2 or members.ranks_per_host == 1:
            return 1.0
        return 1.5 if members.hosts > 1 else members.half_factor

    def _exchange(self, op: Collective, after: list[int]) -> int:
        costs, busiest = _exchanged(self._cluster, op.graph, op.phase)
        for level, most in busiest.items():
            self._graph.carry(level, most * op.nbytes)
        cost = costs.at(op.nbytes)
        return self._graph.communicate("exchange", cost, op.nbytes, after)

    def _access(self, op: Collective, after: list[int]) -> int:
        """Add copies to and from the memory of all ranks, by the program; each host's link is the busiest."""
        cluster, graph = self._cluster, self._graph
        far = (cluster.hosts - 1) / cluster.hosts
        place = graph.move("push and pull", (1 - far) * 2 * op.nbytes, after)
        if far:
            through = op.nbytes * far * cluster.ranks_per_host
            graph.carry("host out", through)
            graph.carry("host in", through)
            seconds = through / cluster.between.bytes_per_s
            latency_s = 2 * cluster.size * cluster.between.latency_s * far
            place = graph.compute("wait for the servers", seconds + latency_s)
        return place

    def disk(self, op: Disk, after: list[int]) -> int:
        rate = self._cluster.disk_bytes_per_s
        if rate is None:
            raise InvalidArgument('plan: state is in files; expected disk = "2 GB/s" in the cluster\'s file')
        return self._graph.compute("disk", op.nbytes / rate, after)

    def wait(self, op: Wait, after: list[int]) -> int:
        self.under_way = self.under_way - {op.key} if op.key else set()
        return self._graph.wait(self._last_of.get(op.key) if op.key else None)


ADD: Mapping[type, Callable[[_Segment, Any, list[int]], int]] = {
    Compute: _Segment.compute,
    Move: _Segment.move,
    Check: _Segment.check,
    Collective: _Segment.collective,
    Disk: _Segment.disk,
    Wait: _Segment.wait,
}


def _busy_s(graph: StepGraph, spans: Sequence[Span]) -> float:
    both = zip(graph.tasks, spans, strict=True)
    return sum(span.end_s - span.start_s for task, span in both if task.track == COMMUNICATION)


@lru_cache(maxsize=256)
def _exchanged(cluster: Cluster, graph: Graph, phase: int) -> tuple[Costs, dict[str, float]]:
    return cost_of_rounds(cluster, rounds_of_graph(graph, cluster.size, phase))


def rounds_of_graph(graph: Graph, size: int, step: int = 0) -> list[Round]:
    """Return the rounds of a step, of one byte each: every rank sends to its neighbours in turn.

    Raises:
        InvalidArgument: there are too many ranks to list their neighbours.
    """
    distances = graph.distances(size, step)
    if distances is not None:
        return [shift(size, distance, 1.0) for distance in distances]
    if size > MAX_RANKS:
        raise InvalidArgument(
            f"plan: {graph} of {size} ranks; expected at most {MAX_RANKS}, or a ring or exponential"
        )
    graph.check(size)
    return neighbours([list(to) for to in graph.destinations(size, step)], 1.0)
