"""Steps of strategies against their closed forms: what is hidden, what is not, how many bytes."""

from __future__ import annotations

import time

import pytest
import torch
from plan_examples import ALPHA, RATE, cluster, predicted, profile

from mpisgd.compress import PerHost, TopK
from mpisgd.compress.compressor import BucketLayout
from mpisgd.errors import InvalidArgument
from mpisgd.methods.from_text import compressor_from_text
from mpisgd.methods.synchronous.synchronous import Synchronous
from mpisgd.tools.bench.strategies.method import Method
from mpisgd.tools.plan.cluster import Cluster, Link
from mpisgd.tools.plan.methods import DEFAULT_METHODS, planned_methods
from mpisgd.tools.plan.network import FatTree
from mpisgd.tools.plan.prediction import predict, predict_all

COMPUTE, OPTIMIZER = 3.0, 0.5
CHECK = ALPHA


def all_reduce_s(nbytes, hosts=4):
    """Of the two rounds between hosts."""
    return 2 * (ALPHA + (hosts - 1) / hosts * nbytes / RATE)


def test_one_rank_sends_nothing_and_waits_for_nobody():
    found = predicted("Synchronous", cluster(1))
    assert found.step_s == pytest.approx(COMPUTE + OPTIMIZER)
    assert (found.step.sent_bytes, found.step.traffic, found.exposed_s) == (0, {}, 0)


def test_without_overlap_the_gradients_follow_backward():
    """Two gradients of 4 MB: each alone in its bucket."""
    found = predicted("Overlap(False)")
    expected = COMPUTE + CHECK + 2 * all_reduce_s(4e6) + OPTIMIZER
    assert found.step_s == pytest.approx(expected, rel=1e-6)


def test_with_overlap_the_first_gradient_is_hidden_behind_the_second_ones_backward():
    found = predicted("Synchronous")
    assert all_reduce_s(4e6) < 1.0  # shorter than what is left of backward
    assert found.step_s == pytest.approx(COMPUTE + CHECK + all_reduce_s(4e6) + OPTIMIZER, rel=1e-6)


def test_on_a_slow_link_a_step_is_what_comes_before_the_first_gradient_and_the_link():
    slow = Cluster(4, 1, Link(ALPHA, RATE / 100), Link(1e-9, 1e15), memory_bytes_per_s=1e15)
    found = predicted("Synchronous", slow)
    link_s = 2 * (CHECK + 2 * (ALPHA + 0.75 * 4e6 / (RATE / 100)))
    assert found.step_s == pytest.approx(2.0 + link_s + OPTIMIZER, rel=1e-6)
    assert found.bound == "links between hosts"


def test_what_sending_takes_of_a_core_is_missing_to_backward():
    """The first gradient is sent while backward computes, and would take all of the core."""
    link = Link(ALPHA, RATE, cpu_s_per_byte=1 / (2 * RATE))
    busy = Cluster(4, 1, link, Link(1e-9, 1e15), memory_bytes_per_s=1e15)
    more = predicted("Synchronous", busy).step_s - predicted("Synchronous").step_s
    assert 0.2 * all_reduce_s(4e6) < more < all_reduce_s(4e6)


@pytest.mark.parametrize("period", [1, 2, 8])
def test_local_sgd_pays_for_a_mean_every_period(period):
    found = predicted(f"LocalSGD({period})")
    mean_s = CHECK + 2 * all_reduce_s(4e6)
    assert found.step_s == pytest.approx(COMPUTE + OPTIMIZER + mean_s / period, rel=1e-6)
    assert found.step.sent_bytes == pytest.approx(2 * 0.75 * 8e6 / period)


def test_means_of_local_strategies_take_the_same():
    expected = predicted("LocalSGD(8)").step_s
    for method in ("DiLoCo(8)", "ElasticAveraging(every=8)"):
        assert predicted(method).step_s == pytest.approx(expected, rel=1e-6)


def test_an_outer_step_that_overlaps_is_hidden():
    found = predicted("DiLoCo(8, overlap_steps=1)")
    assert found.step_s == pytest.approx(COMPUTE + OPTIMIZER, rel=1e-6)


def test_gossip_sends_all_parameters_to_each_neighbour():
    found = predicted("Gossip('ring')")
    exchange_s = 2 * 2 * (ALPHA + 4e6 / RATE)
    assert found.step_s == pytest.approx(COMPUTE + OPTIMIZER + CHECK + exchange_s, rel=1e-6)
    assert found.step.sent_bytes == pytest.approx(2 * 8e6)
    assert predicted("Gossip('one_peer_exponential')").step.sent_bytes == pytest.approx(8e6)


def test_a_divided_optimizer_takes_a_share_of_its_time_and_as_many_bytes():
    found, synchronous = predicted("Sharded(stage=1)"), predicted("Synchronous")
    assert found.step.optimizer_s == OPTIMIZER / 4
    assert found.step.sent_bytes == pytest.approx(synchronous.step.sent_bytes)
    assert predicted("FullyShard").step.sent_bytes == pytest.approx(1.5 * synchronous.step.sent_bytes)
    assert predicted("FullyShard(reshard_after_forward=False)").step.sent_bytes == pytest.approx(
        synchronous.step.sent_bytes
    )


