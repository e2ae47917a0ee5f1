"""What to change: the best prediction again with one thing better than it is."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from mpisgd.bench.strategies.method import Method
from mpisgd.compress.cast import Compression
from mpisgd.plan.cluster import Cluster
from mpisgd.plan.model import StepProfile
from mpisgd.plan.prediction import Options, Prediction, predict, with_faster

__all__ = ["Change", "changes", "code_line", "command_line", "equals_one_process"]

TWICE = 2.0


@dataclass(frozen=True)
class Change:
    """What a step would take if something was better.

    Attributes:
        what: for people.
        step_s: then.
        saved: share of the step that it saves.
    """

    what: str
    step_s: float
    saved: float


def changes(
    cluster: Cluster, profile: StepProfile, method: Method, options: Options | None = None
) -> list[Change]:
    """Return what each part of the cluster, twice as fast, would save; most first."""
    now = predict(cluster, profile, method, options).step_s
    tried: dict[str, Callable[[], Prediction]] = {
        "ranks that compute twice as fast": lambda: predict(
            cluster, profile.slower(1 / TWICE), method, options
        ),
        "an optimizer twice as fast": lambda: predict(
            cluster, replace(profile, optimizer_s=profile.optimizer_s / TWICE), method, options
        ),
        "half the latency": lambda: predict(with_faster(cluster, "latency", TWICE), profile, method, options),
        "ranks of a host joined twice as fast": lambda: predict(
            with_faster(cluster, "within", TWICE), profile, method, options
        ),
    }
    if cluster.hosts > 1:
        tried["links between hosts twice as fast"] = lambda: predict(
            with_faster(cluster, "between", TWICE), profile, method, options
        )
    if cluster.compute_spread:
        tried["ranks of equal speed"] = lambda: predict(
            replace(cluster, compute_spread=0.0), profile, method, options
        )
    found = [Change(what, then, 1 - then / now) for what, run in tried.items() for then in [run().step_s]]
    return sorted(found, key=lambda change: -change.saved)


EXACT = ("Synchronous", "Overlap", "Sharded", "FullyShard")


def equals_one_process(method: Method) -> bool:
    """Return whether ranks compute what one process computes on the joined batch."""
    strategy = method.strategy
    sums = type(strategy).__name__ in EXACT or getattr(strategy, "mode", "") == "sync"
    return sums and method.compression == Compression.none


def command_line(prediction: Prediction, program: str = "train.py") -> str:
    """Return what starts a program on the ranks of a prediction."""
    hosts = " --hostfile hosts" if prediction.cluster.hosts > 1 else ""
    return f"python -m mpisgd run -n {prediction.cluster.size}{hosts} {program}"


def code_line(method: Method) -> str:
    """Return the call in the program that trains by a method."""
    strategy, _, compression = (word.strip() for word in method.name.partition("+"))
    name = strategy.partition("(")[0]
    if name == "FullyShard":
        return "torch.distributed.fsdp.fully_shard(model)  # after init_process_group('mpisgd')"
    arguments = []
    if name == "Overlap":
        arguments.append(f"overlap={method.strategy.overlap}")  # type: ignore[attr-defined]
    elif method.name != "Synchronous":
        arguments.append(f"strategy=mpisgd.{strategy}{'' if '(' in strategy else '()'}")
    if compression:
        cast = compression in ("fp16", "bf16", "none")
        arguments.append(f"compression=mpisgd.{'Compression' if cast else 'compress'}.{compression}")
    return f"mpisgd.DistributedOptimizer({', '.join(['optimizer', *arguments])})"
