"""The step of a `Parallel` layout: the operations of its ranks by `mpisgd/pipeline/cost.py`, in seconds.

    rank of place 0   F0 F1 F2 F3 .  B0 F4 B1 ...  mean over dp, optimizer
    link                 >0 >1 >2    <0
    rank of place 1      F0 B0 F1 B1 ...

One pipeline stands for all, one rank of each place for its tp group. A pass waits for the message that it
takes and for the passes before it; messages go beside the passes, and share the links of hosts. Passes have
their all-reduces over tp in them. Before it updates, a rank means its gradients over dp.
"""

from mpisgd.methods.cost_kit import REPLICAS, Collective, Compute, Op, Send, Wait
from mpisgd.methods.wire_bytes import sent_bytes
from mpisgd.tools.plan.cluster import Cluster
from mpisgd.tools.plan.simulation.collectives import (
    busiest_bytes,
    cost_of,
    fastest,
    link_bytes,
    round_seconds,
)
from mpisgd.tools.plan.simulation.costs import Cost
from mpisgd.tools.plan.simulation.engine import Task, simulate
from mpisgd.tools.plan.steps.graph import PlannedStep
from mpisgd.tools.plan.steps.job import PlannedJob
from mpisgd.tools.plan.steps.parallel import Parallel
from mpisgd.tools.plan.steps.stages import DividedModel, divide, sum_cost

__all__ = ["MESSAGES", "plan_pipeline"]

MESSAGES = "messages"  # their row in a timeline


def plan_pipeline(job: PlannedJob, layout: Parallel) -> PlannedStep:
    """Return the step of a layout.

    Raises:
        InvalidArgument: see `divide`.
    """
    pipeline = _Pipeline(job, divide(job, layout))
    pipeline.add_all()
    return pipeline.planned()


