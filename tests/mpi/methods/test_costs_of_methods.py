"""Costs equal what is sent and kept: bytes that mpi4py was given, and memory that torch has allocated."""

from __future__ import annotations

import itertools
import tempfile

import pytest
from cost_cases import MethodCase, methods, placements, sent_so_far
from divided_cost_cases import layouts, pipelines
from peak_meter import peak_bytes
from pretended_hosts import group_of_hosts
from verdicts import everyone, referee

import mpisgd
from mpisgd import compress, config
from mpisgd.methods.cost_kit import Cycle, World
from mpisgd.methods.costs import cost_of, wire_of
from mpisgd.methods.peak_memory import peak_memory
from mpisgd.sharding.offload import block_cache

pytestmark = pytest.mark.mpi(min_size=2)


def cases(ratio: float | None = None, turn: int = 0):
    """All, with names; of the short ones each second one is not long, from number `turn` on."""
    others = placements(tempfile.gettempdir()), pipelines(), layouts()
    found = sorted(itertools.chain(methods(ratio), *others), key=lambda case: not case.is_short)
    return [
        pytest.param(case, id=case.name, marks=() if case.is_short and i % 2 == turn else pytest.mark.long)
        for i, case in enumerate(found)
    ]


BY_DATA = compress.Threshold


def refused(case) -> bool:
    """Whether a cost says that nobody can know it before; it must, where that is so."""
    if not isinstance(case, MethodCase) or type(case.compressor) is not BY_DATA:
        return False
    with pytest.raises(mpisgd.InvalidArgument, match="depend on the gradients"):
        case.ops(mpisgd.size(), range(1, 9))
    return True


def skip_replicas(case) -> None:
    if getattr(case, "replicas", None) and mpisgd.size() != sum(case.replicas):
        pytest.skip("has another number of ranks")


@pytest.mark.parametrize("case", cases())
def test_bytes_are_those_of_the_cost(case, monkeypatch, request):
    """In the steps before those that stand for all, too: a warm-up, a freeze."""
    if refused(case):
        return
    skip_replicas(case)
    request.addfinalizer(case.close)  # also where it fails: a group of torch's would be in the way of others
    monkeypatch.setattr(config, "shared_memory", lambda: False)
    with group_of_hosts(range(mpisgd.size())) as group:
        at_end, kept = group.job.at_end, len(group.job.at_end)
        case.make(group)
        case.steps(0)
        first, length = case.cycle()
        begin = 0
        for count in filter(None, (first, length, 2 * length)):
            steps, begin = range(begin + 1, begin + count + 1), begin + count
            before = sent_so_far()
            case.steps(count)
            found = sent_so_far() - before
            if case.mean_of_ranks:
                found = sum(referee().allgather(found)) / mpisgd.size()
            range_ = case.said_bytes(steps)
            text = f"{steps}: sent {found:,.0f} bytes, said {range_.said:,.0f}"
            everyone(range_.least <= found <= range_.most, text)
        for free in at_end[kept:]:  # windows end before their group does
            free()
        del at_end[kept:]


@pytest.mark.parametrize("case", cases(ratio=0.01, turn=1))
def test_peak_memory_is_that_of_the_cost(case, monkeypatch, request):
    if refused(case):
        return
    skip_replicas(case)
    request.addfinalizer(case.close)
    blocks, aligned = [0], block_cache.aligned_memory

    def counted(nbytes):
        blocks.append(nbytes)
        return aligned(nbytes)

    monkeypatch.setattr(block_cache, "aligned_memory", counted)
    case.watch(monkeypatch)
    group = mpisgd.new_group()
    first, length = case.cycle()

    def begin() -> None:
        case.make(group)
        case.steps(first + length)

    if case.begins_unseen:
        begin()
    peak = peak_bytes(
        begin if not case.begins_unseen else lambda: None,
        lambda: case.steps(length if case.begins_unseen else 2 * length),
    )
    found = peak + case.beside(sum(blocks))
    range_ = case.said_peak()
    text = f"kept {found:,.0f} bytes, said {range_.said:,.0f}"
    if case.mean_of_ranks:
        found = max(referee().allgather(found))
    everyone(range_.least <= found <= range_.most, text)


def test_what_depends_on_the_gradients_is_refused():
    case = MethodCase(mpisgd.Synchronous(), mpisgd.Compression.none)
    sizes, world = case.job(1).sizes, case.job(1).world
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
    sizes = MethodCase(mpisgd.LocalSGD(2), mpisgd.Compression.none).job(1).sizes
    world = World(4, 1, wire_of(mpisgd.Compression.none))
    own, known = cost_of(Halved()), cost_of(mpisgd.LocalSGD(2))
    assert peak_memory(own, sizes, world) == peak_memory(known, sizes, world)


def test_a_strategy_without_a_cost_is_refused():
    class Unknown(mpisgd.Strategy):
        def synchronizer(self, training):
            raise NotImplementedError

    with pytest.raises(mpisgd.InvalidArgument, match="is not planned"):
        cost_of(Unknown())
