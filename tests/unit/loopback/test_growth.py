"""By which law what a rank sends and computes grows, for each operation, group, step and job."""

from __future__ import annotations

import pytest
import torch
from growth.laws import ALLOWED, LAWS, law_of, laws_of
from growth.programs import PAIRWISE, everything
from growth.runs import Shape, count_acts

import mpisgd
from mpisgd.job.threads_as_ranks import run_ranks
from mpisgd.threads import scheduling
from mpisgd.transport.loopback.links import Links

# More hosts than send each other one message each.
SHAPES = [Shape(16, 2), Shape(32, 2), Shape(16, 4)]


def faster_than_allowed(counts, *pairwise):
    """What grows faster, as (act, count, law)."""
    return [
        (act, field, law)
        for act, laws in laws_of(counts).items()
        for field, law in laws.items()
        if [*LAWS, None].index(law) > [*LAWS].index("ranks" if act.startswith(pairwise) else ALLOWED[field])
    ]


def test_operations_groups_and_steps_grow_as_they_may():
    counts = {
        shape: count_acts(shape, lambda: everything(["Synchronous()"]), traced=(0,)) for shape in SHAPES
    }
    assert not faster_than_allowed(counts, *PAIRWISE)
    assert counts[SHAPES[0]]["barrier"].messages == 4


def test_laws_are_told_apart():
    for name, law in LAWS.items():
        assert law_of({shape: round(100 * law(shape)) for shape in SHAPES}) == name
    assert law_of({shape: shape.size**3 for shape in SHAPES}) is None


# -- time over links ------------------------------------------------------------------------------------

LATENCY_S, BYTES_PER_S = 2e-5, 1.25e9


def seconds(hosts: int, nbytes: int) -> float:
    """What an all-reduce takes where each host has such a link and one rank; they share their memory."""
    shared = torch.zeros(nbytes // 4)

    def program():
        tensor = shared.view(-1)
        mpisgd.barrier()
        began_s = scheduling.now_s()
        mpisgd.all_reduce(tensor)
        return began_s, scheduling.now_s()

    links = Links(LATENCY_S, BYTES_PER_S, message_s=2e-6)
    times = run_ranks(hosts, program, ranks_per_host=(1,) * hosts, num_draws=0, links=links, timeout_s=1e6)
    return max(end_s for _, end_s in times) - max(begin_s for begin_s, _ in times)


@pytest.mark.parametrize(
    ("hosts", "nbytes"), [(16, 4_000_000), pytest.param(128, 8_000_000, marks=pytest.mark.long)]
)
def test_a_large_all_reduce_takes_what_the_links_take(hosts, nbytes):
    bound_s = 2 * (hosts - 1) / hosts * nbytes / BYTES_PER_S
    assert bound_s < seconds(hosts, nbytes) < 1.15 * bound_s


@pytest.mark.parametrize("hosts", [16, 24, pytest.param(128, marks=pytest.mark.long)])
def test_a_small_all_reduce_takes_a_logarithmic_number_of_latencies(hosts):
    rounds = (hosts - 1).bit_length() + (hosts & (hosts - 1) > 0)
    assert seconds(hosts, 4096) < 2 * rounds * LATENCY_S
