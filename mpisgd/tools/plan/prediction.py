"""`predict`: what a method of training takes on a cluster: time, its parts, memory, bytes and price."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mpisgd.errors import InvalidArgument, MpisgdError
from mpisgd.layouts.layout import MeshLayout
from mpisgd.methods.cast.cast import Compression
from mpisgd.methods.costs import MethodCost, cost_of
from mpisgd.methods.peak_memory import Memory, peak_memory
from mpisgd.methods.strategy.strategy import Strategy
from mpisgd.methods.synchronous.synchronous import Synchronous
from mpisgd.tools.bench.strategies.method import Method
from mpisgd.tools.plan.cluster import Cluster
from mpisgd.tools.plan.failures import Interruptions, interruptions, straggler_factor
from mpisgd.tools.plan.methods import layouts_of, method_of
from mpisgd.tools.plan.models.model import StepProfile
from mpisgd.tools.plan.network import FatTree
from mpisgd.tools.plan.simulation.collectives import AUTO
from mpisgd.tools.plan.steps.graph import PlannedStep
from mpisgd.tools.plan.steps.job import PlannedJob
from mpisgd.tools.plan.steps.mesh_layout import mesh_cost
from mpisgd.tools.plan.steps.parallel import Parallel
from mpisgd.tools.plan.steps.stages import divide
from mpisgd.tools.plan.steps.step_time import plan_step, steps_between_meetings
from mpisgd.tools.plan.steps.tensor_step import plan_layout

__all__ = ["LeftOut", "Options", "Prediction", "level_seconds", "predict", "predict_all"]


@dataclass(frozen=True)
class Options:
    """Options of a prediction.

    Attributes:
        algorithm: the algorithm of all-reduces, or `auto`: the fastest of mpisgd's.
        compression_s: seconds per element, by compressor.
        overlap: as for `DistributedOptimizer`.
    """

    algorithm: str = AUTO
    compression_s: Mapping[str, float] | None = None
    overlap: bool | None = None


@dataclass(frozen=True)
class LeftOut:
    """A method that cannot be planned on this number of ranks, and the reason."""

    method: str
    ranks: int
    reason: str


@dataclass(frozen=True)
class Prediction:
    """The prediction for a method on some ranks.

    Attributes:
        method: the method, as it was written.
        cluster: the cluster, with its ranks.
        profile: a rank's step without communication, including stragglers.
        step: the planned step.
        memory: memory of a rank.
        straggler_s: seconds of a step spent waiting for the slowest rank.
        interruptions: the cost of failures; None if the cluster has no `[failures]`.
    """

    method: str
    cluster: Cluster
    profile: StepProfile
    step: PlannedStep
    memory: Memory
    straggler_s: float
    interruptions: Interruptions | None

    @property
    def step_s(self) -> float:
        """Seconds from one step to the next."""
        return self.step.step_s

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward of a rank of average speed."""
        return self.profile.compute_s - self.straggler_s

    @property
    def exposed_s(self) -> float:
        """Seconds that communication adds to a step: what is not hidden, and the strategy's computation."""
        return max(0.0, self.step_s - self.profile.compute_s - self.step.optimizer_s)

    @property
    def examples_per_s(self) -> float:
        """Examples per second of all ranks together, without interruptions."""
        return self.profile.batch * self.cluster.size / self.step_s

    @property
    def price_per_hour(self) -> float:
        """Price of all hosts."""
        return self.cluster.price_per_hour * self.cluster.hosts

    @property
    def price_per_million(self) -> float:
        """Price of a million examples; 0 if no price is given."""
        return self.price_per_hour / 3600 * 1e6 / self.examples_per_s

    @property
    def fits(self) -> bool:
        """Whether a rank has enough memory."""
        return self.cluster.memory_bytes is None or self.memory.total <= self.cluster.memory_bytes

    @property
    def bound(self) -> str:
        """The largest part of the step: compute, optimizer, latency, compression, or the busiest kind of
        link.
        """
        if not self.fits:
            return "memory of a rank"
        parts = {
            "compute": self.compute_s,
            "stragglers": self.straggler_s,
            "optimizer": self.step.optimizer_s,
        }
        largest = max(parts, key=parts.__getitem__)
        if self.exposed_s < parts[largest]:
            return largest
        levels = level_seconds(self.cluster, self.step.traffic)
        found = {
            LEVELS.get(level, BETWEEN): seconds for level, seconds in sorted(levels.items(), key=_seconds)
        }
        found |= {"latency": self.step.alpha_s, "compression": self.step.compression_s}
        found |= {"pipeline's bubble": self.step.waiting_s}
        return max(found, key=found.__getitem__)


BETWEEN = "links between hosts"
LEVELS = {
    "memory": "memory of a host",
    "rank out": "links within hosts",
    "rank in": "links within hosts",
    "leaf up": "switch uplinks",
    "leaf down": "switch uplinks",
}


