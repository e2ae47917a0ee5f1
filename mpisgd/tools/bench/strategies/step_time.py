"""`bench compression`: what a step takes, and what it sends, for different strategies and compressions.

Speed only, on the models of `bench step`; `bench strategies` shows what becomes of the accuracy. The step
without communication is the bound: no compression can be faster. Methods that do not pay are named. Beside
what was measured stands what `compression="auto"` would predict: the step without communication, and then
the reductions.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import mpisgd
from mpisgd.methods.auto.compression_choice import Trial
from mpisgd.tools.bench.cases import BATCHES
from mpisgd.tools.bench.measure import slowest
from mpisgd.tools.bench.report.rows import as_time
from mpisgd.tools.bench.strategies.method import SYNCHRONOUS, Method
from mpisgd.tools.bench.strategies.tasks import sent_bytes
from mpisgd.tools.bench.training import StepTask, Training

__all__ = ["CompressionPlan", "run_compression"]

BLOCKS = 3  # of steps, each timed as a whole
WARM_UP = 2  # steps; after the first the buckets are in their final order
NO_COMMUNICATION = "no communication"
NOTHING_MIB = 0.01  # what the measurement itself sends
PAYS = 0.98  # of the time of the synchronous step


@dataclass(frozen=True)
class CompressionPlan:
    """What to compare.

    Attributes:
        methods: in the order of the table.
        models: some of MODELS.
        steps: of a block that is timed as a whole; a strategy that meets every k steps needs a multiple of k.
        small: miniatures of the models.
    """

    methods: Sequence[Method]
    models: Sequence[str]
    steps: int
    small: bool = False


def run_compression(
    plan: CompressionPlan, peers: object, report: Callable[[str, Any], None]
) -> dict[str, Any]:
    """Time steps of all methods on all models; return a row for each. Collective."""
    rows: list[dict[str, Any]] = []
    left_out, notes = [], []
    for model in plan.models:
        task = StepTask(model, BATCHES[model], mpisgd.size(), plan.small)
        found = [
            _measured(NO_COMMUNICATION, Training(replace(task, communicates=False), mpisgd.rank()), plan)
        ]
        for method in plan.methods:
            training = Training(task, mpisgd.rank())
            try:
                optimizer = _optimizer(method, training)
                training.optimizer = optimizer
                predicted_s = _predicted(method, optimizer, found[0]["median_s"])
            except (mpisgd.InvalidArgument, mpisgd.UnsupportedOp) as exc:  # alike on all ranks
                left_out.append({"model": model, "variant": method.name, "reason": str(exc)})
                continue
            found.append({**_measured(method.name, training, plan), "predicted_s": predicted_s})
            report(model, found[-1:])
        rows += _compared(found)
        notes += _advice(model, found)
    if mpisgd.num_nodes() == 1:
        notes.append("all ranks share a host: nothing passes a link")
    return {"rows": rows, "left_out": left_out, "notes": notes, "steps": plan.steps}


def _optimizer(method: Method, training: Training) -> torch.optim.Optimizer:
    """Return the optimizer of a method, or that of the model, made to train with others. Collective."""
    params, optimizer = training.model.named_parameters(), training.optimizer
    if method.optimizer is not None:
        optimizer = method.optimizer.make(training.model.parameters())
    return method.distribute(optimizer, named_parameters=params)


def _measured(name: str, training: Training, plan: CompressionPlan) -> dict[str, Any]:
    """Return the seconds of a step on the slowest rank, and the bytes that all hosts send in it."""
    for _ in range(WARM_UP):
        training.step()
    seconds, sent = [], sent_bytes()
    for _ in range(BLOCKS):
        mpisgd.barrier()
        started = time.perf_counter()
        for _ in range(plan.steps):
            training.step()
        seconds.append(slowest(time.perf_counter() - started) / plan.steps)
    mib = (sent_bytes() - sent) / (BLOCKS * plan.steps) / 2**20
    times = {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}
    return {"model": training.task.model, "variant": name, **times, "mib_sent": mib}


def _predicted(method: Method, optimizer: torch.optim.Optimizer, alone_s: float) -> float | None:
    """Return the expected seconds of a step; None for a method that does more than reduce now and then."""
    every = 1 if isinstance(method.strategy, mpisgd.Synchronous) else _period(method.strategy)
    if every is None or not isinstance(optimizer, mpisgd.DistributedOptimizer):
        return None
    job = optimizer.synchronizer.training
    return alone_s + Trial(job.params, job.group, job.options).seconds(optimizer.compression) / every


def _period(strategy: mpisgd.Strategy) -> int | None:
    every = (mpisgd.DiLoCo, mpisgd.LocalSGD, mpisgd.SparseLoCo)
    return strategy.sync_every if isinstance(strategy, every) else None


def _compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add what each is compared with the synchronous step, and with none."""
    base = next((row for row in rows if row["variant"] == SYNCHRONOUS), None)
    rows[0]["predicted_s"] = None
    for row in rows:
        row["speed_up"] = base["median_s"] / row["median_s"] if base else None
        row["ratio_to_none"] = row["median_s"] / rows[0]["median_s"]
        row["sent_ratio"] = (
            base["mib_sent"] / row["mib_sent"] if base and row["mib_sent"] > NOTHING_MIB else None
        )
    return list(rows)


def _advice(model: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Say which methods do not pay here, and how much of the synchronous step could be won at all."""
    base = next((row for row in rows if row["variant"] == SYNCHRONOUS), None)
    if base is None:
        return []
    at_most = base["median_s"] / rows[0]["median_s"]
    notes = [
        f"{model}: a step without any communication takes {as_time(rows[0]['median_s'])}, so nothing can be "
        f"more than {at_most:.3g} x faster than the synchronous step"
    ]
    slow = [r["variant"] for r in rows[1:] if r is not base and r["median_s"] > PAYS * base["median_s"]]
    return notes + ([f"{model}: these do not pay here: {', '.join(slow)}"] if slow else [])
