"""Memory of a rank: ZeRO's table, and what strategies and compressors keep."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_examples import cluster, predicted, profile

from mpisgd import Compression, Sharded, Synchronous
from mpisgd.methods.cost_kit import Bucket, Parameter, Sizes, World
from mpisgd.methods.costs import cost_of, wire_of
from mpisgd.methods.peak_memory import peak_memory
from mpisgd.methods.sharded.cost import FullyShard

# Rajbhandari and others 2020, figure 1: 7.5 billion parameters, 64 ranks, K = 12, in GB.
STAGES = [(Synchronous(), 120), (Sharded(1), 31.4), (Sharded(2), 16.6), (FullyShard(), 1.9)]


def model_states(strategy, ranks=64):
    """What a rank keeps of the model, without what it needs meanwhile, which the paper leaves out."""
    parameters = (Parameter(0, (7_500_000_000,), 2, 12 * 7_500_000_000, alone=True),)
    sizes = Sizes(parameters, (Bucket(0, parameters),))
    found = peak_memory(cost_of(strategy), sizes, World(ranks, 1, wire_of(Compression.none)))
    return found.parameters + found.gradients + found.optimizer


@pytest.mark.parametrize(("strategy", "gigabytes"), STAGES)
def test_the_table_of_zero(strategy, gigabytes):
    assert round(model_states(strategy) / 1e9, 1) == gigabytes


def test_stages_of_one_rank_are_all_alike():
    assert {model_states(strategy, 1) for strategy, _ in STAGES} == {7.5e9 * 16}


def memory(method, ranks=4, optimizer="adamw"):
    return predicted(method, cluster(ranks), profile(optimizer=optimizer)).memory


MODEL = 8e6  # bytes of the parameters


def test_a_synchronous_step_keeps_parameters_gradients_and_state():
    found = memory("Synchronous")
    assert (found.parameters, found.gradients, found.optimizer) == (MODEL, MODEL, 2 * MODEL)
    assert found.total == 4 * MODEL  # large gradients are sent from where they lie


@pytest.mark.parametrize("stage", [1, 2])
def test_sharding_divides_what_its_stage_says(stage):
    found, whole = memory(f"Sharded(stage={stage})"), memory("Synchronous")
    assert found.optimizer == whole.optimizer / 4
    assert found.gradients == (whole.gradients / 4 if stage == 2 else whole.gradients)
    assert found.parameters == whole.parameters


def test_fully_sharded_divides_all_and_gathers_two_layers():
    found = memory("FullyShard")
    assert (found.parameters, found.gradients, found.optimizer) == (MODEL / 4, MODEL / 4, 2 * MODEL / 4)
    assert found.buffers == 3 * MODEL / 2


def test_strategies_keep_their_copies():
    one = MODEL / 2  # of two parameters
    assert memory("DiLoCo(100)").strategy == 3 * MODEL + one  # z, its momentum, the changes, and Nesterov's
    assert memory("DiLoCo(100, outer_options={'lr': 1.0})").strategy == 2 * MODEL + one
    assert memory("ElasticAveraging(every=8)").strategy == 2 * MODEL
    assert memory("LocalSGD(8)").strategy == 0
    assert memory("Gossip('ring')").strategy == 4 * one  # two neighbours', of two messages


def test_residuals_are_as_large_as_the_gradients():
    one = MODEL / 2
    messages = 4 * 8 * 0.01 * one / 4
    assert memory("Synchronous + TopK(ratio=0.01)").compression == MODEL + 1.25 * one + messages
    assert memory("Synchronous + bf16").compression == one / 2  # what travels of one gradient


def test_memory_is_that_of_one_moment():
    """Activations are gone when the changes of parameters are there."""
    least = predicted("DiLoCo(100)", cluster(4), profile(optimizer="adamw")).memory.total
    step = replace(profile(optimizer="adamw"), activation_bytes=MODEL)
    assert predicted("DiLoCo(100)", cluster(4), step).memory.total == least
    assert predicted("Synchronous", cluster(4), step).memory.activations == MODEL


def test_more_ranks_never_need_more_memory():
    for method in ("Synchronous", "Sharded(stage=2)", "FullyShard", "DiLoCo(8)"):
        totals = [memory(method, ranks).total for ranks in (2, 4, 8, 64)]
        assert totals == sorted(totals, reverse=True)
