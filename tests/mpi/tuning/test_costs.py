"""The cost model of a job: one for all ranks, whatever lies on their hosts."""

from __future__ import annotations

import math

import pytest
import torch
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd.collectives.all_reduce import choose_algorithm
from mpisgd.collectives.dispatch import TUNED, transport_for
from mpisgd.job.lifecycle import world
from mpisgd.job.rank_info import topology
from mpisgd.tuning import CostModel, Curve, LineSegment, MeasuredCurves
from mpisgd.tuning.profile import as_profile, built_in, default_path, find_costs, write

SHAPE = (2,)


def profile(mpi_s: float, node_s: float):
    """A profile in which both take the same time, whatever the size."""
    lines = {name: (LineSegment(math.inf, s, 0.0),) for name, s in (("mpi", mpi_s), ("node", node_s))}
    return as_profile(
        [MeasuredCurves(SHAPE, tuple(Curve(name, False, line) for name, line in lines.items()))], {}
    )


@pytest.fixture
def found(groups):
    """Find costs as `init()` does; and what this rank would warn of."""
    communicator = world().queue.communicator.duplicate()
    yield lambda: find_costs(communicator, topology().ranks_per_host)
    communicator.free()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of this rank's own, as on a host without a shared home."""
    monkeypatch.delenv("MPISGD_PROFILE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"rank {mpisgd.rank()}"))
    return tmp_path


def choices(model):
    return [model.at(SHAPE).choose(("mpi", "node"), 4**power) for power in range(1, 13)]


def test_without_a_profile_the_built_in_values_serve(found, cache):
    model, complaint = found()
    everyone(model == built_in().at(topology().ranks_per_host), model.source)
    everyone(not complaint)


@pytest.mark.parametrize("by_name", [False, True])
def test_ranks_with_different_files_choose_the_same(found, cache, monkeypatch, by_name):
    """Rank 0's says MPI, the others' say node."""
    path = default_path(topology().ranks_per_host)
    write(path, profile(1.0, 2.0) if mpisgd.rank() == 0 else profile(2.0, 1.0))
    if by_name:
        path = path.rename(path.with_name("mine.json"))
        monkeypatch.setenv("MPISGD_PROFILE", str(path))
    model, complaint = found()
    everyone(not complaint)
    same_on_all_ranks(model)
    everyone(set(choices(model)) == {"mpi"}, str(choices(model)))
    everyone(mpisgd.rank() != 0 or model.source == str(path), model.source)


def test_a_file_of_other_ranks_only_changes_nothing(found, cache):
    if mpisgd.rank() != 0:
        write(default_path(topology().ranks_per_host), profile(2.0, 1.0))
    model, complaint = found()
    everyone((model.source, complaint) == ("built-in", ""))


def test_what_a_profile_lacks_is_built_in(found, cache):
    write(default_path(topology().ranks_per_host), profile(1.0, 2.0))
    model, _ = found()
    everyone(model.at([1, 1]).seconds("ring", 2**20) == built_in().at([1, 1]).seconds("ring", 2**20))
    everyone(model.at([1, 1]).seconds("ring", 2**20) < math.inf)


@pytest.mark.parametrize("content", ["{", '{"format": "mpisgd profile", "version": 999}', "[]"])
def test_a_damaged_profile_is_one_warning_that_names_it(found, cache, content):
    path = default_path(topology().ranks_per_host)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    model, complaint = found()
    everyone(model.source == "built-in", model.source)
    everyone(str(path) in complaint if mpisgd.rank() == 0 else not complaint, complaint)


def test_a_named_profile_that_is_not_there_is_an_error_on_every_rank(found, cache, monkeypatch):
    monkeypatch.setenv("MPISGD_PROFILE", f"/nowhere/rank-{mpisgd.rank()}.json")
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        found()
    everyone("MPISGD_PROFILE='/nowhere/rank-0.json'" in caught.text, caught.text)


def test_the_built_in_values_can_be_asked_for(found, cache, monkeypatch):
    write(default_path(topology().ranks_per_host), profile(1.0, 2.0))
    monkeypatch.setenv("MPISGD_PROFILE", "built-in")
    model, complaint = found()
    everyone((model.source, complaint) == ("built-in", ""))


def test_a_group_has_the_jobs_model_for_its_own_ranks(group):
    everyone(group.costs.ranks_per_host == group.topology.ranks_per_host)
    everyone(group.costs == world().costs.at(group.topology.ranks_per_host))


def costs_of(**seconds: float) -> CostModel:
    """A model in which everything takes so long, on any ranks and for any dtype."""
    lines = {name: (LineSegment(math.inf, s, 0.0),) for name, s in seconds.items()}
    curves = tuple(Curve(name, half, line) for name, line in lines.items() for half in (False, True))
    return CostModel("test", tuple(MeasuredCurves(ranks, curves) for ranks in ((2,), (1, 1), (2, 2))))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("best", ["mpi", "own"])
def test_auto_takes_what_is_predicted_to_be_fastest(groups, monkeypatch, best):
    """MPI adds no halves, so it never gets them."""
    group = groups["world"]
    fast, slow = (1.0, 2.0) if best == "own" else (2.0, 1.0)
    model = costs_of(mpi=slow, node=fast, hierarchical=fast, all_to_all=3.0)
    monkeypatch.setattr(group, "costs", model.at(group.topology.ranks_per_host))
    own = group.transports[0].name if group.transports else "mpi"
    assert choose_algorithm(group, "auto", torch.zeros(3)) == (own if best == "own" else "mpi")
    half = choose_algorithm(group, "auto", torch.zeros(3, dtype=torch.bfloat16))
    assert half == ("all_to_all" if own == "mpi" else own)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("collective", TUNED)
def test_other_collectives_go_the_way_that_was_measured_to_be_faster(groups, monkeypatch, collective):
    group = groups["world"]
    if group.shared_memory is None:
        pytest.skip("one host with shared memory")

    def chosen(collective, nbytes):
        return transport_for(group, collective, None, nbytes, tuned=True)

    for transport in ("node", "mpi"):
        monkeypatch.setattr(group, "costs", group.costs.only(transport, collective))
        for nbytes in (4, 2**20, 2**30):
            assert (chosen(collective, nbytes) is not None) == (transport == "node")
        others = set(TUNED) - {collective}  # nobody has measured those: by their size
        assert all(chosen(other, 2**30) is not None for other in others)
