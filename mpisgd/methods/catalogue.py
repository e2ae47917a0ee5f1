"""All methods with a public name: a line of a stub `__init__.pyi` is all that each needs.

The fuzzer, `verify`, and the tables of the documentation go through the examples of these.
"""

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import mpisgd
from mpisgd import compress
from mpisgd.arguments import call_text
from mpisgd.compress.compressor import Compressor
from mpisgd.lazy_names import modules_of_names
from mpisgd.methods.cast.cast import Cast
from mpisgd.methods.compressed_momentum.compressed_momentum import CompressedMomentumOptimizer
from mpisgd.methods.strategy.strategy import Strategy

__all__ = ["compressors", "examples_that_go_together", "optimizers", "strategies", "text_of"]


def strategies() -> list[type[Strategy]]:
    """Return the strategies, in the order of their names."""
    return [each for each in _public() if _is_one(each, Strategy)]


def optimizers() -> list[type[CompressedMomentumOptimizer]]:
    """Return the optimizers that average by themselves, in the order of their names."""
    return [each for each in _public() if _is_one(each, CompressedMomentumOptimizer)]


def _public() -> list[Any]:
    """Return the public names of mpisgd's methods; others would load torch's parallelism."""
    modules = modules_of_names(str(mpisgd.__file__))
    return [getattr(mpisgd, name) for name in mpisgd.__all__ if modules[name].startswith("mpisgd.methods.")]


def compressors() -> list[type[Compressor]]:
    """Return the compressors, in the order of their names: the casts first."""
    found = (getattr(compress, name) for name in compress.__all__)
    return [Cast, *(each for each in found if _is_one(each, Compressor))]


def _is_one(value: Any, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base) and value is not base


def examples_that_go_together() -> Iterator[tuple[Strategy, Compressor]]:
    """Yield the pairs of examples that the strategies' declarations allow."""
    for strategy in (example for kind in strategies() for example in kind.examples()):
        for compressor in (example for kind in compressors() for example in kind.examples()):
            if not strategy.goes_with.compression.why_not(compressor):
                yield strategy, compressor


def text_of(value: Any) -> str:
    """Return a method as a program writes it: `mpisgd.LocalSGD(sync_every=2)`."""
    if isinstance(value, Cast):
        return f"mpisgd.{value!r}"
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    name = type(value).__name__
    homes = {"mpisgd": mpisgd, "mpisgd.compress": compress, "mpisgd.gossip": mpisgd.gossip}
    home = next(home for home, module in homes.items() if name in module.__all__)
    return f"{home}.{call_text(value, text_of)}"
