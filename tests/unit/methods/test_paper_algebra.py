"""The linear algebra that papers promise, and the cases in which they are synchronous SGD."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from paper_programs import CLOSE, Program, assert_same, by_paper, definition_of, gradient, momentum, paper_run
from torch import Tensor

import mpisgd
from mpisgd import DiLoCo, ElasticAveraging, Gossip, LocalSGD, compress
from mpisgd.methods.adasum.paper import Adasum
from mpisgd.methods.compression_kit import Compressor, TwoStepCompressor
from mpisgd.methods.diloco import paper as diloco
from mpisgd.methods.gossip.ad_psgd.paper import ADPSGD
from mpisgd.methods.paper_kit import Event, Vec
from mpisgd.methods.parameter_server.paper import ParameterServer
from mpisgd.methods.synchronous.paper import Synchronous
from mpisgd.tools.verification.paper_run import Definition

PUSH = [[0.5, 0.25, 0.25], [0.25, 0.5, 0.5], [0.25, 0.25, 0.25]]


def total(vectors: Any) -> Vec:
    return sum(vectors, Vec())


def apart(a: Vec, b: Vec) -> float:
    """The largest difference, relative to the largest element."""
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max()) / max(1.0, float(b[n].abs().max())) for n in b)


# --- nothing is lost --------------------------------------------------------------------------------------

KEPT = [
    compress.TopK(0.1),
    compress.Threshold(1.5),
    compress.RandomK(0.2),
    compress.OneBit(),
    compress.OneBit(two_step=True),
    compress.BlockQuantized(bits=2, block=7, error_feedback=True),
    compress.QSGD(4, error_feedback=True),
    compress.Natural(error_feedback=True),
    compress.PowerSGD(1),
]


@pytest.mark.parametrize("compression", KEPT, ids=repr)
def test_what_was_sent_and_the_residual_are_all_gradients(compression):
    program = Program(size=3, dyadic=False, steps=9)
    run = paper_run(program, definition_of(program, compression=compression))
    sent, given = Vec(), Vec()
    for step in range(program.steps):
        g = {rank: gradient(program, run, rank, step) for rank in run.ranks}
        given = given + total(g.values())
        sent = sent + 3.0 * run.step(g)[0]
    left = total(run.state.e.values())
    if isinstance(run.paper, TwoStepCompressor):  # the owners' errors are of the mean
        left = left + 3.0 * total(d for mine in run.state.d.values() for d in mine.values())
    assert apart(sent + left, given) < CLOSE


@pytest.mark.parametrize("nesterov", [False, True])
def test_deep_gradient_with_everything_sent_is_sgd_without_momentum(nesterov):
    program = Program(size=2, dyadic=False)
    compression = compress.DeepGradient(1.0, momentum=0.5, nesterov=nesterov)
    found = by_paper(program, definition_of(program, compression=compression))
    scale = 1.5 if nesterov else 1.0  # one look ahead of a velocity that begins at 0
    plain = Program(size=2, dyadic=False, make=lambda params: torch.optim.SGD(params, lr=0.5 * scale))
    assert_same(found, by_paper(plain, Definition(Synchronous())), CLOSE)


@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_top_k_is_a_contraction_by_as_many_elements_as_it_sends(ratio):
    program = Program(size=2)
    paper = definition_of(program, compression=compress.TopK(ratio)).paper
    assert isinstance(paper, Compressor)
    x = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    left = x - paper.C(Vec(x=x), None, None)["x"]  # type: ignore[arg-type]
    assert float(left.square().sum()) <= (1 - ratio) * float(x.square().sum())


class Drawn:
    """Numbers of torch's generator."""

    def __init__(self, seed: int) -> None:
        self._draw = torch.Generator().manual_seed(seed)

    def uniform(self, name: str, like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=self._draw, dtype=like.dtype)

    def choice(self, numel: int, count: int) -> Tensor:
        return torch.randperm(numel, generator=self._draw)[:count]


@pytest.mark.parametrize(
    ("compression", "deviations"),
    [
        (compress.QSGD(3, segment=4), 1.0),
        (compress.QSGD(3, norm="l2"), 1.0),
        (compress.TernGrad(), 1.0),
        (compress.Natural(), 1.0),
        (compress.RandomK(0.25, error_feedback=False), 1.0),
    ],
    ids=repr,
)
def test_random_compressors_have_the_gradient_as_their_expectation(compression, deviations):
    program, count = Program(size=2), 3000
    run = paper_run(program, definition_of(program, compression=compression))
    x = Vec(bias=torch.linspace(-1.0, 1.5, 8, dtype=torch.float64))
    drawn = torch.stack([run.paper.C(x, run._world(), Drawn(seed))["bias"] for seed in range(count)])
    error = (drawn.mean(0) - x["bias"]).abs()
    assert bool((error <= 5 * deviations * drawn.std(0) / math.sqrt(count) + 1e-12).all())


