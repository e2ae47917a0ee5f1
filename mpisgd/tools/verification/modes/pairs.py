"""Strategies and compressors in pairs, as their declarations allow them: equal to their papers."""

from collections.abc import Iterator
from functools import partial

import torch

import mpisgd
from mpisgd.errors import InvalidArgument
from mpisgd.methods import catalogue
from mpisgd.tools.verification.mode import Mode, between_orders
from mpisgd.tools.verification.modes.compressions import plain
from mpisgd.tools.verification.modes.strategies import by_paper
from mpisgd.tools.verification.modes.synchronous import native
from mpisgd.tools.verification.papers import paper_of

__all__ = ["pairs"]

SIZE = 3  # of which a definition is asked for, to see that there is one
# Names and bytes, as many as a strategy may cut them into.
LENGTHS = (("a", 8), ("b", 8), ("c", 8), ("d", 8))


def has_paper(strategy: mpisgd.Strategy, compressor: mpisgd.Compressor) -> bool:
    """Return whether there is a definition of both together."""
    try:
        paper_of(strategy, compressor, size=SIZE, lengths=LENGTHS)
    except InvalidArgument:
        return False
    return True


def _same(strategy: mpisgd.Strategy, _: int) -> mpisgd.Strategy:
    """Return the strategy, whatever number of ranks there is."""
    return strategy


def pairs() -> Iterator[Mode]:
    """Yield a mode for each example of one with what is plain of the other, and for each two kinds."""
    tried: set[tuple[type, type]] = set()
    for strategy, compressor in catalogue.examples_that_go_together():
        if not strategy.goes_with.repeats.goes or not has_paper(strategy, compressor):
            continue
        kinds = type(strategy), type(compressor)
        is_plain = strategy == mpisgd.Synchronous() or compressor == mpisgd.Compression.none
        if kinds in tried and not is_plain:
            continue
        tried.add(kinds)
        train = native(plain, strategy=strategy, compression=compressor)
        definition = by_paper(partial(_same, strategy), compressor, plain)
        name = f"{catalogue.text_of(strategy)}, {catalogue.text_of(compressor)}".replace("mpisgd.", "")
        yield Mode(
            name, "pairs", train, between_orders(definition), (2, 2**31), (torch.float64,), quick=False
        )
