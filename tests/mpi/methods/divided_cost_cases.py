"""Cases of what a model costs that is cut over the ranks: by pipelines, and by layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from cost_cases import CHECK, NONE, Case, Range
from torch import nn
from torch.nn.functional import mse_loss

import mpisgd
from mpisgd.core import operation_queue
from mpisgd.methods.cost_kit import ALL, Check, Collective, Op, Send, World
from mpisgd.methods.costs import wire_of
from mpisgd.methods.peak_memory import peak_of
from mpisgd.methods.wire_bytes import sent_bytes
from mpisgd.pipeline import PipeDream, Pipeline
from mpisgd.pipeline.cost import StageSizes
from mpisgd.pipeline.cost import cost as pipeline_cost
from mpisgd.pipeline.messages import MOST_BYTES, PipelineMessages
from mpisgd.pipeline.schedules.named import NAMED_SCHEDULES
from mpisgd.tools.plan.cluster import Cluster, Link
from mpisgd.tools.plan.methods import planned_methods
from mpisgd.tools.plan.models.count_model import count
from mpisgd.tools.plan.models.model import profile_of
from mpisgd.tools.plan.prediction import predict

# --- pipelines ------------------------------------------------------------------------------------------

ROWS, WIDTH = 2048, 32  # of a micro-batch
MESSAGE, WEIGHT = 4 * ROWS * WIDTH, 4 * WIDTH**2
SCHEDULES = (*dict.fromkeys(NAMED_SCHEDULES.values()), PipeDream(vertical_sync=True))


class PipelineCase(Case):
    """A pipeline of equal linear stages.

    Args:
        schedule: of it.
        replicas: of each stage; None: a stage on each rank, two of them with an interleaved schedule.
        settles: whether a send is through before the next one.
    """

    mean_of_ranks = False
    begins_unseen = True  # shapes of messages are known from the first step on

    def __init__(self, schedule, replicas=None, *, settles=False) -> None:
        self.schedule, self.replicas, self.settles = schedule, replicas, settles
        self.name = f"{schedule}{', replicas' * bool(replicas)}{', settled' * settles}"
        self.unfinished = [0]
        self.is_short = bool(replicas) or (
            settles and schedule.name in ("OneForwardOneBackward", "PipeDream")
        )

    def make(self, group: mpisgd.Group) -> None:
        size = mpisgd.size()
        count = len(self.replicas or ()) or (2 * size if self.schedule.name == "Interleaved" else size)
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
        number = 4 * size
        self.data = torch.ones(number * ROWS, WIDTH)
        self.pipeline = Pipeline(
            [lambda: nn.Linear(WIDTH, WIDTH, bias=False) for _ in self.sizes],
            schedule=self.schedule,
            num_micro_batches=number,
            loss=mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=1e-3, foreach=False),
            replicas=self.replicas,
        )

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.pipeline.step(self.data, self.data)
        self.pipeline.flush()

    def cycle(self) -> tuple[int, int]:
        return 0, 1 if self.schedule.flushes else 3

    def ops(self, count: int) -> list[Op]:
        return list(pipeline_cost(self.schedule, self.pipeline.shape, self.sizes, mpisgd.rank(), count))

    def said_bytes(self, steps) -> Range:
        """Exactly: objects say what a batch is, that replicas have come, and shapes of first messages."""
        ops, shape = self.ops(len(steps)), self.pipeline.shape
        said = sent_bytes(ops, World(1, mpisgd.size(), wire_of(NONE)))[ALL]
        told = len(steps) if self.schedule.flushes else 1
        reduced = sum(isinstance(op, Collective) for op in ops)
        assert sum(isinstance(op, Check) for op in ops) == told + reduced
        objects = told * (mpisgd.size() - 1) + reduced * (len(shape.ranks[0]) - 1)
        activations = [op for op in ops if isinstance(op, Send) and "recvA" in op.key]
        if 1 in steps:
            objects += len({(op.dst, op.key.partition(".")[0]) for op in activations})
        return Range.of(said + objects * MOST_BYTES, 0.0, 0.0)

    def said_peak(self) -> Range:
        """To a fraction of a message, but for sends that are not through by the next one."""
        said = peak_of(self.ops(self.cycle()[1])).total
        return Range.of(said, MESSAGE / 4, MESSAGE / 4 + max(self.unfinished) * MESSAGE)

    def beside(self, in_blocks: int) -> float:
        return WEIGHT * len(self.pipeline.stages)  # which is there already

    def watch(self, monkeypatch) -> None:
        """Count the sends that are not through by the next one, or wait for them."""
        send, unfinished, settles = PipelineMessages.send, self.unfinished, self.settles

        def watched(self, *arguments):
            if settles:
                self.settle()
            send(self, *arguments)
            unfinished.append(0 if settles else len(self._sends) - 1)

        monkeypatch.setattr(PipelineMessages, "send", watched)

    def close(self) -> None:
        self.pipeline.close()
        super().close()


def pipelines() -> Iterator[PipelineCase]:
    """Every schedule."""
    for schedule in SCHEDULES:
        yield PipelineCase(schedule)
        yield PipelineCase(schedule, settles=True)
        if schedule.name != "Interleaved" and schedule != PipeDream(vertical_sync=True):  # none of replicas
            yield PipelineCase(schedule, (2, 1))


# --- layouts --------------------------------------------------------------------------------------------

NAMES = {
    "up.weight": ("hidden", "model"),
    "down.weight": ("model", "hidden"),
    "up": ("batch", "hidden"),
    "down": ("batch", "model"),
}
INSIDE = 768  # 2, 3 and 4 ranks divide it


class Pair(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(INSIDE, INSIDE, bias=False)
        self.down = nn.Linear(INSIDE, INSIDE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


class LayoutCase(Case):
    """A model divided over all ranks by the names of its dimensions."""

    mean_of_ranks = True
    is_short = True

    def __init__(self, rules: str) -> None:
        self.rules, self.name = rules, f"layout({rules!r})"

    def make(self, group: mpisgd.Group) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()  # with shared memory, where other tests have made it
        self.data = torch.ones(INSIDE, INSIDE)
        layout = mpisgd.layout(self.rules, mesh={"a": mpisgd.size()})
        names = {"inputs": ("batch", "model")}
        named = mpisgd.NamedModel(Pair().to("meta"), NAMES, [self.data.to("meta")], **names)
        hosts = Cluster(mpisgd.size(), 1, Link(1e-6, 1e9), Link(1e-6, 1e9), flops_per_s=1e9)
        step = profile_of(
            replace(count("pair", named.model, *named.example), named=named), hosts, INSIDE // hosts.size
        )
        self.planned = predict(hosts, step, planned_methods(layout.text)[0])
        self.model = layout.distribute(Pair(), NAMES, **names)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.model.zero_grad()
            self.model(self.data).sum().backward()

    def cycle(self) -> tuple[int, int]:
        return 0, 1

    def said_bytes(self, steps) -> Range:
        return Range.of(len(steps) * self.planned.step.sent_bytes, 0.0, 4 * CHECK * len(steps))

    def watch(self, monkeypatch) -> None:
        """Let operations run in this thread, however late others come: frees of other ones are not seen."""
        monkeypatch.setattr(operation_queue, "INLINE_WAIT_S", 30.0)

    def said_peak(self) -> Range:
        """Of what is there for a moment nothing is said: gradients of activations, and what all-reduces make.

        All gradients of weights are said to be there all the time, and come one after the other: found is at
        most one activation of the whole batch more (0.7 to 0.95 of it on 2 to 4 ranks, and 0.2 at the least).
        """
        said = self.planned.memory.total
        return Range.of(said, 0.01 * said, 0.01 * said + self.data.nbytes)

    def beside(self, in_blocks: int) -> float:
        return -self.data.nbytes

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        super().close()


def layouts() -> Iterator[LayoutCase]:
    """Data and tensor parallelism."""
    yield from map(LayoutCase, ("batch:a", "hidden:a"))