class _Pipeline:
    """The tasks of one pipeline, and what they send."""

    def __init__(self, job: PlannedJob, model: DividedModel) -> None:
        self._job, self._model, self._grid = job, model, model.grid
        self._tasks: list[Task] = []
        self._places = range(self._grid.pp)
        self._waits_for: list[list[int]] = [[] for _ in self._places]  # of the next pass
        self._last_pass: list[tuple[int, ...]] = [() for _ in self._places]
        self._messages: dict[str, int] = {}  # by what waits for them
        self._edges: dict[tuple[int, int], tuple[Cost, dict[str, float]]] = {}
        self._busy_s = [0.0 for _ in self._places]
        self._alpha_s = self._communication_s = self._sent_bytes = 0.0
        self._carried: dict[str, dict[int, float]] = {}  # by level, and rank or host
        self._optimizer_s = 0.0

    def add_all(self) -> None:
        """Add what all ranks do, each operation after those that it waits for."""
        left = []
        for place in self._places:
            ops = list(self._model.cost(place))
            self._sent_bytes += sum(sent_bytes(ops, self._job.world).values()) / self._grid.pp
            left.append(ops[::-1])
        while any(left):
            for place, ops in enumerate(left):
                while ops and self._is_due(ops[-1]):
                    self._add(place, ops.pop())

    def _is_due(self, op: Op) -> bool:
        return not isinstance(op, Wait) or not op.key or op.key in self._messages

    def _add(self, place: int, op: Op) -> None:
        if isinstance(op, Wait) and op.key:
            self._waits_for[place].append(self._messages[op.key])
        elif isinstance(op, Collective):
            add = self._mean if op.group == REPLICAS else self._sum
            add(place, op.nbytes)
        elif isinstance(op, Send):
            self._send(place, op)
        elif isinstance(op, Compute) and op.what in ("forward", "backward"):
            self._compute(place, op)
        elif isinstance(op, Compute) and op.stage == self._model.shape.stages_of(place)[0]:
            self._update(place)

    def _on_rank(
        self, place: int, name: str, core_s: float, seconds: float, demands: dict[str, float] | None = None
    ) -> None:
        """Add what a rank does, behind what it has done before."""
        after = (*self._last_pass[place], *self._waits_for[place])
        needs = {f"core {place}": core_s, **(demands or {})}
        self._tasks.append(Task(name, needs, after, seconds=seconds, track=f"stage {place}"))
        self._waits_for[place] = []
        self._last_pass[place] = (len(self._tasks) - 1,)
        self._busy_s[place] += seconds

    def _compute(self, place: int, op: Compute) -> None:
        stage = self._model.stages[op.stage]
        seconds = stage.forward_s if op.what == "forward" else stage.backward_s
        self._on_rank(place, op.what, seconds, seconds)

    def _sum(self, place: int, nbytes: float) -> None:
        """Note an all-reduce of activations, whose seconds are in those of the pass."""
        cost = sum_cost(self._grid, nbytes, self._job.algorithm)
        self._communicate(cost.seconds(nbytes), cost.alpha_s)
        self._all_reduce_traffic(place, self._grid.tensor_group, nbytes)

    def _send(self, place: int, op: Send) -> None:
        cluster, grid, nbytes, to = self._job.cluster, self._grid, op.nbytes, op.dst
        cost, levels = self._edge(place, to)
        src, dst = grid.host_of(place), grid.host_of(to)
        busy_s = cost.beta_s_per_byte * nbytes
        if src != dst:
            core_s = nbytes * cluster.between.cpu_s_per_byte / 2
            needs = {f"out {src}": busy_s, f"in {dst}": busy_s, f"core {place}": core_s, f"core {to}": core_s}
        elif cluster.within_is_shared:
            needs = {f"memory {src}": busy_s}
        else:
            needs = {f"rank {place} out": busy_s, f"rank {to} in": busy_s}
        self._tasks.append(Task("send", needs, self._last_pass[place], cost.alpha_s, busy_s, MESSAGES))
        self._messages[op.key] = len(self._tasks) - 1
        self._communicate(cost.alpha_s + busy_s, cost.alpha_s)
        for level, most in levels.items():
            self._carry(level, to if level.endswith(("in", "down")) else place, most * nbytes)

    def _edge(self, place: int, to: int) -> tuple[Cost, dict[str, float]]:
        """Return the time of messages from a place to another, and their load on links, per byte."""
        if (place, to) not in self._edges:
            each = self._grid.messages(place, to)
            carried = link_bytes(self._job.cluster, [each])
            found = (
                round_seconds(self._job.cluster, each),
                {level: most for level, (most, _) in carried.items()},
            )
            self._edges[place, to] = found
        return self._edges[place, to]

    def _mean(self, place: int, nbytes: float) -> None:
        """Add the mean of the gradients of a rank."""
        job, group = self._job, self._grid.data_group
        how = fastest(group, nbytes, job.algorithm)
        cost = cost_of(group, how).at(nbytes)
        check_s = group.operation_s + (group.between.latency_s if group.hosts > 1 else 0.0)
        seconds = check_s + cost.seconds(nbytes)
        shared = {f"memory {self._grid.host_of(place)}": cost.beta_s_per_byte * nbytes}
        self._on_rank(place, f"all_reduce {how}", 0.0, seconds, shared if group.hosts == 1 else None)
        self._communicate(seconds, check_s + cost.alpha_s)
        self._all_reduce_traffic(place, group, nbytes)

    def _update(self, place: int) -> None:
        """Add the optimizer."""
        job, numel = self._job, self._model.numel_of(place)
        optimizer_s = job.profile.optimizer_s * numel / job.profile.numel
        self._optimizer_s = max(self._optimizer_s, optimizer_s)
        self._on_rank(place, "optimizer", optimizer_s, optimizer_s)

    def _communicate(self, seconds: float, alpha_s: float) -> None:
        """Note what a rank of the mean sends."""
        self._communication_s += seconds / self._grid.pp
        self._alpha_s += alpha_s / self._grid.pp

    def _all_reduce_traffic(self, place: int, group: Cluster, nbytes: float) -> None:
        """Note what all groups of a kind send at a place."""
        if not nbytes:
            return
        how = fastest(group, nbytes, self._job.algorithm)
        for level, most in busiest_bytes(group, how).items():
            self._carry(level, place, most * nbytes * self._grid.cluster.sharers(group, level))

    def _carry(self, level: str, place: int, nbytes: float) -> None:
        """Note bytes on a link of a rank at a place, or of its host."""
        key = place if level.startswith("rank") else self._grid.host_of(place)
        carried = self._carried.setdefault(level, {})
        carried[key] = carried.get(key, 0.0) + nbytes

    def planned(self) -> PlannedStep:
        """Return the step."""
        names = {name for task in self._tasks for name in task.demands}
        spans = simulate(self._tasks, dict.fromkeys(names, 1.0))
        step_s = max(span.end_s for span in spans)
        return PlannedStep(
            step_s=step_s,
            optimizer_s=self._optimizer_s,
            communication_s=self._communication_s,
            alpha_s=self._alpha_s,
            compression_s=0.0,
            sent_bytes=self._sent_bytes,
            traffic={level: max(hosts.values()) for level, hosts in self._carried.items()},
            tasks=self._tasks,
            spans=spans,
            waiting_s=step_s - sum(self._busy_s) / self._grid.pp,
        )
