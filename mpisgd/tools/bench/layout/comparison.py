"""The rounds of all layouts, their rows, and which layout is the fastest."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpisgd.tools.bench.jobs import has_several_cores
from mpisgd.tools.bench.layout.plan import LayoutPlan, ProcessLayout, typed
from mpisgd.tools.bench.layout.program import TooFewSteps, run_program
from mpisgd.tools.bench.measure import turns
from mpisgd.tools.bench.report.rows import as_time, timed_rows

__all__ = ["Comparison", "layout_rows", "start_command", "verdict"]

# Twice everything is measured; then no more what takes so many times as long as the fastest.
SURE_ROUNDS, TOO_SLOW = 2, 1.5

Row = dict[str, Any]


class Comparison:
    """Runs the program in all layouts, in turns; those that are far behind after two rounds have no third.

    Args:
        plan: what to measure.
        report: called with a line about each start.
    """

    def __init__(self, plan: LayoutPlan, report: Callable[[str], None]) -> None:
        self._plan, self._report = plan, report
        self._step_s: dict[ProcessLayout, list[float]] = {}  # a number for each round
        self._left_out: dict[ProcessLayout, str] = {}
        self._notes = [plan.work()]

    def run(self) -> dict[str, Any]:
        """Return rows, what was left out, and notes.

        Raises:
            TooFewSteps: the program cannot be measured in the first layout.
            JobError: it cannot be started.
        """
        going: Sequence[ProcessLayout] = self._plan.layouts
        for number in range(self._plan.rounds):
            for layout in turns(going, number):
                self._measure(layout, f"round {number + 1} of {self._plan.rounds}")
            if number + 1 >= SURE_ROUNDS:
                going = self._near_the_fastest()
            going = [layout for layout in going if layout in self._step_s]
        rows = layout_rows(self._plan, self._step_s)
        command = start_command(self._plan, ProcessLayout(rows[0]["ranks"], rows[0]["threads"]))
        what = {"model": name_of(self._plan)}
        return {
            "rows": rows,
            "left_out": [{**what, "variant": str(one), "reason": why} for one, why in self._left_out.items()],
            "notes": [*dict.fromkeys(self._notes), verdict(rows), f"start it with: {command}"],
        }

    def _measure(self, layout: ProcessLayout, when: str) -> None:
        try:
            steps = run_program(self._plan, layout)
        except TooFewSteps as exc:
            if not self._step_s.keys() - {layout}:
                raise
            self._report(f"{when}, {exc}")
            self._left_out[layout] = exc.reason
            self._step_s.pop(layout, None)
            return
        seconds = steps.seconds_per_step(self._plan.warmup)
        self._step_s.setdefault(layout, []).append(seconds)
        self._report(f"{when}, {layout}: {as_time(seconds)} a step")
        if steps.threads != layout.threads:
            self._notes.append(f"{layout}: the program itself sets torch's threads, to {steps.threads}")

    def _near_the_fastest(self) -> list[ProcessLayout]:
        shortest = {layout: min(found) for layout, found in _batch_s(self._plan, self._step_s).items()}
        limit_s = TOO_SLOW * min(shortest.values())
        return [layout for layout, seconds in shortest.items() if seconds <= limit_s]


def _batch_s(
    plan: LayoutPlan, step_s: Mapping[ProcessLayout, Sequence[float]]
) -> dict[ProcessLayout, list[float]]:
    """Return the seconds for a batch, of those for a step."""
    return {
        layout: [seconds / plan.batches_per_step(layout) for seconds in found]
        for layout, found in step_s.items()
    }


def layout_rows(plan: LayoutPlan, step_s: Mapping[ProcessLayout, Sequence[float]]) -> list[Row]:
    """Return a row for each layout, the fastest first.

    Args:
        plan: of the measurement.
        step_s: seconds of a step, one number for each round.
    """
    batch_s = _batch_s(plan, step_s)
    fastest_s = min(statistics.median(found) for found in batch_s.values())
    seconds = {str(layout): found for layout, found in batch_s.items()}
    rows = timed_rows({"program": name_of(plan)}, seconds, {"fastest": fastest_s})
    for row, layout in zip(rows, batch_s, strict=True):
        row.update(layout._asdict())
        row["step_s"] = row["median_s"] * plan.batches_per_step(layout)
        row["batches_per_s"] = 1 / row["median_s"]
        row["communicates"] = layout.ranks > 1
    return sorted(rows, key=lambda row: row["median_s"])


def name_of(plan: LayoutPlan) -> str:
    """Return a short name of the program: its file, where there is one."""
    return next((Path(word).name for word in plan.program if word.endswith(".py")), plan.program[0])


def verdict(rows: Sequence[Row]) -> str:
    """Return which layout is the fastest, and by how much: of one process, or of several ranks."""
    best = rows[0]
    others = [row for row in rows if row["communicates"] != best["communicates"]]
    if not others:
        return f"fastest: {best['variant']}"
    other = others[0]
    what = "one process" if best["communicates"] else "several ranks"
    factor = f"{other['ratio_to_fastest']:.2f} times as long"
    text = f"fastest: {best['variant']}; the best of {what}, {other['variant']}, takes {factor}"
    if best["rounds"] == 1:
        return f"{text}, in a single round"
    return text if best["max_s"] < other["min_s"] else f"{text}, but their rounds overlap"


def start_command(plan: LayoutPlan, layout: ProcessLayout) -> str:
    """Return the command by which a user starts the program as it was measured."""
    unbound = plan.is_open_mpi and has_several_cores(layout.ranks)
    launcher = [Path(plan.launcher[0]).name, *plan.launcher[1:], *(["--bind-to", "none"] if unbound else [])]
    return f"OMP_NUM_THREADS={layout.threads} {typed(plan.command(layout, launcher))}"
