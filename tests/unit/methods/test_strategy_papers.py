"""Strategies are what their papers say, in the situations that a program can be in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paper_programs import CLOSE, LR, Program, assert_equal, assert_same, by_mpisgd, by_paper, momentum

import mpisgd
from mpisgd import DiLoCo, ElasticAveraging, Gossip, LocalSGD, compress
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
