"""Which steps stand for all, as found in the stream of a cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

import mpisgd
from mpisgd.methods import catalogue
from mpisgd.methods.cost_cycle import found_cycle
from mpisgd.methods.cost_kit import Cycle, Move, World
from mpisgd.methods.costs import cost_of, wire_of
from mpisgd.methods.sizes import parameter, sizes_of
from mpisgd.methods.wire_bytes import sent_bytes

NONE = mpisgd.Compression.none
WORLD = World(2, 2, wire_of(NONE))
SIZES = sizes_of([parameter(0, (64, 32), 4, 0), parameter(1, (64,), 4, 0)], 2**20)


def goes_with_none(strategy: mpisgd.Strategy) -> bool:
    return not strategy.goes_with.compression.why_not(NONE)


@dataclass(frozen=True)
class Numbers:
    """A strategy of which only these matter."""

    first: int = 0
    every: int = 1
    other: int = 1

    def cost(self, sizes: Any, world: Any, step: int) -> Any:
        since = step - self.first
        yield Move(1 + (since > 0 and since % self.every == 0) + 2 * (since > 0 and since % self.other == 0))


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (Numbers(), Cycle(0, 1)),
        (Numbers(0, 100), Cycle(0, 100)),
        (Numbers(0, 4, 6), Cycle(0, 12)),
        (Numbers(7), Cycle(7, 1)),
        (Numbers(50, 3), Cycle(50, 3)),
        (Numbers(0, 997), Cycle(0, 997)),
    ],
)
def test_a_cycle_is_the_shortest_after_the_fewest_steps(numbers, expected):
    found = found_cycle(numbers, numbers.cost, WORLD)
    assert found.length == expected.length
    assert found.first in (expected.first, expected.first - 1, max(0, expected.first - expected.length + 1))


def test_steps_that_do_not_repeat_are_refused():
    with pytest.raises(mpisgd.InvalidArgument, match="does not repeat"):
        found_cycle(Numbers(), lambda sizes, world, step: iter([Move(step)]), WORLD)


# Each strategy with one compressor that it goes with: none, where it goes with none.
PAIRS = {repr(strategy): (strategy, wire) for strategy, wire in catalogue.examples_that_go_together()}
PAIRS |= {repr(strategy): (strategy, NONE) for strategy, wire in PAIRS.values() if goes_with_none(strategy)}
PAIRS["growing to a limit"] = mpisgd.LocalSGD(1, growth=2.0, max_sync_every=4), NONE


@pytest.mark.parametrize(("strategy", "compressor"), PAIRS.values(), ids=PAIRS)
def test_what_is_found_costs_as_much_as_what_is_declared(strategy, compressor):
    cost, world = cost_of(strategy), WORLD._replace(wire=wire_of(compressor))
    if getattr(strategy, "growth", 1.0) > 1 and strategy.max_sync_every is None:  # no two periods are alike
        with pytest.raises(mpisgd.InvalidArgument, match="does not repeat"):
            found_cycle(strategy, cost.cost, world)
        return

    def sent(cycle: Cycle) -> float:
        steps = range(cycle.first + 1, cycle.first + cycle.length + 1)
        ops = [op for step in steps for op in cost.cost(SIZES, world, step)]
        return sum(sent_bytes(ops, world).values()) / cycle.length

    found = found_cycle(strategy, cost.cost, world)
    assert sent(found) == pytest.approx(sent(cost.cycle(world)))
