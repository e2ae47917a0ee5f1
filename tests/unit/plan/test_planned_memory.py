"""Memory of a rank: ZeRO's table, and what strategies and compressors keep."""

from __future__ import annotations

import pytest
from plan_examples import cluster, predicted, profile

from mpisgd.errors import InvalidArgument
from mpisgd.plan.steps.memory import zero_bytes


# Rajbhandari and others 2020, figure 1: 7.5 billion parameters, 64 ranks, K = 12, in GB.
@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_table_of_zero(stage, gigabytes):
    assert round(zero_bytes(7.5e9, 64, stage) / 1e9, 1) == gigabytes


def test_stages_of_one_rank_are_all_alike():
    assert {zero_bytes(10, 1, stage) for stage in range(4)} == {160.0}


def test_an_unknown_stage_is_refused():
    with pytest.raises(InvalidArgument, match="stage"):
        zero_bytes(10, 2, 4)


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
    assert memory("DiLoCo(100)").strategy == 3 * MODEL  # z, its momentum, and the changes
    assert memory("DiLoCo(100, outer_options={'lr': 1.0})").strategy == 2 * MODEL
    assert memory("ElasticAveraging(every=8)").strategy == 2 * MODEL
    assert memory("LocalSGD(8)").strategy == 0
    assert memory("Gossip('ring')").strategy == 2 * MODEL


def test_residuals_are_as_large_as_the_gradients():
    assert memory("Synchronous + TopK(ratio=0.01)").compression == MODEL
    assert memory("Synchronous + bf16").compression == 0


def test_more_ranks_never_need_more_memory():
    for method in ("Synchronous", "Sharded(stage=2)", "FullyShard", "DiLoCo(8)"):
        totals = [memory(method, ranks).total for ranks in (2, 4, 8, 64)]
        assert totals == sorted(totals, reverse=True)
