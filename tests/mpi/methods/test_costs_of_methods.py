"""Costs equal what is sent and kept: bytes that mpi4py was given, and memory that torch has allocated."""

from __future__ import annotations

import pytest
import torch
from peak_meter import peak_bytes
from verdicts import everyone, referee

import mpisgd
from mpisgd import compress, config
from mpisgd.methods.catalogue import compressors, optimizers, strategies
from mpisgd.methods.cost_kit import ALL, Cycle, Sizes, World
from mpisgd.methods.costs import MethodCost, cost_of, wire_of
from mpisgd.methods.peak_memory import peak_memory
from mpisgd.methods.wire_bytes import sent_bytes
from mpisgd.plan.cluster import Cluster, Link
from mpisgd.plan.methods import planned_methods
from mpisgd.plan.models.model import Gradient, StepProfile
from mpisgd.plan.steps.job import PlannedJob

# Three travel from where they lie, the others together.
SHAPES = ((2048, 512), (2048, 512), (2048, 512), (64, 512), (512,), (100, 50))
NBYTES = [4 * torch.Size(shape).numel() for shape in SHAPES]
MODEL, LARGEST = sum(NBYTES), max(NBYTES)
# Sums and random numbers come in chunks of so many bytes, two of them at a time at most.
CHUNKS = 2 * 2**19 + 2**17

METHODS = (
    "Synchronous",
    "Synchronous + bf16",
    "Synchronous + TopK(ratio=0.01)",
    "Synchronous + RandomK(ratio=0.1)",
    "Synchronous + DeepGradient(ratio=0.01)",
    "Synchronous + DeepGradient(ratio=0.01, warmup_steps=2)",
    "Synchronous + OneBit()",
    "Synchronous + OneBit(two_step=True)",
    "Synchronous + SignSGD()",
    "Synchronous + SignSGD(majority_vote=False)",
    "Synchronous + QSGD(bits=4)",
    "Synchronous + TernGrad()",
    "Synchronous + Natural()",
    "Synchronous + PowerSGD(rank=2)",
    "Synchronous + PowerSGD(rank=2, warmup_steps=2)",
    "Synchronous + PerHost(TopK(ratio=0.01))",
    "LocalSGD(2)",
    "LocalSGD(2) + bf16",
    "LocalSGD(2) + TopK(ratio=0.01)",
    "DiLoCo(2)",
    "DiLoCo(2, fragments=2)",
    "DiLoCo(3, overlap_steps=1)",
    "DiLoCo(2) + bf16",
    "ElasticAveraging(every=2)",
    "ElasticAveraging(every=2) + TopK(ratio=0.01)",
    "Gossip('ring')",
    "Gossip('exponential', style='push_sum')",
    "Gossip('ring', every=2) + bf16",
    "Gossip('ring', consensus_step=0.3) + TopK(ratio=0.01)",
    "Gossip('ring', consensus_step=0.3) + OneBit()",
    "Gossip('complete', style='asynchronous')",
    "ParameterServer('sync')",
    "ParameterServer('async')",
    "ParameterServer('async', push_every=2)",
    "Sharded(1)",
    "Sharded(2)",
    "Sharded(1) + bf16",
    "Synchronous with OneBitAdam(freeze_step=2)",
    "Synchronous with OneBitLamb(freeze_step=2)",
    "Synchronous with ZeroOneAdam(var_freeze_step=2, local_step_scaler=1, local_step_clipper=2)",
)
SHORT = {"Synchronous", "Synchronous + OneBit(two_step=True)", "DiLoCo(2)", "Sharded(1) + bf16"}
CASES = [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in METHODS]
# What nobody can say before, or only a user's program can.
WITHOUT = {"Threshold", "Auto"}


