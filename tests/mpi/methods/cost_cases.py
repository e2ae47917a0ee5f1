"""Cases of what a method costs: every method of the catalogue, and every placement of its parameters.

A case takes steps, and says by its cost which operations these are.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

import mpisgd
from mpisgd.compress.compressor import has_momentum
from mpisgd.methods import catalogue
from mpisgd.methods.cost_kit import Check, Collective, Op
from mpisgd.methods.costs import cost_of
from mpisgd.methods.peak_memory import peak_of
from mpisgd.methods.wire_bytes import sent_bytes
from mpisgd.tools.plan.cluster import Cluster, Link
from mpisgd.tools.plan.models.blocks import Block
from mpisgd.tools.plan.models.model import Gradient, StepProfile
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
        if isinstance(strategy, mpisgd.Sharded) and (strategy.gradients or strategy.parameters):
            continue  # refused with either
        if "offload" in inspect.signature(type(strategy)).parameters:
            for what in ("optimizer", "optimizer,parameters"):
                offload = mpisgd.Offload(folder, what=what, block_bytes=BLOCK)
                yield MethodCase(replace(strategy, offload=offload), NONE)
