"""The partitioner against all partitions there are."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn

from mpisgd.errors import InvalidArgument
from mpisgd.pipeline import LayerCost, Pop, Stash, costs_table, measure_layers, partition, split
from mpisgd.pipeline.balance import balance


def divisions(total, parts):
    """All ways to write a number as so many positive ones, in order."""
    for bars in itertools.combinations(range(1, total), parts - 1):
        ends = (0, *bars, total)
        yield [after - before for before, after in itertools.pairwise(ends)]


def layers_of(seed, count):
    rng = random.Random(seed)
    return [
        LayerCost(str(i), rng.uniform(1, 5), rng.uniform(1, 9), rng.randrange(1, 9), rng.randrange(50))
        for i in range(count)
    ]


def slowest(layers, sizes, replicas, bandwidth):
    """The time of the slowest stage or message, from the paper's formulas."""
    times, begin = [], 0
    for size, m in zip(sizes, replicas, strict=True):
        own = layers[begin : begin + size]
        compute = sum(layer.forward_s + layer.backward_s for layer in own)
        exchange = 2 * (m - 1) * sum(layer.parameter_bytes for layer in own) / bandwidth
        times.append(max(compute, exchange) / m)
        begin += size
        if begin < len(layers):
            times.append(2 * layers[begin - 1].activation_bytes / bandwidth)
    return max(times)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_no_partition_is_faster_than_the_one_that_is_found(seed, num_ranks):
    layers, bandwidth = layers_of(seed, 6), random.Random(seed).choice([0.5, 3.0, 100.0])
    found = partition(layers, num_ranks, bandwidth=bandwidth)
    best = min(
        slowest(layers, sizes, replicas, bandwidth)
        for stages in range(1, min(num_ranks, len(layers)) + 1)
        for sizes in divisions(len(layers), stages)
        for replicas in divisions(num_ranks, stages)
    )
    assert found.time_s == pytest.approx(best, rel=1e-12)
    sizes = [len(stage.layers) for stage in found.stages]
    assert slowest(layers, sizes, found.replicas, bandwidth) == pytest.approx(best, rel=1e-12)
    assert (sum(sizes), sum(found.replicas)) == (6, num_ranks)
    assert [name for stage in found.stages for name in stage.layers] == [layer.name for layer in layers]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_without_replicas_the_times_are_balanced(num_ranks):
    layers = layers_of(3, 7)
    found = partition(layers, num_ranks, replicate=False)
    times = [layer.time_s for layer in layers]
    assert found.replicas == (1,) * num_ranks
    best = min(
        max(
            sum(times[end - size : end]) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)
        )
        for sizes in divisions(7, num_ranks)
    )
    assert found.time_s == pytest.approx(best, rel=1e-12)
    assert [len(stage.layers) for stage in found.stages] == balance(times, num_ranks)


def test_a_slow_link_makes_stages_and_a_fast_one_replicas():
    heavy = [LayerCost(str(i), 1.0, 1.0, 1, 1000) for i in range(4)]
    assert partition(heavy, 4, bandwidth=10.0).replicas == (1, 1, 1, 1)
    light = [LayerCost(str(i), 1.0, 1.0, 1000, 1) for i in range(4)]
    assert partition(light, 4, bandwidth=10.0).replicas == (4,)


def test_a_partition_prints_and_splits_the_model():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Linear(8, 2))
    layers = measure_layers(model, torch.randn(3, 4), repetitions=2)
    assert [layer.name for layer in layers] == ["0", "1", "2", "3"]
    assert [layer.activation_bytes for layer in layers] == [96, 96, 96, 24]
    assert [layer.parameter_bytes for layer in layers] == [160, 0, 288, 72]
    assert all(layer.forward_s > 0 for layer in layers)
    assert model[0].weight.grad is None
    found = partition(layers, 2, replicate=False)
    parts = found.split(model)
    assert [name for part in parts for name, _ in part.named_children()] == ["0", "1", "2", "3"]
    joined = {name: value for part in parts for name, value in part.state_dict().items()}
    assert joined.keys() == model.state_dict().keys()
    assert "slowest stage or message" in str(found)
    assert "activation MB" in costs_table(layers)


def test_layers_with_skip_connections_are_measured():
    model = nn.Sequential(Stash("a"), nn.Linear(4, 4), Pop("a"), nn.Linear(4, 1))
    assert len(measure_layers(model, torch.randn(2, 4), repetitions=3)) == 4


def test_split_balances_parameters_or_takes_sizes():
    model = nn.Sequential(*(nn.Linear(n, n) for n in (2, 2, 2, 20, 2)))
    assert [len(part) for part in split(model, 3)] == [3, 1, 1]
    assert [len(part) for part in split(model, [1, 4])] == [1, 4]


@pytest.mark.parametrize(
    "make",
    [
        lambda: split(nn.Sequential(nn.Linear(1, 1)), 2),
        lambda: split(nn.Sequential(nn.Linear(1, 1)), [1, 1]),
        lambda: split(nn.Linear(1, 1), 1),
        lambda: partition([], 1),
        lambda: partition(layers_of(0, 2), 3, replicate=False),
        lambda: partition(layers_of(0, 2), 0),
        lambda: partition(layers_of(0, 2), 2, bandwidth=0),
        lambda: measure_layers(nn.Linear(1, 1), torch.ones(1, 1)),
    ],
)
def test_mistakes_are_refused(make):
    with pytest.raises(InvalidArgument):
        make()