class Case:
    """A method, its cost for the model above, and its training."""

    def __init__(self, name: str) -> None:
        (self.method,) = planned_methods(name)
        chosen = self.method.optimizer
        self.cost: MethodCost = cost_of(
            self.method.strategy, chosen and chosen.kind, chosen and chosen.options
        )

    def job(self, hosts: int, optimizer: str = "sgd") -> tuple[Sizes, World]:
        """The model and the ranks, as the planner has them."""
        order = reversed(range(len(SHAPES)))
        gradients = tuple(Gradient(f"{i}", i, SHAPES[i], 4, 2.0 - 0.1 * i) for i in order)
        cluster = Cluster(hosts, mpisgd.size() // hosts, Link(0.0, 1e9), Link(0.0, 1e9))
        profile = StepProfile("model", 1, 1.0, 1.0, 1.0, gradients, optimizer)
        job = PlannedJob(cluster, profile, self.method.compression, overlap=False)
        return job.sizes, job.world

    def train(self, group, momentum=0.0, **options):
        """A function that takes so many steps, and the optimizer."""
        params: list[torch.nn.Parameter] = []
        slopes: list[torch.Tensor] = []
        made: list[torch.optim.Optimizer] = []

        def step(count: int) -> None:
            if not made:
                generator = torch.Generator().manual_seed(0)
                params.extend(torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES)
                generator.manual_seed(mpisgd.rank())
                slopes.extend(torch.randn(shape, generator=generator) for shape in SHAPES)
                chosen = self.method.optimizer
                if chosen is None:
                    sgd = torch.optim.SGD(params, lr=1e-3, momentum=momentum, foreach=False)
                    made.append(self.method.distribute(sgd, group=group, overlap=False, **options))
                else:
                    made.append(chosen.make(params, group=group))
            for _ in range(count):
                made[0].zero_grad()
                sum((param * slope).sum() for param, slope in zip(params, slopes, strict=True)).backward()
                made[0].step()

        return step, made


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_the_cost(name, monkeypatch):
    """In the steps before those that stand for all, too: a warm-up, a freeze."""
    monkeypatch.setattr(config, "shared_memory", lambda: False)
    case, group = Case(name), mpisgd.new_group()
    size = mpisgd.size()
    sizes, world = case.job(hosts=size)
    first, length = case.cost.cycle(world)
    step, made = case.train(group)
    step(0)
    done = 0
    # Those of a method that costs the same in all steps are counted once they repeat.
    for count, times in ((first, 1), (length, 1 if first else 0), (2 * length, 2)):
        before = counted(group, made[0])
        step(count)
        found = (counted(group, made[0]) - before) / max(1, times)
        steps = range(done + 1, done + count // max(1, times) + 1)
        done += count
        if not times:
            continue
        said = sum(sent_bytes(case.cost.cost(sizes, world, each), world)[ALL] for each in steps)
        least, most = 0.998 * said - 0.002 * MODEL, said + 0.002 * MODEL
        if case.method.name.startswith("ParameterServer('async'"):
            # What a rank holds itself goes through its window, too; reads are tried again while others write.
            least, most = said * size / (size - 1), 1.5 * said * size / (size - 1)
        if "asynchronous" in name:
            least = 0.0  # at the most: a rank that has not been answered asks nobody
        everyone(least <= found <= most, f"steps {steps}: sent {found:,.0f} bytes, said {said:,.0f}")


def counted(group, optimizer) -> float:
    """What a rank has sent so far on average, by what mpi4py was given."""
    communicator, size = group.queue.communicator, group.size
    given = communicator.given_bytes
    sent = communicator.sent_bytes + (size - 1) * given["Allgather"]
    sent += (size - 1) / size * (2 * given["Allreduce"] + given["Alltoall"])
    synchronizer = getattr(optimizer, "synchronizer", None)
    if (memory := getattr(synchronizer, "_memory", None)) is not None:
        sent += memory.window._memory._window.sent_bytes
    if (averaging := getattr(synchronizer, "_averaging", None)) is not None:
        sent += averaging._communicator.sent_bytes
    total = torch.tensor([float(sent)], dtype=torch.float64)
    mpisgd.all_reduce(total)
    return float(total) / size


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", CASES)
def test_peak_memory_is_that_of_the_cost(name):
    case, group = Case(name), mpisgd.new_group()
    sizes, world = case.job(hosts=1)
    first, length = case.cost.cycle(world)
    step, made = case.train(group)
    peak = peak_bytes(lambda: step(first + length), lambda: step(2 * length)) - 2 * MODEL
    found = max(referee().allgather(peak + elsewhere(name, made[0])))
    memory = peak_memory(case.cost, sizes, world)
    said = memory.total - memory.parameters
    everyone(abs(found - said) <= CHUNKS + 0.01 * said, f"kept {found:,.0f} bytes, said {said:,.0f}")


@pytest.mark.long
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["Synchronous", "Sharded(1)", "Sharded(2)"])
def test_peak_memory_with_shared_parameters_is_that_of_the_cost(name):
    """With momentum: the ranks of a host divide its state among them."""
    case, group = Case(name), mpisgd.new_group()
    sizes, world = case.job(hosts=1, optimizer="momentum")
    step, _ = case.train(group, momentum=0.9, share_parameters=True)
    peak = peak_bytes(lambda: step(1), lambda: step(2)) - MODEL  # of the slopes: parameters have gone
    found = max(referee().allgather(peak))
    memory = peak_memory(case.cost, sizes, world._replace(shares=True))
    said = memory.total - memory.parameters
    everyone(abs(found - said) <= CHUNKS + 0.01 * said, f"kept {found:,.0f} bytes, said {said:,.0f}")


@pytest.mark.long
@pytest.mark.mpi(min_size=2)
def test_peak_memory_with_state_in_files_is_that_of_the_cost(tmp_path):
    folder = mpisgd.broadcast_object(str(tmp_path))
    case = Case(f"Sharded(1, offload=Offload({folder!r}, block_bytes={2**20}))")
    group = mpisgd.new_group()
    sizes, world = case.job(hosts=1, optimizer="momentum")
    step, _ = case.train(group, momentum=0.9)
    blocks = 2 * 3 * 2**20  # two are read ahead and two wait to be written: in memory that is not torch's
    found = blocks + peak_bytes(lambda: step(1), lambda: step(2)) - 2 * MODEL
    memory = peak_memory(case.cost, sizes, world)
    said = memory.total - memory.parameters
    everyone(abs(found - said) <= CHUNKS + 0.01 * said, f"kept {found:,.0f} bytes, said {said:,.0f}")


def elsewhere(name: str, optimizer) -> float:
    """What lies in memory that the ranks of a host share, and not in torch's."""
    if name == "ParameterServer('sync')":
        return MODEL  # the parameters
    if name.startswith("ParameterServer('async'"):
        return max(layout.nbytes for layout in optimizer.synchronizer._memory.layouts)
    return 0.0


def test_every_public_method_is_here():
    """A method without an entry, or an entry that nothing above takes part in, fails."""
    chosen = [Case(name).method for name in METHODS]
    there = {type(each.strategy).__name__ for each in chosen}
    there |= {each.optimizer.kind.__name__ for each in chosen if each.optimizer is not None}
    there |= {type(each.compression).__name__ for each in chosen} | WITHOUT
    expected = {each.__name__ for each in (*strategies(), *compressors(), *optimizers())}
    assert expected <= there, expected - there


def test_what_depends_on_the_gradients_is_refused():
    sizes, world = Case("Synchronous").job(1)
    wire = wire_of(compress.Threshold(0.1))
    with pytest.raises(mpisgd.InvalidArgument, match="depend on the gradients"):
        list(wire.cost(sizes.buckets[0], world._replace(hosts=2), 1))


class Halved(mpisgd.Strategy):
    """A user's own: every second step the ranks exchange one message."""

    def synchronizer(self, training):
        raise NotImplementedError

    def cost(self, sizes, world, step):
        """See `mpisgd.methods.cost_kit`."""
        yield from cost_of(mpisgd.LocalSGD(2)).cost(sizes, world, step)

    def cycle(self, world):
        """See `mpisgd.methods.cost_kit`."""
        return Cycle(0, 2)


def test_a_strategy_of_a_user_has_its_cost_with_it():
    sizes, _ = Case("LocalSGD(2)").job(1)
    world = World(4, 1, wire_of(mpisgd.Compression.none))
    own, known = cost_of(Halved()), cost_of(mpisgd.LocalSGD(2))
    assert peak_memory(own, sizes, world) == peak_memory(known, sizes, world)


def test_a_strategy_without_a_cost_is_refused():
    class Unknown(mpisgd.Strategy):
        def synchronizer(self, training):
            raise NotImplementedError

    with pytest.raises(mpisgd.InvalidArgument, match="is not planned"):
        cost_of(Unknown())
