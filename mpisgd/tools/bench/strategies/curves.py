"""`bench strategies`: how good a model becomes, against steps, time and bytes, for ways of training together.

Each method trains the same network from the same weights on the same data. After each part of a training the
model that the ranks' models stand for is evaluated; that takes no time of the method's. What it sends is
counted by the network interfaces of the hosts.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

import mpisgd
from mpisgd.methods.from_text import OptimizerChoice
from mpisgd.tools.bench.measure import slowest
from mpisgd.tools.bench.strategies.method import Method, common_model, finish
from mpisgd.tools.bench.strategies.tasks import Task, sent_bytes

__all__ = ["Report", "StrategiesPlan", "run_strategies"]


class Report(Protocol):
    """What is called with the rows of each training, and with the record of all trainings so far."""

    def __call__(self, what: str, rows: Any, so_far: dict[str, Any] | None = None) -> None:
        """Print the rows; keep the record."""


@dataclass(frozen=True)
class StrategiesPlan:
    """What to compare.

    Attributes:
        methods: in the order of the tables.
        make_task: returns what they train. Collective.
        seeds: so many trainings of each method, each with other weights and another order of the data.
        optimizer: of methods that name none; None: that of the task.
        before: rows of an earlier record: what they have is not trained again. On rank 0.
    """

    methods: Sequence[Method]
    make_task: Callable[[], Task]
    seeds: int
    optimizer: OptimizerChoice | None = None
    before: Sequence[dict[str, Any]] = ()


class Point(NamedTuple):
    """How far a training has come: seconds, bytes that all hosts have sent, accuracy or loss, and steps."""

    seconds: float
    nbytes: float
    score: float
    steps: int


class _Results:
    """The curves so far, and the rows that they make."""

    def __init__(self, plan: StrategiesPlan, task: Task) -> None:
        self._plan, self._task = plan, task
        self._curves: dict[str, list[list[Point]]] = {method.name: [] for method in plan.methods}
        self._left_out: dict[str, str] = {}
        for row in mpisgd.broadcast_object(list(plan.before)):
            if row["variant"] in self._curves:
                self._curves[row["variant"]] = [[Point(*point) for point in c] for c in row["curves"]]

    def has(self, method: Method, seed: int) -> bool:
        """Return whether a training is there."""
        return len(self._curves[method.name]) > seed

    def add(self, method: Method, curve: list[Point]) -> dict[str, Any]:
        """Take a training; return its row."""
        self._curves[method.name].append(curve)
        return self._row(method, [curve])

    def leave_out(self, method: Method, reason: str) -> None:
        """Note that a method cannot be had here."""
        self._left_out[method.name] = reason

    def record(self) -> dict[str, Any]:
        """Return the rows of all methods, compared with the best synchronous one of their section."""
        rows = [
            self._row(method, curves)
            for method in self._plan.methods
            if (curves := self._curves[method.name])
        ]
        for row in rows:
            row.update(self._compared(row, rows))
        rows.sort(key=itemgetter("section"))
        left_out = [{"model": self._task.name, "variant": n, "reason": r} for n, r in self._left_out.items()]
        notes = [] if mpisgd.num_nodes() > 1 else ["all ranks share a host: nothing passes a link"]
        return {"rows": rows, "left_out": left_out, "notes": notes, "seeds": self._plan.seeds}

    def _row(self, method: Method, curves: Sequence[Sequence[Point]]) -> dict[str, Any]:
        """Return the means over the seeds: at the end, and after each part."""
        measure, mean = self._task.measure, np.mean(np.asarray(curves), axis=0)
        finals = [curve[-1].score for curve in curves]
        return {
            "section": _section(self._task, method),
            "variant": method.name,
            "is_synchronous": method.is_synchronous,
            measure: float(np.mean(finals)),
            f"{measure}_{self._task.worst.__name__}": _worst(self._task, finals),
            "finals": finals,
            "median_s": float(mean[-1][0]),
            "mib_sent": float(mean[-1][1]) / 2**20,
            "curve": mean.tolist(),
            "curves": [[list(point) for point in curve] for curve in curves],
        }

    def _compared(self, row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        measure = self._task.measure
        bases = [r for r in rows if r["is_synchronous"] and r["section"] == row["section"]]
        ratio, worst = f"{measure}_ratio", f"{measure}_ratio_{self._task.worst.__name__}"
        if not bases:
            return {"speed_up": None, "bytes_ratio": None, ratio: None, worst: None}
        base = self._task.best(bases, key=lambda each: each[measure])
        finals = np.asarray(list(zip(row["finals"], base["finals"], strict=False)))  # of seeds that both have
        mine, its = finals.sum(0)
        return {
            "speed_up": base["median_s"] / row["median_s"],
            "bytes_ratio": row["mib_sent"] / base["mib_sent"] if base["mib_sent"] else None,
            ratio: float(mine / its),
            worst: _worst(self._task, (finals[:, 0] / finals[:, 1]).tolist()),
        }


def _section(task: Task, method: Method) -> str:
    """Return the task, and the family of a method's optimizer where it is not the usual one."""
    family = _family(method.chosen(task.optimizer))
    return task.name if family == _family(task.optimizer) else f"{task.name}, {family}"


def _family(choice: OptimizerChoice) -> str:
    return "Adam" if "Adam" in choice.kind.__name__ else choice.kind.__name__


def _worst(task: Task, finals: Sequence[float]) -> float:
    """Return the worst of some results; one that is no number is."""
    return float(next(filter(math.isnan, finals), task.worst(finals)))


def run_strategies(plan: StrategiesPlan, peers: object, report: Report) -> dict[str, Any]:
    """Train with all methods in turns; return a row for each, with its curve. Collective."""
    task = plan.make_task()
    task.optimizer = plan.optimizer or task.optimizer
    results = _Results(plan, task)
    for seed in range(plan.seeds):
        for method in plan.methods:
            if results.has(method, seed):
                continue
            try:
                row = results.add(method, _curve(task, method, seed))
            except (mpisgd.InvalidArgument, mpisgd.UnsupportedOp) as exc:  # alike on all ranks
                results.leave_out(method, str(exc))
                continue
            report(f"seed {seed}, {task.measure} {row[task.measure]:.4f}", [row], results.record())
    return results.record()


def _curve(task: Task, method: Method, seed: int) -> list[Point]:
    """Train once; return how far it was after each part."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = method.distribute(method.chosen(task.optimizer).make(model.parameters()))
    rates = [group["lr"] for group in optimizer.param_groups]
    curve, seconds, nbytes, steps = [], 0.0, 0.0, 0
    for part in range(task.num_parts):
        batches = list(task.batches(seed, part))
        mpisgd.barrier()
        sent, started = sent_bytes(), time.perf_counter()
        for step, (inputs, targets) in enumerate(batches):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * task.factor(part, step)
            optimizer.zero_grad()
            task.loss(model, inputs, targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if part == task.num_parts - 1:
            finish(optimizer)
        seconds += slowest(time.perf_counter() - started)
        nbytes += sent_bytes() - sent
        steps += len(batches)
        with common_model(optimizer):
            curve.append(Point(seconds, nbytes, task.evaluate(model), steps))
    return curve