def _seconds(level: tuple[str, float]) -> float:
    return level[1]


def level_seconds(cluster: Cluster, traffic: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds for which the busiest link of each level is used."""
    network, rates = cluster.network, {"memory": cluster.within.bytes_per_s}
    rates |= {"rank out": cluster.within.bytes_per_s, "rank in": cluster.within.bytes_per_s}
    if isinstance(network, FatTree):
        uplink = network.uplink * cluster.between.bytes_per_s
        rates |= {"leaf up": uplink, "leaf down": uplink}
    return {
        level: nbytes / rates.get(level, cluster.between.bytes_per_s) for level, nbytes in traffic.items()
    }


def predict(
    cluster: Cluster, profile: StepProfile, method: Method, options: Options | None = None
) -> Prediction:
    """Return the prediction for a method on all ranks of a cluster.

    Raises:
        InvalidArgument: this method cannot be planned, or not for this number of ranks.
    """
    options = options or Options()
    measured = options.compression_s or {}
    job = PlannedJob(
        cluster, profile, method.compression, options.algorithm, options.overlap, compression_s=measured
    )
    layout = method.strategy if isinstance(method.strategy, Parallel) and cluster.size > 1 else None
    cost = _cost_of(method, cluster, profile)
    every = steps_between_meetings(job, cost) if layout is None else 1.0
    factor = straggler_factor(cluster.compute_spread, *((1, 1.0) if every is None else (cluster.size, every)))
    job = replace(job, profile=profile.slower(factor))
    failures = cluster.failures
    return Prediction(
        method=method.name,
        cluster=cluster,
        profile=job.profile,
        step=plan_step(job, cost) if layout is None else plan_layout(job, layout),
        memory=peak_memory(cost, job.sizes, job.world) if layout is None else divide(job, layout).memory(),
        straggler_s=job.profile.compute_s - profile.compute_s,
        interruptions=None if failures is None else interruptions(failures, cluster.hosts),
    )


def _cost_of(method: Method, cluster: Cluster, profile: StepProfile) -> MethodCost:
    """Return the cost of a method; that of `Parallel` is its own."""
    if isinstance(method.strategy, MeshLayout):
        if method.compression != Compression.none:
            raise InvalidArgument(
                f"plan: {method.strategy.text} with {method.compression}; expected no compression"
            )
        return mesh_cost(cluster, profile, method.strategy)
    strategy = Synchronous() if isinstance(method.strategy, Parallel) else method.strategy
    if isinstance(strategy, Strategy) and (why := strategy.goes_with.compression.why_not(method.compression)):
        raise InvalidArgument(f"plan: {strategy} with {method.compression}: {why}")
    own = method.optimizer
    return cost_of(strategy) if own is None else cost_of(strategy, own.kind, own.options)


def predict_all(
    clusters: Sequence[Cluster],
    profile: StepProfile,
    methods: Sequence[Method],
    options: Options | None = None,
    *,
    layouts: bool = False,
) -> tuple[list[Prediction], list[LeftOut]]:
    """Return predictions of all methods on all clusters, the fastest first, and the methods left out.

    Methods that fit into memory come first. `layouts=True` adds tensor and pipeline parallelism, as far as
    the model's blocks and the ranks allow; see `layouts_of`.
    """
    found: list[Prediction] = []
    left_out: list[LeftOut] = []
    for cluster in clusters:
        # A single rank trains alone, whatever the method.
        for method in methods if cluster.size > 1 else methods[:1]:
            try:
                found.append(predict(cluster, profile, method, options))
            except MpisgdError as exc:
                left_out.append(LeftOut(method.name, cluster.size, f"{exc}"))
        for layout in layouts_of(cluster, profile) if layouts and cluster.size > 1 else []:
            found.append(_with_layout(cluster, profile, layout, options))
    if not found and left_out:
        raise InvalidArgument(left_out[0].reason)
    return sorted(found, key=lambda each: (not each.fits, -each.examples_per_s)), left_out


def _with_layout(
    cluster: Cluster, profile: StepProfile, layout: Parallel, options: Options | None
) -> Prediction:
    """Return the prediction of a layout; where it does not fit, with activations that are computed again."""
    found = predict(cluster, profile, method_of(layout), options)
    return (
        found
        if found.fits
        else predict(cluster, profile, method_of(replace(layout, recompute=True)), options)
    )


def with_faster(cluster: Cluster, what: str, factor: float) -> Cluster:
    """Return the cluster with `between` or `within` so many times as fast, or with less `latency`."""
    if what == "latency":
        links = {name: getattr(cluster, name) for name in ("between", "within")}
        faster = {
            name: replace(link, latency_s=link.latency_s / factor, message_s=link.message_s / factor)
            for name, link in links.items()
        }
        return replace(cluster, operation_s=cluster.operation_s / factor, **faster)
    link = getattr(cluster, what)
    return replace(cluster, **{what: replace(link, bytes_per_s=link.bytes_per_s * factor)})
