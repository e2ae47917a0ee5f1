"""`bench checks`: what it costs that every operation is checked.

Two answers. A training step with and without: in the experiment the ranks still meet at the beginning of each
operation, but describe, hash and compare nothing. And, since that difference drowns in the noise of steps,
the time on a core that one check takes by itself, times the number of operations that a step has.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import mpisgd
from mpisgd.core import submission as submission_module
from mpisgd.core.consistency import ConsistencyCheck, ConsistencyChecker, Operation, fold
from mpisgd.core.group import Group
from mpisgd.job.lifecycle import world
from mpisgd.tools.bench.measure import Timed, measure, slowest
from mpisgd.tools.bench.peers.remote import Peers
from mpisgd.tools.bench.report.rows import spread, timed_rows
from mpisgd.tools.bench.step import StepPlan
from mpisgd.tools.bench.training import StepTask, Training

__all__ = ["run_checks"]

NUM_CHECKS, NUM_CHECKS_IN_SMALL = 2000, 50  # in a row, for the cost of one
CHECKED, BARE = "mpisgd", "ranks meet, nothing is checked"


class _BareChecker(ConsistencyChecker):
    """One that lets the ranks meet, and that is all."""

    def begin(self, check: ConsistencyCheck, before: Callable[[], None] | None = None) -> None:
        """Start to meet: what the ranks compare is the same whatever they do."""
        self.number += 1
        if before is not None:
            before()
        check.checker = self
        self.digest_exchange.start(self.number)


class _Switch:
    """Switches the checks of a group off and on again."""

    def __init__(self, group: Group) -> None:
        self._queue = group.queue
        full = group.queue.consistency
        bare = _BareChecker(full.communicator, full.digest_exchange, name=full.name, timeout_s=full.timeout_s)
        self._ways: dict[bool, tuple[ConsistencyChecker, Callable[[], Callable[[], str]]]] = {
            True: (full, submission_module.call_site),
            False: (bare, lambda: str),  # str(): no site
        }

    def turn(self, on: bool) -> None:
        """Switch them on or off. Collective."""
        number = self._queue.consistency.number
        self._queue.consistency, submission_module.call_site = self._ways[on]
        self._queue.consistency.number = number
        mpisgd.barrier()


def run_checks(plan: StepPlan, peers: Peers, report: Callable[[str, Any], None]) -> dict[str, Any]:
    """Measure the models of `plan`; return rows and the cost of one check. Collective.

    No peer has a part in this.
    """
    switch = _Switch(world())
    count = NUM_CHECKS_IN_SMALL if plan.small else NUM_CHECKS
    one = vars(spread([slowest(_checks_in_a_row(count)) for _ in range(plan.pace.rounds)]))
    rows: list[dict[str, Any]] = []
    for model in plan.models:
        new = _rows(plan.task(model), plan, switch, one["median_s"])
        report(model, new)
        rows += new
    notes = [
        f"one check: {one['median_s'] * 1e6:.1f} us (rounds from {one['min_s'] * 1e6:.1f} to "
        f"{one['max_s'] * 1e6:.1f}), the slowest rank's; x operations is their part in the step"
    ]
    return {"rows": rows, "one_check": one, "notes": notes}


def _rows(task: StepTask, plan: StepPlan, switch: _Switch, check_s: float) -> list[dict[str, Any]]:
    variants, operations = [], 0
    for name, on in ((CHECKED, True), (BARE, False)):
        training = Training(task, mpisgd.rank())
        training.distribute(mpisgd.DistributedOptimizer)
        operations = _operations(training)
        start = functools.partial(switch.turn, on)
        variants.append(Timed(name, training.step, training, start=start, ours=True))
    found = measure(variants, plan.pace)
    switch.turn(True)
    pairs = zip(found.seconds[CHECKED], found.seconds[BARE], strict=True)
    paired = spread([with_s / without_s for with_s, without_s in pairs])
    rows = timed_rows({"model": task.model}, found.seconds, {})
    for row in rows:
        checked = row["variant"] == CHECKED
        row["operations"] = operations
        row["ratio_to_bare"] = paired.median_s if checked else None
        row["part_of_step"] = operations * check_s / row["median_s"] if checked else None
    return rows


def _operations(training: Training) -> int:
    """Return how many operations a step has, once there is a plan."""
    training.step()
    before = world().queue.consistency.number
    training.step()
    return world().queue.consistency.number - before


def _checks_in_a_row(count: int) -> float:
    """Return the seconds on a core of what a check adds to a meeting of the ranks, described as in a step."""
    spread_of_world, history, differences = world().queue.consistency.digest_exchange, 0, 0
    started_s = time.thread_time()
    for number in range(count):
        bucket, step = f"bucket {number % 8} of plan 0123456789abcdef", f"step {number // 8}, reduction 0"
        operation = Operation("gradients", "AVG", "float32", (6553600,), extra=bucket, when=step)
        submission_module.call_site()
        history = fold(history, operation)
        low, high = spread_of_world.extremes()
        differences += low != high
    return (time.thread_time() - started_s) / count
