"""What the ranks of a pipeline send and keep is what its cost says."""

from __future__ import annotations

import pytest
import torch
from peak_meter import peak_bytes
from torch import nn
from torch.nn.functional import mse_loss
from verdicts import everyone

import mpisgd
from mpisgd import config
from mpisgd.methods.cost_kit import ALL, Check, Collective, Send, World
from mpisgd.methods.costs import wire_of
from mpisgd.methods.peak_memory import peak_of
from mpisgd.methods.wire_bytes import sent_bytes
from mpisgd.pipeline import PipeDream, Pipeline
from mpisgd.pipeline.cost import StageSizes, cost
from mpisgd.pipeline.messages import MOST_BYTES, PipelineMessages
from mpisgd.pipeline.schedules.named import NAMED_SCHEDULES

ROWS, WIDTH = 2048, 32  # of a micro-batch
MESSAGE, WEIGHT = 4 * ROWS * WIDTH, 4 * WIDTH**2
SCHEDULES = [*dict.fromkeys(NAMED_SCHEDULES.values()), PipeDream(vertical_sync=True)]


class Case:
    """A pipeline of equal linear stages, and its cost."""

    def __init__(self, schedule, replicas=None) -> None:
        size = mpisgd.size()
        count = len(replicas or ()) or (2 * size if schedule.name == "Interleaved" else size)
        # What goes on is kept, and the last output by its loss; what comes, in its message.
        last = count - 1
        self.sizes = [
            StageSizes(
                WEIGHT,
                0,
                {stage + 1: MESSAGE} if stage < last else {},
                kept_bytes=MESSAGE,
                pass_bytes=WEIGHT + (MESSAGE if stage == last else 0),  # gradients of weights, of the output
            )
            for stage in range(count)
        ]
        self.schedule, self.replicas = schedule, replicas
        self.num_micro_batches = 4 * size
        self.data = torch.ones(self.num_micro_batches * ROWS, WIDTH)

    def make(self) -> None:
        self.pipeline = Pipeline(
            [lambda: nn.Linear(WIDTH, WIDTH, bias=False) for _ in self.sizes],
            schedule=self.schedule,
            num_micro_batches=self.num_micro_batches,
            loss=mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=1e-3, foreach=False),
            replicas=self.replicas,
        )

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.pipeline.step(self.data, self.data)

    def cost(self, count: int):
        shape = self.pipeline.shape
        return list(cost(self.schedule, shape, self.sizes, mpisgd.rank(), count))

    def counted(self) -> float:
        """Bytes that this rank has sent, by what mpi4py was given."""
        found = 0.0
        for group in self.pipeline._groups:
            found += group.point_to_point.communicator.sent_bytes
            size, queue = group.size, group.queue.communicator
            found += queue.sent_bytes + 2 * (size - 1) / size * queue.given_bytes["Allreduce"]
        return found


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_bytes_are_those_of_the_cost(schedule, replicated, monkeypatch):
    monkeypatch.setattr(config, "shared_memory", lambda: False)
    size = mpisgd.size()
    if replicated and (size != 3 or schedule.name == "Interleaved" or schedule == PipeDream(True)):
        pytest.skip("has no replicas, or not a number of them that divides the micro-batches")
    case = Case(schedule, (size - 1, 1) if replicated else None)
    case.make()
    case.steps(3)
    case.pipeline.flush()
    ops = case.cost(3)
    said = sent_bytes(ops, World(1, size, wire_of(mpisgd.Compression.none)))[ALL]
    # Small objects are left out: what a batch is, and that replicas have come; the shapes of a first message.
    first_rank, rank = case.pipeline.shape.ranks[0], mpisgd.rank()
    told = 3 if schedule.flushes else 1
    objects = told * (size - 1)
    reduced = sum(isinstance(op, Collective) for op in ops)
    objects += reduced * (len(first_rank) - 1)
    assert sum(isinstance(op, Check) for op in ops) == told + reduced
    shape, activations = case.pipeline.shape, [op for op in ops if isinstance(op, Send) and "recvA" in op.key]
    objects += len({(op.dst, op.key.partition(".")[0]) for op in activations})
    assert shape.num_stages == len(case.sizes)
    found = case.counted() - objects * MOST_BYTES
    case.pipeline.close()
    everyone(found == said, f"rank {rank} sent {found:,.0f}, said {said:,.0f}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_peak_memory_is_that_of_the_cost(schedule, monkeypatch):
    """To a fraction of a message, but for sends that are not through by the next one, which hold theirs."""
    unfinished = [0]
    send = PipelineMessages.send

    def send_and_count(self, *arguments):
        send(self, *arguments)
        unfinished.append(len(self._sends) - 1)

    def send_when_settled(self, *arguments):
        self.settle()
        send(self, *arguments)

    case, count = Case(schedule), 1 if schedule.flushes else 3
    case.make()
    case.steps(1)  # shapes of messages are known from here on
    case.pipeline.flush()

    def run() -> None:
        case.steps(count)
        case.pipeline.flush()

    said, model = peak_of(case.cost(count)), WEIGHT * len(case.pipeline.stages)  # which is there already
    for how in (send_when_settled, send_and_count):
        monkeypatch.setattr(PipelineMessages, "send", how)
        more = peak_bytes(lambda: None, run) + model - said.total
        most = max(unfinished) * MESSAGE
        everyone(-MESSAGE / 4 <= more <= most + MESSAGE / 4, f"{more / MESSAGE:.2f} messages more than said")
    case.pipeline.close()


@pytest.mark.mpi(min_size=2)
def test_losses_of_earlier_micro_batches_keep_no_outputs():
    """torch makes some losses, mse_loss's among them, in memory that is as large as the output."""
    peaks = []
    for num_micro_batches in (4, 16):
        case = Case(NAMED_SCHEDULES["1f1b"])
        case.num_micro_batches, case.data = num_micro_batches, torch.ones(num_micro_batches * ROWS, WIDTH)
        case.make()
        case.steps(1)
        peaks.append(peak_bytes(lambda: None, lambda case=case: case.steps(1)))
        case.pipeline.close()
    everyone(abs(peaks[1] - peaks[0]) <= 2 * MESSAGE, f"{peaks}")
