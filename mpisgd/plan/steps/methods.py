"""What is planned for: the strategies of `DistributedOptimizer` with a compression, and torch's sharding."""

from dataclasses import dataclass
from typing import Any

from mpisgd.arguments import shown
from mpisgd.bench.strategies.method import Method, methods_of
from mpisgd.errors import InvalidArgument
from mpisgd.strategies.from_text import call_of

__all__ = ["DEFAULT_METHODS", "FullyShard", "Overlap", "planned_methods"]

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
class FullyShard:
    """torch's FSDP2, ZeRO's stage 3: parameters are divided, too, and gathered for each layer's turn.

    Attributes:
        reshard_after_forward: whether they are gathered again for the backward pass.
    """

    reshard_after_forward: bool = True


@dataclass(frozen=True)
class Overlap:
    """`Synchronous()` with `overlap=` given: whether gradients are sent while backward computes others."""

    overlap: bool = True


# What is no strategy of the optimizer's, or takes an option beside it.
OWN: dict[str, Any] = {"FullyShard": FullyShard, "Overlap": Overlap}


def planned_methods(text: str) -> list[Method]:
    """Return the methods of a list with semicolons, such as `Synchronous + bf16; FullyShard`.

    Raises:
        InvalidArgument: one of them is misspelt.
    """
    found = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        strategy, _, compression = (word.strip() for word in part.partition("+"))
        name = strategy.partition("(")[0].strip()
        if name not in OWN:
            found += methods_of(part)
            continue
        (synchronous,) = methods_of(f"Synchronous + {compression or 'none'}")
        found.append(Method(part, _own(name, strategy), synchronous.compression))
    return found


def _own(name: str, text: str) -> Any:
    """Return one of OWN, from a call with literals."""
    _, arguments, options = call_of("strategy", text)
    try:
        return OWN[name](*arguments, **options)
    except TypeError as exc:
        raise InvalidArgument(f"strategy {shown(text)}: {exc}") from exc