def test_power_sgd_of_a_matrix_of_its_rank_is_exact():
    program = Program(size=2, steps=1)
    run = paper_run(program, definition_of(program, compression=compress.PowerSGD(2)))
    draw = torch.Generator().manual_seed(5)
    left, right = (torch.randn(n, 2, generator=draw, dtype=torch.float64) for n in (6, 8))
    g = {0: Vec(matrix=left @ right.T), 1: Vec(matrix=3 * left @ right.T)}
    assert apart(run.step(g)[0], Vec(matrix=2 * left @ right.T)) < CLOSE


# --- sums that do not change ------------------------------------------------------------------------------

STILL = [
    Gossip("ring"),
    Gossip("one_peer_exponential"),
    Gossip("ring", style="combine_then_adapt"),
    LocalSGD(2),
    LocalSGD(2, warmup_steps=2),
]


@pytest.mark.parametrize("strategy", STILL, ids=repr)
def test_the_mean_of_all_models_takes_the_mean_of_all_updates(strategy):
    """So it is that of one process, if gradients do not depend on the parameters."""
    program = Program(size=4)
    found = by_paper(program, definition_of(program, strategy=strategy))
    expected = by_paper(program, Definition(Synchronous()))
    for step in range(program.steps):
        mean = total(mine[step] for mine in found) / 4
        assert apart(mean, expected[0][step]) < CLOSE


@pytest.mark.parametrize(
    "compression", [compress.TopK(0.2), compress.OneBit(), compress.RandomK(0.5)], ids=repr
)
def test_choco_keeps_the_mean_and_comes_to_it(compression):
    program = Program(size=3, steps=1)
    strategy = Gossip("ring", consensus_step=0.2)
    run = paper_run(program, definition_of(program, strategy=strategy, compression=compression))
    run.step({rank: gradient(program, run, rank, 0) for rank in run.ranks})
    mean = total(run.x.values()) / 3
    first = apart(run.x[0], mean)
    for _ in range(150):
        run.step({})
    assert apart(total(run.x.values()) / 3, mean) < CLOSE
    assert apart(run.x[0], mean) < 0.05 * first


def test_push_sum_keeps_the_sums_of_values_and_weights_and_comes_to_their_ratio():
    program = Program(size=3, steps=1)
    run = paper_run(program, definition_of(program, strategy=Gossip(PUSH, style="push_sum")))
    run.step({rank: gradient(program, run, rank, 0) for rank in run.ranks})
    weights = run.state.w
    assert len(set(weights.values())) > 1
    mean = total(weights[rank] * run.x[rank] for rank in run.ranks) / 3
    for _ in range(60):
        run.step({})
        assert math.isclose(sum(run.state.w.values()), 3.0, rel_tol=1e-12)
    assert max(apart(run.x[rank], mean) for rank in run.ranks) < CLOSE


def test_an_asynchronous_average_keeps_the_sum_whenever_it_comes():
    program = Program(size=3)
    run = paper_run(program, Definition(ADPSGD()))
    start, taken = total(run.x.values()), Vec()
    draw = torch.Generator().manual_seed(2)
    for number in range(40):
        rank = int(torch.randint(3, (), generator=draw))
        if number % 3:
            g = gradient(program, run, rank, number)
            taken = taken + 0.5 * g
            run.event(Event("step", (rank,), g))
        else:
            for what in ("ask", "answer", "take"):
                run.event(Event(what, (rank, (rank + 1) % 3)))
            both = [run.state.x[each] for each in (rank, (rank + 1) % 3)]
            assert apart(*both) < CLOSE
    assert apart(total(run.state.x.values()), start - taken) < CLOSE


def test_elastic_averaging_keeps_the_sum_of_models_and_centre():
    """What a rank is drawn by, the centre is drawn by: alpha d_i."""
    program = Program(size=4)
    run = paper_run(program, definition_of(program, strategy=ElasticAveraging(alpha=0.2)))
    everything = total([*run.x.values(), run.state.z])
    for step in range(program.steps):
        g = {rank: gradient(program, run, rank, step) for rank in run.ranks}
        run.step(g)
        everything = everything - 0.5 * total(g.values())
    assert apart(total([*run.x.values(), run.state.z]), everything) < CLOSE