@pytest.mark.parametrize(
    "text", ["bf16", "PowerSGD(rank=2)", "TopK(ratio=0.01)", "OneBit()", "QSGD(bits=4)", "SignSGD()"]
)
def test_bytes_are_those_of_the_compressors_own_formula(text):
    """Two matrices in one bucket; the reducer of the test is made on the CPU."""
    shapes = ((64, 50), (30, 20))
    step = profile(64 * 50, 30 * 20)
    gradients = tuple(g._replace(shape=s) for g, s in zip(step.gradients, shapes, strict=True))
    step = type(step)(**{**vars(step), "gradients": gradients})
    layout = BucketLayout(tuple(map(torch.Size, shapes)), torch.float32)
    expected = compressor_from_text(text).reducer(layout).bytes_on_the_wire(4)
    assert predicted(f"Synchronous + {text}", step=step).step.sent_bytes == expected > 0


def shapes_of_resnet18():
    """ResNet-18 for images of 32 x 32 pixels (He and others 2016): two blocks of each width."""
    shapes, before = [(64, 3, 3, 3), (64,), (64,)], 64
    for width in (64, 128, 256, 512):
        for _ in range(2):
            shapes += [(width, before, 3, 3), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            shapes += [(width, before, 1, 1), (width,), (width,)] if before != width else []
            before = width
    return [*shapes, (10, 512), (10,)]


@pytest.mark.parametrize(("rank", "published"), [(1, 243), (2, 136), (4, 72)])
def test_the_bytes_of_power_sgd_are_those_of_its_paper(rank, published):
    """Vogels and others 2019, table 3: ResNet-18 on 16 GPUs."""
    shapes = shapes_of_resnet18()
    step = profile(*(torch.Size(shape).numel() for shape in shapes))
    gradients = tuple(g._replace(shape=s) for g, s in zip(step.gradients, shapes, strict=True))
    step = type(step)(**{**vars(step), "gradients": gradients})
    sent = [
        predicted(f"Synchronous + {how}", cluster(16), step).step.sent_bytes
        for how in ("none", f"PowerSGD(rank={rank})")
    ]
    assert round(sent[0] / sent[1]) == published


def test_per_host_compresses_once_for_each_host():
    step = profile(10**6)
    inner = predicted("Synchronous + TopK(ratio=0.01)", cluster(4, 1), step).step
    compressor = PerHost(TopK(ratio=0.01))
    outer = predict(cluster(4, 2), step, Method("per host", Synchronous(), compressor))
    assert outer.step.sent_bytes == inner.sent_bytes


def test_stragglers_matter_less_to_those_who_meet_seldom():
    spread = cluster(16, compute_spread=0.1)
    waits = {
        m: predicted(m, spread).straggler_s
        for m in ("Synchronous", "LocalSGD(4)", "Gossip('ring', style='asynchronous')")
    }
    assert waits["Synchronous"] == pytest.approx(2 * waits["LocalSGD(4)"])
    assert waits["Gossip('ring', style='asynchronous')"] == 0


@pytest.mark.parametrize("method", DEFAULT_METHODS)
def test_faster_links_and_fewer_bytes_never_make_a_step_longer(method):
    fast = Cluster(4, 1, Link(ALPHA / 2, RATE * 2), Link(1e-9, 1e15), memory_bytes_per_s=1e15)
    small = profile(10**5, 10**5)
    now = predicted(method).step_s
    assert predicted(method, fast).step_s <= now * (1 + 1e-9)
    assert predicted(method, step=small).step_s <= now * (1 + 1e-9)


def test_every_method_is_planned_at_a_hundred_thousand_ranks_in_seconds():
    large = Cluster(12_500, 8, Link(1e-5, 12.5e9), Link(5e-6, 2e11), FatTree(32, 4.0), within_is_shared=False)
    begun = time.perf_counter()
    found, left_out = predict_all([large], profile(*[10**6] * 10), planned_methods(";".join(DEFAULT_METHODS)))
    assert not left_out
    assert len(found) == len(DEFAULT_METHODS)
    assert time.perf_counter() - begun < 60  # takes 3 s; only a mistake of another order is to be found here


def test_a_method_that_is_not_planned_is_left_out_with_its_reason():
    methods = planned_methods("Synchronous; ParameterServer('async', servers=(0,))")
    found, left_out = predict_all([cluster()], profile(), methods)
    assert [each.method for each in found] == ["Synchronous"]
    assert "is not planned" in left_out[0].reason


def test_what_does_not_fit_comes_last():
    small = cluster(4, memory_bytes=20e6)
    found, _ = predict_all([small], profile(optimizer="adamw"), planned_methods("DiLoCo(100); FullyShard"))
    assert [(each.method, each.fits) for each in found] == [("FullyShard", True), ("DiLoCo(100)", False)]


@pytest.mark.parametrize("text", ["Synchron", "Sharded(stage=3)", "FullyShard(1, 2)", "Overlap(overlap=)"])
def test_a_method_that_is_misspelt_is_refused(text):
    with pytest.raises(InvalidArgument):
        planned_methods(text)
