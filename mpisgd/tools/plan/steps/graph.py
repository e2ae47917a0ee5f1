"""`StepGraph`: the tasks of some steps of one rank, which stands for all.

    track "compute"         the program: forward, backward, optimizer; one task after the other
    track "communication"   the group's queue: one operation after the other, once it is submitted

All ranks do the same, so one of them is simulated, and an operation takes what its rounds take on the whole
cluster. Both tracks share the rank's core: what sending takes of it is missing to the program.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from mpisgd.tools.plan.cluster import Cluster
from mpisgd.tools.plan.simulation.collectives import AUTO, busiest_bytes, cost_of, fastest
from mpisgd.tools.plan.simulation.costs import Cost
from mpisgd.tools.plan.simulation.engine import Span, Task, simulate

__all__ = ["COMMUNICATION", "COMPUTE", "PlannedStep", "StepGraph"]


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


COMPUTE, COMMUNICATION = "compute", "communication"
CORE = "core"


@dataclass
class StepGraph:
    """Tasks that are added in the order of the program.

    Attributes:
        cluster: of the job.
        algorithm: of all-reduces, or `auto`.
        tasks: so far.
        traffic: bytes that the busiest link of each level carries.
        alpha_s: of all that operations take, what more bytes per second would not shorten.
        compression_s: what compressing and decompressing computes.
    """

    cluster: Cluster
    algorithm: str = AUTO
    tasks: list[Task] = field(default_factory=list)
    traffic: dict[str, float] = field(default_factory=dict)
    alpha_s: float = 0.0
    compression_s: float = 0.0
    _last: dict[str, int] = field(default_factory=dict)

    @property
    def program_so_far(self) -> list[int]:
        """The place of the last task of the program, if there is one."""
        return [self._last[COMPUTE]] if COMPUTE in self._last else []

    def compute(self, name: str, seconds: float, after: Iterable[int] = ()) -> int:
        """Add what the program computes; return its place."""
        return self._add(Task(name, {CORE: seconds}, tuple(after), track=COMPUTE))

    def move(
        self, name: str, nbytes: float, after: Iterable[int] = (), tensors: int = 0, fresh: float = 0.0
    ) -> int:
        """Add what only reads and writes memory, of which so many bytes are allocated for it, and what so
        many tensors take besides.
        """
        cluster = self.cluster
        seconds = nbytes / cluster.memory_bytes_per_s + fresh * cluster.fresh_s_per_byte
        return self.compute(name, seconds + tensors * cluster.tensor_s, after)

    def begin_operation(self, after: Iterable[int] = (), cluster: Cluster | None = None) -> int:
        """Add the check with which an operation of a group begins; what follows belongs to it."""
        members = cluster or self.cluster
        if members.size == 1:
            return self.communicate("nothing", Cost(0.0, 0.0), 0.0, after)
        latency = members.between.latency_s if members.hosts > 1 else 0.0
        return self.communicate("check", Cost(members.operation_s + latency, 0.0), 0.0, after)

    def communicate(self, name: str, cost: Cost, nbytes: float, after: Iterable[int] = ()) -> int:
        """Add something in the group's queue that takes this cost for `nbytes`."""
        self.alpha_s += cost.alpha_s
        seconds = cost.alpha_s + cost.beta_s_per_byte * nbytes
        leaves = self._leaves_host(nbytes) if cost.beta_s_per_byte else 0.0
        core = min(seconds, leaves * self.cluster.between.cpu_s_per_byte)
        return self._add(Task(name, {CORE: core}, tuple(after), seconds=seconds, track=COMMUNICATION))

    def carry(self, level: str, nbytes: float) -> None:
        """Note what the busiest link of a level carries."""
        self.traffic[level] = self.traffic.get(level, 0.0) + nbytes

    def _leaves_host(self, nbytes: float) -> float:
        return 2 * (self.cluster.hosts - 1) / self.cluster.hosts * nbytes

    def collective(
        self,
        name: str,
        nbytes: float,
        after: Iterable[int] = (),
        cluster: Cluster | None = None,
        sharers: Callable[[str], int] = lambda level: 1,
    ) -> int:
        """Add an all-reduce, or another collective by its name; so many groups use a link of a level."""
        members = cluster or self.cluster
        if members.size == 1 or not nbytes:
            return self.communicate(name, Cost(0.0, 0.0), 0.0, after)
        how = fastest(members, nbytes, self.algorithm, name)
        for level, carried in busiest_bytes(members, how, name).items():
            self.carry(level, carried * nbytes * sharers(level))
        return self.communicate(f"{name} {how}", cost_of(members, how, name).at(nbytes), nbytes, after)

    def compress(self, seconds: float, num_collectives: int, after: Iterable[int] = ()) -> int:
        """Add what a compressor computes, in the queue, a part of it before each of so many collectives."""
        if not seconds:
            return self.communicate("compress", Cost(0.0, 0.0), 0.0, after)
        self._add(Task("compress", {CORE: seconds}, tuple(after), track=COMMUNICATION))
        self.compression_s += seconds
        return self._meet(num_collectives)

    def _meet(self, times: int) -> int:
        """Add what ranks wait for each other that have computed before, in the queue."""
        seconds, busy = times * self.cluster.meeting_s, times * self.cluster.busy_meeting_s
        self.alpha_s += seconds
        return self._add(Task("meeting", seconds=seconds, while_used={CORE: busy}, track=COMMUNICATION))

    def wait(self, place: int | None = None) -> int:
        """Let the program go on when what is at a place is over; None: when everything has been sent."""
        last = self._last.get(COMMUNICATION) if place is None else place
        return self.compute("wait", 0.0, [] if last is None else [last])

    def _add(self, task: Task) -> int:
        """Add a task behind the last one of its track."""
        before = {*task.after, *([self._last[task.track]] if task.track in self._last else [])}
        self.tasks.append(replace(task, after=tuple(before)))
        self._last[task.track] = len(self.tasks) - 1
        return self._last[task.track]

    def run(self) -> list[Span]:
        """Return when each task runs."""
        return simulate(self.tasks, {CORE: 1.0})
