"""`bench strategies`: test accuracy against time and against bytes, for different ways of training together.

Each method trains the same small network on scikit-learn's digits, from the same weights, on the same
images. After each epoch the model that the ranks' models stand for is evaluated; that takes no time of the
method's. What it sends is counted by the network interfaces of the hosts.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import mpisgd
from mpisgd.bench.measure import slowest
from mpisgd.bench.strategies.method import SYNCHRONOUS, Method
from mpisgd.bench.strategies.sent_bytes import sent_bytes

__all__ = ["StrategiesPlan", "run_strategies"]

NUM_CLASSES, TEST_SHARE = 10, 0.2
LEARNING_RATE, MOMENTUM = 0.05, 0.9


@dataclass(frozen=True)
class StrategiesPlan:
    """What to compare.

    Attributes:
        methods: in the order of the tables.
        epochs: of each training.
        seeds: so many trainings of each method, each with other weights and another order of the images.
        batch: images of a step, over all ranks.
        width: of the network's two hidden layers.
    """

    methods: Sequence[Method]
    epochs: int
    seeds: int
    batch: int
    width: int


class Point(NamedTuple):
    """How far a training has come: seconds, bytes that all hosts have sent, and accuracy on the test set."""

    seconds: float
    nbytes: float
    accuracy: float


class Digits(NamedTuple):
    """Images [n, 64] and labels [n], to train on and to test with."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load_digits() -> Digits:
    """Return scikit-learn's 1,797 digits of 8 x 8 pixels, shuffled once for all, from 0 to 1.

    Raises:
        JobError: there is no scikit-learn.
    """
    try:
        from sklearn import datasets
    except ImportError as exc:
        raise mpisgd.JobError(
            'bench strategies needs scikit-learn: pip install "mpisgd[demo]"', exit_code=2
        ) from exc
    images, labels = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.from_numpy(np.asarray(images, np.float32) / 16)[order]
    y = torch.from_numpy(np.asarray(labels, np.int64))[order]
    cut = round(TEST_SHARE * len(y))
    return Digits((x[cut:], y[cut:]), (x[:cut], y[:cut]))


def run_strategies(plan: StrategiesPlan, peers: object, report: Callable[[str, Any], None]) -> dict[str, Any]:
    """Train with all methods in turns; return a row for each, with its curve. Collective."""
    digits = load_digits()
    curves: dict[str, list[list[Point]]] = {method.name: [] for method in plan.methods}
    left_out = []
    for seed in range(plan.seeds):
        for method in plan.methods:
            try:
                curve = _curve(plan, method, digits, seed)
                curves[method.name].append(curve)
                report(f"seed {seed}", [_row(method.name, [curve])])
            except (mpisgd.InvalidArgument, mpisgd.UnsupportedOp) as exc:  # alike on all ranks
                if not seed:
                    left_out.append({"model": "digits", "variant": method.name, "reason": str(exc)})
    rows = [_row(name, found) for name, found in curves.items() if found]
    base = next((row["median_s"] for row in rows if row["variant"] == SYNCHRONOUS), None)
    for row in rows:
        row["speed_up"] = base / row["median_s"] if base else None
    notes = [] if mpisgd.num_nodes() > 1 else ["all ranks share a host: nothing passes a link"]
    return {"rows": rows, "left_out": left_out, "notes": notes, "seeds": plan.seeds}


def _row(name: str, curves: Sequence[Sequence[Point]]) -> dict[str, Any]:
    """Return the means over the seeds: at the end, and after each epoch."""
    mean = np.mean(np.asarray(curves), axis=0)
    final = [curve[-1].accuracy for curve in curves]
    return {
        "section": "digits",
        "variant": name,
        "accuracy": float(np.mean(final)),
        "accuracy_min": min(final),
        "median_s": float(mean[-1][0]),
        "mib_sent": float(mean[-1][1]) / 2**20,
        "curve": mean.tolist(),
    }


def _curve(plan: StrategiesPlan, method: Method, digits: Digits, seed: int) -> list[Point]:
    """Train once; return how far it was after each epoch."""
    torch.manual_seed(seed)
    width = plan.width
    model = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, NUM_CLASSES)
    )
    optimizer = method.distribute(torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM))
    curve, seconds, nbytes = [], 0.0, 0.0
    for epoch in range(plan.epochs):
        batches = list(_batches(digits.train, plan.batch, seed * plan.epochs + epoch))
        mpisgd.barrier()
        sent, started = sent_bytes(), time.perf_counter()
        for images, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        seconds += slowest(time.perf_counter() - started)
        nbytes += sent_bytes() - sent
        with optimizer.consensus():
            curve.append(Point(seconds, nbytes, _accuracy(model, digits.test)))
    return curve


def _batches(data: tuple[Tensor, Tensor], batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Return this rank's part of each batch of an epoch."""
    order = torch.randperm(len(data[1]), generator=torch.Generator().manual_seed(seed))
    for start in range(0, len(order) - batch + 1, batch):
        mine = order[start + mpisgd.rank() : start + batch : mpisgd.size()]
        yield data[0][mine], data[1][mine]


@torch.no_grad()
def _accuracy(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    return float((model(data[0]).argmax(1) == data[1]).double().mean())
