"""What is planned for: strategies of `DistributedOptimizer` with compressions, torch's sharding, layouts."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mpisgd.arguments import check_flag, shown
from mpisgd.errors import InvalidArgument
from mpisgd.layouts.layout import layout
from mpisgd.methods.cost_kit import Cycle, Op, Sizes, World
from mpisgd.methods.from_text import call_of
from mpisgd.methods.sharded.cost import FullyShard
from mpisgd.methods.synchronous import cost as synchronous
from mpisgd.tools.bench.strategies.method import Method, methods_of
from mpisgd.tools.plan.cluster import Cluster
from mpisgd.tools.plan.models.model import StepProfile
from mpisgd.tools.plan.steps.parallel import Parallel, lies_evenly

__all__ = ["DEFAULT_METHODS", "FullyShard", "Overlap", "layouts_of", "method_of", "planned_methods"]

DEFAULT_METHODS = (
    "Synchronous",
    "Synchronous + bf16",
    "Synchronous + PowerSGD(rank=4)",
    "Synchronous + TopK(ratio=0.01)",
    "Synchronous + OneBit(two_step=True)",
    "LocalSGD(8)",
    "DiLoCo(100)",
    "Gossip('one_peer_exponential')",
    "ElasticAveraging(every=8)",
    "ParameterServer('sync')",
    "Sharded(stage=1)",
    "Sharded(stage=2)",
    "FullyShard",
)


@dataclass(frozen=True)
class Overlap:
    """`Synchronous()` with `overlap=` given: whether gradients are sent while backward computes others."""

    overlap: bool = True

    def __post_init__(self) -> None:
        check_flag("Overlap", "overlap", self.overlap)

    def cost(self, sizes: Sizes, world: World, step: int) -> Iterator[Op]:
        """Yield what a step takes."""
        yield from synchronous.cost(self, sizes, world._replace(overlaps=self.overlap), step)

    def cycle(self, world: World) -> Cycle:
        """Return the steps that stand for all."""
        return synchronous.cycle(self, world)


# What is no strategy of the optimizer's, or takes an option beside it.
OWN: dict[str, Any] = {"FullyShard": FullyShard, "Overlap": Overlap, "Parallel": Parallel, "layout": layout}
BETWEEN_METHODS = re.compile(r";(?![^(]*\))")  # not those between the rules of a layout


def planned_methods(text: str) -> list[Method]:
    """Return the methods of a list with semicolons, such as `Synchronous + bf16; FullyShard`.

    Raises:
        InvalidArgument: one of them is misspelt.
    """
    found = []
    for part in filter(None, (part.strip() for part in BETWEEN_METHODS.split(text))):
        strategy, plus, compression = (word.strip() for word in part.partition("+"))
        name = strategy.partition("(")[0].strip()
        if name not in OWN:
            found += methods_of(part)
            continue
        (synchronous,) = methods_of(f"Synchronous {plus} {compression}")
        found.append(Method(part, _own(name, strategy), synchronous.compression))
    if not found:
        raise InvalidArgument(
            f"plan: methods={shown(text)}; expected such as Synchronous + bf16; LocalSGD(8)"
        )
    return found


def _own(name: str, text: str) -> Any:
    """Return one of OWN, from a call with literals."""
    _, arguments, options = call_of("strategy", text)
    try:
        return OWN[name](*arguments, **options)
    except TypeError as exc:
        raise InvalidArgument(f"strategy {shown(text)}: {exc}") from exc


MOST_STAGES = 16


def layouts_of(cluster: Cluster, profile: StepProfile) -> list[Parallel]:
    """Return tensor and pipeline parallelism, and both, beside data parallelism, as far as they go together.

    Tensor parallelism on a host alone, as it sends in every block; powers of two of each; schedules 1F1B and,
    of what mpisgd.pipeline trains, GPipe.
    """
    blocks = profile.blocks
    divides = any(block.all_reduces for block in blocks)
    tensor = _powers(cluster.ranks_per_host if divides else 1)
    stages = [pp for pp in _powers(min(MOST_STAGES, len(blocks))) if pp <= cluster.size]
    return [
        Parallel(tp, pp, schedule)
        for tp in tensor
        for pp in stages
        for schedule in ("1f1b", "gpipe")[: 1 if pp == 1 or tp > 1 else 2]
        if tp * pp > 1 and lies_evenly(cluster, tp, pp)
    ]


def method_of(layout: Parallel) -> Method:
    """Return a layout as a method."""
    (method,) = planned_methods(layout.text)
    return method


def _powers(most: int) -> list[int]:
    return [1 << bit for bit in range(max(0, most).bit_length())]
