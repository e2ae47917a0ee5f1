"""What trains in a way that has a cost: every method of the catalogue, and every placement.

A case takes steps, and says by its cost which operations these are.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import mpisgd
from mpisgd.compress.compressor import has_momentum
from mpisgd.methods import catalogue
from mpisgd.methods.cost_kit import ALL, Check, Collective, Op, Send, World
from mpisgd.methods.costs import cost_of, wire_of
from mpisgd.methods.peak_memory import peak_of
from mpisgd.methods.wire_bytes import sent_bytes
from mpisgd.pipeline import PipeDream, Pipeline
from mpisgd.pipeline.cost import StageSizes
from mpisgd.pipeline.cost import cost as pipeline_cost
from mpisgd.pipeline.messages import MOST_BYTES, PipelineMessages
from mpisgd.pipeline.schedules.named import NAMED_SCHEDULES
from mpisgd.tools.plan.cluster import Cluster, Link
from mpisgd.tools.plan.methods import planned_methods
from mpisgd.tools.plan.models.blocks import Block
from mpisgd.tools.plan.models.count_model import count
from mpisgd.tools.plan.models.model import Gradient, StepProfile, profile_of
from mpisgd.tools.plan.prediction import predict
from mpisgd.tools.plan.steps.job import PlannedJob
from mpisgd.transport.mpi.communicator import Communicator
from mpisgd.transport.mpi.window import MpiWindow

NONE = mpisgd.Compression.none
# Three travel from where they lie, the others together.
SHAPES = ((2048, 512), (2048, 512), (2048, 512), (64, 512), (512,), (100, 50))
MODEL = sum(4 * torch.Size(shape).numel() for shape in SHAPES)
BLOCK = 2**18  # of files
MOST_STEPS, FEW_STEPS = 100, 5


def sent_so_far() -> float:
    """Bytes that mpi4py was given by this rank, and what its collectives send of them at the least."""
    found = 0.0
    for each in gc.get_objects():
        if isinstance(each, MpiWindow):
            found += each.sent_bytes
        elif isinstance(each, Communicator):
            size, given = each.size, each.given_bytes
            found += each.sent_bytes + (size - 1) * given["Allgather"]
            found += (size - 1) / size * (2 * given["Allreduce"] + given["Alltoall"])
    return found


class Range(NamedTuple):
    """What a cost says, and how far from it what is found may be."""

    said: float
    least: float
    most: float

    @classmethod
    def of(cls, said: float, below: float, above: float) -> Range:
        return cls(said, said - below, said + above)


class Case:
    """A training.

    Attributes:
        name: of it.
        is_short: whether it is tried in every run of the tests.
        mean_of_ranks: whether bytes are those of a rank on average, and memory of the one that has most.
        begins_unseen: whether memory counts from the end of the first steps on.
    """

    name = ""
    is_short = False
    mean_of_ranks = True
    begins_unseen = False

    def __str__(self) -> str:
        return self.name

    def watch(self, monkeypatch) -> None:
        """Look at what decides how much is kept."""

    def make(self, group: mpisgd.Group) -> None:
        """Make the model. Collective."""

    def steps(self, count: int) -> None:
        """Take so many."""

    def close(self) -> None:
        """End the training, and let go of it: a case is there as long as the tests are."""
        for name in ("optimizer", "model", "pipeline", "data"):
            vars(self).pop(name, None)
        gc.collect()


# --- methods, and where their parameters and states are -------------------------------------------------


class Layer(nn.Module):
    """Parameters whose gradients are given numbers, whatever comes in."""

    def __init__(self, number: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(torch.randn(SHAPES[number], generator=draw))
        draw.manual_seed(100 * mpisgd.rank() + number)
        self.slope = [torch.randn(SHAPES[number], generator=draw)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.weight * self.slope[0]).sum()


class MethodCase(Case):
    """A strategy with a compressor, or an optimizer that averages by itself."""

    def __init__(self, strategy, compressor, optimizer=None, settings=None, *, shares=False) -> None:
        self.strategy, self.compressor, self.shares = strategy, compressor, shares
        self.kind, self.settings = optimizer, settings
        self.offload = getattr(strategy, "offload", None)
        self.cost = cost_of(strategy, optimizer, settings)
        self.has_momentum = optimizer is None and not has_momentum(compressor)
        parts = [catalogue.text_of(strategy)]
        parts += [] if compressor == NONE else [catalogue.text_of(compressor)]
        parts += [] if optimizer is None else [f"{optimizer.__name__}{settings}"]
        parts += ["share_parameters"] if shares else []
        self.name = ", ".join(parts).replace("mpisgd.", "").replace("compress.", "")
        self.is_short = compressor == NONE and optimizer is None and strategy == type(strategy).examples()[0]

    def job(self, hosts: int) -> PlannedJob:
        """The model and the ranks, as the planner has them."""
        order = reversed(range(len(SHAPES)))
        gradients = tuple(Gradient(f"{i}", i, SHAPES[i], 4, 2.0 - 0.1 * i) for i in order)
        cluster = Cluster(hosts, mpisgd.size() // hosts, Link(0.0, 1e9), Link(0.0, 1e9))
        optimizer = "momentum" if self.has_momentum else "sgd"
        blocks = tuple(Block(f"{i}", (shape,), 1.0, 1.0) for i, shape in enumerate(SHAPES))
        profile = StepProfile("model", 1, 1.0, 1.0, 1.0, gradients, optimizer, 0.0, blocks)
        return PlannedJob(cluster, profile, self.compressor, overlap=False)

    def ops(self, hosts: int, steps) -> list[Op]:
        """The operations of these steps."""
        job = self.job(hosts)
        world = job.world._replace(shares=self.shares)
        return [op for step in steps for op in self.cost.cost(job.sizes, world, step)]

    def cycle(self) -> tuple[int, int]:
        """Which steps stand for all; earlier ones where those come later than a test waits."""
        first, length = self.cost.cycle(self.job(mpisgd.size()).world)
        return (first, length) if first <= MOST_STEPS else (MOST_STEPS, FEW_STEPS)

    def make(self, group: mpisgd.Group) -> None:
        self.model = nn.Sequential(*(Layer(number) for number in range(len(SHAPES))))
        if self.offload is not None and "parameters" in self.offload.parts:
            mpisgd.offload_parameters(self.model, self.offload, group=group)
        params = self.model.parameters()
        if self.kind is not None:
            self.optimizer = self.kind(params, lr=1e-3, **self.settings, group=group)
            return
        sgd = torch.optim.SGD(params, lr=1e-3, momentum=0.9 * self.has_momentum, foreach=False)
        options = {"share_parameters": True} if self.shares else {}
        self.optimizer = mpisgd.DistributedOptimizer(
            sgd, strategy=self.strategy, compression=self.compressor, group=group, overlap=False, **options
        )

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(torch.zeros(())).backward()
            self.optimizer.step()
        if hasattr(self.optimizer, "synchronizer") and hasattr(self.optimizer.synchronizer, "wait"):
            self.optimizer.synchronizer.wait()  # what the next forward would wait for

    def said_bytes(self, steps) -> Range:
        """Bytes of these steps, one rank on each host."""
        size, ops = mpisgd.size(), self.ops(mpisgd.size(), steps)
        said = sum(sent_bytes(ops, self.job(size).world).values())
        kinds = {op.kind for op in ops if isinstance(op, Collective)}
        if "pairs" in kinds:  # at the most: a rank that has not been answered asks nobody
            return Range(said, 0.0, said)
        if "access" in kinds:  # what a rank holds itself goes through its window, too
            every = said * size / (size - 1)
            return Range(said, every, 1.5 * every)  # reads are tried again while others write
        checks = CHECK * (1 + sum(isinstance(op, (Check, Collective)) for op in ops))
        sparse = ESTIMATED * said if self.is_sparse else 0.0
        return Range.of(said, sparse, checks + sparse)

    @property
    def is_sparse(self) -> bool:
        """Whether it depends on the gradients how many of the ranks' elements are the same ones."""
        chosen = getattr(self.compressor, "compressor", self.compressor)
        return isinstance(chosen, (mpisgd.compress.TopK, mpisgd.compress.DeepGradient))

    def said_peak(self) -> Range:
        """Bytes of all that is kept, at most, all ranks on one host."""
        first, length = self.cycle()
        memory = peak_of(self.ops(1, (0, *range(first + 1, first + length + 1))))
        slack = CHUNKS + 0.01 * memory.total
        return Range.of(memory.total, slack, slack)

    def beside(self, in_blocks: int) -> float:
        """What is not in torch's memory, but the method's; less what is there, and not the method's."""
        found = in_blocks - MODEL  # of the slopes
        synchronizer = getattr(self.optimizer, "synchronizer", None)
        if self.shares or self.strategy == mpisgd.ParameterServer("sync"):
            return found + MODEL / mpisgd.size()  # the parameters
        if (memory := getattr(synchronizer, "_memory", None)) is not None:
            return found + max(layout.nbytes for layout in memory.layouts)
        return found


