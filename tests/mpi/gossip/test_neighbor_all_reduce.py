"""`neighbor_all_reduce` against the mixing matrix; who sends to whom; mistakes."""

from __future__ import annotations

import pytest
import torch
from verdicts import everyone, raises_everywhere

import mpisgd
from mpisgd import config
from mpisgd.errors import CollectiveMismatch, InvalidArgument, UnsupportedOp
from mpisgd.gossip import MixingMatrix, OnePeerExponential, RandomPairs, Ring, Star
from mpisgd.gossip.graphs import NAMED_GRAPHS

NUMEL = 1000


def names(size: int) -> list[str]:
    return [name for name in NAMED_GRAPHS if name != "hypercube" or size & (size - 1) == 0]


def inputs(size: int, numel: int = NUMEL, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """[size, numel], different for every rank and element."""
    return torch.sin(torch.arange(size * numel, dtype=torch.float64)).view(size, numel).to(dtype)


def directed(size: int) -> torch.Tensor:
    """Column-stochastic, not symmetric: rank r keeps a part of its own, and the next ones get the rest."""
    weights = torch.zeros(size, size, dtype=torch.float64)
    for j in range(size):
        targets = {j: 2.0, (j + 1) % size: 1.0}
        if j % 2 == 0:
            targets[(j + 2) % size] = targets.get((j + 2) % size, 0) + 1.0
        for i, share in targets.items():
            weights[i, j] = share / sum(targets.values())
    return weights


@pytest.fixture(params=["shared memory", "messages"])
def any_group(request, monkeypatch):
    """All ranks, with and without shared memory."""
    if request.param == "messages":
        monkeypatch.setattr(config, "shared_memory", lambda: False)
    return mpisgd.new_group()


def test_it_is_the_product_with_the_mixing_matrix(any_group):
    size, rank = any_group.size, any_group.rank
    for topology in [*names(size), directed(size), RandomPairs(7)]:
        given = topology if isinstance(topology, torch.Tensor) else None
        for step in range(3):
            graph = NAMED_GRAPHS.get(topology, topology) if isinstance(topology, str) else topology
            matrix = graph.matrix(size, step) if given is None else given
            mine = inputs(size)[rank].clone()
            mpisgd.neighbor_all_reduce(mine, topology, any_group, step=step)
            wrong = (mine - (matrix @ inputs(size))[rank]).abs().max().item()
            everyone(wrong <= 1e-14, f"{topology}, step {step}: {wrong}")


def test_large_messages_go_to_one_neighbour_after_the_other(any_group):
    size, rank = any_group.size, any_group.rank
    values = inputs(size, 40_000)
    for name in names(size):
        mine = values[rank].clone()
        mpisgd.neighbor_all_reduce(mine, name, any_group)
        wrong = (mine - (NAMED_GRAPHS[name].matrix(size) @ values)[rank]).abs().max().item()
        everyone(wrong <= 1e-14, f"{name}: {wrong}")


@pytest.mark.parametrize("numel", [0, 1, 3 * 2**17 + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
def test_any_size_and_floating_dtype(any_group, numel, dtype):
    size, rank = any_group.size, any_group.rank
    mine = inputs(size, numel, dtype)[rank].clone()
    mpisgd.neighbor_all_reduce(mine, "ring", any_group)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    exact = (Ring().matrix(size).to(wide) @ inputs(size, numel, dtype).to(wide))[rank]
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.complex128: 1e-14}[dtype]
    everyone(torch.allclose(mine.to(wide), exact, rtol=tolerance, atol=tolerance), f"{mine}, {exact}")


def test_several_tensors_of_several_dtypes_and_layouts(any_group):
    size, rank = any_group.size, any_group.rank
    wide = inputs(size, 200_000)
    tensors = [
        inputs(size, 12)[rank].view(3, 4).clone().t(),
        wide[rank].clone(),
        inputs(size, 7, torch.float32)[rank].clone(),
        inputs(size, 5)[rank].clone(),
    ]
    mpisgd.neighbor_all_reduce_coalesced(tensors, "exponential", any_group)
    matrix = NAMED_GRAPHS["exponential"].matrix(size)
    everyone(torch.allclose(tensors[0].t().reshape(-1), (matrix @ inputs(size, 12))[rank], atol=1e-14))
    everyone(torch.allclose(tensors[1], (matrix @ wide)[rank], atol=1e-14))
    everyone(torch.allclose(tensors[2].double(), (matrix @ inputs(size, 7))[rank], atol=1e-6))
    everyone(torch.allclose(tensors[3], (matrix @ inputs(size, 5))[rank], atol=1e-14))
    mpisgd.neighbor_all_reduce_coalesced([], "exponential", any_group)


def test_asynchronous_ones_keep_their_order(any_group):
    size, rank = any_group.size, any_group.rank
    mine = inputs(size)[rank].clone()
    works = [mpisgd.neighbor_all_reduce(mine, "ring", any_group, async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    expected = (torch.linalg.matrix_power(Ring().matrix(size), 3) @ inputs(size))[rank]
    everyone(torch.allclose(mine, expected, rtol=0, atol=1e-13))


def test_a_complete_graph_gives_the_same_bits_on_all_ranks(any_group):
    mine = inputs(any_group.size, dtype=torch.float32)[any_group.rank].clone()
    mpisgd.neighbor_all_reduce(mine, "complete", any_group)
    mpisgd.check_in_sync([("mean", mine)], any_group)


@pytest.mark.parametrize("name", ["ring", "torus", "star", "complete", "exponential"])
def test_a_hundred_rounds_reach_the_mean_at_the_rate_of_the_spectral_gap(name):
    size, rank = mpisgd.size(), mpisgd.rank()
    mine, mean = inputs(size)[rank].clone(), inputs(size).mean(0)
    rate = 1 - NAMED_GRAPHS[name].spectral_gap(size)
    first = torch.linalg.norm(inputs(size) - mean).item()
    for num_rounds in range(1, 101):
        mpisgd.neighbor_all_reduce(mine, name)
        if num_rounds in (1, 5, 20, 100):
            square = (mine - mean).square().sum()
            mpisgd.all_reduce(square)
            distance = square.sqrt().item()
            everyone(distance <= first * rate**num_rounds + 1e-12, f"{num_rounds}: {distance}, {rate}")
    everyone((mine - mean).abs().max().item() <= max(1e-12, first * rate**100))


# -- bytes ------------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_only_neighbours_are_sent_to(monkeypatch):
    monkeypatch.setattr(config, "shared_memory", lambda: False)
    group = mpisgd.new_group()
    size, rank, communicator = group.size, group.rank, group.queue.communicator
    sent: list[tuple[int, int]] = []
    isend = communicator.isend

    def noted(tensor, dst, tag=0):
        sent.append((dst, tensor.nbytes))
        return isend(tensor, dst, tag)

    monkeypatch.setattr(communicator, "isend", noted)
    for graph in [NAMED_GRAPHS[name] for name in names(size)]:
        for step in range(3):
            before = communicator.sent_bytes
            sent.clear()
            mpisgd.neighbor_all_reduce(torch.ones(NUMEL), graph, group, step=step)
            matrix = graph.matrix(size, step)
            mine = [i for i in range(size) if i != rank and matrix[i, rank] != 0]
            everyone(sorted(sent) == [(dst, 4 * NUMEL) for dst in mine], f"{graph}: {sent}, {mine}")
            everyone(communicator.sent_bytes - before == 4 * NUMEL * len(mine))


# -- mistakes ---------------------------------------------------------------------------------------


def test_matrices_that_are_not_stochastic_are_refused_on_every_rank():
    size = mpisgd.size()
    with raises_everywhere(InvalidArgument):
        mpisgd.neighbor_all_reduce(torch.ones(2), torch.full((size, size), 0.9 / size))
    with raises_everywhere(InvalidArgument):
        mpisgd.neighbor_all_reduce(torch.ones(2), [[1 / (size + 1)] * (size + 1)] * (size + 1))
    with raises_everywhere(UnsupportedOp):
        mpisgd.neighbor_all_reduce(torch.ones(2, dtype=torch.int64), "ring")
    mpisgd.barrier()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_disagree_are_told_so():
    rank = mpisgd.rank()
    mine = torch.full((3,), float(rank))
    with raises_everywhere(CollectiveMismatch) as caught:
        mpisgd.neighbor_all_reduce(mine, "ring" if rank else "star")
    everyone("Ring()" in caught.text and "Star()" in caught.text, caught.text)
    with raises_everywhere(CollectiveMismatch) as caught:
        mpisgd.neighbor_all_reduce(mine, RandomPairs(), step=rank)
    everyone("step 0" in caught.text and "step 1" in caught.text, caught.text)
    everyone(bool((mine == rank).all()), f"{mine}")


def test_what_does_not_change_from_step_to_step_takes_any():
    """So a counter that differs matters only where it counts."""
    mine = torch.ones(2)
    mpisgd.neighbor_all_reduce(mine, Star(), step=mpisgd.rank())
    mpisgd.neighbor_all_reduce(mine, OnePeerExponential(), step=0)
    mpisgd.neighbor_all_reduce(mine, MixingMatrix(Ring().matrix(mpisgd.size())))
    everyone(torch.allclose(mine, torch.ones(2)))
