"""Strategies are what their papers say, in the situations that a program can be in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paper_programs import (
    CLOSE,
    LR,
    Program,
    assert_equal,
    assert_same,
    by_mpisgd,
    by_paper,
    momentum,
    paper_run,
    paper_step,
)

import mpisgd
from mpisgd import DiLoCo, ElasticAveraging, Gossip, LocalSGD, SparseLoCo, compress
from mpisgd.methods.gossip.d_psgd.paper import DPSGD
from mpisgd.methods.slow_mo.paper import SlowMo
from mpisgd.tools.verification.paper_run import Definition

DIRECTED = [[0.25, 0.5, 0.0], [0.75, 0.5, 0.0], [0.0, 0.0, 1.0]]
PUSH = [[0.5, 0.25, 0.25], [0.25, 0.5, 0.5], [0.25, 0.25, 0.25]]
HALVES = [[0.5, 0.25, 0.0, 0.25], [0.25, 0.5, 0.25, 0.0], [0.0, 0.25, 0.5, 0.25], [0.25, 0.0, 0.25, 0.5]]
OUTER = {"outer_options": {"lr": 0.5, "momentum": 0.5, "nesterov": True}}

# Of a power of two ranks, with weights and rates that are dyadic, no bit may differ.
EXACT = [
    LocalSGD(3),
    LocalSGD(2, warmup_steps=2),
    LocalSGD(2, growth=1.5, max_sync_every=3),
    DiLoCo(3, **OUTER),
    DiLoCo(4, fragments=2, **OUTER),
    DiLoCo(3, fragments=2, overlap_steps=1, overlap_alpha=0.25, **OUTER),
    DiLoCo.slow_momentum(2, momentum=0.5),
    SparseLoCo(2, keep=2, chunk=7, error_decay=0.5, lr=0.5),
    SparseLoCo(3, keep=1, chunk=5, error_decay=1.0),
    ElasticAveraging(alpha=0.125, every=2),
    Gossip(HALVES),
    Gossip(HALVES, style="combine_then_adapt"),
    Gossip(HALVES, every=2),
    Gossip("one_peer_exponential"),
    Gossip(HALVES, style="push_sum"),
]
OTHERS = [
    LocalSGD(3),
    LocalSGD(hierarchy={"host": 1, "job": 3}),
    DiLoCo(3),
    DiLoCo(3, fragments=2, overlap_steps=1),
    SparseLoCo(2),
    SparseLoCo(3, keep=3, chunk=10, bits=4, lr=0.8),
    ElasticAveraging(every=2),
    Gossip("ring"),
    Gossip("exponential", style="combine_then_adapt"),
    Gossip("random_pairs"),
    Gossip(PUSH, style="push_sum"),
    Gossip(PUSH, style="push_sum", every=2),
]
COMPRESSED = [
    (LocalSGD(2), compress.TopK(0.2)),
    (LocalSGD(2, warmup_steps=3), compress.TopK(0.2)),
    (LocalSGD(2), compress.PowerSGD(1)),
    (LocalSGD(2), compress.OneBit()),
    (LocalSGD(2), compress.OneBit(two_step=True)),
    (LocalSGD(2), compress.PerHost(compress.TopK(0.2))),
    (LocalSGD(2), mpisgd.Compression.bf16),
    (DiLoCo(2), compress.TopK(0.2)),
    (DiLoCo(2), compress.QSGD(4, segment=10)),
    (DiLoCo(4, fragments=2), compress.TopK(0.2)),
    (DiLoCo(2, fragments=2), compress.RandomK(0.3)),
    (DiLoCo(3, fragments=2, overlap_steps=1), compress.BlockQuantized(8, block=7, error_feedback=True)),
    (LocalSGD(2), compress.PerHost(compress.BlockQuantized(error_feedback=True))),
    (DiLoCo(3, fragments=2, overlap_steps=1), compress.ChunkTopK(keep=2, chunk=9)),
    (LocalSGD(2, warmup_steps=3), compress.ChunkTopK(keep=2, chunk=9)),
    (ElasticAveraging(every=2), compress.ChunkTopK(keep=2, chunk=9, error_decay=1.0)),
    (ElasticAveraging(every=2), compress.ChunkTopK(keep=5, chunk=9, error_decay=0.0)),
    (Gossip("ring", consensus_step=0.3), compress.ChunkTopK(keep=2, chunk=9)),
    (ElasticAveraging(every=2), compress.TopK(0.2)),
    (ElasticAveraging(every=2), compress.OneBit()),
    (ElasticAveraging(every=2), compress.RandomK(0.5)),
    (Gossip("ring", consensus_step=0.3), compress.TopK(0.2)),
    (Gossip("ring", consensus_step=0.3, every=2), compress.RandomK(0.3)),
    (Gossip("ring", consensus_step=0.3), compress.RandomK(0.3, error_feedback=False)),
    (Gossip("ring", consensus_step=0.3), compress.OneBit()),
    (Gossip("ring", consensus_step=0.3), compress.OneBit(two_step=True)),
    (Gossip("ring", consensus_step=0.3), compress.QSGD(4)),
    (Gossip("ring", consensus_step=0.3), compress.Natural()),
]


def on_one_rank(rank: int, step: int) -> list[str]:
    return ["bias", "cube"] if rank == 1 and step in (2, 3) else []


FOUR = Program(size=4, hosts=(2, 2), make=momentum)
SITUATIONS = {
    "momentum": FOUR,
    "accumulated": replace(FOUR, passes=lambda rank, step: 2, options={"backward_passes_per_step": 2}),
    "unused on a rank": replace(FOUR, unused=on_one_rank),
    "no backward on a rank": replace(FOUR, passes=lambda rank, step: int(rank != 1 or step != 2)),
}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("strategy", EXACT, ids=repr)
def test_bit_for_bit(strategy, situation):
    assert_equal(SITUATIONS[situation], strategy=strategy)


@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("strategy", OTHERS, ids=repr)
def test_but_for_roundings(strategy, max_norm):
    program = Program(size=3, hosts=(2, 1), dyadic=False, max_norm=max_norm, make=momentum)
    assert_equal(program, strategy=strategy)


@pytest.mark.parametrize(("strategy", "compression"), COMPRESSED, ids=repr)
def test_with_a_compressor_on_the_wire(strategy, compression):
    program = Program(size=3, hosts=(2, 1), dyadic=False, rows=16)  # of 169 elements: other chunks by host
    assert_equal(program, strategy=strategy, compression=compression)


def test_slow_momentum_in_the_symbols_of_its_paper():
    program = Program(make=momentum)
    found = by_mpisgd(program, strategy=DiLoCo.slow_momentum(2, momentum=0.25, lr=0.5))
    expected = by_paper(program, Definition(SlowMo(tau=2, gamma=LR, beta=0.25, alpha=0.5)))
    assert_same(found, expected, 0.0)


def test_weights_of_a_ring_by_hand():
    """In other tests the paper has the weights of the graph."""
    third = [[1 / 3] * 3] * 3
    program = Program(size=3, dyadic=False)
    expected = by_paper(program, Definition(DPSGD(lambda size, k: third)))
    assert_same(by_mpisgd(program, strategy=Gossip("ring")), expected, CLOSE)


def test_the_paper_of_elastic_averaging_differs_from_its_equations_by_alpha_times_an_update():
    """With the force at the x_i of the gradient, as in the paper, x_i would be alpha u lower."""
    program = Program(size=2, steps=1)
    alpha = 0.125
    (mine, _), start = by_mpisgd(program, strategy=ElasticAveraging(alpha=alpha)), program.start()
    (term,) = program.terms(0, 0)
    for name, x in start.items():
        update = 0.5 * term[name]
        equations = x.detach() - update - alpha * (x.detach() - x.detach())
        assert torch.equal(mine[0][name], equations + alpha * update)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sparse_loco_is_diloco_by_chunk_top_k(size):
    """To the last bit, whatever the gradients are."""
    program = Program(size=size, dyadic=False, make=momentum, steps=9)
    found = by_mpisgd(program, strategy=SparseLoCo(3, 2, 9, 3, 0.75, 0.625))
    sent = compress.ChunkTopK(2, 9, 3, 0.75)
    expected = by_mpisgd(program, strategy=DiLoCo(3, outer_options={"lr": 0.625}), compression=sent)
    assert_same(found, expected, 0.0)
    plain = by_mpisgd(program, strategy=DiLoCo(3, outer_options={"lr": 0.625}))
    if size > 1:
        assert not torch.equal(found[0][-1]["matrix"], plain[0][-1]["matrix"])


def test_equal_magnitudes_are_chosen_alike():
    """Of many equals the first ones, by method and paper; their signs differ by rank."""

    class Equals(Program):
        def _gradient(self, rank, step, number, name):
            shape = self.shapes[name]
            signs = torch.arange(torch.Size(shape).numel()).add(rank + step) % 3 - 1
            return signs.double().view(shape)

    for strategy in (SparseLoCo(1, keep=2, chunk=7, error_decay=1.0), SparseLoCo(2, keep=3, chunk=8, lr=0.5)):
        assert_equal(Equals(size=4, hosts=(2, 2)), strategy=strategy)


@pytest.mark.parametrize(("decay", "drifts"), [(1.0, False), (0.5, True)])
def test_a_centre_would_drift_from_what_fades_in_the_residual(decay, drifts):
    """Why `ElasticAveraging` refuses it: without gradients the ranks move on for ever."""
    sent = compress.ChunkTopK(keep=1, chunk=16, error_decay=decay).paper()
    program = Program(size=2, steps=6, dyadic=False)
    run = paper_run(program, Definition(ElasticAveraging(every=1).paper(2), sent))
    for step in range(program.steps):
        paper_step(program, run, step)
    means = []
    for count in (300, 100):
        for _ in range(count):
            run.step({rank: {} for rank in run.ranks})
        means.append(torch.stack([x["matrix"] for x in run.x.values()]).mean(0))
    moved = float((means[1] - means[0]).abs().max())
    assert moved > 0.1 if drifts else moved < 1e-6
    assert (
        bool(ElasticAveraging().goes_with.compression.why_not(compress.ChunkTopK(error_decay=decay)))
        == drifts
    )