# What a check of an operation, or a collective of it, sends beside the bytes: headers, and hashes.
CHECK = 1024
# Of elements that the ranks choose independently of each other.
ESTIMATED = 0.005
# Sums and random numbers come in chunks of so many bytes, two of them at a time at most.
CHUNKS = 2 * 2**19 + 2**17


def methods(ratio: float | None = None) -> Iterator[MethodCase]:
    """Every example, with every kind of compressor that it goes with; and optimizers.

    Args:
        ratio: of elements that are sent, in place of those of the examples, which are for tiny models.
    """
    met: set[tuple[type, type]] = set()
    for strategy, compressor in catalogue.examples_that_go_together():
        pair = type(strategy), type(compressor)
        if pair in met and not (strategy == mpisgd.Synchronous() or compressor == NONE):
            continue
        met.add(pair)
        yield MethodCase(strategy, compressor if ratio is None else _with_ratio(compressor, ratio))
    for kind in catalogue.optimizers():
        for settings in kind.examples():
            yield MethodCase(mpisgd.Synchronous(), NONE, kind, settings)


def _with_ratio(compressor, ratio: float):
    if hasattr(compressor, "compressor"):
        return replace(compressor, compressor=_with_ratio(compressor.compressor, ratio))
    return replace(compressor, ratio=ratio) if hasattr(compressor, "ratio") else compressor


def placements(folder: str) -> Iterator[MethodCase]:
    """Shared parameters, and files, wherever a strategy goes with them."""
    for strategy in (each for kind in catalogue.strategies() for each in kind.examples()):
        if strategy.goes_with.share_parameters.goes:
            yield MethodCase(strategy, NONE, shares=True)
        if "offload" in inspect.signature(type(strategy)).parameters:
            for what in ("optimizer", "optimizer,parameters"):
                offload = mpisgd.Offload(folder, what=what, block_bytes=BLOCK)
                yield MethodCase(replace(strategy, offload=offload), NONE)


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
