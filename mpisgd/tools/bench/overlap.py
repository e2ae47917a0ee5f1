"""`bench overlap`: how much of the communication between hosts a training step hides behind its backward.

The batch is chosen so that a step alone takes a given share of the time in which the link passes its
gradients. What no exact synchronous step can beat is computed from when each gradient is ready:

    compute   | forward |  backward  g1   g2      g3 |               | optimizer |
    link                              |g1|  | g2 | |   g3   |
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

import mpisgd
from mpisgd.job.lifecycle import world
from mpisgd.tools.bench.cases import Case
from mpisgd.tools.bench.hardware_limits import keep_faster_limit, limits
from mpisgd.tools.bench.measure import Measured, Pace, Timed, Variant, measure
from mpisgd.tools.bench.network import Ring, open_ring
from mpisgd.tools.bench.payload import Payload
from mpisgd.tools.bench.peers.remote import Peers
from mpisgd.tools.bench.report.rows import BOUND, COMPUTE, LIMIT, overlap_rows
from mpisgd.tools.bench.step import ours, remote
from mpisgd.tools.bench.training import StepTask, Training, build

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = ["OverlapPlan", "earliest_end", "find_batch", "run_overlap"]

REDUCE = "all_reduce alone"
MAX_BATCH = 4096
SEARCH = Pace(rounds=3, min_rounds=3, budget_s=0.0, turn_s=0.0, max_calls=1)


@dataclass(frozen=True)
class OverlapPlan:
    """What to measure.

    Attributes:
        model: one of MODELS.
        batch: examples of one rank; None: found so that compute takes `share` of the link's time.
        share: see there.
        factor: the second batch is so many times the first.
        bucket_bytes: bucket sizes to try with DDP.
        small: a miniature of the model.
        pace: for each batch.
    """

    model: str
    batch: int | None
    share: float
    factor: int
    bucket_bytes: Sequence[int]
    small: bool
    pace: Pace


def earliest_end(gradients: Iterable[tuple[float, int]], bytes_per_s: float) -> float:
    """Return when the last gradient has passed the link, which takes each as soon as it can.

    Args:
        gradients: when each is ready, in this order, and its bytes.
        bytes_per_s: of the link.
    """
    free_s = 0.0
    for ready_s, nbytes in gradients:
        free_s = max(free_s, ready_s) + nbytes / bytes_per_s
    return free_s


def find_batch(seconds: Callable[[int], float], wanted_s: float) -> int:
    """Return the batch whose step takes about `wanted_s`: doubled until it is too long, then in between.

    Args:
        seconds: measures a batch; grows with it.
        wanted_s: what is asked for; 1 where already that takes longer.
    """
    batch, short_s, long_s = 1, 0.0, seconds(1)
    while long_s < wanted_s and batch < MAX_BATCH:
        batch, short_s = 2 * batch, long_s
        long_s = seconds(batch)
    if batch == 1 or long_s <= wanted_s:
        return batch
    return round(batch / 2 * (1 + (wanted_s - short_s) / (long_s - short_s)))


class MarkedTraining(Training):
    """A training without communication that notes when each gradient is ready.

    Attributes:
        gradients: of each step so far, in the order of their being ready: seconds since its start, bytes.
        optimizer_s: of each step so far, what its optimizer took.
    """

    def __init__(self, task: StepTask, rank: int) -> None:
        super().__init__(task, rank)
        self.gradients: list[list[tuple[float, int]]] = []
        self.optimizer_s: list[float] = []
        self._started = 0.0
        for param in self.model.parameters():
            param.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Take one step."""
        self.gradients.append([])
        self._started = time.perf_counter()
        self.backward()
        backward_ended = time.perf_counter()
        self.optimizer.step()
        self.optimizer_s.append(time.perf_counter() - backward_ended)

    def earliest_ends(self, bytes_per_s: float) -> list[float]:
        """Return when each step could have ended at best, with a link of this rate."""
        steps = zip(self.gradients, self.optimizer_s, strict=True)
        return [earliest_end(gradients, bytes_per_s) + optimizer_s for gradients, optimizer_s in steps]

    def _note(self, param: torch.Tensor) -> None:
        self.gradients[-1].append((time.perf_counter() - self._started, param.nbytes))


def run_overlap(plan: OverlapPlan, peers: Peers, report: Callable[[str, Any], None]) -> dict[str, Any]:
    """Measure a step and its parts, at two batches; return rows and what was left out. Collective."""
    from mpisgd.transport.mpi import as_mpi

    communicator = as_mpi(world().queue.communicator).duplicate()
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, str]] = []
    with open_ring() as ring:
        first = plan.batch or _search(plan, communicator, ring)
        for batch in (first, plan.factor * first):
            task = StepTask(plan.model, batch, mpisgd.size(), plan.small)
            name = f"{plan.model}, batch {batch}"
            found = _measure(task, plan, peers, communicator, ring)
            peers.drop_broken()
            new = overlap_rows(name, batch, found.seconds)
            report(name, new)
            rows += new
            left_out += found.left_out_of(model=name)
    communicator.free()
    return {"rows": rows, "left_out": left_out, "gradient_bytes": _as_one_tensor(task).nbytes}


def _as_one_tensor(task: StepTask) -> Case:
    """Return the all-reduce of as many elements as the gradients have."""
    return Case("all_reduce", "float32", sum(param.numel() for param in build(task).parameters()), task.size)


def _search(plan: OverlapPlan, communicator: "Communicator", ring: Ring | None) -> int:
    """Return the batch whose step alone takes the wanted share of the link's time; the same on all ranks."""

    def alone(batch: int) -> float:
        training = MarkedTraining(replace(task, batch=batch), mpisgd.rank())
        found = measure([Timed(COMPUTE, training.step)], SEARCH)
        return min(found.seconds[COMPUTE])  # what a busy machine adds would mislead

    task = StepTask(plan.model, 1, mpisgd.size(), plan.small, communicates=False)
    link = measure(limits(_as_one_tensor(task), communicator, ring), SEARCH).seconds
    keep_faster_limit(link)
    return find_batch(alone, plan.share * statistics.median(link[LIMIT]))


def _measure(
    task: StepTask, plan: OverlapPlan, peers: Peers, communicator: "Communicator", ring: Ring | None
) -> Measured:
    alone = MarkedTraining(replace(task, communicates=False), mpisgd.rank())
    payload = Payload(_as_one_tensor(task), mpisgd.rank())
    parts: list[Variant] = [
        Timed(COMPUTE, alone.step),
        *limits(payload.case, communicator, ring),
        Timed(REDUCE, lambda: mpisgd.all_reduce(payload.output), payload, ours=True),
    ]
    found = measure([*parts, ours(task), *remote(task, plan.bucket_bytes, peers)], plan.pace)
    keep_faster_limit(found.seconds)
    link_s = statistics.median(found.seconds[LIMIT])
    ends = torch.tensor(alone.earliest_ends(payload.case.nbytes / link_s), dtype=torch.float64)
    mpisgd.all_reduce(ends, mpisgd.ReduceOp.MAX)
    found.seconds[BOUND] = ends.tolist()[-len(found.seconds[LIMIT]) :]  # those of the rounds that count
    return found
