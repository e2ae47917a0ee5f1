"""Every method of the catalogue and every layout of tensor, pipeline and data has a plan, on all hosts."""

from __future__ import annotations

import itertools
import math
import os

import pytest
from plan_examples import cluster, profile

from mpisgd.errors import InvalidArgument
from mpisgd.methods.catalogue import examples_that_go_together, optimizers
from mpisgd.tools.bench.strategies.method import Method
from mpisgd.tools.plan.methods import layouts_of, method_of, planned_methods
from mpisgd.tools.plan.models.gpt import gpt
from mpisgd.tools.plan.models.model import profile_of
from mpisgd.tools.plan.network import FatTree, Torus
from mpisgd.tools.plan.prediction import Options, predict
from mpisgd.tools.plan.steps.parallel import Parallel, lies_evenly

# One host, hosts of one rank, of two and of three; 3 is no power of two.
PLACES = [(1, 4), (4, 1), (3, 1), (2, 2), (2, 3)]


def has_a_plan(where, step, method, **options):
    found = predict(where, step, method, Options(**options))
    amounts = (found.step_s, found.memory.total, found.step.sent_bytes, found.examples_per_s)
    assert all(0 <= amount < math.inf for amount in amounts), (method.name, amounts)
    assert found.step_s >= found.compute_s > 0, method.name
    return found


@pytest.mark.parametrize(("hosts", "k"), PLACES)
def test_every_method_with_every_compression_that_goes_with_it(hosts, k):
    """But for those whose bytes nobody knows before: these are refused, and say so."""
    where = cluster(hosts, k, disk_bytes_per_s=1e9)
    step, refused, count = profile(10**4, 4000, 100), set(), 0
    for strategy, compressor in examples_that_go_together():
        try:
            has_a_plan(where, step, Method(f"{strategy!r} + {compressor!r}", strategy, compressor))
        except InvalidArgument as exc:
            refused.add((repr(compressor), str(exc)))
        count += 1
    assert count > 100
    assert all("Threshold" in name and "depend on the gradients" in said for name, said in refused), refused


OPTIMIZERS = {
    "Dion": "rank_fraction=0.5",
    "OneBitAdam": "freeze_step=2",
    "OneBitLamb": "freeze_step=2",
    "ZeroOneAdam": "var_freeze_step=2",
}


@pytest.mark.parametrize("name", [kind.__name__ for kind in optimizers()])
def test_every_optimizer_that_averages_by_itself(name):
    (method,) = planned_methods(f"Synchronous with {name}({OPTIMIZERS[name]})")
    for hosts, k in PLACES:
        has_a_plan(cluster(hosts, k), profile(10**4, 4000, 100), method)


LAYOUT_PLACES = [(1, 8), (8, 1), (2, 4), (4, 2), (3, 4)]
NETWORKS = [FatTree(2, 2.0), Torus((3, 3))]


@pytest.mark.parametrize(("hosts", "k"), LAYOUT_PLACES)
def test_every_layout_of_tensor_pipeline_and_data_parallel_ranks(hosts, k):
    """All of tp x pp that lie evenly, with each schedule, recomputed or not; --long: with both."""
    both = "MPISGD_TEST_LONG" in os.environ
    where = cluster(hosts, k, flops_per_s=1e12)
    step = profile_of(gpt(layers=8, heads=4, dim=64, context=32), where, 12)
    found = set()
    for tp, pp in itertools.product((1, 2, 3, 4, 8), repeat=2):
        if tp * pp == 1 or not lies_evenly(where, tp, pp):
            continue
        schedules = [("1f1b", 1), ("gpipe", 1), *([("interleaved", 2)] if pp in (2, 4) else [])]
        for number, ((schedule, stages), recompute) in enumerate(itertools.product(schedules, (False, True))):
            if not both and number % 2 != (number // 2 + len(found)) % 2:
                continue
            layout = Parallel(tp, pp, schedule, stages_per_rank=stages, recompute=recompute)
            has_a_plan(where, step, method_of(layout))
        found.add((tp > 1, pp > 1, where.size > tp * pp))
    assert (True, True, True) in found or k == 1


@pytest.mark.parametrize("network", NETWORKS, ids=str)
@pytest.mark.parametrize(
    "algorithm", ["auto", "ring", "halving_doubling", "tree", "hierarchical", "all_to_all"]
)
def test_layouts_on_other_networks_by_every_algorithm(network, algorithm):
    where = cluster(4, 2, network=network, flops_per_s=1e12)
    step = profile_of(gpt(layers=4, heads=4, dim=64, context=32), where, 8)
    layouts = layouts_of(where, step)
    assert any(each.tp > 1 and each.pp > 1 for each in layouts)
    for layout in layouts:
        has_a_plan(where, step, method_of(layout), algorithm=algorithm)