def test_the_adaptive_sum_of_what_is_orthogonal_or_parallel():
    run = paper_run(Program(size=2), Definition(Adasum()))
    a, b = torch.zeros(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    a[1], b[5] = 3.0, -4.0
    assert torch.equal(run.step({0: Vec(bias=a), 1: Vec(bias=b)})[0]["bias"], a + b)
    assert torch.equal(run.step({0: Vec(bias=a), 1: Vec(bias=a)})[0]["bias"], a)
    assert torch.equal(run.step({0: Vec(bias=a), 1: {}})[0]["bias"], a)


# --- synchronous SGD --------------------------------------------------------------------------------------

SYNCHRONOUS = [
    {"strategy": LocalSGD(1)},
    {"strategy": LocalSGD(99, warmup_steps=99)},
    {"strategy": LocalSGD(hierarchy={"host": 1, "job": 4})},
    {"strategy": DiLoCo(1, outer_options={"lr": 1.0})},
    {"strategy": Gossip("complete")},
    {"compression": compress.TopK(1.0)},
    {"compression": compress.Threshold(1e-300)},
    {"compression": compress.RandomK(1.0)},
    {"compression": compress.PowerSGD(8, min_compression_rate=0.1)},
    {"compression": compress.PerHost(compress.TopK(0.1))},
    {"strategy": Gossip("complete", consensus_step=1.0), "compression": compress.TopK(1.0)},
]


@pytest.mark.parametrize("options", SYNCHRONOUS, ids=repr)
def test_in_a_special_case_it_is_synchronous_sgd(options):
    program = Program(size=3, dyadic=False, max_norm=0.0)
    found = by_paper(program, definition_of(program, **options))
    assert_same(found, by_paper(program, Definition(Synchronous())), 10 * CLOSE)


def test_outer_steps_of_size_one_without_momentum_are_local_sgd():
    program = Program(make=momentum)
    expected = by_paper(program, definition_of(program, strategy=LocalSGD(3)))
    assert_same(by_paper(program, Definition(diloco.DiLoCo(H=3, lr=1.0, mu=0.0))), expected, 0.0)


def test_a_parameter_server_that_all_push_to_in_turn_is_synchronous_sgd():
    """Staleness 0: gradients of a step are all taken at the parameters from before it."""
    program = Program(size=4)
    run = paper_run(program, Definition(ParameterServer(share=0.25, bound=0)))
    expected = by_paper(program, Definition(Synchronous()))
    for step in range(program.steps):
        g = {rank: gradient(program, run, rank, step) for rank in run.ranks}
        for rank in (2, 0, 3, 1):
            run.event(Event("step", (rank,), g[rank]))
            run.event(Event("push", (rank,)))
        for rank in run.ranks:
            run.event(Event("fetch", (rank,)))
        assert apart(run.x[step % 4], expected[0][step]) == 0.0


def test_a_rank_that_is_too_far_ahead_must_have_waited():
    run = paper_run(Program(size=2), Definition(ParameterServer(bound=1)))
    run.event(Event("push", (0,)))
    run.event(Event("fetch", (0,)))
    run.event(Event("push", (0,)))
    with pytest.raises(ValueError, match=r"rank 0 fetches matrix, of which .* \{0: 2, 1: 0\}"):
        run.event(Event("fetch", (0,)))


def test_a_step_between_the_ask_and_the_take_is_one_after_the_average():
    program = Program(size=2, dyadic=False, apart=True)
    after, between = (paper_run(program, Definition(ADPSGD())) for _ in range(2))
    g = gradient(program, after, 0, 0)
    for what in ("ask", "answer", "take"):
        after.event(Event(what, (0, 1)))
    after.event(Event("step", (0,), g))
    for event in (("ask", (0, 1)), ("step", (0,), g), ("answer", (0, 1)), ("take", (0, 1))):
        between.event(Event(*event))
    for rank in range(2):
        assert apart(between.state.x[rank], after.state.x[rank]) < CLOSE


def test_the_paper_of_one_rank_is_one_process():
    program = Program(size=1, dyadic=False)
    expected = by_paper(program, Definition(Synchronous()))
    for options in ({"compression": compress.TopK(0.1)}, {"strategy": LocalSGD(3)}, {"op": mpisgd.Adasum}):
        assert_same(by_paper(program, definition_of(program, **options)), expected, CLOSE)


def test_a_mean_of_hosts_of_different_sizes_is_that_of_all_ranks():
    program = Program(size=3, hosts=(2, 1), dyadic=False)
    definition = definition_of(program, compression=compress.PerHost(compress.TopK(1.0)))
    assert_same(
        by_paper(program, definition), by_paper(replace(program, hosts=()), Definition(Synchronous())), CLOSE
    )
